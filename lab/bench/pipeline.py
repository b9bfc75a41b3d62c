"""Drafting behind verification: `python -m lab.bench.pipeline`.

Target and draft have a core each; the demo target is widened. Figures that are compared are
measured in turns (A B A B) in one run, beside what theory predicts from the same passes.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import mean, median

from lab.bench.coordinator_overhead import report as overhead_table
from lab.bench.gamma_plot import CHOICES, Rates, in_turn, plot, table
from lab.bench.heavy_drafting import GAMMAS, STREAMS, compare_with_lockstep
from lab.bench.rig import (
    LoopRun,
    Prompts,
    Rig,
    RigPair,
    open_rigs,
    open_together,
    run_with_uvloop,
    trace_of,
)
from lab.bench.simulation_check import STREAMS as CHECKED_STREAMS
from lab.bench.simulation_check import CheckedRigs, check_simulation
from specserve.cluster.ray_session import local_ray
from specserve.config.tree import DEMO
from specserve.demo.corpus import held_out_prompts
from specserve.models.checkpoints.widen import inflate
from specserve.tools.bench.report import machine
from specserve.types import Request, Speculation, Warp

log = logging.getLogger(__name__)

TOKENS = 128
GAMMA = 5
LOOP_TOKENS = 48  # of each request of the closed loops
SAMPLINGS = {
    "greedy": (Warp(temperature=0.0), None),
    "T = 1, `coupled`": (Warp(), "coupled"),
    "T = 1, `speculative`": (Warp(), "speculative"),
    "T = 1, `block`": (Warp(), "block"),
}


@dataclass(frozen=True, slots=True)
class DecodeFigures:
    """Figures of the decode rounds of several runs at batch 1."""

    runs: tuple[LoopRun, ...]

    @property
    def round_seconds(self) -> list[float]:
        """Seconds from the start of each round to the start of the next."""
        return [
            later.start - earlier.start
            for run in self.runs
            for earlier, later in zip(run.decode_rounds, run.decode_rounds[1:], strict=False)
        ]

    @property
    def verify_seconds(self) -> list[float]:
        """Seconds of the target for each verification."""
        return [seconds for run in self.runs for seconds in run.span_seconds("target", "verify")]

    @property
    def busy_share(self) -> float:
        """Share of the decode time in which the target is busy."""
        return sum(self.verify_seconds) / sum(
            run.decode_rounds[-1].end - run.decode_rounds[0].start for run in self.runs
        )

    @property
    def committed_per_round(self) -> float:
        return mean(round_.num_committed for run in self.runs for round_ in run.decode_rounds)

    @property
    def hit_rate(self) -> float:
        hits = [hit for run in self.runs for hit in run.hits]
        return mean(hits) if hits else 0.0

    @property
    def rates(self) -> list[float]:
        """Tokens per second of the decode rounds, for each run."""
        return [
            sum(round_.num_committed for round_ in run.decode_rounds)
            / (run.decode_rounds[-1].end - run.decode_rounds[0].start)
            for run in self.runs
        ]

    @property
    def rate(self) -> float:
        return median(self.rates)

    def ratio_to(self, other: DecodeFigures) -> float:
        """Return the median of the ratios of tokens per second of each turn."""
        return median(mine / theirs for mine, theirs in zip(self.rates, other.rates, strict=True))

    def ideal_ratio_to(self, plain: DecodeFigures) -> float:
        """Return the gain over plain decoding if no time were lost outside the passes.

        It is (mean accepted + 1) t_plain / t_verify, the median of the turns.
        """
        turns = [
            (DecodeFigures((mine,)), DecodeFigures((theirs,)))
            for mine, theirs in zip(self.runs, plain.runs, strict=True)
        ]
        return median(
            mine.committed_per_round * mean(theirs.verify_seconds) / mean(mine.verify_seconds)
            for mine, theirs in turns
        )

    @property
    def spread(self) -> str:
        return f"{self.rate:.0f} ({min(self.rates):.0f} to {max(self.rates):.0f})"


def make_requests(
    prompts: Prompts, warp: Warp, verifier: str | None, *, tokens: int = TOKENS
) -> list[Request]:
    """Return one request per prompt, with fixed seeds so that a run can be repeated."""
    speculation = Speculation(verifier=verifier)
    return [
        Request(prompt, tokens, warp, seed=i, speculation=speculation, ignore_eos=True)
        for i, prompt in enumerate(prompts)
    ]


async def measure_in_turns(
    cases: dict[str, tuple[Rig, int | None]], requests: Sequence[Request], *, turns: int
) -> dict[str, DecodeFigures]:
    """Complete one request a turn in every case, by its rig and gamma.

    The first turn warms up and is not counted.
    """
    runs: dict[str, list[LoopRun]] = {name: [] for name in cases}
    for turn in range(-1, turns):
        for name, (rig, gamma) in cases.items():
            run = await rig.run_closed_loop([requests[turn % len(requests)]], gamma=gamma)
            log.info("turn %d, %s: %.1f tokens/s", turn, name, run.rate)
            if turn >= 0:
                runs[name].append(run)
    return {name: DecodeFigures(tuple(runs[name])) for name in cases}


async def measure_hiding(rigs: RigPair, *, gamma: int, turns: int) -> Iterator[str]:
    """Measure at batch 1 how much drafting is hidden, and the time lost outside the passes."""
    lines = [
        "| | tokens/s | lockstep | plain | target busy | hit rate | round / verify "
        "| (accepted + 1) t_plain / t_verify | of that reached |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, (warp, verifier) in SAMPLINGS.items():
        cases: dict[str, tuple[Rig, int | None]] = {
            "fixed": (rigs.anticipating, gamma),
            "auto": (rigs.anticipating, None),
            "lockstep": (rigs.lockstep, gamma),
            "plain": (rigs.anticipating, 0),
        }
        requests = make_requests(rigs.prompts, warp, verifier)
        figures = await measure_in_turns(cases, requests, turns=turns)
        lines += [
            _hiding_row(
                f"{name}, gamma {gamma if case == 'fixed' else case}", figures[case], figures
            )
            for case in ("fixed", "auto")
        ]
    return iter(lines)


def _hiding_row(
    name: str, anticipating: DecodeFigures, figures: Mapping[str, DecodeFigures]
) -> str:
    lockstep, plain = figures["lockstep"], figures["plain"]
    ideal = anticipating.ideal_ratio_to(plain)
    cells = [
        name,
        anticipating.spread,
        f"{lockstep.spread}, {anticipating.ratio_to(lockstep):.2f} x",
        f"{plain.spread}, {anticipating.ratio_to(plain):.2f} x",
    ]
    cells += [
        f"{anticipating.busy_share:.3f}",
        f"{anticipating.hit_rate:.3f}",
        f"{mean(anticipating.round_seconds) / mean(anticipating.verify_seconds):.3f}",
    ]
    cells += [f"{ideal:.2f}", f"{anticipating.ratio_to(plain) / ideal:.3f}"]
    return f"| {' | '.join(cells)} |"


async def sweep_gammas(
    rigs: RigPair, *, turns: int, batches: Sequence[int]
) -> tuple[list[str], Rates]:
    """Compare the pacer's choice with fixed gammas, in closed loops with anticipation.

    A finished stream is replaced by the next. Returns the lines of a table, and the tokens per
    second of each turn by number of streams and gamma.
    """
    rates: Rates = {}
    for batch in batches:
        loop = [
            rigs.prompts[i % len(rigs.prompts)] for i in range(batch * (3 if batch < 16 else 2))
        ]
        requests = make_requests(loop, *SAMPLINGS["greedy"], tokens=LOOP_TOKENS)
        rates[batch] = {name: [] for name in CHOICES}
        for turn in range(-1, turns):
            for name in in_turn(turn):
                run = await rigs.anticipating.run_closed_loop(
                    requests, gamma=CHOICES[name], concurrency=batch
                )
                if turn >= 0:
                    rates[batch][name].append(run.rate)
    return list(table(rates)), rates


async def switch_off_and_on(rigs: RigPair, *, batch: int = 4, turns: int = 5) -> Iterator[str]:
    """Switch speculation off in the middle of a load and on again.

    The accepted draft tokens of a proposal are compared before the pause and right after it.
    """
    before, after = [], []
    for _ in range(turns):
        requests = make_requests(rigs.prompts[:batch], *SAMPLINGS["greedy"], tokens=3 * TOKENS)
        run = await rigs.anticipating.run_closed_loop(
            requests, gamma=GAMMA, gamma_changes={20: 0, 60: GAMMA}
        )
        drafted = [
            (number, round_) for number, round_ in enumerate(run.decode_rounds) if round_.outcomes
        ]
        first = [round_ for number, round_ in drafted if number < 18]
        second = [round_ for number, round_ in drafted if number >= 60]
        before += [outcome.accepted for round_ in first for outcome in round_.outcomes]
        after += [outcome.accepted for round_ in second[3:15] for outcome in round_.outcomes]
    return iter(
        [
            f"Accepted a proposal before: {mean(before):.2f}; from the third round after "
            f"speculation was switched on again: {mean(after):.2f}."
        ]
    )


def widen_demo_target(params: int, into: Path) -> Path:
    """Write the demo target, widened to that many parameters, and return its directory."""
    inflate(DEMO / "target", params, into)
    return into


SECTIONS: dict[str, str] = {
    "hidden": "## One stream: is the drafting hidden?",
    "weighs": "## Where drafting weighs: the target at 30M, the draft at 5M",
    "sweep": "## The pacer",
    "switch": "## Off and on again",
    "simulation": "## The simulation against these devices",
    "host": "## The coordinator's own work, with workers that cost nothing",
}


async def measure(options: argparse.Namespace, wide: Path, heavy: tuple[Path, Path]) -> list[str]:
    """Measure the sections that the options name and return their lines."""
    lines: list[str] = []
    prompts, only = held_out_prompts(count=32, length=TOKENS), options.only

    def add_section(name: str, body: Iterator[str]) -> None:
        lines.extend(["", SECTIONS[name], "", *body])
        _write(options.out, lines)  # so that a later failure loses no figures

    if {"hidden", "sweep", "switch", "simulation"} & set(only):
        async with open_rigs(wide, DEMO / "draft", prompts) as rigs:
            if "hidden" in only:
                add_section(
                    "hidden", await measure_hiding(rigs, gamma=options.gamma, turns=options.turns)
                )
                for name, file in (
                    ("greedy", options.greedy_trace),
                    ("T = 1, `coupled`", options.trace),
                ):
                    traced = await rigs.anticipating.run_closed_loop(
                        make_requests(prompts[:1], *SAMPLINGS[name]), gamma=options.gamma
                    )
                    file.write_text(json.dumps(trace_of(traced)))
            if "sweep" in only:
                table, rates = await sweep_gammas(
                    rigs, turns=options.turns, batches=options.batches
                )
                options.plot.write_text(plot(rates))
                add_section(
                    "sweep",
                    iter([*table, "", f"![tokens/s over plain decoding]({options.plot.name})"]),
                )
            if "switch" in only:
                add_section("switch", await switch_off_and_on(rigs))
            if "simulation" in only:
                tokens = TOKENS // 4 if options.quick else TOKENS
                async with open_together(wide, DEMO / "draft") as together:
                    checked = await check_simulation(
                        CheckedRigs(rigs.lockstep, rigs.anticipating, together),
                        make_requests(prompts, *SAMPLINGS["greedy"], tokens=tokens),
                        gamma=options.gamma,
                        turns=options.turns,
                        streams=(1, 8) if options.quick else CHECKED_STREAMS,
                    )
                add_section("simulation", iter(checked))
    if "weighs" in only:
        async with open_rigs(*heavy, prompts) as rigs:
            add_section(
                "weighs",
                await compare_with_lockstep(
                    rigs,
                    turns=options.turns,
                    streams=options.streams,
                    gammas=GAMMAS[:1] if options.quick else GAMMAS,
                ),
            )
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="where the report goes; the terminal by default")
    parser.add_argument(
        "--trace", type=Path, default=Path("trace.json"), help="of one run at temperature 1"
    )
    parser.add_argument(
        "--greedy-trace", type=Path, default=Path("trace-greedy.json"), help="of a greedy run"
    )
    parser.add_argument("--plot", type=Path, default=Path("pacer.svg"))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--gamma", type=int, default=GAMMA)
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[1, 4, 16, 32], help="of the pacer's sweep"
    )
    parser.add_argument(
        "--streams", type=int, nargs="+", default=list(STREAMS), help="where drafting weighs"
    )
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--quick", action="store_true", help="a tiny form, to see that it works")
    options = parser.parse_args(arguments)
    if options.quick:
        options.turns, options.streams, options.batches = 1, [2], [2]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    with tempfile.TemporaryDirectory() as scratch, local_ray(num_cpus=16):
        wide = (
            widen_demo_target(8_000_000 if options.quick else 200_000_000, Path(scratch) / "wide")
            if set(options.only) - {"weighs", "host"}
            else Path()
        )
        heavy = Path(scratch) / "30M", Path(scratch) / "5M"
        if "weighs" in options.only:
            inflate(DEMO / "target", 30_000_000, heavy[0])
            inflate(DEMO / "draft", 5_000_000, heavy[1])
        lines = run_with_uvloop(measure(options, wide, heavy))
    if "host" in options.only:
        lines += ["", SECTIONS["host"], "", *overhead_table()]
    _write(options.out, lines)
    if options.out is None:
        print("\n".join(lines))


def _write(out: Path | None, lines: Sequence[str]) -> None:
    about = (
        f"{date.today()}, {machine()}. The target has one core and one thread, "
        "the draft and the coordinator share the other."
    )
    pair = (
        f"The demo pair, its target widened to 200M unless said; bf16; {TOKENS} tokens in and out. "
        "`python -m lab.bench.pipeline`."
    )
    if out is not None:
        out.write_text("\n".join(["# Drafting behind verifying", "", about, pair, *lines, ""]))


if __name__ == "__main__":
    main()
