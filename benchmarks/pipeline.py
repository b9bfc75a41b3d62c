"""Drafting behind verifying, taken apart: target and draft on a core each, the demo target widened: `python -m benchmarks.pipeline`.

What is compared is measured in turns (A B A B) in one run, and every figure stands beside what theory makes of the same passes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import mean, median

from benchmarks.coordinator_overhead import report as coordinating
from benchmarks.gamma_plot import plot
from benchmarks.rig import Rig, Run, run, trace_of
from benchmarks.simulation_check import check
from specserve.cluster.ray_session import own_ray
from specserve.config.tree import DEMO, parse
from specserve.demo.corpus import held_out_prompts
from specserve.tools.bench.report import machine
from specserve.tools.inflate import inflate
from specserve.types import Request, Speculation, Warp

log = logging.getLogger(__name__)

TARGET_CORE, DRAFT_CORE = 0, 1
TOKENS, GAMMA = 128, 5
LOOP_TOKENS = 48  # of each request of the closed loops
KINDS = {
    "greedy": (Warp(temperature=0.0), None),
    "T = 1, `coupled`": (Warp(), "coupled"),
    "T = 1, `speculative`": (Warp(), "speculative"),
    "T = 1, `block`": (Warp(), "block"),
}
Prompts = Sequence[tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Rigs:
    """The same target twice: before a draft that anticipates, and before one that waits to be asked."""

    ahead: Rig
    lockstep: Rig
    prompts: Prompts


@dataclass(frozen=True, slots=True)
class Decoding:
    """The decoding rounds of several runs at batch 1, taken together."""

    runs: tuple[Run, ...]

    @property
    def rounds(self) -> list[float]:
        """Seconds from one round's beginning to the next one's."""
        return [
            later.begun - earlier.begun
            for run in self.runs
            for earlier, later in zip(run.decoding, run.decoding[1:], strict=False)
        ]

    @property
    def verify(self) -> list[float]:
        """Seconds of the worker for each verification."""
        return [seconds for run in self.runs for seconds in run.spans("target", "verify")]

    @property
    def busy(self) -> float:
        """The target's share of the wall time while decoding."""
        return sum(self.verify) / sum(
            run.decoding[-1].ended - run.decoding[0].begun for run in self.runs
        )

    @property
    def committed(self) -> float:
        return mean(done.num_committed for run in self.runs for done in run.decoding)

    @property
    def hit_rate(self) -> float:
        known = [
            outcome.anticipated
            for run in self.runs
            for done in run.decoding
            for outcome in done.outcomes
            if outcome.anticipated is not None
        ]
        return mean(known) if known else 0.0

    @property
    def rates(self) -> list[float]:
        """Tokens a second while decoding, of each run."""
        return [
            sum(done.num_committed for done in run.decoding)
            / (run.decoding[-1].ended - run.decoding[0].begun)
            for run in self.runs
        ]

    @property
    def rate(self) -> float:
        return median(self.rates)

    def against(self, other: Decoding) -> float:
        """The ratio of tokens a second, turn by turn."""
        return median(mine / theirs for mine, theirs in zip(self.rates, other.rates, strict=True))

    def ideal_against(self, plain: Decoding) -> float:
        """(mean accepted + 1) t_plain / t_verify, turn by turn: what there is to gain if nothing is lost outside the passes."""
        turns = [
            (Decoding((mine,)), Decoding((theirs,)))
            for mine, theirs in zip(self.runs, plain.runs, strict=True)
        ]
        return median(
            mine.committed * mean(theirs.verify) / mean(mine.verify) for mine, theirs in turns
        )

    @property
    def spread(self) -> str:
        return f"{self.rate:.0f} ({min(self.rates):.0f} to {max(self.rates):.0f})"


@contextlib.asynccontextmanager
async def opened(target: Path, draft: Path, prompts: Prompts) -> AsyncIterator[Rigs]:
    def config(*, anticipates: bool) -> dict[str, object]:
        return {
            "target": {"path": str(target), "threads": 1},
            "draft": {"path": str(draft), "threads": 1},
            "cache": {"pages": 2048, "prefix_caching": False},
            "speculation.anticipation.enabled": anticipates,
        }

    cores = {"target_core": TARGET_CORE, "draft_core": DRAFT_CORE}
    async with (
        Rig.open(parse(config(anticipates=True)), **cores) as ahead,
        Rig.open(parse(config(anticipates=False)), **cores) as lockstep,
    ):
        yield Rigs(ahead, lockstep, prompts)


def requests(
    prompts: Prompts, warp: Warp, verifier: str | None, *, tokens: int = TOKENS
) -> list[Request]:
    """Unseeded ones, whose seeds are told here so that a run can be repeated."""
    wish = Speculation(verifier=verifier)
    return [
        Request(prompt, tokens, warp, seed=i, speculation=wish, ignore_eos=True)
        for i, prompt in enumerate(prompts)
    ]


async def in_turns(
    runs: dict[str, tuple[Rig, int | None]], asked: Sequence[Request], *, turns: int
) -> dict[str, Decoding]:
    """Each turn another request, by every rig; the first turn does not count."""
    found: dict[str, list[Run]] = {name: [] for name in runs}
    for turn in range(-1, turns):
        for name, (rig, gamma) in runs.items():
            done = await rig.complete([asked[turn % len(asked)]], gamma=gamma)
            log.info("turn %d, %s: %.1f tokens/s", turn, name, done.rate)
            if turn >= 0:
                found[name].append(done)
    return {name: Decoding(tuple(done)) for name, done in found.items()}


async def hidden(rigs: Rigs, *, gamma: int, turns: int) -> Iterator[str]:
    """Batch 1: how much of the drafting is hidden, and what is lost outside the passes."""
    lines = [
        "| | tokens/s | lockstep | plain | target busy | hit rate | round / verify | (accepted + 1) t_plain / t_verify | of that reached |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, (warp, verifier) in KINDS.items():
        kinds: dict[str, tuple[Rig, int | None]] = {
            "ahead": (rigs.ahead, gamma),
            "auto": (rigs.ahead, None),
        }
        kinds |= {"lockstep": (rigs.lockstep, gamma), "plain": (rigs.ahead, 0)}
        found = await in_turns(kinds, requests(rigs.prompts, warp, verifier), turns=turns)
        lines += [
            _hidden_row(f"{name}, gamma {gamma if kind == 'ahead' else kind}", found[kind], found)
            for kind in ("ahead", "auto")
        ]
    return iter(lines)


def _hidden_row(name: str, ahead: Decoding, found: Mapping[str, Decoding]) -> str:
    lockstep, plain = found["lockstep"], found["plain"]
    ideal = ahead.ideal_against(plain)
    cells = [
        name,
        ahead.spread,
        f"{lockstep.spread}, {ahead.against(lockstep):.2f} x",
        f"{plain.spread}, {ahead.against(plain):.2f} x",
    ]
    cells += [
        f"{ahead.busy:.3f}",
        f"{ahead.hit_rate:.3f}",
        f"{mean(ahead.rounds) / mean(ahead.verify):.3f}",
    ]
    cells += [f"{ideal:.2f}", f"{ahead.against(plain) / ideal:.3f}"]
    return f"| {' | '.join(cells)} |"


async def best_gammas(rigs: Rigs, *, turns: int) -> Iterator[str]:
    """Greedy, batch 1: anticipation against lockstep, each at its own best gamma, and what hiding could give at most."""
    asked = requests(rigs.prompts, *KINDS["greedy"])
    tried: dict[str, tuple[Rig, int | None]] = {
        f"{name} {gamma}": (rig, gamma)
        for gamma in (2, 3, 4, 6)
        for name, rig in (("ahead", rigs.ahead), ("lockstep", rigs.lockstep))
    }
    swept = await in_turns(tried, asked, turns=2)
    best = {
        name: max((key for key in swept if key.startswith(name)), key=lambda key: swept[key].rate)
        for name in ("ahead", "lockstep")
    }
    found = await in_turns({name: tried[key] for name, key in best.items()}, asked, turns=turns)
    ahead, lockstep = found["ahead"], found["lockstep"]
    gamma = int(best["lockstep"].split()[1])
    drafting = mean(seconds for run in lockstep.runs for seconds in run.spans("draft", "draft"))
    share = drafting / mean(lockstep.verify)
    return iter(
        [
            f"Anticipation at gamma {best['ahead'].split()[1]}: {ahead.spread} tokens/s, hit rate {ahead.hit_rate:.2f},",
            f"target busy {ahead.busy:.2f}.",
            f"Lockstep at gamma {gamma}: {lockstep.spread} tokens/s; drafting takes {share:.2f} of a verification ({drafting * 1e3:.2f} ms).",
            f"**Ratio {ahead.against(lockstep):.3f}**; hiding all of the drafting at lockstep's gamma would give {1 + share:.3f} at most.",
        ]
    )


async def sweep(
    rigs: Rigs, *, turns: int, batches: Sequence[int] = (1, 4, 16, 32)
) -> tuple[list[str], dict[int, dict[str, list[float]]]]:
    """Closed loops, in which whoever has its text is followed by another: the pacer's choice against fixed gammas, each with anticipation."""
    choices: dict[str, int | None] = {"0": 0, "2": 2, "4": 4, "8": 8, "auto": None}
    rates: dict[int, dict[str, list[float]]] = {}
    lines = [
        "| streams | gamma 0 | 2 | 4 | 8 | auto | auto / best fixed | auto / gamma 0 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for batch in batches:
        loop = [
            rigs.prompts[i % len(rigs.prompts)] for i in range(batch * (3 if batch < 16 else 2))
        ]
        asked = requests(loop, *KINDS["greedy"], tokens=LOOP_TOKENS)
        found = rates[batch] = {name: [] for name in choices}
        for turn in range(-1, turns):
            for place in range(len(choices)):
                name = list(choices)[
                    (turn + place) % len(choices)
                ]  # who comes later in a turn meets another machine than who comes first
                done = await rigs.ahead.complete(asked, gamma=choices[name], concurrency=batch)
                if turn >= 0:
                    found[name].append(done.rate)
        middle = {name: median(values) for name, values in found.items()}
        best = max((name for name in choices if name != "auto"), key=lambda name: middle[name])
        against = {
            name: median(a / b for a, b in zip(found["auto"], found[name], strict=True))
            for name in (best, "0")
        }
        cells = " | ".join(f"{middle[name]:.0f}" for name in choices)
        lines.append(
            f"| {batch} | {cells} | {against[best]:.3f} (of gamma {best}) | {against['0']:.3f} |"
        )
    return lines, rates


async def off_and_on(rigs: Rigs, *, batch: int = 4, turns: int = 5) -> Iterator[str]:
    """Speculation is switched off in the middle of a load and on again: how many tokens a round commits before, and right after."""
    before, after = [], []
    for _ in range(turns):
        asked = requests(rigs.prompts[:batch], *KINDS["greedy"], tokens=3 * TOKENS)
        done = await rigs.ahead.complete(asked, gamma=GAMMA, gamma_from={20: 0, 60: GAMMA})
        drafted = [(number, r) for number, r in enumerate(done.decoding) if r.outcomes]
        on = [r for number, r in drafted if number < 18]
        again = [r for number, r in drafted if number >= 60]
        before += [outcome.accepted for r in on for outcome in r.outcomes]
        after += [outcome.accepted for r in again[3:15] for outcome in r.outcomes]
    return iter(
        [
            f"Accepted a proposal before: {mean(before):.2f}; from the third round after speculation was switched on again: {mean(after):.2f}."
        ]
    )


def widened(params: int, into: Path) -> Path:
    inflate(DEMO / "target", params, into)
    return into


SECTIONS: dict[str, str] = {
    "hidden": "## One stream: is the drafting hidden?",
    "weighs": "## Where drafting weighs: the target at 30M",
    "light": "## Where it does not: the target at 200M",
    "sweep": "## The pacer",
    "switch": "## Off and on again",
    "simulation": "## The simulation against these devices",
    "host": "## The coordinator's own work, with workers that cost nothing",
}


async def measure(options: argparse.Namespace, wide: Path, small: Path) -> list[str]:
    lines: list[str] = []
    texts, only = held_out_prompts(count=32, length=TOKENS), options.only

    def section(name: str, body: Iterator[str]) -> None:
        lines.extend(["", SECTIONS[name], "", *body])
        _write(options.out, lines)  # what has been measured stays, whatever comes

    if {"hidden", "light", "sweep", "switch", "simulation"} & set(only):
        async with opened(wide, DEMO / "draft", texts) as rigs:
            if "hidden" in only:
                section("hidden", await hidden(rigs, gamma=options.gamma, turns=options.turns))
                shown = await rigs.ahead.complete(
                    requests(texts[:1], *KINDS["T = 1, `coupled`"]), gamma=options.gamma
                )
                options.trace.write_text(json.dumps(trace_of(shown)))
            if "light" in only:
                section("light", await best_gammas(rigs, turns=options.turns))
            if "sweep" in only:
                table, rates = await sweep(rigs, turns=options.turns)
                options.plot.write_text(plot(rates))
                section(
                    "sweep",
                    iter([*table, "", f"![tokens/s over plain decoding]({options.plot.name})"]),
                )
            if "switch" in only:
                section("switch", await off_and_on(rigs))
            if "simulation" in only:
                asked = requests(texts, *KINDS["greedy"])
                section(
                    "simulation",
                    iter(
                        await check(
                            rigs.lockstep,
                            rigs.ahead,
                            asked,
                            gamma=options.gamma,
                            turns=options.turns,
                        )
                    ),
                )
    if "weighs" in only:
        async with opened(small, DEMO / "draft", texts) as rigs:
            section("weighs", await best_gammas(rigs, turns=options.turns))
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="where the report goes; the terminal by default")
    parser.add_argument(
        "--trace", type=Path, default=Path("trace.json"), help="of one run of the first section"
    )
    parser.add_argument("--plot", type=Path, default=Path("pacer.svg"))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--gamma", type=int, default=GAMMA)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    with tempfile.TemporaryDirectory() as scratch, own_ray(num_cpus=16):
        wide = (
            widened(200_000_000, Path(scratch) / "200M")
            if set(options.only) - {"weighs", "host"}
            else Path()
        )
        small = widened(30_000_000, Path(scratch) / "30M") if "weighs" in options.only else Path()
        lines = run(measure(options, wide, small))
    if "host" in options.only:
        lines += ["", SECTIONS["host"], "", *coordinating()]
    _write(options.out, lines)
    if options.out is None:
        print("\n".join(lines))


def _write(out: Path | None, lines: Sequence[str]) -> None:
    about = f"{date.today()}, {machine()}. The target has one core and one thread, the draft and the coordinator share the other."
    pair = f"The demo pair, its target widened to 200M unless said; bf16; {TOKENS} tokens in and out. `make bench-pipeline`."
    if out is not None:
        out.write_text("\n".join(["# Drafting behind verifying", "", about, pair, *lines, ""]))


if __name__ == "__main__":
    main()
