"""Train an EAGLE-3 head on a target's own distribution over given texts: `specserve eagle`.

The target is not changed.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specserve.api.tokenizer import Tokenizer
from specserve.checkpoint_files import read_text
from specserve.errors import UnsupportedModel
from specserve.features.eagle.checkpoint import (
    require_eagle_for,
)
from specserve.features.eagle.head_files import load_head, save_head
from specserve.features.eagle.train_heads import (
    FADE,
    FLOOR,
    WARM_UP,
    Teacher,
    require_positive,
    shuffled_numbers,
    split_windows,
    text_windows,
)
from specserve.features.eagle.trainable_head import DEPTHS, EagleModule
from specserve.host import available_memory
from specserve.models.checkpoints.find import find_checkpoint
from specserve.models.checkpoints.library import is_encoder_decoder, llama_config, read_config
from specserve.models.checkpoints.weights import fingerprint
from specserve.progress import ReportProgress

LEARNING_RATE = 2e-3
"""Learning rate of AdamW."""
DRAFT_VOCAB = 32_000
"""Most frequent tokens of the texts that the head can draft."""


OneLesson = TypeVar("OneLesson")


@dataclass(frozen=True, slots=True)
class Lesson:
    """A window as a head learns from it: states, tokens and the target's distribution."""

    taps: Tensor  # [rows, 3 * hidden], in the target's dtype
    tokens: Tensor  # [rows + depths, hidden] embeddings
    p: Tensor  # [rows + depths, draft vocabulary] after each token, in fp16

    @classmethod
    @torch.no_grad()
    def from_window(
        cls, teacher: Teacher, window: Tensor, taps: Sequence[int], ids: Tensor
    ) -> Lesson:
        """Run the target over a window [tokens]."""
        out = teacher.module.base_model(
            input_ids=window[None], use_cache=False, output_hidden_states=True
        )
        states = torch.cat([out.hidden_states[layer][0] for layer in taps], dim=-1)
        p = teacher.head(out.last_hidden_state[0]).softmax(-1)
        embedded = teacher.module.get_input_embeddings().weight[window[1:]]
        rows = len(window) - DEPTHS
        return cls(states[:rows], embedded, p[1:].index_select(-1, ids).half())

    def losses(self, head: EagleModule, *, rejection: bool) -> Tensor:  # [depths]
        """Return the loss of each depth: the divergence of q from p, or what is rejected.

        p is that of the tokens that the head knows; it sums to less than 1.
        """
        rows, found = len(self.taps), []
        unrolled = head.unroll(self.taps.float(), self.tokens.float(), DEPTHS)
        for depth, log_q in enumerate(unrolled):
            p = self.p[depth : depth + rows].float()
            if rejection:
                found.append(1 - torch.minimum(p, log_q.exp()).sum(-1).mean())
            else:
                found.append(F.kl_div(log_q, p, reduction="none").sum(-1).mean())
        return torch.stack(found)


class Lessons(Generic[OneLesson]):
    """The lessons of windows: each is made when it is first read, and kept while memory allows.

    They never change, and the target takes longer over a window than the head does.
    """

    def __init__(
        self,
        windows: Sequence[Tensor],
        make: Callable[[Tensor], OneLesson],
        device: torch.device,
    ) -> None:
        self._windows, self._make, self._device = windows, make, device
        self._kept: dict[int, OneLesson] = {}
        self._least_memory = available_memory() // 2

    def __getitem__(self, number: int) -> OneLesson:
        lesson = self._kept.get(number)
        if lesson is None:
            lesson = self._make(self._windows[number].to(self._device))
            if self._device.type == "cpu" and available_memory() > self._least_memory:
                self._kept[number] = lesson
        return lesson


def train(
    target: str,
    texts: Sequence[Path],
    out: Path,
    *,
    minutes: float,
    draft_vocab: int | None = None,
    resume: bool = False,
    threads: int | None = None,
    report_progress: ReportProgress,
) -> str:
    """Write a head; return a sentence with its alpha on held-out windows. Raises BadValue.

    With `resume` it goes on from the head in `out`, which keeps its own vocabulary.
    """
    require_positive({"minutes": minutes, "draft-vocab": draft_vocab})
    if threads is not None:
        torch.set_num_threads(threads)
    checkpoint = find_decoder(target)
    tokenizer = Tokenizer.load(checkpoint)
    report_progress("reading the texts")
    windows = text_windows([tokenizer.encode(read_text(text)) for text in texts], DEPTHS)
    report_progress("loading the target")
    teacher = Teacher(checkpoint)
    config = layer_config(teacher)
    if resume:
        taps = require_eagle_for(checkpoint, out).taps(teacher.spec.num_layers)
        head, ids = load_head(config, teacher, out)
    else:
        taps = tapped_layers(teacher.spec.num_layers)
        ids = frequent_ids(windows, min(draft_vocab or DRAFT_VOCAB, teacher.spec.vocab_size))
        head = _new_head(config, teacher, ids)
    head.to(teacher.device)
    learnt, held_out = split_windows(windows)
    make = partial(Lesson.from_window, teacher, taps=taps, ids=ids.to(teacher.device))
    lessons = Lessons(learnt, make, teacher.device)
    fit_module(
        head,
        lambda number, rejection: lessons[number].losses(head, rejection=rejection),
        teacher,
        num_lessons=len(learnt),
        minutes=minutes,
        report_progress=report_progress,
    )
    save_head(head, config, taps, ids, fingerprint(checkpoint), teacher.spec.vocab_size, out)
    report_progress("evaluating the head")
    alphas = ", ".join(f"{one:.3f}" for one in coverage(head, teacher, held_out, taps, ids))
    tokens = sum(len(window) for window in held_out)
    return f"{out} is an EAGLE-3 head; on {tokens:,} tokens that were held out, alpha is {alphas}"


@torch.no_grad()
def coverage(
    head: EagleModule,
    teacher: Teacher,
    windows: Sequence[Tensor],
    taps: Sequence[int],
    ids: Tensor,
) -> list[float]:
    """Return alpha = E[sum min(p, q)] of each depth at temperature 1.

    All tokens before are the text's.
    """
    total, count = torch.zeros(DEPTHS), 0
    for window in windows:
        lesson = Lesson.from_window(teacher, window.to(teacher.device), taps, ids)
        total += (1 - lesson.losses(head, rejection=True).cpu()) * len(lesson.taps)
        count += len(lesson.taps)
    return (total / count).tolist()


def tapped_layers(num_layers: int) -> tuple[int, int, int]:
    """Return an early, a middle and a late layer whose inputs the head reads.

    They are the usual 2, half of all and all but 3 where a target is deep enough for that.
    """
    if num_layers >= 8:
        return 2, num_layers // 2, num_layers - 3
    return min(1, num_layers - 1), num_layers // 2, num_layers - 1


def frequent_ids(windows: Sequence[Tensor], num: int) -> Tensor:
    """Return the most frequent tokens, and where texts have too few the lowest ids, in order."""
    counts = Counter(token for window in windows for token in window.tolist())
    chosen = [token for token, _ in counts.most_common(num)]
    seen = set(chosen)
    rest = (token for token in range(num + len(seen)) if token not in seen)
    chosen += [next(rest) for _ in range(num - len(chosen))]
    return torch.tensor(sorted(chosen))


def find_decoder(target: str, what: str = "an EAGLE-3 head") -> Path:
    """Return a target's checkpoint. Raises UnsupportedModel for an encoder-decoder."""
    checkpoint = find_checkpoint(target, key="--target")
    if is_encoder_decoder(read_config(checkpoint)):
        raise UnsupportedModel(
            f"{what} is for decoder-only targets, and {checkpoint} is an encoder-decoder"
        )
    return checkpoint


def _new_head(config: Any, teacher: Teacher, ids: Tensor) -> EagleModule:
    head = EagleModule(config, target_hidden=teacher.spec.hidden_size, draft_vocab=len(ids))
    _initialise(head, teacher, ids)
    return head


def layer_config(teacher: Teacher) -> Any:
    """Return the config of a layer as wide as the target's."""
    own, spec = teacher.module.config, teacher.spec
    heads, dim = own.num_attention_heads, spec.head_dim
    return llama_config(
        {
            "hidden_size": spec.hidden_size,
            "intermediate_size": getattr(own, "intermediate_size", None) or 4 * spec.hidden_size,
            "num_attention_heads": heads,
            "num_key_value_heads": getattr(own, "num_key_value_heads", None) or heads,
            "head_dim": dim,
            "rms_norm_eps": getattr(own, "rms_norm_eps", 1e-6),
            "max_position_embeddings": spec.max_context,
            "rope_theta": (getattr(own, "rope_parameters", None) or {}).get("rope_theta", 10000.0),
            "vocab_size": spec.vocab_size,
        }
    )


@torch.no_grad()
def _initialise(head: EagleModule, teacher: Teacher, ids: Tensor) -> None:
    """Begin with the target's last tapped state and its head, and a layer that adds little."""
    layer: Any = head.midlayer
    hidden = teacher.spec.hidden_size
    head.fc.weight.mul_(0.1)
    head.fc.weight[:, -hidden:] += torch.eye(hidden)
    for linear in (layer["self_attn"]["o_proj"], layer["mlp"]["down_proj"]):
        linear.weight.mul_(0.1)
    output = teacher.module.get_output_embeddings().weight
    head.lm_head.weight.copy_(output[ids.to(output.device)].float().cpu())
    norm = getattr(getattr(teacher.module.base_model, "norm", None), "weight", None)
    if norm is not None:
        head.norm.weight.copy_(norm.float().cpu())


def fit_module(
    module: nn.Module,
    losses_of: Callable[[int, bool], Tensor],
    teacher: Teacher,
    *,
    num_lessons: int,
    minutes: float,
    report_progress: ReportProgress,
) -> None:
    """Minimise the divergence from the target first, then the probability of rejection.

    `losses_of` returns what each draft token of a lesson loses, of which the first weigh most.
    """
    mixed = torch.autocast(teacher.device.type, torch.bfloat16, enabled=teacher.is_bf16)
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0
    )
    start = time.monotonic()
    for step, number in enumerate(shuffled_numbers(num_lessons)):
        progress = (time.monotonic() - start) / (60 * minutes)
        if progress >= 1:
            return
        rate = min(1.0, (step + 1) / WARM_UP) * (
            FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * progress))
        )
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * rate
        rejection = progress > 0.5
        with mixed:
            losses = losses_of(number, rejection)
        fade = torch.tensor([FADE**i for i in range(len(losses))], device=losses.device)
        torch.autograd.backward((losses * fade).sum())
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        name = "rejected" if rejection else "divergence"
        each = ", ".join(f"{value:.3f}" for value in losses.tolist())
        report_progress("training the head", progress, f"{step + 1} windows, {name} {each}")
