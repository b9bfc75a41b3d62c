"""Quantise a checkpoint, and measure how far that moves its distribution: `specserve quantize`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specserve.api.tokenizer import Tokenizer
from specserve.checkpoint_files import read_text
from specserve.demo.corpus import standard_library
from specserve.errors import BadValue
from specserve.models.checkpoints.find import find_checkpoint
from specserve.models.checkpoints.quantize import write_quantized
from specserve.models.model import ModelOptions, open_model
from specserve.progress import ReportProgress, no_progress
from specserve.tools.plan.measure import ModelReader

WINDOW = 256
"""Positions that are read together; the next ones see none of them."""


@dataclass(frozen=True, slots=True)
class Shift:
    """How far one model's distribution is from another's, as means over positions of a text."""

    divergence: float  # KL(p, q) in nats
    agreement: float  # share of positions with the same likeliest token
    overlap: float  # sum of min(p, q)
    num_tokens: int

    @classmethod
    def from_logits(cls, original: Tensor, moved: Tensor) -> Shift:
        """Return the shift of logits [tokens, vocab]."""
        log_p, log_q = original.log_softmax(-1), moved.log_softmax(-1)
        divergence = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
        overlap = torch.minimum(log_p, log_q).exp().sum(-1).mean()
        agreement = (log_p.argmax(-1) == log_q.argmax(-1)).float().mean()
        return cls(float(divergence), float(agreement), float(overlap), len(log_p))


def quantize_model(
    model: Path,
    to: str,
    out: Path,
    *,
    text: Path | None = None,
    num_tokens: int = 512,
    report_progress: ReportProgress = no_progress,
) -> str:
    """Write a quantised copy and return a report of it. Raises BadValue or ModelError."""
    content = "\n".join(standard_library().held_out) if text is None else read_text(text)
    source = find_checkpoint(model, key="--model")
    tokens = Tokenizer.load(source).encode(content)[: max(num_tokens, 0)]
    if not tokens:
        raise BadValue("--text and --tokens leave no token to compare on.", param="tokens")
    count = write_quantized(source, to, out, report_progress)
    shift = measure_shift(source, out, tokens, report_progress)
    sizes = [sum(path.stat().st_size for path in d.glob("*.safetensors")) for d in (source, out)]
    return (
        f"{out} has {count} matrices in {to} and takes {sizes[1] / 1e6:,.1f} MB, where {model} "
        f"takes {sizes[0] / 1e6:,.1f} MB.\n"
        f"On {shift.num_tokens} tokens: KL {shift.divergence:.2g} nats a token, the likeliest "
        f"token is the same at {shift.agreement:.1%} of the positions, and as a draft of the "
        f"original it would have alpha {shift.overlap:.3f} at temperature 1."
    )


@torch.inference_mode()
def measure_shift(
    original: Path,
    moved: Path,
    tokens: Sequence[int],
    report_progress: ReportProgress = no_progress,
) -> Shift:
    """Return how far `moved` is from `original` on a text. They are opened one after the other."""
    found = []
    for number, directory in enumerate((original, moved)):
        report_progress("measuring", number / 2, directory.name)
        options = ModelOptions(pages=WINDOW // ModelOptions().page_size, prefix_caching=False)
        opened = open_model(directory, options)
        window = min(WINDOW, opened.max_context)
        reader = ModelReader(opened, support=1)
        starts = range(0, len(tokens), window)
        found.append(
            torch.cat([reader.logits(0, tokens[start : start + window]) for start in starts])
        )
    return Shift.from_logits(*found)
