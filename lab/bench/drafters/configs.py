"""Configs of every kind of drafter over the demo target."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from specserve.config.tree import DEMO

DRAFT, SMALL = str(DEMO / "draft"), str(DEMO / "small")
CASCADE_K = ((5, 3, 2), (0, 4, 2), (0, 0, 4))
Keys = Mapping[str, object]


def drafter_configs(tables: Path, eagle: Path, dflash: Path) -> dict[str, Keys]:
    """Return config keys by the drafter's name, with drafts that were trained for the demo target.

    The tables keep their counts (`learn` is off), so that q does not change during a measurement.
    """
    counted = {"path": str(tables), "learn": False}
    neural = {
        "draft": {"kind": "neural", "path": DRAFT},
        "small": {"kind": "neural", "path": SMALL},
    }
    bigram = {"kind": "bigram", **counted}
    return {
        "neural, draft": _dotted(neural["draft"]),
        "neural, small": _dotted(neural["small"]),
        **{kind: _dotted({"kind": kind, **counted}) for kind in ("unigram", "bigram", "max_gram")},
        "prompt_copy": _dotted({"kind": "prompt_copy"}),
        "vertical, draft > bigram": _dotted(
            {"kind": "vertical", "stages": [neural["draft"], bigram]}
        ),
        "horizontal, draft > bigram": _dotted(
            {"kind": "horizontal", "stages": [neural["draft"], bigram], "k": [[2, 4]]}
        ),
        "cascade, draft > small > bigram": _dotted(
            {
                "kind": "cascade",
                "stages": [neural["draft"], neural["small"], bigram],
                "k": CASCADE_K,
            }
        ),
        "layer_skip": _dotted({"kind": "layer_skip"}),
        "layer_skip, without 3": _dotted({"kind": "layer_skip", "skip": [3]}),
        "heads": _dotted({"kind": "heads"}),
        "eagle": _dotted({"kind": "eagle", "path": str(eagle)}),
        "dflash": _dotted({"kind": "dflash", "path": str(dflash)}),
    }


def _dotted(draft: Keys) -> Keys:
    return {f"draft.{key}": value for key, value in draft.items()}
