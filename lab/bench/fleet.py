"""Fleets of 1,000 and 10,000 GPUs of four types, simulated: `python -m lab.bench.fleet`.

The real scheduler runs on simulated devices. Each part of a fleet is a model on one type of GPU;
its engines are simulated by a sample that gets its share of the requests, since engines only meet
in the router and in pools. The time of the scheduler itself is measured on this machine, by the
real code at the size of the fleet.
"""

from __future__ import annotations

import argparse
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from lab.bench import decision_times
from lab.bench.fleet_parts import (
    ALPHA,
    ARRANGEMENTS,
    GPUS,
    LINK_S,
    M8,
    M70,
    OUTPUT,
    PAIRS,
    PARTS,
    PLAIN,
    POOLS,
    PROMPT,
    TOGETHER,
    WARM_SHARE,
    Arrangement,
    FleetPart,
    ModelShape,
    mean_output,
    plain_rate,
    scenario_of,
)
from lab.simulate.period import PeriodResult
from lab.simulate.run import simulate
from lab.simulate.statistics import Quantiles
from specserve.tools.bench.report import machine

log = logging.getLogger(__name__)

SIZES = (1_000, 10_000)
SAMPLE = 4
"""Engines that stand for all of a part; as many as share a draft device, if those are more."""
LOADS = (4, 16)
"""Streams of an engine without a draft, on average."""
SPAN = 2.5
"""Time in which requests arrive, in times that an answer takes on an engine without other work."""


@dataclass(frozen=True, slots=True)
class PartRun:
    """A sample of a part's engines in one arrangement, at one load."""

    part: FleetPart
    arrangement: Arrangement
    streams: int
    engines: int  # of the sample
    rate: float  # requests a second of each engine
    result: PeriodResult
    wall_s: float


def run_part(
    part: FleetPart,
    arrangement: Arrangement,
    streams: int,
    *,
    engines: int | None = None,
    span: float = SPAN,
    seed: int = 0,
) -> PartRun:
    """Simulate engines of a part, which share the load that its GPUs have without drafts."""
    rate = plain_rate(part, streams) * arrangement.devices(part) / part.ranks
    start = time.perf_counter()
    seconds = span * part.answer_s
    engines = engines or max(SAMPLE, arrangement.engines)
    made = scenario_of(part, arrangement, rate, engines=engines, seconds=seconds, seed=seed)
    period = simulate(made).period
    assert period is not None
    run = PartRun(part, arrangement, streams, engines, rate, period, time.perf_counter() - start)
    log.info("%s (%.0f s)", part_row(run), run.wall_s)
    return run


PART_HEAD = (
    "| part | streams | drafts | engines at 1,000 GPUs | requests/s an engine "
    "| TTFT p50, ms | p99 | TPOT p50, ms | p99 | target busy | draft asked | draft busy |",
    "|---|---|---|---|---|---|---|---|---|---|---|---|",
)


def part_row(run: PartRun) -> str:
    result, has_draft = run.result, run.arrangement is not PLAIN
    return (
        f"| {run.part.name} | {run.streams} | {run.arrangement.name} "
        f"| {run.arrangement.num_engines(run.part, SIZES[0])} | {run.rate:.2f} "
        f"| {_p50_p99(result.time_to_first)} | {_p50_p99(result.time_per_token)} "
        f"| {result.target_busy:.0%} | {f'{result.draft_asked:.0%}' if has_draft else ''} "
        f"| {f'{result.draft_busy:.0%}' if has_draft else ''} |"
    )


def _p50_p99(times: Quantiles | None) -> str:
    return " | " if times is None else f"{1e3 * times.p50:.1f} | {1e3 * times.p99:.1f}"


FLEET_HEAD = (
    "| GPUs | streams | drafts | engines | GPUs used | GPUs that only draft | tokens/s "
    "| TTFT p99 at most, ms | TPOT p50, 70B, ms | 8B, ms | USD an hour "
    "| USD for 10^6 output tokens |",
    "|---|---|---|---|---|---|---|---|---|---|---|---|",
)


def fleet_rows(runs: Sequence[PartRun], prices: Mapping[str, float]) -> Iterator[str]:
    """Yield a row for each size, load and arrangement: all parts, by their numbers of engines."""
    by_key: dict[tuple[int, Arrangement], list[PartRun]] = {}
    for run in runs:
        by_key.setdefault((run.streams, run.arrangement), []).append(run)
    for size in SIZES:
        for (streams, arrangement), parts in by_key.items():
            engines = [arrangement.num_engines(one.part, size) for one in parts]
            drafts = [
                math.ceil(count / arrangement.engines) if arrangement.engines else 0
                for count in engines
            ]
            used = [
                one.part.ranks * count + draft
                for one, count, draft in zip(parts, engines, drafts, strict=True)
            ]
            tokens = mean_output() * sum(
                one.rate * count for one, count in zip(parts, engines, strict=True)
            )
            price = sum(
                prices[one.part.gpu.name] * count for one, count in zip(parts, used, strict=True)
            )
            yield (
                f"| {size:,} | {streams} | {arrangement.name} | {sum(engines):,} | {sum(used):,} "
                f"| {sum(drafts):,} | {tokens:,.0f} "
                f"| {_latest(parts)} | {_tpot(parts, M70)} | {_tpot(parts, M8)} "
                f"| {price:,.0f} | {price / 3600 / tokens * 1e6:.2f} |"
            )


def _latest(parts: Sequence[PartRun]) -> str:
    """Return the largest p99 of first tokens: the parts keep up with what arrives."""
    first = [one.result.time_to_first for one in parts]
    return f"{max((1e3 * one.p99 for one in first if one is not None), default=0.0):.0f}"


def _tpot(parts: Sequence[PartRun], model: ModelShape) -> str:
    """Return the median TPOT of a model on each type of GPU."""
    times = [one.result.time_per_token for one in parts if one.part.target is model]
    return " / ".join("" if one is None else f"{1e3 * one.p50:.1f}" for one in times)


CHECK_HEAD = (
    "| part | drafts | engines | TTFT p50, ms | p99 | TPOT p50, ms | p99 "
    "| target busy | seconds of this machine |",
    "|---|---|---|---|---|---|---|---|---|",
)


def check_row(run: PartRun) -> str:
    result = run.result
    return (
        f"| {run.part.name} | {run.arrangement.name} | {run.engines} "
        f"| {_p50_p99(result.time_to_first)} | {_p50_p99(result.time_per_token)} "
        f"| {result.target_busy:.0%} | {run.wall_s:.0f} |"
    )


def run_all(*, quick: bool) -> tuple[list[PartRun], list[PartRun], list[PartRun]]:
    """Return the runs of all parts, the runs of pool sizes, and samples before each whole part."""
    parts, loads, span = (PARTS[2:3], LOADS[:1], 1.0) if quick else (PARTS, LOADS, SPAN)
    runs = [
        run_part(part, arrangement, streams, span=span)
        for streams in loads
        for arrangement in ARRANGEMENTS
        for part in parts
    ]
    pools = [] if quick else [run_part(PARTS[0], one, LOADS[0]) for one in (PAIRS, *POOLS)]
    checks = [] if quick else list(_checks(runs))
    return runs, pools, checks


def _checks(runs: Sequence[PartRun]) -> Iterator[PartRun]:
    for part, arrangement in ((PARTS[0], PLAIN), (PARTS[1], TOGETHER), (PARTS[1], POOLS[1])):
        key = part, arrangement, LOADS[0]
        yield next(one for one in runs if (one.part, one.arrangement, one.streams) == key)
        engines = arrangement.num_engines(part, SIZES[0])
        yield run_part(part, arrangement, LOADS[0], engines=engines, seed=1)


def head(prices: Mapping[str, float]) -> Iterator[str]:
    yield "# Fleets of 1,000 and 10,000 GPUs"
    yield ""
    yield "`python -m lab.bench.fleet`"
    yield ""
    yield (
        f"{date.today()}. **Simulated**, but for the last table: no such fleet was run. The real "
        "coordinator, pacer, anticipation and sharing of pools run on simulated devices under a "
        "virtual clock. Prompts and outputs are log-normal with medians of "
        f"{PROMPT.tokens} and {OUTPUT.tokens} tokens (sigma {PROMPT.sigma} and {OUTPUT.sigma}), "
        "arrivals are random. **Assumed**:"
    )
    yield ""
    yield (
        "- Shares of the fleet's GPUs: "
        + ", ".join(f"{one.share:.0%} {one.gpu.name} for {one.name}" for one in PARTS)
        + ". Each of these parts is a deployment with requests of its own. The draft has 1B "
        "parameters and runs on the type of its targets."
    )
    yield (
        "- Passes by data sheets ("
        + "; ".join(
            f"{gpu.name} {gpu.bandwidth_gb_s:,} GB/s, {gpu.tflops} TFLOP/s, {gpu.memory_gb} GB"
            for gpu in GPUS.values()
        )
        + "), of which the shares are reached that the real kernels reach on an H100, and with its "
        "times beside ([roofline](roofline.md), `deploy/simulate-70b.yaml`)."
    )
    yield (
        f"- Alpha {ALPHA} at every position. {1e6 * LINK_S:.0f} us one way to a worker, wherever "
        "it is. Requests go to the less busy of two engines."
    )
    yield (
        "- USD an hour for a GPU: "
        + ", ".join(f"{name} {price:g}" for name, price in prices.items())
        + ": the rates of one cloud (RunPod) as "
        "[compiled in March 2026](https://deploybase.ai/articles/runpod-gpu-pricing). Hosts, "
        "network and idle hours are not in them. "
        "`python -m lab.bench.fleet --price H100=6.88` takes another one."
    )
    yield ""
    yield (
        "*Streams* is the load: so many requests are under way on average in an engine that "
        "has all its GPUs for the target, if nothing else delays them. Every arrangement gets the "
        "same requests on the same GPUs: *plain* and *together*, where the draft shares the "
        "target's GPUs, have the most engines, *pairs* (a draft device for each engine) the "
        "fewest. Figures are of the last "
        f"{1 - WARM_SHARE:.0%} of the time in which requests arrive, which is {SPAN:g} times "
        "what an answer takes alone. *Tokens/s* are those that arrive and that all arrangements "
        "write, since none of them falls behind. Cost thus differs between loads, and at a given "
        "TPOT between arrangements."
    )
    yield ""


def page(prices: Mapping[str, float], *, quick: bool) -> list[str]:
    runs, pools, checks = run_all(quick=quick)
    sizes, repeats = ((8, 70), 40) if quick else ((8, 250, 2_500), 1_000)
    decisions = decision_times.measure_all(sizes, repeats=repeats)
    return [
        *head(prices),
        "## The fleet",
        "",
        *FLEET_HEAD,
        *fleet_rows(runs, prices),
        "",
        "## Its parts",
        "",
        *PART_HEAD,
        *map(part_row, runs),
        "",
        "*Draft asked* is the share of a draft device's time in which an engine waits for it, "
        "*draft busy* has what it prepares meanwhile, too.",
        "",
        "## Engines of a draft device",
        "",
        *PART_HEAD,
        *map(part_row, pools),
        "",
        "## Samples beside the whole",
        "",
        f"A part is simulated by {SAMPLE} engines, or by all of a draft device. The same figures "
        "of all engines, with other random numbers:",
        "",
        *CHECK_HEAD,
        *map(check_row, checks),
        "",
        "## The scheduler's own time",
        "",
        f"**Measured**, {machine()}; other work ran beside it. Engines are names and queue "
        "lengths, all else is the code of a server. A request has "
        f"{decision_times.PROMPT:,} tokens, of which {decision_times.SHARED} are one of "
        f"{decision_times.GROUPS} shared beginnings, and {decision_times.ONGOING} requests for "
        "each engine are under way.",
        "",
        *decision_times.HEAD,
        *(one.row() for one in decisions),
    ]


def price(text: str) -> tuple[str, float]:
    """Return the type and the price of a text such as H100=6.88."""
    name, _, usd = text.partition("=")
    if name not in GPUS or not usd.replace(".", "", 1).isdigit():
        raise argparse.ArgumentTypeError(f"one of {', '.join(GPUS)}, =, USD; not {text!r}")
    return name, float(usd)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="where the report goes; the terminal by default")
    parser.add_argument("--quick", action="store_true", help="a tiny form, to see that it works")
    parser.add_argument(
        "--price", type=price, nargs="+", default=[], metavar="GPU=USD", help="of an hour"
    )
    options = parser.parse_args(arguments)
    prices = {gpu.name: gpu.price for gpu in GPUS.values()} | dict(options.price)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    log.setLevel(logging.INFO)
    lines = page(prices, quick=options.quick)
    if options.out is None:
        print("\n".join(lines))
    else:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
