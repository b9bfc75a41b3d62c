"""Compare drafters that continue the same prompts with one target, in turns.

Counts tokens a second and accepted draft tokens; knows no formulas.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Protocol, runtime_checkable

from specserve.config.kinds import CASCADE_KINDS
from specserve.config.tree import Config
from specserve.drafters.registry import open_drafter
from specserve.llm.inprocess import EngineParts, LocalDrafter
from specserve.llm.llm import LLM
from specserve.progress import ReportProgress
from specserve.sampling_params import Sampling
from specserve.types import Target, Verdict, VerifyStep

Prompts = Sequence[tuple[int, ...]]


@runtime_checkable
class CountsPasses(Protocol):
    """Cascade that counts the passes of each stage, the largest first."""

    @property
    def passes(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class ContenderConfig:
    """Drafter to compare. `stages` are named from the largest; `k` is that of a cascade."""

    name: str
    config: Config
    gamma: int
    stages: tuple[str, ...] = ()
    k: str = ""


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Outcome of draft tokens. Tokens after a rejection are not verified."""

    rounds: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0

    @property
    def alpha(self) -> float:
        return self.accepted / self.verified if self.verified else 0.0

    @property
    def tokens(self) -> int:
        """Number of committed tokens: the accepted ones, and one of the target's a round."""
        return self.accepted + self.rounds


@dataclass(frozen=True, slots=True)
class ContenderResult:
    """Outcome of all turns of one contender.

    `passes` are counted by stage, the largest first, or None if they are not counted; `rates`
    are tokens a second by turn.
    """

    spec: ContenderConfig
    count: DraftCounts
    passes: tuple[int, ...] | None
    rates: tuple[float, ...]

    def speedup_over(self, other: ContenderResult) -> float:
        """Return the median ratio of the rates, turn by turn."""
        return median(mine / theirs for mine, theirs in zip(self.rates, other.rates, strict=True))


class RecordingTarget:
    """Target that records its verdicts and their times, one sequence at a time.

    The first verdict of a sequence comes with its prompt and is not counted.
    """

    def __init__(self, target: Target) -> None:
        self._target = target
        self._last: float | None = None
        self.count, self.seconds = DraftCounts(), 0.0

    def begin(self) -> None:
        """Start another prompt."""
        self._last = None

    async def verify(self, steps: Sequence[VerifyStep]) -> Sequence[Verdict]:
        verdicts = await self._target.verify(steps)
        now = time.perf_counter()
        for step, verdict in zip(
            (step for step in steps if step.needs_verdict), verdicts, strict=True
        ):
            if self._last is not None:
                self.count = _count_round(self.count, len(step.drafts), verdict.accepted)
                self.seconds += now - self._last
            self._last = now
        return verdicts

    async def release(self, seq_ids: Sequence[int]) -> None:
        await self._target.release(seq_ids)


def _count_round(count: DraftCounts, drafted: int, accepted: int) -> DraftCounts:
    verified = min(accepted + 1, drafted)
    return DraftCounts(
        count.rounds + 1,
        count.drafted + drafted,
        count.verified + verified,
        count.accepted + accepted,
    )


class Contender:
    """Engine with one drafter, and its rates until now."""

    def __init__(self, parts: EngineParts, spec: ContenderConfig, *, threads: int) -> None:
        """Open the drafter. Raises a SpecserveError if the config or its files are invalid."""
        self.spec, self._target = spec, RecordingTarget(parts.target)
        self._drafter = (
            None
            if spec.config.draft.kind == "none"
            else open_drafter(spec.config, target_vocab_size=parts.info.vocab_size)
        )
        own = replace(parts, target=self._target)
        if self._drafter is not None:
            own = replace(
                own,
                drafter=LocalDrafter(self._drafter, threads=threads),
                draft_context=self._drafter.context,
            )
        self._llm = LLM.from_parts(own, spec.config)
        self._rates: list[float] = []

    def turn(self, prompts: Prompts, *, max_tokens: int, temperature: float) -> None:
        """Continue one prompt after the other, as in the papers, with the same seeds for all."""
        tokens, seconds = self._target.count.tokens, self._target.seconds
        for seed, prompt in enumerate(prompts):
            speculation = {"gamma": self.spec.gamma, "verifier": "speculative"}
            self._target.begin()
            self._llm.generate(
                [prompt],
                Sampling(
                    max_tokens=max_tokens,
                    temperature=temperature,
                    seed=seed,
                    ignore_eos=True,
                    speculation=speculation,
                ),
            )
        self._rates.append((self._target.count.tokens - tokens) / (self._target.seconds - seconds))

    def result(self) -> ContenderResult:
        return ContenderResult(self.spec, self._target.count, self._passes(), tuple(self._rates))

    def _passes(self) -> tuple[int, ...] | None:
        """Return the passes of each stage; a single drafter makes one for each token."""
        if self.spec.config.draft.kind in CASCADE_KINDS:
            return self._drafter.passes if isinstance(self._drafter, CountsPasses) else None
        return () if self._drafter is None else (self._target.count.drafted,)


def run_in_turns(
    parts: EngineParts,
    specs: Sequence[ContenderConfig],
    prompts: Prompts,
    *,
    max_tokens: int,
    temperature: float,
    turns: int,
    threads: int,
    report_progress: ReportProgress,
) -> list[ContenderResult]:
    """Return the results of all, in turns (A B C A B C), so that drift affects all alike."""
    contenders = [Contender(parts, spec, threads=threads) for spec in specs]
    for turn in range(turns):
        for number, contender in enumerate(contenders):
            report_progress(
                "measuring in turns", (turn + number / len(contenders)) / turns, contender.spec.name
            )
            contender.turn(prompts, max_tokens=max_tokens, temperature=temperature)
    return [contender.result() for contender in contenders]
