"""Engines whose drafter uses the target's weights, over a tiny target of three layers.

The expected q of each kind is computed by the library alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig

from specserve.drafters.after_verify import AfterVerify
from specserve.drafters.branches import Fanout
from specserve.drafters.ngram.drafter import NgramDrafter
from specserve.drafters.registry import OpenDrafter
from specserve.llm.inprocess import SyncDrafter
from specserve.models.checkpoints.embedding import load_embedding
from specserve.models.checkpoints.weights import fingerprint
from specserve.models.hidden_taps import HiddenTaps
from specserve.models.target import TargetModel
from specserve.types import Request
from tests.support import checkpoints
from tests.support.clock import counting_clock
from tests.support.continuations import (
    COUNTED,
    LOGIT_DIVISOR,
    PAGES,
    VOCAB,
    Group,
    Pairs,
    rewrite_checkpoint,
)
from tests.support.dflash_drafts import DFlashSizes, ReferenceDraft, write_z_lab
from tests.support.dflash_drafts import write_speculators as write_dflash
from tests.support.eagle_heads import HeadSizes, ReferenceHead, write_speculators
from tests.support.engines import Engine, PacerLike, Run, load_target, model_options
from tests.support.exact_distribution import (
    Conditionals,
    Floats,
    Ints,
    LibraryModel,
    all_continuations,
    warp_logits,
)
from tests.support.local_worker import run_apart

if TYPE_CHECKING:
    from specserve.features.eagle.heads_drafter import HeadsDrafter

WITHOUT_CACHE = ("layer_skip", "heads", "top 3 heads")  # they have none of their own
EAGLES = {
    "eagle": HeadSizes(
        num_heads=2,
        intermediate_size=64,
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        taps=(0, 1, 2),
        logit_scale=0.6,
    ),
    "eagle, 6 of 8 ids": HeadSizes(
        num_heads=1,
        kv_heads=1,
        vocab_size=VOCAB,
        draft_vocab_size=6,
        taps=(2, 1, 2),
        has_embedding=False,
        logit_scale=0.6,
    ),
}
EAGLES["eagle block"] = replace(EAGLES["eagle"], num_layers=2, mask_token=3)  # P-EAGLE
EAGLES["eagle apart"] = EAGLES["eagle with copies"] = EAGLES["eagle"]
EAGLES["eagle ahead"] = EAGLES["eagle, 6 of 8 ids"]
APART = ("eagle apart", "eagle ahead")  # the latter anticipates
SMALL_BLOCK = DFlashSizes(
    num_heads=2, kv_heads=1, intermediate_size=64, vocab_size=VOCAB, taps=(0, 2), mask_token=3
)
DFLASHES = {
    "dflash": SMALL_BLOCK,
    # No row sees masks after its own, so that the first q is the same for every gamma.
    "dflash, causal": replace(SMALL_BLOCK, draft_vocab_size=VOCAB, logit_scale=0.6, causal=True),
    "dspark": replace(SMALL_BLOCK, draft_vocab_size=6, logit_scale=0.6, markov_rank=4),
}
SELF_SPECULATIVE = (*WITHOUT_CACHE, *EAGLES, *DFLASHES)
SKIP, NUM_HEADS = (1,), 3
TEXT = tuple(range(20, 60))
LLM_KEYS: dict[str, Any] = {
    "target.dtype": "float32",
    "target.threads": 1,
    "draft.dtype": "float32",
    "draft.threads": 1,
    "cache.pages": 60,
    "speculation.gamma": 3,
}
MakeDrafter = Callable[[TargetModel], AfterVerify]


class SelfSpeculativeEngine(Engine):
    """An engine whose target and drafter share the pages, so there is one cache to check."""

    def __init__(
        self, target: Path, make: MakeDrafter, *, pages: int = PAGES, dtype: str = "float32"
    ) -> None:
        self.target = load_target(
            target, model_options(dtype=dtype, pages=pages), returns_hidden=make is not layer_skip
        )
        self.drafter, self.ahead = make(self.target), None  # type: ignore[assignment]

    def check_idle(self) -> None:
        cache = self.target.runner.cache
        cache.check()
        assert cache.num_used == 0
        assert not self.target.latest_hidden


class EagleEngine(Engine):
    """An engine whose drafter runs an EAGLE-3 head on the target's states, with pages of its own.

    There are enough of them that a preempted sequence finds its states again.
    """

    drafts_prompts = False

    def __init__(
        self,
        target: Path,
        head: Path,
        sizes: HeadSizes,
        *,
        copies: bool = False,
        pages: int = PAGES,
    ) -> None:
        from specserve.features.eagle.drafter import EagleDrafter

        assert sizes.taps is not None
        self.target = load_target(target, model_options(pages=pages), taps=HiddenTaps(sizes.taps))
        drafter = EagleDrafter.from_files(
            head, self.target, dtype="float32", support=VOCAB, pages=4 * pages
        )
        if copies:
            drafter.copies = NgramDrafter(copies=True)
        self.drafter, self.ahead = drafter, None  # type: ignore[assignment]


class DFlashEngine(Engine):
    """An engine whose drafter runs a DFlash draft on the target's states, as `EagleEngine` does."""

    drafts_prompts = False

    def __init__(
        self, target: Path, draft: Path, sizes: DFlashSizes, *, pages: int = PAGES
    ) -> None:
        from specserve.features.eagle.dflash.drafter import DFlashDrafter

        self.target = load_target(target, model_options(pages=pages), taps=HiddenTaps(sizes.taps))
        drafter = DFlashDrafter.from_files(
            draft, self.target, dtype="float32", support=VOCAB, pages=4 * pages
        )
        self.drafter, self.ahead = drafter, None  # type: ignore[assignment]


class EagleApartEngine(Engine):
    """An engine whose head lives in a draft worker and is sent the target's states."""

    def __init__(
        self, target: Path, head: Path, sizes: HeadSizes, *, ahead: bool, pages: int = PAGES
    ) -> None:
        from specserve.features.eagle.drafter import EagleDrafter
        from specserve.features.eagle.head_options import HeadOptions

        assert sizes.taps is not None
        self.target = load_target(target, model_options(pages=pages), taps=HiddenTaps(sizes.taps))
        info, self.ahead = self.target.info, None
        where = HeadOptions(
            torch.device("cpu"),
            "float32",
            8 * pages,
            info.page_size,
            True,
            info.vocab_size,
            info.max_context,
            VOCAB,
        )
        drafter = EagleDrafter.open(
            head, where, target_embedding=lambda dtype: load_embedding(target, dtype=dtype)
        )
        self.drafter = drafter  # type: ignore[assignment]
        self.worker_drafter = OpenDrafter(
            drafter,
            context=drafter.context,
            runners=(drafter.runner,),
            fanout=Fanout(per_position=4) if ahead else None,
            receive_hidden=drafter.receive_hidden,
            clock=counting_clock(),
        )
        self.rng = np.random.default_rng(0) if ahead else None

    def run(
        self,
        requests: Sequence[Request],
        *,
        pacer: PacerLike | None = None,
        drafts: bool = True,
        with_drafter: SyncDrafter | None = None,
        **options: Any,
    ) -> Run:
        """Generate all requests at once; with anticipation, which is interrupted at random."""
        assert drafts
        assert with_drafter is None
        run, _ = run_apart(
            self.target, self.worker_drafter, requests, pacer=pacer, rng=self.rng, **options
        )
        self.worker_drafter.prepare(lambda: True)  # it drops what is stale
        self.check_idle()
        return run


def layer_skip(target: TargetModel) -> AfterVerify:
    from specserve.features.layer_skip.drafter import LayerSkipDrafter

    return LayerSkipDrafter(target, SKIP, support=VOCAB)


def small_gemma3(directory: Path) -> Path:
    """Make a tiny Gemma 3 with a tokenizer in `directory`, and return its path."""
    checkpoint = checkpoints.make("gemma3", directory / "gemma3")
    checkpoints.add_tokenizer(checkpoint)
    return checkpoint


def with_heads(directory: Path, *, support: int = VOCAB) -> MakeDrafter:
    from specserve.features.eagle.heads import load_heads
    from specserve.features.eagle.heads_drafter import HeadsDrafter

    def make(target: TargetModel) -> HeadsDrafter:
        heads = load_heads(
            directory, dtype=target.runner.cache.keys[0].dtype, device=torch.device("cpu")
        )
        return HeadsDrafter(target, heads, support=support)

    return make


def random_heads(
    target: Path, out: Path, *, hidden_size: int, vocab_size: int, spread: float = 0.05
) -> Path:
    from specserve.features.eagle.heads import Heads, HeadsInfo, save_heads

    heads = Heads(NUM_HEADS, hidden_size)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(
                spread * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7))
            )
    save_heads(heads, HeadsInfo(NUM_HEADS, hidden_size, vocab_size, fingerprint(target)), out)
    return out


class SelfSpeculativePairs(Pairs):
    """The pairs of the other proofs with other drafters, and with a target of three layers."""

    def __init__(self, directory: Path) -> None:
        from specserve.features.eagle.heads import WEIGHTS

        sizes: dict[str, Any] = {
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
        }
        tokens: dict[str, Any] = {
            "vocab_size": VOCAB,
            "max_position_embeddings": 64,
            "pad_token_id": None,
            "bos_token_id": None,
            "eos_token_id": 2,
        }
        peaked = checkpoints.write(LlamaConfig(**sizes, **tokens), directory / "peaked", seed=3)
        self.directory = directory
        target = rewrite_checkpoint(peaked, directory / "target", logit_divisor=LOGIT_DIVISOR)
        heads = random_heads(target, directory / "heads", hidden_size=64, vocab_size=VOCAB)
        eagles = {
            name: write_speculators(directory / name, sizes) for name, sizes in EAGLES.items()
        }
        dflashes = {
            name: (write_z_lab if sizes.markov_rank == 0 else write_dflash)(directory / name, sizes)
            for name, sizes in DFLASHES.items()
        }
        self.engines = {
            "layer_skip": SelfSpeculativeEngine(target, layer_skip),
            "heads": SelfSpeculativeEngine(target, with_heads(heads)),
            "top 3 heads": SelfSpeculativeEngine(target, with_heads(heads, support=3)),
            **{
                name: EagleApartEngine(target, eagles[name], sizes, ahead=name == "eagle ahead")
                if name in APART
                else EagleEngine(target, eagles[name], sizes, copies=name == "eagle with copies")
                for name, sizes in EAGLES.items()
            },
            **{
                name: DFlashEngine(target, dflashes[name], sizes)
                for name, sizes in DFLASHES.items()
            },
            "none": Engine(target, pages=PAGES),
        }
        self._target = LibraryModel(target, vocab=VOCAB)
        embedding = self._target.model.get_input_embeddings().weight.detach()
        self._eagles = {
            name: ReferenceHead(head, EAGLES[name], embedding) for name, head in eagles.items()
        }
        self._dflashes = {
            name: ReferenceDraft(draft, DFLASHES[name], self._target.model)
            for name, draft in dflashes.items()
        }
        self._heads = {name: tensor.double() for name, tensor in load_file(heads / WEIGHTS).items()}
        self._logits_after = cache(self._compute_logits)  # the same for every warp
        self.cache_distributions()

    def full_support_drafter(self, drafter: str) -> str:
        """Return the drafter with full support: coupled draft tokens are drawn from all ids."""
        return "heads" if drafter == "top 3 heads" else drafter

    def _q(self, group: Group, drafter: str) -> Conditionals:
        """Return q of the first draft token of a round.

        The whole target has cached the tokens before the newest.
        """
        support = 3 if drafter == "top 3 heads" else VOCAB
        rows = []
        for depth in range(COUNTED):
            texts, logits = self._logits_after(drafter, group.prompt, depth)
            q = torch.from_numpy(warp_logits(logits, texts, len(group.prompt), group.warp))
            top, ids = q.topk(support, dim=-1)
            rows.append(
                torch.zeros_like(q).scatter_(1, ids, top / top.sum(-1, keepdim=True)).numpy()
            )
        return Conditionals(tuple(rows))

    def _compute_logits(
        self, drafter: str, prompt: tuple[int, ...], depth: int
    ) -> tuple[Ints, Floats]:
        """Return the texts of `depth` more tokens, and the drafter's logits after each."""
        compute = self._layer_skip_logits if drafter == "layer_skip" else self._first_heads_logits
        if drafter in EAGLES:
            compute = partial(self._eagle_logits, drafter)
        if drafter in DFLASHES:
            compute = partial(self._dflash_logits, drafter)
        texts = all_continuations(prompt, depth, VOCAB)
        return texts, compute(torch.from_numpy(texts)).numpy()

    @torch.inference_mode()
    def _layer_skip_logits(self, texts: Tensor) -> Tensor:  # [texts, length] -> [texts, vocab]
        whole = self._target.model
        partial: Any = AutoModelForCausalLM.from_pretrained(
            self.directory / "target", dtype=torch.float64, attn_implementation="eager"
        )
        partial.model.layers = nn.ModuleList(
            layer for i, layer in enumerate(partial.model.layers) if i not in SKIP
        )
        cached = whole(texts[:, :-1], use_cache=True).past_key_values
        logits: Tensor = partial(texts[:, -1:], past_key_values=cached, use_cache=True).logits
        return logits[:, -1]

    @torch.inference_mode()
    def _eagle_logits(self, drafter: str, texts: Tensor) -> Tensor:
        """Return the logits of a head after each text, [texts, length] -> [texts, vocab]."""
        reference = self._eagles[drafter]
        states = self._target.model(texts[:, :-1], output_hidden_states=True).hidden_states
        taps = torch.cat([states[i] for i in reference.sizes.taps or ()], dim=-1)
        return reference.draft_many(texts, taps)[:, 0]

    @torch.inference_mode()
    def _dflash_logits(self, drafter: str, texts: Tensor) -> Tensor:
        """Return the logits of a block's first token after each text."""
        reference = self._dflashes[drafter]
        states = self._target.model(texts[:, :-1], output_hidden_states=True).hidden_states
        taps = torch.cat([states[i] for i in reference.sizes.taps], dim=-1)
        pairs = zip(texts.tolist(), taps, strict=True)
        return torch.stack([reference.draft(text, own, ())[0] for text, own in pairs])

    @torch.inference_mode()
    def _first_heads_logits(self, texts: Tensor) -> Tensor:  # [texts, length] -> [texts, vocab]
        model = self._target.model
        hidden = model.model(texts[:, :-1], use_cache=False).last_hidden_state[:, -1]
        inputs = torch.cat(
            [F.rms_norm(rows, (64,)) for rows in (hidden, model.model.embed_tokens(texts[:, -1]))],
            dim=-1,
        )
        logits: Tensor = model.lm_head(
            hidden + F.silu(inputs @ self._heads["weight"][0] + self._heads["bias"][0])
        )
        return logits
