"""The forward pass: by the library's modelling code for any architecture, else by a fused network.

`llama` has the fused network for Llama-shaped models; encoder-decoders have one in their feature.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specserve.models.attention import Attention, AttentionVariant
from specserve.models.cache import PagedCache
from specserve.models.checkpoints.load import LoadedModel
from specserve.models.falcon import attend_by
from specserve.models.float8_pages import UNSCALED
from specserve.models.hidden_taps import HiddenTaps
from specserve.models.layers import leave_unrounded, pack_linears
from specserve.models.layout import Layout
from specserve.models.llama import FusedNetwork
from specserve.models.shard import GatheredHead, Shard
from specserve.models.skip import layers_of, without_layers

LLAMA_SHAPED = ("llama", "mistral", "qwen2", "qwen3", "granite", "seed_oss", "smollm3")
STATIC_ROTARY = ("default", "linear", "llama3", "yarn", "dynamic")
"""Rotary embeddings whose angle depends on the position alone, so that a table will do.

`dynamic` ones change with a text's length from `max_position_embeddings` on, where contexts end.
"""


class Network(Protocol):
    """A model's forward pass, which writes the keys and values of all rows into the KV cache."""

    @property
    def run_rows(self) -> int | None:
        """Rows of a run, if its layers attend in runs; None: they attend in groups."""
        ...

    def logits(self, ids: Tensor, layout: Layout, rows: Tensor | None) -> Tensor:  # [rows, vocab]
        """Return the logits of these rows of the pass; None: of all rows."""
        ...

    def logits_in_parts(
        self, ids: Tensor, layout: Layout, parts: Sequence[Tensor]
    ) -> Iterator[Tensor]:
        """Run one pass, and yield the logits of each part of its rows when they are requested."""
        ...


class ShareableNetwork(Network, Protocol):
    """A network whose weights a drafter may use.

    If it `returns_hidden`, each row has the hidden state that the head was given after its logits.
    With taps, each pass leaves the inputs of the tapped layers there, of all its rows.
    """

    @property
    def embedding(self) -> Tensor: ...  # [vocab, hidden]

    def without_layers(self, skip: Collection[int]) -> ShareableNetwork:
        """Return a network with the same weights and pages that leaves some layers out."""
        ...

    def embed(self, ids: Tensor) -> Tensor: ...  # [rows] -> [rows, hidden]

    def head(self, hidden: Tensor) -> Tensor: ...  # [rows, hidden] -> [rows, vocab]


class CapturableNetwork(ShareableNetwork, Protocol):
    """A network whose pass can be captured, up to what is computed for some rows alone."""

    @property
    def sharded_head(self) -> GatheredHead | None:
        """The vocabulary head, if each of several ranks has a share of it."""
        ...

    def without_layers(self, skip: Collection[int]) -> CapturableNetwork: ...

    def run_layers(self, ids: Tensor, layout: Layout) -> Tensor:
        """Return a row for each row of the pass, from which `finish` computes logits."""
        ...

    def finish(self, x: Tensor, rows: Tensor | None) -> Tensor:
        """Return the logits of these rows of what `run_layers` returned; None: of all of them."""
        ...


def build_network(
    loaded: LoadedModel,
    cache: PagedCache,
    *,
    attention: Attention,
    shard: Shard | None,
    returns_hidden: bool = False,
    taps: HiddenTaps | None = None,
    is_adaptable: bool = False,
) -> CapturableNetwork:
    """Return a fused network where there is one; an adaptable one has the library's layers."""
    if can_fuse(loaded) and not is_adaptable:
        return FusedNetwork(
            loaded,
            cache,
            attention=attention,
            shard=shard,
            returns_hidden=returns_hidden,
            taps=taps,
        )
    return LibraryNetwork(
        loaded, cache, attention=attention, returns_hidden=returns_hidden, taps=taps
    )


def can_fuse(loaded: LoadedModel) -> bool:
    config = loaded.config
    rotary = getattr(config, "rope_parameters", None) or {}
    return (
        config.model_type in LLAMA_SHAPED
        and config.hidden_act == "silu"
        and rotary.get("rope_type", "default") in STATIC_ROTARY
        and rotary.get("partial_rotary_factor", 1.0) == 1.0
    )


class LibraryNetwork:
    """The library's modelling code over packed rows, with our attention and packed linears."""

    def __init__(
        self,
        loaded: LoadedModel,
        cache: PagedCache,
        *,
        attention: Attention,
        returns_hidden: bool = False,
        taps: HiddenTaps | None = None,
    ) -> None:
        module: Any = loaded.module
        self.module, self.run_rows = module, attention.run_rows
        self.attention = PagedAttention(cache, attention, loaded.layers)
        self._hidden: list[Tensor] = []  # what the head was given in the pass under way
        for part in module.modules():
            if isinstance(getattr(part, "layer_idx", None), int):
                part.paged_attention = self.attention
                # By the row of the pass, not the position; within our context it scales by 1.
                part.attn_temperature_tuning = False
        if loaded.config.model_type == "falcon":
            attend_by(module, library_attention)
        pack_linears(module)
        leave_unrounded(module.get_output_embeddings())
        if returns_hidden:
            module.get_output_embeddings().register_forward_pre_hook(
                lambda _, given: self._hidden.append(given[0][0])
            )
        if taps is not None:
            _hook_layers(module, taps)

    @property
    def embedding(self) -> Tensor:
        weight: Tensor = self.module.get_input_embeddings().weight
        return weight.detach()

    @property
    def sharded_head(self) -> GatheredHead | None:
        head = self.module.get_output_embeddings()
        return head if isinstance(head, GatheredHead) else None

    def logits(self, ids: Tensor, layout: Layout, rows: Tensor | None) -> Tensor:
        self.attention.layout = layout
        out = self.module(
            input_ids=ids[None],
            position_ids=layout.positions[None],
            use_cache=False,
            logits_to_keep=0 if rows is None else rows,
        )
        logits: Tensor = out.logits[0]
        return torch.cat([logits, self._hidden.pop()], dim=-1) if self._hidden else logits

    def run_layers(self, ids: Tensor, layout: Layout) -> Tensor:
        return self.logits(ids, layout, None)  # the head is inside the library's code

    def finish(self, x: Tensor, rows: Tensor | None) -> Tensor:
        return x.clone() if rows is None else x.index_select(0, rows)

    def logits_in_parts(
        self, ids: Tensor, layout: Layout, parts: Sequence[Tensor]
    ) -> Iterator[Tensor]:
        """Yield the logits of each part of the rows.

        The head and what follows it run once a part, over the output that the decoder had in the
        first. A decoder that the module does not call as such runs once a part, too, and writes
        the same keys and values again.
        """
        decoder, outputs = self.module.get_decoder(), []
        hook = decoder.register_forward_hook(lambda *call: outputs.append(call[-1]))
        try:
            logits = self.logits(ids, layout, parts[0])
        finally:
            hook.remove()
        yield logits
        for rows in parts[1:]:
            with _returning(decoder, outputs):
                logits = self.logits(ids, layout, rows)
            yield logits

    def without_layers(self, skip: Collection[int]) -> LibraryNetwork:
        other = copy.copy(self)
        other.module = without_layers(self.module, skip)
        return other

    def embed(self, ids: Tensor) -> Tensor:
        return self.module.get_input_embeddings()(ids)  # type: ignore[no-any-return]

    def head(self, hidden: Tensor) -> Tensor:
        """Return the head's output, without what an architecture does to its logits afterwards."""
        logits: Tensor = self.module.get_output_embeddings()(hidden[None])[0]
        self._hidden.clear()
        return logits


def _hook_layers(module: Any, taps: HiddenTaps) -> None:
    """Make the layers of the library's module show the taps their inputs, and the last its output.

    A layer is called with its input by position or by name, and returns it alone or in a tuple.
    """
    layers = layers_of(module)[1]

    def show_input(layer: int, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        taps.add(layer, (given[0] if given else named["hidden_states"])[0])

    def show_output(out: Any) -> None:
        taps.add(len(layers), (out[0] if isinstance(out, tuple) else out)[0])

    for i, layer in enumerate(layers):
        layer.register_forward_pre_hook(
            lambda _, given, named, i=i: show_input(i, given, named), with_kwargs=True
        )
    layers[-1].register_forward_hook(lambda *call: show_output(call[-1]))


@contextmanager
def _returning(module: nn.Module, outputs: Sequence[object]) -> Iterator[None]:
    """Make the module return its one known output instead of running, if there is one."""
    if len(outputs) != 1:
        yield
        return
    module.forward = lambda *_, **__: outputs[0]
    try:
        yield
    finally:
        del module.forward  # the class's is in force again


class PagedAttention:
    """The shared state of one model's attention modules: KV cache and layout of the pass."""

    def __init__(self, cache: PagedCache, attention: Attention, layers: Sequence[int]) -> None:
        self.attention, self.keys, self.values = attention, cache.keys, cache.values
        self._scales = cache.scales
        self._indices = {layer: i for i, layer in enumerate(layers)}  # in the cache
        self.layout: Layout | None = None

    def __call__(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant
    ) -> Tensor:
        assert self.layout is not None
        i = self._indices[layer]
        keys, values, width = self.keys[i], self.values[i], v.shape[-1]
        if k.shape[1:] != keys.shape[1:]:
            q, k, v = (
                F.pad(q, (0, keys.shape[-1] - q.shape[-1])),
                _padded(k, keys),
                _padded(v, values),
            )
        if self._scales[i] != UNSCALED:
            variant = replace(variant, scales=self._scales[i])
        attended = self.attention.attend(self.layout, keys, values, q, k, v, variant)
        return attended[..., :width]


def _padded(own: Tensor, pool: Tensor) -> Tensor:  # [rows, kv_heads, dim] -> as in the pool
    """Return keys or values of a layer that has fewer or smaller heads than the pool.

    Zeros add nothing to a product, and queries that share a head find it wherever it is repeated.
    """
    repeats = pool.shape[1] // own.shape[1]
    return F.pad(own, (0, pool.shape[-1] - own.shape[-1])).repeat_interleave(repeats, dim=1)


def library_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, rows, dim]
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Attend for the library, where this function is registered under the name "specserve"."""
    variant = AttentionVariant(
        query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap, s_aux
    )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    attend_paged: Any = module.paged_attention
    return attend_paged(module.layer_idx, q, k, v, variant)[None], None
