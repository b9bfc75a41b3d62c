"""The pacer beside fixed gammas: `python -m lab.bench.pacer`.

Draft and target in one process, the target widened to 200M. For each number of streams and kind of
text, closed loops with every gamma take turns with those in which the pacer chooses.
"""

from __future__ import annotations

import argparse
import doctest
import inspect
import logging
import os
import platform
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import Any

from lab.bench.gamma_plot import CHOICES, Rates, in_turn, plot, table
from lab.bench.pipeline import widen_demo_target
from specserve.config.tree import DEMO
from specserve.demo.corpus import held_out_prompts
from specserve.host import usable_cores
from specserve.llm.llm import LLM
from specserve.sampling_params import Sampling

log = logging.getLogger(__name__)

STREAMS = (1, 2, 4, 8, 16, 32, 64)
TOKENS = 48
PROMPT = 128
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "kind": {"enum": ["red", "green", "blue"]},
        "sizes": {"type": "array", "items": {"type": "integer"}, "minItems": 4, "maxItems": 8},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TextKind:
    """Prompts of one kind, and how they are continued."""

    prompts: Callable[[], Sequence[Prompt]]
    sampling: Sampling


def _python() -> Sequence[Prompt]:
    return held_out_prompts(count=32, length=PROMPT)


def _prose() -> Sequence[Prompt]:
    """Return paragraphs of documentation in English."""
    modules: tuple[ModuleType, ...] = (argparse, doctest, logging, inspect, textwrap, tempfile)
    texts = [inspect.getdoc(item) or "" for module in modules for item in vars(module).values()]
    return sorted({text[:400] for text in texts if len(text) > 300})[:32]


def _json() -> Sequence[Prompt]:
    return [f'# Thing {number} as JSON\nthing = json.loads("""' for number in range(32)]


KINDS = {
    "python": TextKind(_python, Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)),
    "prose": TextKind(_prose, Sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)),
    "json": TextKind(_json, Sampling(max_tokens=TOKENS, temperature=0.0, guided={"json": SCHEMA})),
}


def sweep(target: Path, kind: TextKind, *, streams: Sequence[int], turns: int) -> Rates:
    """Measure every gamma at every number of streams."""
    rates: Rates = {}
    prompts = kind.prompts()
    for count in streams:
        number = count * (3 if count < 16 else 2)
        batch = [prompts[i % len(prompts)] for i in range(number)]
        rates[count] = {name: [] for name in CHOICES}
        keys: dict[str, Any] = {
            "target.path": str(target),
            "draft.path": str(DEMO / "draft"),
            "limits.max_running": count,
            "limits.max_queued": number,
            "cache.pages": 256 + 16 * count,
        }
        with LLM(**keys) as llm:
            for turn in range(-1, turns):
                for name in in_turn(turn):
                    rate = _rate(llm, batch, kind.sampling, gamma=CHOICES[name])
                    if turn >= 0:
                        rates[count][name].append(rate)
        log.info("%d streams: %s", count, {k: round(median(v)) for k, v in rates[count].items()})
    return rates


def _rate(llm: LLM, batch: Sequence[Prompt], sampling: Sampling, *, gamma: int | None) -> float:
    """Return the output tokens a second of a closed loop, prompts included."""
    if gamma is not None:
        sampling = replace(sampling, speculation={"gamma": gamma})
    start = time.perf_counter()
    outputs = llm.generate(list(batch), sampling)
    seconds = time.perf_counter() - start
    return sum(len(output.token_ids) for output in outputs) / seconds


def head(turns: int) -> list[str]:
    busy = os.getloadavg()[0]
    return [
        "# The pacer beside fixed gammas",
        "",
        "`python -m lab.bench.pacer`",
        "",
        f"{date.today()}, {platform.system()} {platform.machine()}, {usable_cores()} cores; one "
        f"process, the demo target widened to 200M; output tokens a second in closed loops of "
        f"{TOKENS} tokens each, greedy, prompts included; medians of {turns} turns, in each of "
        f"which the choices change places. The load average was {busy:.1f} before.",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, nargs="+", default=list(STREAMS))
    parser.add_argument("--texts", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, help="where the report goes; the terminal by default")
    parser.add_argument("--plot", type=Path, help="an SVG file for a plot of the first text")
    parser.add_argument("--quick", action="store_true", help="a tiny form, to see that it works")
    options = parser.parse_args(arguments)
    if options.quick:
        options.streams, options.turns = [2], 1
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    lines = head(options.turns)
    with tempfile.TemporaryDirectory() as scratch:
        params = 8_000_000 if options.quick else 200_000_000
        target = widen_demo_target(params, Path(scratch) / "wide")
        for number, name in enumerate(options.texts):
            rates = sweep(target, KINDS[name], streams=options.streams, turns=options.turns)
            lines += ["", f"## {name}", "", *table(rates)]
            if options.plot is not None and number == 0:
                options.plot.write_text(plot(rates), encoding="utf-8")
            if options.out is not None:  # so that a later failure loses no figures
                options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if options.out is None:
        print("\n".join(lines))


if __name__ == "__main__":
    main()
