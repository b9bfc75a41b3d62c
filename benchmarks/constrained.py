"""One stream under a JSON schema, with drafts and without: target and draft on a core each, the demo target widened.

`python -m benchmarks.constrained`
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

from benchmarks.pipeline import GAMMA, KINDS, TOKENS, Rigs, in_turns, opened, requests, widened
from benchmarks.rig import run
from specserve.cluster.ray_session import own_ray
from specserve.config.tree import DEMO
from specserve.demo.corpus import held_out_prompts
from specserve.tools.bench.report import machine
from specserve.types import Grammar

ARGUMENT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "type": {"enum": ["str", "int"]},
        "optional": {"type": "boolean"},
    },
    "required": ["name", "type", "optional"],
    "additionalProperties": False,
}
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2, "maxLength": 20},
        "kind": {"enum": ["function", "method", "class", "module"]},
        "arguments": {
            "type": "array",
            "items": {"$ref": "#/$defs/argument"},
            "minItems": 3,
            "maxItems": 6,
        },
        "lines": {"type": "integer", "minimum": 1, "maximum": 9999},
    },
    "required": ["name", "kind", "arguments", "lines"],
    "additionalProperties": False,
    "$defs": {"argument": ARGUMENT},
}
HEAD = (
    "",
    "tokens/s",
    "auto",
    "plain",
    "over plain",
    "auto over plain",
    "committed a round",
    "hit rate",
    "verify ms",
    "plain verify ms",
)


async def measure(wide: Path, *, gamma: int, turns: int) -> list[str]:
    """A B A B: each turn another prompt, by every way. Texts end where the schema lets them."""
    lines = [_row(HEAD), _row(["---"] * len(HEAD))]
    async with opened(wide, DEMO / "draft", held_out_prompts(count=32, length=TOKENS)) as rigs:
        for name in KINDS:
            lines.append(_row([name, *await _cells(rigs, name, gamma=gamma, turns=turns)]))
    return lines


async def _cells(rigs: Rigs, name: str, *, gamma: int, turns: int) -> list[str]:
    warp, verifier = KINDS[name]
    grammar = Grammar("json_schema", json.dumps(RECORD))
    asked = [
        replace(one, grammar=grammar, ignore_eos=False, max_tokens=2 * TOKENS)
        for one in requests(rigs.prompts, warp, verifier)
    ]
    found = await in_turns(
        {"ahead": (rigs.ahead, gamma), "auto": (rigs.ahead, None), "plain": (rigs.ahead, 0)},
        asked,
        turns=turns,
    )
    ahead, auto, plain = found["ahead"], found["auto"], found["plain"]
    cells = [
        ahead.spread,
        auto.spread,
        plain.spread,
        f"{ahead.against(plain):.2f} x",
        f"{auto.against(plain):.2f} x",
    ]
    return [
        *cells,
        f"{ahead.committed:.2f}",
        f"{ahead.hit_rate:.2f}",
        f"{1e3 * mean(ahead.verify):.2f}",
        f"{1e3 * mean(plain.verify):.2f}",
    ]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--params", default=200_000_000, type=int, help="of the widened target")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--gamma", type=int, default=GAMMA)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    with tempfile.TemporaryDirectory() as scratch, own_ray(num_cpus=16):
        lines = run(
            measure(
                widened(options.params, Path(scratch) / "wide"),
                gamma=options.gamma,
                turns=options.turns,
            )
        )
    print("\n".join([f"{machine()}; gamma {options.gamma}, {options.turns} turns", "", *lines]))


if __name__ == "__main__":
    main()
