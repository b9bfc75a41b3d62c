"""One stream under a JSON schema, with and without draft tokens.

`python -m lab.bench.constrained`. Target and draft have a core each; the demo target is widened.
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

from lab.bench.pipeline import (
    GAMMA,
    SAMPLINGS,
    TOKENS,
    make_requests,
    measure_in_turns,
    widen_demo_target,
)
from lab.bench.rig import RigPair, open_rigs, run_with_uvloop
from specserve.cluster.ray_session import local_ray
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
    """Return a table of the samplings, measured in turns (A B A B) with a prompt for each turn.

    Texts end where the schema lets them.
    """
    lines = [_row(HEAD), _row(["---"] * len(HEAD))]
    async with open_rigs(wide, DEMO / "draft", held_out_prompts(count=32, length=TOKENS)) as rigs:
        for name in SAMPLINGS:
            lines.append(_row([name, *await _cells(rigs, name, gamma=gamma, turns=turns)]))
    return lines


async def _cells(rigs: RigPair, name: str, *, gamma: int, turns: int) -> list[str]:
    warp, verifier = SAMPLINGS[name]
    grammar = Grammar("json_schema", json.dumps(RECORD))
    constrained = [
        replace(request, grammar=grammar, ignore_eos=False, max_tokens=2 * TOKENS)
        for request in make_requests(rigs.prompts, warp, verifier)
    ]
    figures = await measure_in_turns(
        {
            "fixed": (rigs.anticipating, gamma),
            "auto": (rigs.anticipating, None),
            "plain": (rigs.anticipating, 0),
        },
        constrained,
        turns=turns,
    )
    fixed, auto, plain = figures["fixed"], figures["auto"], figures["plain"]
    cells = [
        fixed.spread,
        auto.spread,
        plain.spread,
        f"{fixed.ratio_to(plain):.2f} x",
        f"{auto.ratio_to(plain):.2f} x",
    ]
    return [
        *cells,
        f"{fixed.committed_per_round:.2f}",
        f"{fixed.hit_rate:.2f}",
        f"{1e3 * mean(fixed.verify_seconds):.2f}",
        f"{1e3 * mean(plain.verify_seconds):.2f}",
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
    parser.add_argument("--quick", action="store_true", help="a tiny form, to see that it works")
    options = parser.parse_args(arguments)
    if options.quick:
        options.params, options.turns = 8_000_000, 1
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    with tempfile.TemporaryDirectory() as scratch, local_ray(num_cpus=16):
        lines = run_with_uvloop(
            measure(
                widen_demo_target(options.params, Path(scratch) / "wide"),
                gamma=options.gamma,
                turns=options.turns,
            )
        )
    print("\n".join([f"{machine()}; gamma {options.gamma}, {options.turns} turns", "", *lines]))


if __name__ == "__main__":
    main()
