"""Contenders that continue the same prompts with one target, in turns: tokens a second, and what became of the drafts. Knows no formulas."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Protocol, runtime_checkable

from specserve.config.cascade import CASCADES
from specserve.config.tree import Config
from specserve.drafters.registry import open_drafter
from specserve.inprocess import LocalDrafter, Parts
from specserve.llm import LLM
from specserve.progress import Tell
from specserve.sampling_params import Sampling
from specserve.types import Target, Verdict, VerifyStep

Prompts = Sequence[tuple[int, ...]]


@runtime_checkable
class CountsPasses(Protocol):
    """A cascade that says how many passes each of its stages has made, the largest first."""

    @property
    def passes(self) -> tuple[int, ...]: ...


@dataclass(frozen=True, slots=True)
class Way:
    """A way to draft."""

    name: str
    config: Config
    gamma: int
    stages: tuple[str, ...] = ()  # what drafts, the largest first
    k: str = ""  # of a cascade


@dataclass(frozen=True, slots=True)
class Count:
    """What became of draft tokens."""

    rounds: int = 0  # that judged something or could have
    drafted: int = 0
    judged: int = 0  # what lies behind a refusal is not looked at
    accepted: int = 0

    @property
    def alpha(self) -> float:
        return self.accepted / self.judged if self.judged else 0.0

    @property
    def tokens(self) -> int:
        """The accepted ones, and one a round that is the target's own."""
        return self.accepted + self.rounds


@dataclass(frozen=True, slots=True)
class Result:
    """Of all turns of one contender."""

    way: Way
    count: Count
    passes: (
        tuple[int, ...] | None
    )  # of each stage, the largest first; None where the drafter does not count them
    rates: tuple[float, ...]  # tokens a second, by turn

    def against(self, other: Result) -> float:
        """Times faster, turn by turn."""
        return median(mine / theirs for mine, theirs in zip(self.rates, other.rates, strict=True))


class Witness:
    """A target that remembers what it decided, and when. One sequence at a time; its first verdict comes with the prompt, and does not count."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._last: float | None = None  # when the last verdict came
        self.count, self.seconds = Count(), 0.0

    def begin(self) -> None:
        """With another prompt."""
        self._last = None

    async def verify(self, steps: Sequence[VerifyStep]) -> Sequence[Verdict]:
        verdicts = await self._target.verify(steps)
        now = time.perf_counter()
        for step, verdict in zip((step for step in steps if step.decide), verdicts, strict=True):
            if self._last is not None:
                self.count = _seen(self.count, len(step.drafts), verdict.accepted)
                self.seconds += now - self._last
            self._last = now
        return verdicts

    async def release(self, seq_ids: Sequence[int]) -> None:
        await self._target.release(seq_ids)


def _seen(count: Count, drafted: int, accepted: int) -> Count:
    judged = min(accepted + 1, drafted)
    return Count(
        count.rounds + 1, count.drafted + drafted, count.judged + judged, count.accepted + accepted
    )


class Contender:
    """One way, and what came of it so far."""

    def __init__(self, parts: Parts, way: Way, *, threads: int) -> None:
        """Raises whatever is wrong with the config or its files."""
        self.way, self._witness = way, Witness(parts.target)
        self._drafter = (
            None
            if way.config.draft.kind == "none"
            else open_drafter(way.config, target_vocab_size=parts.info.vocab_size)
        )
        own = replace(parts, target=self._witness)
        if self._drafter is not None:
            own = replace(
                own,
                drafter=LocalDrafter(self._drafter, threads=threads),
                draft_context=self._drafter.context,
            )
        self._llm = LLM.over(own, way.config)
        self._rates: list[float] = []

    def turn(self, prompts: Prompts, *, max_tokens: int, temperature: float) -> None:
        """One prompt after the other, as in the papers, whose batches are of 1. The seeds are those of all contenders."""
        tokens, seconds = self._witness.count.tokens, self._witness.seconds
        for seed, prompt in enumerate(prompts):
            wish = {"gamma": self.way.gamma, "verifier": "speculative"}
            self._witness.begin()
            self._llm.generate(
                [prompt],
                Sampling(
                    max_tokens=max_tokens,
                    temperature=temperature,
                    seed=seed,
                    ignore_eos=True,
                    speculation=wish,
                ),
            )
        self._rates.append(
            (self._witness.count.tokens - tokens) / (self._witness.seconds - seconds)
        )

    def result(self) -> Result:
        return Result(self.way, self._witness.count, self._passes(), tuple(self._rates))

    def _passes(self) -> tuple[int, ...] | None:
        """A single drafter makes one for each token."""
        if self.way.config.draft.kind in CASCADES:
            return self._drafter.passes if isinstance(self._drafter, CountsPasses) else None
        return () if self._drafter is None else (self._witness.count.drafted,)


def hold(
    parts: Parts,
    ways: Sequence[Way],
    prompts: Prompts,
    *,
    max_tokens: int,
    temperature: float,
    turns: int,
    threads: int,
    tell: Tell,
) -> list[Result]:
    """Of all ways, in turns (A B C A B C), so that the machine's moods meet all alike."""
    contenders = [Contender(parts, way, threads=threads) for way in ways]
    for turn in range(turns):
        for number, contender in enumerate(contenders):
            tell("letting all take turns", (turn + number / len(ways)) / turns, contender.way.name)
            contender.turn(prompts, max_tokens=max_tokens, temperature=temperature)
    return [contender.result() for contender in contenders]
