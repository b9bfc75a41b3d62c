"""Anticipation where drafting weighs, beside lockstep, at several numbers of streams.

Each runs at the best of its fixed gammas, and as the pacer chooses. The passes of the run itself
say how much faster it would be if all of the drafting were hidden, or that of the proposals
that were ready when they were wanted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, median

from lab.bench.rig import LoopRun, RigPair
from specserve.types import Request, Speculation, Warp

log = logging.getLogger(__name__)

STREAMS = (1, 8, 32)
GAMMAS = (1, 2, 4, 6)
TOKENS = 48
GREEDY = Warp(temperature=0.0)
HEAD = (
    "| streams | lockstep, tokens/s | anticipating, tokens/s | ratio | pacer's choice, tokens/s "
    "| ratio to lockstep | drafting / verifying | if all were hidden | hit rate "
    "| if hits alone were | target busy |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
)


@dataclass(frozen=True, slots=True)
class PassShares:
    """Seconds of a decode round that drafting and verifying take in lockstep."""

    draft: float
    verify: float

    @classmethod
    def of(cls, runs: Sequence[LoopRun]) -> PassShares:
        rounds = sum(len(run.decode_rounds) for run in runs)
        draft, verify = (
            sum(seconds for run in runs for seconds in run.span_seconds(role, name)) / rounds
            for role, name in (("draft", "draft"), ("target", "verify"))
        )
        return cls(draft, verify)

    @property
    def ratio(self) -> float:
        return self.draft / self.verify

    def bound(self, hidden: float = 1.0) -> float:
        """Return the gain over lockstep if this share of drafting were hidden behind verifying."""
        round_seconds = max(hidden * self.draft, self.verify) + (1 - hidden) * self.draft
        return (self.draft + self.verify) / round_seconds


async def compare_with_lockstep(
    rigs: RigPair, *, turns: int, streams: Sequence[int], gammas: Sequence[int]
) -> Iterator[str]:
    """Return a table of both, in closed loops that take turns."""
    lines = list(HEAD)
    for count in streams:
        requests = _requests(rigs.prompts, count)
        found = await _measure(rigs, requests, count, gammas=gammas, turns=turns)
        lines.append(_row(count, found))
        log.info("%s", lines[-1])
    return iter(lines)


def _requests(prompts: Sequence[tuple[int, ...]], streams: int) -> list[Request]:
    number = streams * (3 if streams < 16 else 2)
    return [
        Request(
            prompts[i % len(prompts)],
            TOKENS,
            GREEDY,
            seed=i,
            speculation=Speculation(),
            ignore_eos=True,
        )
        for i in range(number)
    ]


async def _measure(
    rigs: RigPair,
    requests: Sequence[Request],
    streams: int,
    *,
    gammas: Sequence[int],
    turns: int,
) -> dict[str, tuple[int | None, list[LoopRun]]]:
    """Return the gamma and runs of lockstep and anticipation, each at its best gamma, and auto."""
    kinds = {"lockstep": rigs.lockstep, "anticipating": rigs.anticipating}

    async def run(kind: str, gamma: int | None) -> LoopRun:
        return await kinds[kind].run_closed_loop(requests, gamma=gamma, concurrency=streams)

    tried: dict[str, dict[int, float]] = {kind: {} for kind in kinds}
    for counts in (False, True):  # the first turn warms up
        for gamma in gammas:
            for kind in kinds:
                rate = (await run(kind, gamma)).rate
                if counts:
                    tried[kind][gamma] = rate
    best = {kind: max(rates, key=lambda gamma: rates[gamma]) for kind, rates in tried.items()}
    cases: dict[str, tuple[str, int | None]] = {
        kind: (kind, gamma) for kind, gamma in best.items()
    } | {"auto": ("anticipating", None)}
    found: dict[str, tuple[int | None, list[LoopRun]]] = {
        name: (gamma, []) for name, (_, gamma) in cases.items()
    }
    for turn in range(-1, turns):
        for name in list(cases) if turn % 2 else list(reversed(cases)):
            result = await run(*cases[name])
            if turn >= 0:
                found[name][1].append(result)
    return found


def _row(streams: int, found: dict[str, tuple[int | None, list[LoopRun]]]) -> str:
    lockstep, shares = found["lockstep"][1], PassShares.of(found["lockstep"][1])
    busy = mean(
        sum(run.span_seconds("target", "verify"))
        / (run.decode_rounds[-1].end - run.decode_rounds[0].start)
        for run in found["anticipating"][1]
    )
    hits = [hit for run in found["anticipating"][1] for hit in run.hits]
    hit_rate = mean(hits) if hits else 0.0
    cells = [
        str(streams),
        f"{_rates(lockstep)}, gamma {found['lockstep'][0]}",
        f"{_rates(found['anticipating'][1])}, gamma {found['anticipating'][0]}",
        _ratio(found["anticipating"][1], lockstep),
        _rates(found["auto"][1]),
        _ratio(found["auto"][1], lockstep),
        f"{shares.ratio:.2f} ({shares.draft * 1e3:.1f} / {shares.verify * 1e3:.1f} ms)",
        f"{shares.bound():.2f}",
        f"{hit_rate:.2f}",
        f"{shares.bound(hit_rate):.2f}",
        f"{busy:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def _rates(runs: Sequence[LoopRun]) -> str:
    rates = [run.rate for run in runs]
    return f"{median(rates):.0f} ({min(rates):.0f} to {max(rates):.0f})"


def _ratio(runs: Sequence[LoopRun], others: Sequence[LoopRun]) -> str:
    ratios = [mine.rate / theirs.rate for mine, theirs in zip(runs, others, strict=True)]
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
