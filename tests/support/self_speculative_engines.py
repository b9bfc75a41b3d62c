"""Engines whose drafter is tied to the target, over a tiny target of three layers, and what each kind draws from, by the library alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig

from specserve.drafters.heads import HeadsDrafter, SkippingDrafter
from specserve.models.checkpoints.weights import fingerprint
from specserve.models.heads import WEIGHTS, Heads, HeadsInfo, load_heads, save
from specserve.models.target import TargetModel
from tests.support import checkpoints
from tests.support.continuations import COUNTED, FLATTER, PAGES, VOCAB, Group, Pairs, rewritten
from tests.support.engines import Engine, opened_target, placement
from tests.support.exact_distribution import Conditionals, Library, texts_of, warped

TIED = ("layer_skip", "heads", "top 3 heads")
SKIP, NUM_HEADS = (1,), 3
Make = Callable[[TargetModel], SkippingDrafter | HeadsDrafter]


class TiedEngine(Engine):
    """Target and drafter share the pages, so there is one cache to check."""

    def __init__(
        self, target: Path, make: Make, *, pages: int = PAGES, dtype: str = "float32"
    ) -> None:
        self.target = opened_target(
            target, placement(dtype=dtype, pages=pages), tells_hidden=make is not skipping
        )
        self.drafter, self.ahead = make(self.target), None  # type: ignore[assignment]

    def check_idle(self) -> None:
        cache = self.target.runner.cache
        cache.check()
        assert cache.num_used == 0
        assert not self.target.newest


def skipping(target: TargetModel) -> SkippingDrafter:
    return SkippingDrafter(target, SKIP, support=VOCAB)


def with_heads(directory: Path, *, support: int = VOCAB) -> Make:
    def make(target: TargetModel) -> HeadsDrafter:
        heads = load_heads(
            directory, dtype=target.runner.cache.keys[0].dtype, device=torch.device("cpu")
        )
        return HeadsDrafter(target, heads, support=support)

    return make


def random_heads(
    target: Path, out: Path, *, hidden_size: int, vocab_size: int, spread: float = 0.05
) -> Path:
    heads = Heads(NUM_HEADS, hidden_size)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(
                spread * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7))
            )
    save(heads, HeadsInfo(NUM_HEADS, hidden_size, vocab_size, fingerprint(target)), out)
    return out


class TiedPairs(Pairs):
    """As the pairs of the other proofs, but for the drafters, and the layers of the target."""

    def __init__(self, directory: Path) -> None:
        sizes = {
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
        }
        tokens = {
            "vocab_size": VOCAB,
            "max_position_embeddings": 64,
            "pad_token_id": None,
            "bos_token_id": None,
            "eos_token_id": 2,
        }
        peaked = checkpoints.write(LlamaConfig(**sizes, **tokens), directory / "peaked", seed=3)
        self.directory = directory
        target = rewritten(peaked, directory / "target", flatter=FLATTER)
        heads = random_heads(target, directory / "heads", hidden_size=64, vocab_size=VOCAB)
        self.engines = {
            "layer_skip": TiedEngine(target, skipping),
            "heads": TiedEngine(target, with_heads(heads)),
            "top 3 heads": TiedEngine(target, with_heads(heads, support=3)),
            "none": Engine(target, pages=PAGES),
        }
        self._target = Library(target, vocab=VOCAB)
        self._heads = {name: tensor.double() for name, tensor in load_file(heads / WEIGHTS).items()}
        self.p, self.q, self.joint = cache(self._p), cache(self._q), cache(self._joint)

    def whole(self, drafter: str) -> str:
        """Nobody asks for the q of a coupled draft, which is drawn from all ids."""
        return "heads" if drafter == "top 3 heads" else drafter

    def _q(self, group: Group, drafter: str) -> Conditionals:
        """Of the first draft of a round: the tokens before the newest were read by the whole target."""
        logits = self._skipping_logits if drafter == "layer_skip" else self._first_heads_logits
        support = 3 if drafter == "top 3 heads" else VOCAB
        rows = []
        for depth in range(COUNTED):
            texts = texts_of(group.prompt, depth, VOCAB)
            q = torch.from_numpy(
                warped(
                    logits(torch.from_numpy(texts)).numpy(), texts, len(group.prompt), group.warp
                )
            )
            top, ids = q.topk(support, dim=-1)
            rows.append(
                torch.zeros_like(q).scatter_(1, ids, top / top.sum(-1, keepdim=True)).numpy()
            )
        return Conditionals(tuple(rows))

    @torch.inference_mode()
    def _skipping_logits(self, texts: Tensor) -> Tensor:  # [texts, length] -> [texts, vocab]
        whole = self._target.model
        partial: Any = AutoModelForCausalLM.from_pretrained(
            self.directory / "target", dtype=torch.float64, attn_implementation="eager"
        )
        partial.model.layers = nn.ModuleList(
            layer for i, layer in enumerate(partial.model.layers) if i not in SKIP
        )
        held = whole(texts[:, :-1], use_cache=True).past_key_values
        return partial(texts[:, -1:], past_key_values=held, use_cache=True).logits[:, -1]  # type: ignore[no-any-return]

    @torch.inference_mode()
    def _first_heads_logits(self, texts: Tensor) -> Tensor:  # [texts, length] -> [texts, vocab]
        model = self._target.model
        hidden = model.model(texts[:, :-1], use_cache=False).last_hidden_state[:, -1]
        seen = torch.cat(
            [F.rms_norm(rows, (64,)) for rows in (hidden, model.model.embed_tokens(texts[:, -1]))],
            dim=-1,
        )
        return model.lm_head(
            hidden + F.silu(seen @ self._heads["weight"][0] + self._heads["bias"][0])
        )  # type: ignore[no-any-return]
