"""Tokens that are drawn, beside the likeliest ones: `python -m lab.bench.sampling`.

A chat model with a large vocabulary (`--target MODEL`) answers prompts of tasks.jsonl, greedy and
with sampling parameters as checkpoints recommend them, in turns, without draft tokens.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from lab.bench.long_talk import prompts
from specserve import LLM, Sampling
from specserve.tools.bench.report import machine

SETTINGS: Mapping[str, Mapping[str, float]] = {
    "greedy": {"temperature": 0},
    "T = 1": {"temperature": 1},
    "T = 1, top-p 0.9": {"temperature": 1, "top_p": 0.9},
    "T = 1, top-k 40": {"temperature": 1, "top_k": 40},
    "T = 0.7, top-k 20, top-p 0.8": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
}
STREAMS = (1, 8, 32)


def pace(llm: LLM, chats: Sequence[Any], setting: Mapping[str, Any], tokens: int) -> float:
    """Return the output tokens a second of these prompts at once."""
    own = [
        Sampling(max_tokens=tokens, ignore_eos=True, seed=seed, **setting)
        for seed in range(len(chats))
    ]
    start = time.perf_counter()
    outputs = llm.chat(chats, own)
    return sum(len(one.token_ids) for one in outputs) / (time.perf_counter() - start)


def page(options: argparse.Namespace) -> Iterator[str]:
    """Yield the lines of the page."""
    load, target = os.getloadavg()[0], {} if options.target is None else {"target": options.target}
    chats = [[{"role": "user", "content": one}] for one in prompts()][: max(STREAMS)]
    found: dict[tuple[str, int], list[float]] = {
        (name, streams): [] for streams in STREAMS for name in SETTINGS
    }
    with LLM(**target, **{"draft.kind": "none"}) as llm:
        vocab = llm.engine.tokenizer.vocab_size
        for _ in range(1 + options.turns):
            for (name, streams), paces in found.items():
                paces.append(pace(llm, chats[:streams], SETTINGS[name], options.tokens))
            print(f"turn {len(paces) - 1} of {options.turns}", file=sys.stderr, flush=True)
    yield "# Greedy and drawn\n"
    yield f"{date.today()}, {machine()}, load before {load:.1f}. The target is {options.name}, with"
    yield f"{vocab:,} ids; {options.tokens} tokens each, {options.turns} turns. Tokens a second,"
    yield "and what they are to greedy ones of the same turn.\n"
    heads = chain.from_iterable((f"{streams} at once", "to greedy") for streams in STREAMS)
    yield f"| sampling | {' | '.join(heads)} |"
    yield "|---|" + "---|---|" * len(STREAMS)
    for name in SETTINGS:
        cells = [name]
        for streams in STREAMS:
            own, greedy = found[name, streams][1:], found["greedy", streams][1:]  # one warms up
            ratios = [one / other for one, other in zip(own, greedy, strict=True)]
            cells += [
                f"{median(own):.0f}",
                f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            ]
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", help="a chat model; the demo's target by default")
    parser.add_argument("--name", default="the demo's", help="how the page calls the target")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write the page there")
    parser.add_argument("--quick", action="store_true", help="two tokens, once")
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.turns = 2, 1
    text = "\n".join(page(options)) + "\n"
    print(text)
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
