"""Heads fitted to a target by its own distribution over given texts: the work behind `specserve heads`. The target stays as it is."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specserve.api.tokenizer import Text
from specserve.errors import BadValue
from specserve.models.checkpoints.find import find_checkpoint
from specserve.models.checkpoints.load import load_model
from specserve.models.checkpoints.weights import fingerprint
from specserve.models.heads import Heads, HeadsInfo, save
from specserve.models.model import dtype_of
from specserve.progress import Tell
from specserve.tools.count_ngrams import read_text

WINDOW, HELD_OUT, JUDGED = (
    512,
    20,
    32,
)  # tokens that are read at once; of so many windows one is held out; and so many of those are looked at
PLACES, LOGITS = (
    256,
    2**24,
)  # of a window that a step learns from; fewer where the vocabulary is so large that their logits would be more
LIKELY = 64  # tokens of the target's distribution that are learnt from at a place; the rest is hardly ever drawn
RATE, WARM_UP, FLOOR = 2e-3, 50, 0.02  # of AdamW; steps to reach it; its share at the end
FADE = 0.9  # what a place further ahead counts less


@dataclass(frozen=True, slots=True)
class Places:
    """Places in texts: what the target knows where the newest token was chosen, that token, and what it says of those behind it."""

    hidden: Tensor  # [places, hidden]
    newest: Tensor  # [places, hidden] embeddings
    ids: Tensor  # [heads, places, likely] the target's likeliest tokens where each head guesses
    p: Tensor  # likewise


class Teacher:
    """A frozen target, read through the library's own code."""

    def __init__(self, checkpoint: Path) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        loaded = load_model(checkpoint, dtype=dtype_of("auto", device), device=device)
        self.module: Any = loaded.module
        self.spec, self.device = loaded.spec, device

    def head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.module.get_output_embeddings()(hidden)
        return logits.float()

    @torch.no_grad()
    def places(self, window: Tensor, num_heads: int, *, likely: int = LIKELY) -> Places:
        """Of a window [tokens]: some of its places, evenly spread, so that what is held does not depend on the vocabulary."""
        hidden = self.module.base_model(input_ids=window[None], use_cache=False).last_hidden_state[
            0
        ]  # [tokens, hidden]
        most = min(PLACES, max(1, LOGITS // (num_heads * self.spec.vocab_size)))
        last = len(window) - num_heads - 1
        at = torch.linspace(0, last, min(most, last + 1), device=self.device).long()
        ahead = at + torch.arange(1, num_heads + 1, device=self.device)[:, None]  # [heads, places]
        p, ids = self.head(hidden).softmax(-1).topk(min(likely, self.spec.vocab_size), dim=-1)
        return Places(
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
    tell: Tell,
) -> str:
    """Writes the heads; says how much of the target's distribution each covers on what was held out."""
    for name, value in (("heads", num_heads), ("minutes", minutes)):
        if value <= 0:
            raise BadValue(f"--{name} must be above 0, not {value:g}", param=name)
    if threads is not None:
        torch.set_num_threads(threads)
    checkpoint = find_checkpoint(target, key="--target")
    speaks = Text.load(checkpoint)
    tell("reading the texts")
    windows = _windows([speaks.encode(read_text(text)) for text in texts], num_heads)
    tell("loading the target")
    teacher = Teacher(checkpoint)
    heads = Heads(num_heads, teacher.spec.hidden_size).to(teacher.device)
    held_out = windows[::HELD_OUT][:JUDGED]
    _train(
        heads,
        teacher,
        [window for i, window in enumerate(windows) if i % HELD_OUT] or windows,
        minutes=minutes,
        tell=tell,
    )
    save(
        heads,
        HeadsInfo(
            num_heads, teacher.spec.hidden_size, teacher.spec.vocab_size, fingerprint(checkpoint)
        ),
        out,
    )
    tell("judging the heads")
    covered = coverage(heads, teacher, held_out)
    alphas = ", ".join(f"{one:.3f}" for one in covered)
    return f"{out} has {num_heads} heads; on {len(held_out) * WINDOW:,} tokens that were held out, alpha is {alphas}"


def coverage(heads: Heads, teacher: Teacher, windows: Sequence[Tensor]) -> list[float]:
    """alpha = E[sum min(p, q)] of each head at temperature 1, where all tokens before its own are the text's."""
    total, count = torch.zeros(heads.num_heads), 0
    with torch.no_grad():
        for window in windows:
            places = teacher.places(
                window.to(teacher.device), heads.num_heads, likely=teacher.spec.vocab_size
            )
            total += (
                torch.minimum(places.p, _log_q(heads, teacher, places).exp()).sum(-1).sum(-1).cpu()
            )
            count += len(places.hidden)
    return (total / count).tolist()


def _train(
    heads: Heads, teacher: Teacher, windows: Sequence[Tensor], *, minutes: float, tell: Tell
) -> None:
    """First by the divergence from the target, whose gradient is strong from far away; then by what is refused, which is what counts."""
    optimizer = torch.optim.AdamW(heads.parameters(), lr=RATE, betas=(0.9, 0.99), weight_decay=0.0)
    fade = torch.tensor([FADE**place for place in range(heads.num_heads)], device=teacher.device)
    begun = time.monotonic()
    for step, window in enumerate(_for_ever(windows)):
        progress = (time.monotonic() - begun) / (60 * minutes)
        if progress >= 1:
            return
        for group in optimizer.param_groups:
            group["lr"] = (
                RATE
                * min(1.0, (step + 1) / WARM_UP)
                * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * progress)))
            )
        places = teacher.places(window.to(teacher.device), heads.num_heads)
        losses = _losses(
            places.p, _log_q(heads, teacher, places), refusal=progress > 0.5
        )  # [heads]
        torch.autograd.backward((losses * fade).sum())
        torch.nn.utils.clip_grad_norm_(heads.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        what, each = (
            "refused" if progress > 0.5 else "divergence",
            ", ".join(f"{loss:.3f}" for loss in losses.tolist()),
        )
        tell("fitting the heads", progress, f"{step + 1} windows, {what} {each}")


def _log_q(heads: Heads, teacher: Teacher, places: Places) -> Tensor:  # [heads, places, likely]
    """The heads in full precision, the target's vocabulary head in its own."""
    guesses = heads(places.hidden.float(), places.newest.float())
    logits = teacher.head(guesses.to(places.hidden.dtype))
    return logits.gather(-1, places.ids) - logits.logsumexp(-1, keepdim=True)


def _losses(p: Tensor, log_q: Tensor, *, refusal: bool) -> Tensor:  # [heads]
    if refusal:
        return 1 - torch.minimum(p, log_q.exp()).sum(-1).mean(-1)
    return (p * (p.log() - log_q)).sum(-1).mean(-1)


def _windows(texts: Sequence[Sequence[int]], num_heads: int) -> list[Tensor]:
    """Whole windows of one text after the other; of a shorter whole, one that is shorter."""
    tokens = torch.tensor([token for text in texts for token in text])
    if len(tokens) < num_heads + 2:
        raise BadValue(
            f"the files of --text have {len(tokens)} tokens, and {num_heads} heads need {num_heads + 2} at least; name more text",
            param="text",
        )
    return list(torch.split(tokens, WINDOW)[: max(1, len(tokens) // WINDOW)])


def _for_ever(windows: Sequence[Tensor]) -> Iterator[Tensor]:
    """In another order each time."""
    generator = torch.Generator().manual_seed(0)
    while True:
        for i in torch.randperm(len(windows), generator=generator).tolist():
            yield windows[i]
