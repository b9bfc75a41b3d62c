"""The page docs/measurements/families.md: a row for each family, and a table of the refused."""

from __future__ import annotations

from collections.abc import Mapping

import transformers

from docs._build.table import code, table
from specserve.models.checkpoints.decoders import REFUSED
from tests.families.check import Row

COLUMNS = (
    "family",
    "opens",
    "2 ranks",
    "INT8",
    "graph",
    "fused",
    "generate()",
    "same bits",
)
INTRODUCTION = """# Families of models

Command: `python -m tests.families`, with transformers {version}.

For each family a tiny checkpoint with random weights is written in the layout in which the family
is released, and each column is tried on it:

- **opens**: its logits are those of the library's own model, in fp32.
- **2 ranks**: so are those of two ranks that share it (`target.tensor_parallel`). A *no* is refused
  at start, with the reason.
- **INT8**: a copy with INT8 matrices opens and gives the logits of the matrices that they stand for
  ([quantised checkpoints](../guides/your-model.md#quantised-checkpoints)).
- **graph**: on an emulated card, passes are captured as graphs, and replays give the same logits.
- **fused**: it runs in our own network of Llama-shaped models, else in the library's code.
- **generate()**: at temperature 0, with and without a draft, its texts are those of the library's
  `generate()`.
- **same bits**: in bf16 on a CPU the logits of a text are the same bits alone, token by token, and
  in company.

Names are transformers' `model_type`, where one has several shapes with what sets them apart.
"""
TEXT_PARTS = """
## Text parts of multimodal models

Of these checkpoints the text model alone is opened, as a decoder; what sees images or hears is
never read, and the log says so. A request with an image is refused.
"""
NOTES = """
DeepSeek's latent attention runs in the library's code, and the cache keeps whole keys and values of
every head, not the latents from which they come: exact, and many times larger than what the
architecture is known for. Ranks compute the latents whole, and share heads and experts. Llama 4 is
served up to 8,191 positions: beyond those its layers attend within chunks of the text and scale
queries by position. Gemma 4's layers differ in the number and size of their heads, and later ones
share keys and values with earlier ones; the cache keeps all of them, padded to the largest: exact,
and up to a few times larger than it has to be.
"""
REFUSALS = """
## Refused

A model of these kinds is refused from its `config.json`, before weights are read, with the reason
in the table. So is a Falcon with alibi, any model with `layer_types` that are no attention, and any
whose library code computes attention itself.
"""


def page(rows: Mapping[str, Row], text_parts: Mapping[str, Row]) -> str:
    """Return the page of these rows, by the family's name."""
    kinds: dict[str, list[str]] = {}
    for kind, reason in REFUSED.items():
        kinds.setdefault(reason, []).append(code(kind))
    refused = table(
        ("model_type", "reason"), [(", ".join(names), why) for why, names in kinds.items()]
    )
    introduction = INTRODUCTION.format(version=transformers.__version__)
    parts = [introduction, _table(rows) + NOTES, TEXT_PARTS, _table(text_parts) + REFUSALS]
    return "\n".join([*parts, refused]).replace("\n\n\n", "\n\n")


def _table(rows: Mapping[str, Row]) -> str:
    return table(COLUMNS, [(code(name), *row.cells) for name, row in rows.items()])


def line(name: str, row: Row) -> str:
    """Return the line of a family in the page."""
    return "| " + " | ".join([code(name), *row.cells]) + " |"
