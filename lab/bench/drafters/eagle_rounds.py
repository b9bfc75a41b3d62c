"""Rounds of an EAGLE-3 head and a DFlash draft beside a draft model and heads, in one process.

A head apart is imitated: what it prepares after an answer takes none of the time that is counted.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from lab.bench.drafters.alpha import PAGES
from lab.bench.drafters.configs import DRAFT, Keys
from specserve.config.tree import DEMO, config_from_keys
from specserve.demo.corpus import standard_library
from specserve.drafters.base import never
from specserve.drafters.branches import Fanout
from specserve.drafters.registry import OpenDrafter
from specserve.features.eagle.dflash.train import train as train_dflash
from specserve.features.eagle.drafter import EagleDrafter
from specserve.features.eagle.train import train
from specserve.llm.inprocess import EngineParts, LocalDrafter, LocalTarget, open_parts
from specserve.llm.llm import LLM
from specserve.models.target import TargetModel, open_target
from specserve.progress import no_progress
from specserve.sampling_params import Sampling
from specserve.types import Drafter, DraftStep, Proposal, Target, Verdict, VerifyStep

log = logging.getLogger(__name__)

GAMMA = 4
DRAFT_VOCAB = 2048
NUM_FILES = 130
"""Files of the standard library that a head is trained on."""
AHEAD = "eagle apart, anticipating"


@dataclass(slots=True)
class TimedTarget:
    target: Target
    seconds: float = 0.0

    async def verify(self, steps: Sequence[VerifyStep]) -> Sequence[Verdict]:
        start = time.perf_counter()
        verdicts = await self.target.verify(steps)
        self.seconds += time.perf_counter() - start
        return verdicts

    async def release(self, seq_ids: Sequence[int]) -> None:
        await self.target.release(seq_ids)


@dataclass(slots=True)
class TimedDrafter:
    """Drafter whose answers are timed; what it prepares after them is not."""

    drafter: Drafter
    ahead: OpenDrafter | None
    seconds: float = 0.0
    proposals: list[Proposal] = field(default_factory=list)

    async def propose(self, steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]:
        start = time.perf_counter()
        proposals = await self.drafter.propose(steps, math.inf)
        self.seconds += time.perf_counter() - start
        if self.ahead is not None:
            self.ahead.prepare(never)
        self.proposals += [one for one in proposals if one.tokens]
        return proposals

    async def release(self, seq_ids: Sequence[int]) -> None:
        await self.drafter.release(seq_ids)


@dataclass(frozen=True, slots=True)
class RoundsMeasurement:
    """Texts of one drafter: tokens, rounds with drafts, and the seconds that they waited."""

    tokens: int
    rounds: int
    prepared: int  # of the rounds
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class TrainedHeads:
    """Heads of the demo target in a directory, each trained when it is first wanted."""

    directory: Path
    minutes: float
    num_files: int

    @property
    def eagle(self) -> Path:
        return self._trained("eagle", partial(train, draft_vocab=DRAFT_VOCAB))

    @property
    def dflash(self) -> Path:
        return self._trained(
            "dflash", partial(train_dflash, num_layers=2, block_size=8, markov_rank=0)
        )

    def _trained(self, kind: str, train_head: Callable[..., str]) -> Path:
        head, texts = self.directory / kind, self.directory / "texts"
        if not (head / "config.json").is_file():
            texts.mkdir(parents=True, exist_ok=True)
            files = [texts / f"{number}.py" for number in range(self.num_files)]
            for file, text in zip(files, standard_library().train[::4], strict=False):
                file.write_text(text, encoding="utf-8")
            known = [file for file in files if file.is_file()]
            settings = {"minutes": self.minutes, "report_progress": no_progress}
            log.info(train_head(str(DEMO / "target"), known, head, **settings))
        return head


def configs(heads: TrainedHeads) -> dict[str, Keys]:
    eagle = {"draft.kind": "eagle", "draft.path": str(heads.eagle)}
    return {
        "neural, draft": {"draft.kind": "neural", "draft.path": DRAFT},
        "heads": {"draft.kind": "heads"},
        "eagle": eagle,
        "dflash": {"draft.kind": "dflash", "draft.path": str(heads.dflash)},
        AHEAD: eagle,
    }


def measure_rounds(
    name: str,
    keys: Keys,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    temperature: float,
    threads: int,
) -> RoundsMeasurement:
    """Generate one text after the other."""
    config = config_from_keys(
        {
            "target.threads": threads,
            "draft.threads": threads,
            "cache.pages": PAGES,
            "speculation.gamma": GAMMA,
            "limits.max_running": 1,
            **keys,
        }
    )
    parts, ahead = open_parts(config), None
    if name == AHEAD:
        model = open_target(DEMO / "target", config)
        assert isinstance(model, TargetModel)
        eagle = EagleDrafter.from_config(config, model)
        ahead = OpenDrafter(eagle, context=eagle.context, runners=(eagle.runner,), fanout=Fanout())
        parts = EngineParts(parts.tokenizer, LocalTarget(model), model.info, LocalDrafter(ahead))
    assert parts.drafter is not None
    target, drafter = TimedTarget(parts.target), TimedDrafter(parts.drafter, ahead)
    sampling = [
        Sampling(max_tokens=tokens, temperature=temperature, seed=i, ignore_eos=True)
        for i in range(len(prompts))
    ]
    with LLM.from_parts(replace(parts, target=target, drafter=drafter), config) as llm:
        outputs = llm.generate(prompts, sampling)
    return RoundsMeasurement(
        sum(len(output.token_ids) for output in outputs),
        len(drafter.proposals),
        sum(proposal.anticipated is True for proposal in drafter.proposals),
        target.seconds + drafter.seconds,
    )
