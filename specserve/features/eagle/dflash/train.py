"""Train a DFlash or DSpark draft on a target's own distribution: `specserve dflash`.

The target is not changed; its embedding and vocabulary head are the draft's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from specserve.api.tokenizer import Tokenizer
from specserve.checkpoint_files import read_text
from specserve.errors import BadValue
from specserve.features.eagle.dflash.trainable_draft import DFlashModule
from specserve.features.eagle.head_config import FINGERPRINT
from specserve.features.eagle.head_files import FILE_NUMBERS
from specserve.features.eagle.train import (
    Lessons,
    find_decoder,
    fit_module,
    layer_config,
    tapped_layers,
)
from specserve.features.eagle.train_heads import (
    Teacher,
    require_positive,
    split_windows,
    text_windows,
)
from specserve.models.checkpoints.weights import fingerprint
from specserve.models.skip import layers_of
from specserve.progress import ReportProgress

BLOCKS = 48
"""Blocks of a window that a step learns from."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a draft that is trained: a Markov head makes it one of DSpark."""

    num_layers: int
    block_size: int
    markov_rank: int

    @property
    def first(self) -> int:
        """The first row of a block that draws a token: that of the newest, or the first mask's."""
        return int(self.markov_rank == 0)


@dataclass(frozen=True, slots=True)
class BlockLesson:
    """A window as a draft learns from it: states, tokens and the target's distribution."""

    taps: Tensor  # [rows, taps * hidden], in the target's dtype
    tokens: Tensor  # [rows]
    p: Tensor  # [rows, vocabulary] after each token, in fp16

    @classmethod
    @torch.no_grad()
    def from_window(cls, teacher: Teacher, taps: Sequence[int], window: Tensor) -> BlockLesson:
        """Run the target over a window [tokens]."""
        out = teacher.module.base_model(
            input_ids=window[None], use_cache=False, output_hidden_states=True
        )
        states = torch.cat([out.hidden_states[layer][0] for layer in taps], dim=-1)
        p = teacher.head(out.last_hidden_state[0]).softmax(-1)
        return cls(states, window, p.half())

    def losses(
        self,
        draft: DFlashModule,
        teacher: Teacher,
        shape: Shape,
        anchors: Tensor,
        *,
        rejection: bool,
    ) -> Tensor:  # [draft tokens]
        """Return the loss of each draft token of blocks: the divergence of q from p, or 1 - alpha.

        All tokens before it are the text's.
        """
        rows = torch.arange(shape.block_size, device=anchors.device)
        ids = torch.full((len(anchors), len(rows)), mask_token(teacher), device=anchors.device)
        ids[:, 0] = self.tokens[anchors]
        embedded = teacher.module.get_input_embeddings()(ids).float()
        hidden = draft(self.taps.float(), embedded, anchors)[:, shape.first :]
        logits = teacher.head(hidden.to(teacher.module.dtype))
        # The token before the one that a row draws, at this position.
        before = anchors[:, None] + rows[: hidden.shape[1]]
        if draft.markov_head is not None:
            markov: Any = draft.markov_head
            logits = logits + markov["markov_w2"](markov["markov_w1"](self.tokens[before]))
        log_q, p = logits.log_softmax(-1), self.p[before].float()
        if rejection:
            return 1 - torch.minimum(p, log_q.exp()).sum(-1).mean(0)
        return F.kl_div(log_q, p, reduction="none").sum(-1).mean(0)


def mask_token(teacher: Teacher) -> int:
    """Return the last id, which texts hardly ever have: a mask is known by its place in a block."""
    return teacher.spec.vocab_size - 1


def train(
    target: str,
    texts: Sequence[Path],
    out: Path,
    *,
    num_layers: int,
    block_size: int,
    markov_rank: int,
    minutes: float,
    threads: int | None = None,
    report_progress: ReportProgress,
) -> str:
    """Write a draft; return a sentence with its alpha on held-out windows. Raises BadValue."""
    require_positive({"minutes": minutes, "layers": num_layers})
    if block_size < 2:
        raise BadValue(f"--block must be at least 2, not {block_size}", param="block")
    if markov_rank < 0:
        raise BadValue(f"--markov-rank must be 0 or more, not {markov_rank}", param="markov-rank")
    if threads is not None:
        torch.set_num_threads(threads)
    torch.manual_seed(0)
    shape = Shape(num_layers, block_size, markov_rank)
    checkpoint = find_decoder(target, "a DFlash draft")
    tokenizer = Tokenizer.load(checkpoint)
    report_progress("reading the texts")
    windows = text_windows([tokenizer.encode(read_text(text)) for text in texts], block_size)
    report_progress("loading the target")
    teacher = Teacher(checkpoint)
    taps = tapped_layers(teacher.spec.num_layers)
    draft = new_draft(teacher, shape, len(taps)).to(teacher.device)
    learnt, held_out = split_windows(windows)
    make = partial(BlockLesson.from_window, teacher, taps)
    lessons = Lessons(learnt, make, teacher.device)
    generator = torch.Generator().manual_seed(0)

    def losses(number: int, rejection: bool) -> Tensor:
        lesson = lessons[number]
        first = torch.randint(1, len(lesson.tokens) - block_size, (BLOCKS,), generator=generator)
        anchors = first.to(teacher.device)
        return lesson.losses(draft, teacher, shape, anchors, rejection=rejection)

    fit_module(
        draft,
        losses,
        teacher,
        num_lessons=len(learnt),
        minutes=minutes,
        report_progress=report_progress,
    )
    save_draft(draft, teacher, shape, taps, fingerprint(checkpoint), out)
    report_progress("evaluating the draft")
    found = coverage(draft, teacher, shape, [make(one.to(teacher.device)) for one in held_out])
    tokens, alphas = sum(map(len, held_out)), ", ".join(f"{one:.3f}" for one in found)
    kind = "DSpark" if markov_rank else "DFlash"
    return f"{out} is a {kind} draft; on {tokens:,} tokens that were held out, alpha is {alphas}"


@torch.no_grad()
def coverage(
    draft: DFlashModule, teacher: Teacher, shape: Shape, lessons: Sequence[BlockLesson]
) -> list[float]:
    """Return alpha = E[sum min(p, q)] of each draft token at temperature 1."""
    found = []
    for lesson in lessons:
        last = len(lesson.tokens) - shape.block_size
        anchors = torch.arange(1, last, max(1, last // BLOCKS), device=teacher.device)
        found.append(1 - lesson.losses(draft, teacher, shape, anchors, rejection=True))
    return torch.stack(found).mean(0).tolist()


def new_draft(teacher: Teacher, shape: Shape, num_taps: int) -> DFlashModule:
    """Return a draft that begins with the target's last layers over its last tapped state."""
    hidden = teacher.spec.hidden_size
    draft = DFlashModule(
        layer_config(teacher),
        num_layers=shape.num_layers,
        num_taps=num_taps,
        target_hidden=hidden,
        vocab_size=teacher.spec.vocab_size,
        markov_rank=shape.markov_rank,
    )
    with torch.no_grad():
        draft.fc.weight.mul_(0.1)
        draft.fc.weight[:, -hidden:] += torch.eye(hidden)
        norm = getattr(getattr(teacher.module.base_model, "norm", None), "weight", None)
        if norm is not None:
            draft.norm.weight.copy_(norm.float().cpu())
        if draft.markov_head is not None:
            markov: Any = draft.markov_head
            markov["markov_w2"].weight.zero_()
        _copy_layers(draft, teacher)
    return draft


def _copy_layers(draft: DFlashModule, teacher: Teacher) -> None:
    """Give the draft's layers the weights of the target's last ones, where they fit.

    A target may have no norms of queries and keys: theirs keep the usual sizes of both.
    """
    sources = layers_of(teacher.module)[1][-draft.num_layers :]
    for layer, source in zip(draft.layers, sources, strict=True):
        stored = {name: each.float().cpu() for name, each in source.named_parameters()}
        for name, own in layer.named_parameters():
            if name in stored and stored[name].shape == own.shape:
                own.copy_(stored[name])
        for kind in ("q", "k"):
            attention: Any = layer
            rows = attention["self_attn"][f"{kind}_proj"].weight
            if f"self_attn.{kind}_norm.weight" not in stored:
                norm = attention["self_attn"][f"{kind}_norm"]
                norm.weight.fill_(float(rows.pow(2).sum(1).mean().sqrt()))
    first = dict(sources[0].named_parameters())
    if "input_layernorm.weight" in first:
        draft.hidden_norm.weight.copy_(first["input_layernorm.weight"].float().cpu())


def save_draft(
    draft: DFlashModule,
    teacher: Teacher,
    shape: Shape,
    taps: Sequence[int],
    target: str,
    directory: Path,
) -> None:
    """Save a draft of DFlash as z-lab publishes them, and one of DSpark as DeepSpec does."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().cpu().to(FILE_NUMBERS).contiguous()
        for name, tensor in draft.named_parameters()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = draft.config
    # They number outputs of layers, and we inputs.
    own = {
        "mask_token_id": mask_token(teacher),
        "target_layer_ids": [layer - 1 for layer in taps],
    }
    keys = {
        "attention_bias": False,
        "block_size": shape.block_size,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "model_type": "qwen3",
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": shape.num_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "num_target_layers": teacher.spec.num_layers,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_parameters["rope_theta"],
        FINGERPRINT: target,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": teacher.spec.vocab_size,
    }
    if shape.markov_rank:
        keys |= own | {
            "architectures": ["Qwen3DSparkModel"],
            "enable_confidence_head": False,
            "markov_head_type": "vanilla",
            "markov_rank": shape.markov_rank,
        }
    else:
        keys |= {"architectures": ["DFlashDraftModel"], "dflash_config": own}
    (directory / "config.json").write_text(json.dumps(keys, indent=2) + "\n")
