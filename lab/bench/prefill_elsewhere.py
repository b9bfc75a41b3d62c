"""Prompts beside decoding, and on engines of their own: `python -m lab.bench.prefill_elsewhere`.

Simulated: one engine that takes prompts, in chunks, and decodes; and one that only decodes, whose
prompts come computed. The highest rate of requests that keeps the limits counts, for each device.
Engines for prompts only are assumed to be always busy, to be as many as it takes, a fraction
included, and to send pages in no time, so what division gains is a bound.
"""

from __future__ import annotations

import argparse
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import date
from functools import cache
from pathlib import Path

from specserve.engine.budget import TokenBudget
from specserve.tools.simulate.load import LengthsConfig, LoadConfig, arrivals
from specserve.tools.simulate.run import SimulationResult, simulate
from specserve.tools.simulate.scenario import Scenario
from specserve.tools.simulate.study import load_study, scenario

log = logging.getLogger(__name__)

STUDY = Path(__file__).parents[2] / "deploy" / "simulate-70b.yaml"
PROMPTS: Sequence[int] = (512, 2048, 8192)
OUTPUT = 256
SECONDS = 15.0
MIN_REQUESTS = 48
TTFT_S = 2.0
TPOT_S: Sequence[float] = (0.01, 0.02, 0.04)
RATES = tuple(0.25 * 1.15**i for i in range(36))
"""Requests a second that are tried."""
HEAD = (
    "| prompt, tokens | TPOT p90 at most, ms | both on one engine, requests/s (tokens/s a device) "
    "| decoding alone, requests/s | prompts alone, requests/s "
    "| divided, tokens/s a device, at most | divided / both, at most |",
    "|---|---|---|---|---|---|---|",
)


def compare(
    base: Scenario, *, prompts: Sequence[int], limits: Sequence[float], seconds: float
) -> Iterator[str]:
    """Yield a table of the best rates of both, while requests arrive for so many seconds."""
    yield from HEAD
    for prompt in prompts:
        both = cache(lambda rate, prompt=prompt: _run(base, prompt, rate, seconds))
        alone = cache(
            lambda rate, prompt=prompt: _run(
                replace(base, prompts_are_computed=True), prompt, rate, seconds
            )
        )
        prompts_rate = 1 / _prompt_seconds(base, prompt)
        for limit in limits:
            together, decoding = best_rate(both, limit), best_rate(alone, limit)
            shared = OUTPUT * together / base.num_devices
            divided = (
                OUTPUT
                * decoding
                * prompts_rate
                / (base.num_devices * prompts_rate + base.target.num_devices * decoding)
            )
            ratio = f"{divided / shared:.2f}" if shared else ""
            line = (
                f"| {prompt:,} | {1e3 * limit:.0f} | {together:.2f} ({shared:.0f}) "
                f"| {decoding:.2f} | {prompts_rate:.2f} | {divided:.0f} | {ratio} |"
            )
            log.info("%s", line)
            yield line


def best_rate(run: Callable[[float], SimulationResult], tpot_s: float) -> float:
    """Return the highest of the rates that keep the limits, or 0 if none does."""
    kept, beyond = -1, len(RATES)
    while beyond - kept > 1:
        middle = (kept + beyond) // 2
        if _keeps_limits(run(RATES[middle]), tpot_s):
            kept = middle
        else:
            beyond = middle
    return RATES[kept] if kept >= 0 else 0.0


def _run(base: Scenario, prompt: int, rate: float, seconds: float) -> SimulationResult:
    load = LoadConfig(
        kind="poisson",
        rate=rate,
        requests=max(MIN_REQUESTS, math.ceil(seconds * rate)),
        prompt=LengthsConfig(tokens=prompt),
        output=LengthsConfig(tokens=OUTPUT),
    )
    requests = arrivals(load, seed=base.seed, directory=Path())
    return simulate(replace(base, arrivals=requests, concurrency=None))


def _keeps_limits(result: SimulationResult, tpot_s: float) -> bool:
    first, further = result.time_to_first, result.time_per_token
    assert first is not None
    assert further is not None
    return not result.refused and first.p90 <= TTFT_S and further.p90 <= tpot_s


def _prompt_seconds(base: Scenario, prompt: int) -> float:
    """Return the seconds of a prompt by itself, in chunks as large as they are beside decoding."""
    chunk = TokenBudget.from_curve(base.config.limits.max_batch_tokens, base.target.curve).tokens
    return sum(
        base.target.pass_time.seconds(min(chunk, prompt - start), 1, min(prompt, start + chunk))
        for start in range(0, prompt, chunk)
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--study", type=Path, default=STUDY, help="a file of `specserve simulate`")
    parser.add_argument("--out", type=Path, help="where the report goes; the terminal by default")
    parser.add_argument("--quick", action="store_true", help="a tiny form, to see that it works")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    log.setLevel(logging.INFO)
    base = scenario(load_study(options.study), directory=options.study.parent)
    prompts, limits, seconds = PROMPTS, TPOT_S, SECONDS
    if options.quick:
        prompts, limits, seconds = PROMPTS[2:], TPOT_S[:1], 1.0
    lines = [
        "# Prompts on engines of their own",
        "",
        "`make simulate-prefill`",
        "",
        f"{date.today()}. **Simulated**: an engine of `{options.study.name}`, requests that arrive "
        f"at random for {seconds:.0f} s (at least {MIN_REQUESTS}), {OUTPUT} tokens each. TTFT p90 "
        f"is at most {TTFT_S:g} s.",
        "",
        *compare(base, prompts=prompts, limits=limits, seconds=seconds),
    ]
    if options.out is None:
        print("\n".join(lines))
    else:
        options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
