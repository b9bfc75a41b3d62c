"""Autoscaling over an hour of arrivals, simulated: `python -m lab.bench.autoscaling`.

The rules that Ray Serve would call decide, the real scheduler runs on simulated devices. An oracle
that knows all arrivals beforehand, and what one engine can do, is the measure of cost.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from lab.simulate.load import Arrival
from lab.simulate.pass_times import LinearPassTime
from lab.simulate.run import SimulationResult, simulate
from lab.simulate.scenario import DeviceGroup, Mode, Scenario
from specserve.config.tree import config_from_keys
from specserve.engine.first_tokens import BUCKET_RATIO, MAX_LATE_SHARE

TARGET_TTFT_S = 1.0
START_S = 60.0
MAX_ENGINES = 16
TARGET_ONGOING = 32
TARGET = DeviceGroup(LinearPassTime(fixed=0.04, per_row=0.0002))
MEDIAN_PROMPT, MEDIAN_OUTPUT = 1020, 129
"""Tokens in Azure's trace of conversations (Patel et al., Splitwise, 2024, section III)."""
SIGMA_PROMPT, SIGMA_OUTPUT = 0.5, 1.0
MAX_TOKENS = 8192
GAMMA_SHAPE = 0.5
"""Shape of the gaps between arrivals, which come in bursts (Wang et al., BurstGPT, 2024)."""
RATE = 2.5
"""Mean requests a second of the wave."""
SWING = 0.6
CROWD_FACTOR = 2.5
CROWDS = ((0.25, 0.30), (0.65, 0.70))
"""Parts of the hour in which the rate is CROWD_FACTOR times as high at once."""


@dataclass(frozen=True, slots=True)
class ScalingRule:
    """A rule that decides how many engines there are."""

    name: str
    scenario: Scenario


def rate_at(part: float) -> float:
    """Return the requests a second at a part of the hour: one wave, and two crowds."""
    wave = RATE * (1 - SWING * math.cos(2 * math.pi * part))
    return wave * (CROWD_FACTOR if any(start <= part < end for start, end in CROWDS) else 1.0)


def draw_arrivals(seconds: int, *, seed: int) -> tuple[Arrival, ...]:
    """Return arrivals with Gamma gaps, whose rate follows `rate_at`."""
    rng = random.Random(seed)
    arrivals, due, expected = [], 0.0, 0.0
    for second in range(seconds):
        rate = rate_at(second / seconds)
        while due < expected + rate:
            arrivals.append(
                Arrival(
                    second + (due - expected) / rate,
                    _tokens(rng, MEDIAN_PROMPT, SIGMA_PROMPT),
                    _tokens(rng, MEDIAN_OUTPUT, SIGMA_OUTPUT),
                )
            )
            due += rng.gammavariate(GAMMA_SHAPE, 1 / GAMMA_SHAPE)
        expected += rate
    return tuple(arrivals)


def _tokens(rng: random.Random, median: float, sigma: float) -> int:
    return round(min(MAX_TOKENS, max(1.0, rng.lognormvariate(math.log(median), sigma))))


def scenario_of(arrivals: Sequence[Arrival], **replicas: object) -> Scenario:
    keys = {f"replicas.{key}": value for key, value in replicas.items()}
    return Scenario(
        target=TARGET,
        draft=None,
        arrivals=tuple(arrivals),
        mode=Mode.PLAIN,
        config=config_from_keys({"speculation.gamma": 0, "limits.max_running": 128, **keys}),
        startup_s=START_S,
    )


def capacity_of_one(arrivals: Sequence[Arrival], *, per_client: int) -> tuple[int, float]:
    """Return the most requests at which one engine is in time, and the seconds of its rounds.

    That many clients send their next request when they have the answer. All but a share of
    MAX_LATE_SHARE must be in time.
    """
    load, found = 1, (1, TARGET.pass_time.seconds(1, 1, 0))
    while load <= 128:
        one = replace(scenario_of(arrivals[: per_client * load]), concurrency=load)
        result = simulate(one)
        if late_share(result) > MAX_LATE_SHARE:
            return found
        found = load, result.seconds * load / result.tokens
        load = max(load + 1, int(load * BUCKET_RATIO))
    return found


def late_share(result: SimulationResult) -> float:
    late = sum(seconds > TARGET_TTFT_S for seconds in result.first_token_seconds)
    return late / len(result.first_token_seconds)


def oracle_schedule(
    arrivals: Sequence[Arrival], *, capacity: int, token_seconds: float, seconds: int
) -> tuple[int, ...]:
    """Return the engines of each second: those that are needed in it or within their start."""
    changes = [0] * (seconds + 1)
    for arrival in arrivals:
        end = arrival.time + arrival.output_tokens * token_seconds
        changes[int(arrival.time)] += 1
        changes[min(seconds, math.ceil(end))] -= 1
    needed, load = [], 0
    for change in changes[:seconds]:
        load += change
        needed.append(min(MAX_ENGINES, max(1, math.ceil(load / capacity))))
    lead = int(START_S)
    return tuple(max(needed[at : at + lead + 1]) for at in range(seconds))


def row(rule: ScalingRule, result: SimulationResult, *, oracle_hours: float) -> str:
    hours = result.device_seconds / 3600
    first = result.time_to_first
    assert first is not None
    changes = (len(result.replica_counts) - 1) / (result.seconds / 3600)
    return (
        f"| {rule.name} | {first.p50:.2f} | {first.p99:.2f} | {100 * late_share(result):.1f}% "
        f"| {hours:.2f} | {hours / oracle_hours:.2f} | {result.replicas} | {changes:.0f} |"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="where the page goes; the terminal by default")
    parser.add_argument("--quick", action="store_true", help="a tiny form, to see that it works")
    options = parser.parse_args(arguments)
    seconds = 30 if options.quick else 3600
    arrivals = draw_arrivals(seconds, seed=options.seed)
    capacity, token_seconds = capacity_of_one(arrivals, per_client=4 if options.quick else 40)
    bounds = {"min": 1, "max": MAX_ENGINES}
    scheduled = replace(
        scenario_of(arrivals, **bounds),
        schedule=oracle_schedule(
            arrivals, capacity=capacity, token_seconds=token_seconds, seconds=seconds
        ),
    )
    rules = [
        ScalingRule("oracle", scheduled),
        ScalingRule(
            f"`target_ttft_s: {TARGET_TTFT_S}`",
            scenario_of(arrivals, **bounds, target_ttft_s=TARGET_TTFT_S),
        ),
        ScalingRule(
            f"`target_ongoing_requests: {TARGET_ONGOING}`", scenario_of(arrivals, **bounds)
        ),
        ScalingRule(
            f"`target_ongoing_requests: {capacity}`",
            scenario_of(arrivals, **bounds, target_ongoing_requests=capacity),
        ),
    ]
    results = [simulate(rule.scenario) for rule in rules]
    oracle_hours = results[0].device_seconds / 3600
    lines = [
        *head(options.seed, arrivals, capacity=capacity, minutes=seconds / 60),
        "| rule | first token, p50, s | p99, s | late | engine-hours | over the oracle's "
        "| most engines | changes an hour |",
        "|---|---|---|---|---|---|---|---|",
        *(
            row(rule, result, oracle_hours=oracle_hours)
            for rule, result in zip(rules, results, strict=True)
        ),
    ]
    page = "\n".join(lines) + "\n"
    if options.out is None:
        print(page)
    else:
        options.out.write_text(page, encoding="utf-8")


def head(
    seed: int, arrivals: Sequence[Arrival], *, capacity: int, minutes: float
) -> tuple[str, ...]:
    """Return the lines above the table."""
    return (
        "# Autoscaling over an hour",
        "",
        "`python -m lab.bench.autoscaling`",
        "",
        f"Simulated, not measured, {date.today()}: the policies that Ray Serve calls and the real "
        f"scheduler, on devices whose pass takes 40 ms and 0.2 ms a row; {minutes:.0f} minutes "
        f"of {len(arrivals)} requests, seed {seed}. Prompts and outputs are log-normal, with the "
        f"medians of Azure's trace of conversations ({MEDIAN_PROMPT} and {MEDIAN_OUTPUT} tokens; "
        f"sigma {SIGMA_PROMPT} and {SIGMA_OUTPUT}). Gaps between arrivals are Gamma with shape "
        f"{GAMMA_SHAPE}, since BurstGPT finds bursts; their rate goes from "
        f"{rate_at(0.0):.0f} a second to {rate_at(0.5):.0f} and back, and is {CROWD_FACTOR} times "
        f"as high in two crowds of three minutes that nothing announces. An engine takes "
        f"{START_S:.0f} s to start; there may be 1 to {MAX_ENGINES}.",
        "",
        f"A first token is late after {TARGET_TTFT_S:.0f} s. One engine with a steady load keeps "
        f"to that in 95% of the cases with up to {capacity} requests at once. The oracle knows "
        "this number and all arrivals, and starts engines so that they are ready when they are "
        "needed.",
        "",
    )


if __name__ == "__main__":
    main()
