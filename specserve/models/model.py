"""Open a model for inference: from a checkpoint to a runner.

The device, the number format, the attention kernel and the pages of the KV cache are decided here,
once, before anything runs.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from specserve.config.features import part
from specserve.config.sections import MAX_BATCH_TOKENS, DraftConfig, LimitsConfig, TargetConfig
from specserve.config.tree import Config
from specserve.errors import ConfigError
from specserve.models.adapters import Adapters
from specserve.models.attention import Attention
from specserve.models.attention_choice import attention_name, open_attention
from specserve.models.cache import PagedCache, num_spare_pages
from specserve.models.checkpoints.architecture import Architecture, longest_context
from specserve.models.checkpoints.held_bytes import num_held_bytes
from specserve.models.checkpoints.library import is_encoder_decoder, read_config, register_attention
from specserve.models.checkpoints.load import LoadedModel, load_model
from specserve.models.checkpoints.packed import PackedCheckpoint
from specserve.models.checkpoints.quantized.page_scales import read_page_scales
from specserve.models.checkpoints.weights import (
    Codes,
    stored_tensors,
)
from specserve.models.cpu.linear_kernels import linear_kernel
from specserve.models.cpu.shared_weights import open_shared_weights
from specserve.models.device_formats import (
    FP8,
    codes_kept,
    report_float8,
    require_device_for,
    resolve_device,
    resolve_dtype,
    resolve_page_dtype,
)
from specserve.models.float8_pages import PageScales
from specserve.models.float8_weight import FLOAT8
from specserve.models.gpu.flashinfer_attention import FlashInferAttention
from specserve.models.gpu.graphs import GraphedNetwork, pad_to_bucket
from specserve.models.gpu.largest_pass import LargestPass, largest_pass_bytes
from specserve.models.gpu.row_graphs import RowGraphs
from specserve.models.hidden_taps import HiddenTaps
from specserve.models.layers import PrivateWeights, linear_weights
from specserve.models.memory import (
    free_memory,
    keep_freed_memory,
    num_pages_for,
    page_bytes,
    require_memory_for_pages,
    require_room,
)
from specserve.models.network import (
    CapturableNetwork,
    LibraryNetwork,
    ShareableNetwork,
    build_network,
    library_attention,
)
from specserve.models.reproducibility import why_irreproducible
from specserve.models.runner import Runner
from specserve.models.shard import Shard

log = logging.getLogger(__name__)

ATTENTION_NAME = "specserve"
"""Name under which the library's modelling code finds our attention."""
DEFAULT_MEMORY_FRACTION = 0.5
"""Fraction of the free memory for one model's pages, unless cache.memory_fraction names another."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How a model runs, and on what device. `auto` depends on what the machine can do."""

    dtype: str = "auto"
    device: str = "auto"
    attention: str = "auto"
    page_size: int = 16
    pages: int | None = None
    memory_fraction: float = 0.9  # of what is free once the weights are there
    prefix_caching: bool = True
    max_context: int | None = None
    max_sequences: int = 64  # no more pages than that many full contexts
    max_rows: int = 512  # of a pass
    max_gamma: int = 16
    shares_weights: bool = False  # with other processes of the node, on CPUs
    weights_directory: Path | None = None  # None: in memory
    kernel: str = "auto"  # of linear layers on CPUs
    adapter_bytes: int = 0  # of memory for adapters; 0: the model takes none
    round_to: str | None = None  # int8, int4 or fp8: weights are quantised as they are read
    page_dtype: str = "auto"  # or fp8: of the KV cache

    @classmethod
    def from_config(cls, own: TargetConfig | DraftConfig, config: Config) -> ModelOptions:
        """Return the options of a config's target or of its draft, whichever `own` is."""
        return cls(
            dtype=own.dtype,
            device=own.device,
            attention=own.attention if isinstance(own, TargetConfig) else "auto",
            page_size=config.cache.page_size,
            pages=config.cache.pages,
            memory_fraction=config.cache.memory_fraction or DEFAULT_MEMORY_FRACTION,
            max_rows=config.limits.max_batch_tokens or MAX_BATCH_TOKENS,
            max_gamma=config.speculation.max_gamma,
            prefix_caching=config.cache.prefix_caching,
            max_context=config.limits.max_context,
            max_sequences=config.limits.max_running,
            shares_weights=config.weights.shared is True,
            weights_directory=None
            if config.weights.directory is None
            else Path(config.weights.directory),
            kernel=config.weights.kernel,
            adapter_bytes=config.adapters.num_bytes if isinstance(own, TargetConfig) else 0,
            page_dtype=config.cache.dtype if isinstance(own, TargetConfig) else "auto",
            round_to=own.quantize if isinstance(own, DraftConfig) else None,
        )


@dataclass(frozen=True, slots=True)
class Model:
    """A model that is ready to run."""

    runner: Runner
    spec: Architecture
    max_context: int
    network: ShareableNetwork | None = None  # the runner's, if others can draft with it
    adapters: Adapters | None = None  # the runner's
    # Why texts may depend on what else is served; None: they do not.
    irreproducible: str | None = None


def open_model(
    directory: Path,
    options: ModelOptions,
    *,
    shard: Shard | None = None,
    skip: Collection[int] = (),
    returns_hidden: bool = False,
    taps: HiddenTaps | None = None,
) -> Model:
    """Open the model of a checkpoint, without the layers to `skip`.

    Raises ModelError for a model that cannot be served, and TooLittleMemory when not one sequence
    fits.
    """
    opening = _Opening.from_options(
        directory, options, shard=shard, skip=skip, returns_hidden=returns_hidden, taps=taps
    )
    if opening.device.type == "cpu":
        keep_freed_memory()
    register_attention(ATTENTION_NAME, library_attention)

    packed = opening.shared_weights()
    opening.require_room(is_shared=packed is not None)
    loaded = opening.load(packed)
    # A GPU's pages are counted once the largest pass has shown what it needs itself.
    largest = opening.largest_pass(loaded.spec)
    cache = opening.open_cache(loaded, largest)
    attention, network, failed = opening.open_network(loaded, cache, packed)
    model = opening.open_runner(loaded, cache, attention, network, largest)
    return replace(
        model,
        irreproducible=why_irreproducible(
            loaded.module,
            loaded.spec,
            device=opening.device,
            dtype=opening.dtype,
            attention=opening.attention_name,
            failed=failed,
        ),
    )


def plain_runner(
    network: CapturableNetwork, cache: PagedCache, adapters: Adapters | None = None
) -> Runner:
    """Return a runner whose passes are not captured."""
    return Runner(
        network, cache, device=cache.device, adapters=adapters, sharded_head=network.sharded_head
    )


@dataclass(frozen=True, slots=True)
class _Opening:
    """The decisions that are made before a model's weights are read, and its parts by them."""

    directory: Path
    options: ModelOptions
    device: torch.device
    dtype: torch.dtype
    page_dtype: torch.dtype
    attention_name: str
    keeps: Codes | None
    shard: Shard | None
    skip: Collection[int]
    returns_hidden: bool
    taps: HiddenTaps | None

    @classmethod
    def from_options(
        cls,
        directory: Path,
        options: ModelOptions,
        *,
        shard: Shard | None,
        skip: Collection[int],
        returns_hidden: bool,
        taps: HiddenTaps | None,
    ) -> _Opening:
        """Decide what `auto` means here. Raises ConfigError for what does not run."""
        device = resolve_device(options.device)
        require_device_for(options.round_to, device)
        dtype = resolve_dtype(options.dtype, device)
        return cls(
            directory,
            options,
            device,
            dtype,
            attention_name=attention_name(
                options.attention, kernel=options.kernel, device=device, dtype=dtype
            ),
            page_dtype=resolve_page_dtype(directory, options.page_dtype, dtype, device),
            keeps=codes_kept(directory, options.kernel, dtype, device, options.round_to),
            shard=shard,
            skip=skip,
            returns_hidden=returns_hidden,
            taps=taps,
        )

    @property
    def num_ranks(self) -> int:
        return 1 if self.shard is None else self.shard.size

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights, on all ranks together."""
        return num_held_bytes(
            self.directory,
            self.dtype,
            keeps=self.keeps,
            round_to=self.options.round_to,
            ranks=self.num_ranks,
        )

    def shared_weights(self) -> PackedCheckpoint | None:
        """Return the weights that processes of this node share; None for weights of our own."""
        options, shard = self.options, self.shard
        if not options.shares_weights or self.device.type != "cpu":
            return None
        return open_shared_weights(
            self.directory,
            options.weights_directory,
            dtype=self.dtype,
            num_bytes=lambda: self.weight_bytes // self.num_ranks,
            kernel=linear_kernel(options.kernel),
            part=(
                None if shard is None else (shard.rank, shard.size, shard.gathers),
                tuple(self.skip),
                options.adapter_bytes > 0,
                options.round_to,
            ),
            load=self.load,
            build=lambda loaded: self.build(
                loaded, self.make_cache(loaded.spec, 1), self.open_attention(loaded)
            ),
        )

    def require_room(self, *, is_shared: bool) -> None:
        """Raise TooLittleMemory if the weights cannot fit."""
        if self.options.round_to == FP8:
            report_float8(self.directory, self.dtype, self.device, self.weight_bytes)
        if not is_shared and not self.skip:
            require_room(
                self.directory, self.weight_bytes, device=self.device, ranks=self.num_ranks
            )

    def load(self, packed: PackedCheckpoint | None = None) -> LoadedModel:
        return load_model(
            self.directory,
            dtype=self.dtype,
            device=self.device,
            shard=self.shard,
            attention=ATTENTION_NAME,
            skip=self.skip,
            packed=packed,
            keeps=self.keeps,
            round_to=self.options.round_to,
        )

    def context(self, spec: Architecture) -> int:
        """Return the longest context.

        Relative positions have no end, so `limits.max_context` may exceed what an encoder-decoder's
        checkpoint states.
        """
        wanted = self.options.max_context or spec.max_context
        return wanted if spec.is_encoder_decoder else min(spec.max_context, wanted)

    def largest_pass(self, spec: Architecture) -> LargestPass | None:
        """Return the pass to try before pages are counted; None where they need no trial."""
        options = self.options
        if self.device.type != "cuda" or options.pages or spec.is_encoder_decoder:
            return None
        return LargestPass.from_limits(
            max_rows=options.max_rows,
            max_sequences=options.max_sequences,
            max_gamma=options.max_gamma,
            context=self.context(spec),
        )

    def num_pages(self, spec: Architecture, *, reserved: int = 0) -> int:
        """Return the configured number of pages, or how many fit beside the reserved bytes.

        They are no more than full contexts could fill, and on all ranks as many as on the one with
        the least memory.
        """
        options, device, shard = self.options, self.device, self.shard
        page = page_bytes(
            num_layers=spec.num_layers,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            v_head_dim=spec.v_head_dim,
            dtype=self.page_dtype,
            page_size=options.page_size,
        )
        if options.pages:
            if (
                device.type == "cpu"
            ):  # torch may hold free memory of a card, and says when it is full
                require_memory_for_pages(options.pages, page)
            return options.pages
        # Ranks on CPUs may share one memory.
        sharers = 1 if device.type == "cuda" else self.num_ranks
        reserved += options.adapter_bytes * (self.num_ranks if device.type == "cpu" else 1)
        pages = num_pages_for(
            int((free_memory(device) - reserved) * options.memory_fraction) // sharers,
            page,
            page_size=options.page_size,
        )
        pages = max(1, pages - num_spare_pages(device))
        if shard is not None:
            pages = shard.minimum(pages, device=device)
        # An encoder-decoder has the encoder input's pages, and the text's.
        full = -(-self.context(spec) // options.page_size) * (2 if spec.is_encoder_decoder else 1)
        return min(pages, options.max_sequences * full)

    def page_scales(self, loaded: LoadedModel) -> Sequence[PageScales]:
        """Return the scales of each layer's pages; none where pages are not in FP8."""
        if self.page_dtype != FLOAT8:
            return ()
        scales = read_page_scales(stored_tensors(self.directory), loaded.layers)
        log.info("%s: the KV cache is in FP8, with half of the bytes", self.directory.name)
        return scales

    def make_cache(
        self, spec: Architecture, num_pages: int, scales: Sequence[PageScales] = ()
    ) -> PagedCache:
        return PagedCache(
            num_layers=spec.num_layers,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            v_head_dim=spec.v_head_dim,
            num_pages=num_pages,
            page_size=self.options.page_size,
            dtype=self.page_dtype,
            device=self.device,
            scales=scales,
            # With an encoder, the keys of a text depend on its encoder input, too.
            prefix_caching=self.options.prefix_caching and not spec.is_encoder_decoder,
        )

    def open_cache(self, loaded: LoadedModel, largest: LargestPass | None) -> PagedCache:
        """Return the cache with all its pages, or with those that the largest pass takes."""
        spec = loaded.spec
        num_pages = (
            self.num_pages(spec) if largest is None else largest.num_pages(self.options.page_size)
        )
        return self.make_cache(spec, num_pages, self.page_scales(loaded))

    def open_attention(self, loaded: LoadedModel) -> Attention:
        return open_attention(
            self.attention_name,
            loaded,
            kernel=self.options.kernel,
            page_size=self.options.page_size,
            dtype=self.dtype,
            device=self.device,
            page_dtype=self.page_dtype,
        )

    def build(self, loaded: LoadedModel, cache: PagedCache, attention: Attention) -> Any:
        """Return the network: one that can be captured, unless it is an encoder-decoder's."""
        if loaded.spec.is_encoder_decoder:
            return part("encoder_decoder.t5:T5Network")(loaded, cache, shard=self.shard)
        return build_network(
            loaded,
            cache,
            attention=attention,
            shard=self.shard,
            returns_hidden=self.returns_hidden,
            taps=self.taps,
            is_adaptable=self.options.adapter_bytes > 0,
        )

    def open_network(
        self, loaded: LoadedModel, cache: PagedCache, packed: PackedCheckpoint | None
    ) -> tuple[Attention, Any, Collection[tuple[int, int]]]:
        """Return the attention, the network, and the shapes at which its linear layers fail.

        The network is over packed weights if there are any.
        """
        weights = packed or PrivateWeights(self.options.kernel)
        with torch.inference_mode(), linear_weights(weights) as failed:
            attention = self.open_attention(loaded)
            network = self.build(loaded, cache, attention)
        if packed is not None:
            packed.check_finished()
        return attention, network, failed

    def open_runner(
        self,
        loaded: LoadedModel,
        cache: PagedCache,
        attention: Attention,
        network: Any,
        largest: LargestPass | None,
    ) -> Model:
        """Return the model with its runner, once the largest pass has been tried."""
        spec, context = loaded.spec, self.context(loaded.spec)
        if spec.is_encoder_decoder:
            runner = part("encoder_decoder.runner:EncoderDecoderRunner")(network, cache)
            return Model(runner, spec, context)

        adapters = self.open_adapters(loaded, network)
        if largest is not None:
            taken = largest_pass_bytes(plain_runner(network, cache, adapters), largest)
            cache.resize(1)
            torch.cuda.empty_cache()
            cache.resize(self.num_pages(spec, reserved=taken))
        if self.device.type == "cuda" and adapters is None:  # their products differ by pass
            return with_graphs(
                network, attention, cache, spec, context=context, shard=self.shard, taps=self.taps
            )
        return Model(plain_runner(network, cache, adapters), spec, context, network, adapters)

    def open_adapters(self, loaded: LoadedModel, network: CapturableNetwork) -> Adapters | None:
        """Return the store of a network's adapters; None where it takes none."""
        if not self.options.adapter_bytes:
            return None
        assert isinstance(network, LibraryNetwork)
        store: Adapters = part("adapters.store:AdapterStore")(
            self.directory,
            loaded.config,
            network.module,
            max_bytes=self.options.adapter_bytes,
            dtype=self.dtype,
            device=self.device,
            shard=self.shard,
            kernel=self.options.kernel,
        )
        return store


def with_graphs(
    network: CapturableNetwork,
    attention: Attention,
    cache: PagedCache,
    spec: Architecture,
    *,
    context: int,
    shard: Shard | None,
    taps: HiddenTaps | None = None,
) -> Model:
    """Return a model on a GPU whose passes are captured, if they can be."""
    device = cache.device
    if isinstance(attention, FlashInferAttention) and taps is None:
        by_rows = RowGraphs(
            network, attention, cache, device=device, max_context=context, shard=shard
        )
        # Inside a captured pass a head exchanges what it did as it was captured.
        head = None if isinstance(network, LibraryNetwork) else network.sharded_head
        runner = Runner(by_rows, cache, device=device, sharded_head=head)
        return Model(runner, spec, context, by_rows)
    if shard is not None or network.run_rows is not None:  # passes in groups, on one rank alone
        return Model(plain_runner(network, cache), spec, context, network)
    graphed = GraphedNetwork(network, device, taps)
    runner = Runner(graphed, cache, device=device, pad_to_bucket=pad_to_bucket)
    return Model(runner, spec, context, graphed)


def require_context(directory: Path, limits: LimitsConfig) -> int:
    """Return the longest context of a target.

    Raises ConfigError for limits that promise more than the model has.
    """
    config = read_config(directory)
    stated, wanted = longest_context(config), limits.max_context
    if wanted is None or wanted <= stated:
        return wanted or stated
    if is_encoder_decoder(config):  # whose relative positions have no end
        return wanted
    raise ConfigError(
        f"limits.max_context {wanted} is beyond the context of the target {directory}, which has "
        f"{stated} positions; lower it, or leave it out"
    )
