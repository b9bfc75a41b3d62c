"""Train draft heads on a target's own distribution over given texts: `specserve heads`.

The target is not changed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specserve.api.tokenizer import Tokenizer
from specserve.checkpoint_files import read_text
from specserve.errors import BadValue
from specserve.features.eagle.heads import Heads, HeadsInfo, save_heads
from specserve.models.checkpoints.find import find_checkpoint
from specserve.models.checkpoints.load import load_model
from specserve.models.checkpoints.weights import fingerprint
from specserve.models.device_formats import resolve_dtype
from specserve.progress import ReportProgress

WINDOW = 512
"""Tokens in one pass of the target."""
HELD_OUT = 20
"""One window in that many is held out."""
EVALUATED = 32
"""Held-out windows that are evaluated, at most."""
POSITIONS = 256
"""Positions of a window that a step learns from."""
LOGITS = 2**24
"""Bound on the logits of a step: with a large vocabulary it uses fewer positions."""
LIKELY = 64
"""Most likely tokens of the target that are learnt at a position; the rest is hardly ever drawn."""
LEARNING_RATE = 2e-3
"""Learning rate of AdamW."""
WARM_UP = 50
"""Steps until the learning rate is reached."""
FLOOR = 0.02
"""Share of the learning rate at the end."""
FADE = 0.9
"""Weight of a head, relative to the head before it."""


@dataclass(frozen=True, slots=True)
class TrainingPositions:
    """Positions in texts with the target's hidden state, the newest token and p further on.

    `hidden` is the state that chose the newest token; `ids` and `p` are the target's most
    likely tokens at the position of each head and their probabilities.
    """

    hidden: Tensor  # [positions, hidden]
    newest: Tensor  # [positions, hidden] embeddings
    ids: Tensor  # [heads, positions, likely]
    p: Tensor  # [heads, positions, likely]


class Teacher:
    """Frozen target, run by the library's own code."""

    def __init__(self, checkpoint: Path) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        loaded = load_model(checkpoint, dtype=resolve_dtype("auto", device), device=device)
        self.module: Any = loaded.module
        self.spec, self.device = loaded.spec, device

    @property
    def is_bf16(self) -> bool:
        """True where the target runs in bf16, as it does where the device is fast at that."""
        return self.module.dtype == torch.bfloat16  # type: ignore[no-any-return]

    def head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.module.get_output_embeddings()(hidden)
        return logits.float()

    @torch.no_grad()
    def positions(
        self, window: Tensor, num_heads: int, *, likely: int = LIKELY
    ) -> TrainingPositions:
        """Return evenly spread positions of a window [tokens], as many as LOGITS allows."""
        hidden = self.module.base_model(input_ids=window[None], use_cache=False).last_hidden_state[
            0
        ]  # [tokens, hidden]
        most = min(POSITIONS, max(1, LOGITS // (num_heads * self.spec.vocab_size)))
        last = len(window) - num_heads - 1
        at = torch.linspace(0, last, min(most, last + 1), device=self.device).long()
        ahead = at + torch.arange(1, num_heads + 1, device=self.device)[:, None]  # [heads, places]
        p, ids = self.head(hidden).softmax(-1).topk(min(likely, self.spec.vocab_size), dim=-1)
        return TrainingPositions(
            hidden[at], self.module.get_input_embeddings()(window[at + 1]), ids[ahead], p[ahead]
        )


def fit(
    target: str,
    texts: Sequence[Path],
    out: Path,
    *,
    num_heads: int,
    minutes: float,
    threads: int | None = None,
    report_progress: ReportProgress,
) -> str:
    """Write the heads; return a sentence with their alpha on held-out windows. Raises BadValue."""
    require_positive({"heads": num_heads, "minutes": minutes})
    if threads is not None:
        torch.set_num_threads(threads)
    checkpoint = find_checkpoint(target, key="--target")
    tokenizer = Tokenizer.load(checkpoint)
    report_progress("reading the texts")
    windows = text_windows([tokenizer.encode(read_text(text)) for text in texts], num_heads)
    report_progress("loading the target")
    teacher = Teacher(checkpoint)
    heads = Heads(num_heads, teacher.spec.hidden_size).to(teacher.device)
    learnt, held_out = split_windows(windows)
    _train(heads, teacher, learnt, minutes=minutes, report_progress=report_progress)
    save_heads(
        heads,
        HeadsInfo(
            num_heads, teacher.spec.hidden_size, teacher.spec.vocab_size, fingerprint(checkpoint)
        ),
        out,
    )
    report_progress("evaluating the heads")
    covered = coverage(heads, teacher, held_out)
    alphas = ", ".join(f"{one:.3f}" for one in covered)
    tokens = len(held_out) * WINDOW
    return (
        f"{out} has {num_heads} heads; on {tokens:,} tokens that were held out, alpha is {alphas}"
    )


def coverage(heads: Heads, teacher: Teacher, windows: Sequence[Tensor]) -> list[float]:
    """Return alpha = E[sum min(p, q)] of each head at temperature 1.

    All tokens before the head's own are the text's.
    """
    total, count = torch.zeros(heads.num_heads), 0
    with torch.no_grad():
        for window in windows:
            positions = teacher.positions(
                window.to(teacher.device), heads.num_heads, likely=teacher.spec.vocab_size
            )
            total += (
                torch.minimum(positions.p, _log_q(heads, teacher, positions).exp())
                .sum(-1)
                .sum(-1)
                .cpu()
            )
            count += len(positions.hidden)
    return (total / count).tolist()


def _train(
    heads: Heads,
    teacher: Teacher,
    windows: Sequence[Tensor],
    *,
    minutes: float,
    report_progress: ReportProgress,
) -> None:
    """Minimise the divergence from the target first, then the probability of rejection.

    The divergence has a strong gradient from far away; the rejections are what decoding pays for.
    """
    optimizer = torch.optim.AdamW(
        heads.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0
    )
    fade = torch.tensor([FADE**i for i in range(heads.num_heads)], device=teacher.device)
    start = time.monotonic()
    for step, number in enumerate(shuffled_numbers(len(windows))):
        progress = (time.monotonic() - start) / (60 * minutes)
        if progress >= 1:
            return
        for group in optimizer.param_groups:
            group["lr"] = (
                LEARNING_RATE
                * min(1.0, (step + 1) / WARM_UP)
                * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * progress)))
            )
        positions = teacher.positions(windows[number].to(teacher.device), heads.num_heads)
        losses = _losses(
            positions.p, _log_q(heads, teacher, positions), rejection=progress > 0.5
        )  # [heads]
        torch.autograd.backward((losses * fade).sum())
        torch.nn.utils.clip_grad_norm_(heads.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss = "rejected" if progress > 0.5 else "divergence"
        each = ", ".join(f"{value:.3f}" for value in losses.tolist())
        report_progress("fitting the heads", progress, f"{step + 1} windows, {loss} {each}")


def _log_q(heads: Heads, teacher: Teacher, positions: TrainingPositions) -> Tensor:
    """Return log q [heads, positions, likely]; the vocabulary head keeps its own precision."""
    states = heads(positions.hidden.float(), positions.newest.float())
    logits = teacher.head(states.to(positions.hidden.dtype))
    return logits.gather(-1, positions.ids) - logits.logsumexp(-1, keepdim=True)


def _losses(p: Tensor, log_q: Tensor, *, rejection: bool) -> Tensor:  # [heads]
    if rejection:
        return 1 - torch.minimum(p, log_q.exp()).sum(-1).mean(-1)
    return (p * (p.log() - log_q)).sum(-1).mean(-1)


def require_positive(options: Mapping[str, float | None]) -> None:
    """Raise BadValue for an option that is given and not above 0."""
    for name, value in options.items():
        if value is not None and value <= 0:
            raise BadValue(f"--{name} must be above 0, not {value:g}", param=name)


def text_windows(texts: Sequence[Sequence[int]], num_heads: int) -> list[Tensor]:
    """Return whole windows of the texts in order, or one shorter window of short texts."""
    tokens = torch.tensor([token for text in texts for token in text])
    if len(tokens) < num_heads + 2:
        raise BadValue(
            f"the files of --text have {len(tokens)} tokens, and {num_heads} heads need "
            f"{num_heads + 2} at least; name more text",
            param="text",
        )
    return list(torch.split(tokens, WINDOW)[: max(1, len(tokens) // WINDOW)])


def split_windows(windows: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return the windows to learn from and those held out; a window that is alone is both."""
    learnt = [window for i, window in enumerate(windows) if i % HELD_OUT]
    return learnt or windows, windows[::HELD_OUT][:EVALUATED]


def shuffled_numbers(count: int) -> Iterator[int]:
    """Yield the numbers below `count` again and again, each time in another order."""
    generator = torch.Generator().manual_seed(0)
    while True:
        yield from torch.randperm(count, generator=generator).tolist()
