"""Open a model for inference: from a checkpoint to a runner.

The device, the number format, the attention kernel and the pages of the KV cache are decided here,
once, before anything runs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from specserve.config.tree import (
    MAX_BATCH_TOKENS,
    Config,
    DraftConfig,
    LimitsConfig,
    TargetConfig,
)
from specserve.errors import ConfigError
from specserve.models.adapters.store import AdapterStore
from specserve.models.attention import (
    Attention,
    GroupedAttention,
    Kernel,
    invariant_kernel,
    sdpa_kernel,
)
from specserve.models.cache import PagedCache, num_spare_pages
from specserve.models.checkpoints.load import (
    Architecture,
    LoadedModel,
    is_encoder_decoder,
    load_model,
    longest_context,
    num_held_bytes,
    read_config,
    register_attention,
)
from specserve.models.checkpoints.packed import PackedCheckpoint
from specserve.models.checkpoints.quantized.formats import multiplies_float8
from specserve.models.checkpoints.quantized.page_scales import (
    read_page_scales,
    states_float8_pages,
)
from specserve.models.checkpoints.weights import (
    Codes,
    num_head_training_bytes,
    num_training_bytes,
    num_weight_bytes,
    stored_tensors,
)
from specserve.models.flashinfer_attention import (
    FlashInferAttention,
    FlashInferUnusable,
    open_flashinfer,
)
from specserve.models.float8_kernels import float8_fault
from specserve.models.float8_pages import PageScales
from specserve.models.float8_weight import FLOAT8
from specserve.models.graphs import GraphedNetwork, pad_to_bucket
from specserve.models.hidden_taps import SERVED_STATES_BYTES, HiddenTaps
from specserve.models.largest_pass import LargestPass, largest_pass_bytes
from specserve.models.layers import PrivateWeights, linear_weights
from specserve.models.linear_kernels import CompiledKernel, linear_kernel, multiplies_bf16
from specserve.models.memory import (
    free_memory,
    keep_freed_memory,
    num_pages_for,
    require_room,
    require_room_to_train,
)
from specserve.models.network import (
    CapturableNetwork,
    LibraryNetwork,
    Network,
    ShareableNetwork,
    build_network,
    library_attention,
)
from specserve.models.row_graphs import RowGraphs
from specserve.models.runner import Runner
from specserve.models.shard import Shard
from specserve.models.shared_weights import open_shared_weights
from specserve.models.t5 import T5Network

log = logging.getLogger(__name__)

FLASHINFER = "flashinfer"
FP8 = "fp8"
ATTENTION_NAME = "specserve"
"""Name under which the library's modelling code finds our attention."""
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
DEFAULT_MEMORY_FRACTION = 0.5
"""Fraction of the free memory for one model's pages, unless cache.memory_fraction names another."""
KERNELS: Mapping[str, Kernel] = {"invariant": invariant_kernel, "sdpa": sdpa_kernel}
"""Attention kernels that run on every device."""


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
    is_trained: bool = False  # a copy of its weights beside it, which later takes their place
    trained_head: Path | None = None  # of this target, in its process, from states that are kept

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
            is_trained=isinstance(own, DraftConfig) and own.kind == "neural" and own.learn is True,
        )


@dataclass(frozen=True, slots=True)
class Model:
    """A model that is ready to run."""

    runner: Runner
    spec: Architecture
    max_context: int
    network: ShareableNetwork | None = None  # the runner's, if others can draft with it
    adapters: AdapterStore | None = None  # the runner's
    # Returns a network with other weights, by their names, over the runner's cache.
    rebuild: Callable[[Mapping[str, Tensor]], Network] | None = None


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
    device = resolve_device(options.device)
    require_device_for(options.round_to, device)
    dtype = resolve_dtype(options.dtype, device)
    attention_name, page_size = _attention_name(options, device, dtype), options.page_size
    page_dtype = resolve_page_dtype(directory, options.page_dtype, dtype, device)
    ranks = 1 if shard is None else shard.size
    keeps = codes_kept(directory, options.kernel, dtype, device, options.round_to)
    if device.type == "cpu":
        keep_freed_memory()
    register_attention(ATTENTION_NAME, library_attention)

    def load(packed: PackedCheckpoint | None = None) -> LoadedModel:
        return load_model(
            directory,
            dtype=dtype,
            device=device,
            shard=shard,
            attention=ATTENTION_NAME,
            skip=skip,
            packed=packed,
            keeps=keeps,
            round_to=options.round_to,
        )

    def weight_bytes() -> int:
        return num_held_bytes(directory, dtype, keeps=keeps, round_to=options.round_to, ranks=ranks)

    def attention_for(loaded: LoadedModel) -> Attention:
        return _attention(attention_name, options, loaded, dtype, device, page_dtype)

    def build(
        loaded: LoadedModel, cache: PagedCache, attention: Attention
    ) -> CapturableNetwork | T5Network:
        if loaded.spec.is_encoder_decoder:
            return T5Network(loaded, cache, shard=shard)
        return build_network(
            loaded,
            cache,
            attention=attention,
            shard=shard,
            returns_hidden=returns_hidden,
            taps=taps,
            is_adaptable=options.adapter_bytes > 0,
        )

    scales: Sequence[PageScales] = ()

    def make_cache(spec: Architecture, num_pages: int) -> PagedCache:
        return PagedCache(
            num_layers=spec.num_layers,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            v_head_dim=spec.v_head_dim,
            num_pages=num_pages,
            page_size=page_size,
            dtype=page_dtype,
            device=device,
            scales=scales,
            # With an encoder, the keys of a text depend on its encoder input, too.
            prefix_caching=options.prefix_caching and not spec.is_encoder_decoder,
        )

    packed = None
    if options.shares_weights and device.type == "cpu":
        packed = open_shared_weights(
            directory,
            options.weights_directory,
            dtype=dtype,
            num_bytes=lambda: weight_bytes() // ranks,
            kernel=linear_kernel(options.kernel),
            part=(
                None if shard is None else (shard.rank, shard.size, shard.gathers),
                tuple(skip),
                options.adapter_bytes > 0,
                options.round_to,
            ),
            load=load,
            build=lambda loaded: build(loaded, make_cache(loaded.spec, 1), attention_for(loaded)),
        )
    if options.round_to == FP8:
        _report_float8(directory, dtype, device, weight_bytes())
    if packed is None and not skip:
        require_room(directory, weight_bytes(), device=device, ranks=ranks)
    training_bytes = _num_training_bytes(directory, options, dtype)
    if training_bytes:
        require_room_to_train(directory, weight_bytes() // ranks, training_bytes, device=device)
    loaded = load(packed)
    spec = loaded.spec
    if page_dtype == FLOAT8:
        scales = read_page_scales(stored_tensors(directory), loaded.layers)
        log.info("%s: the KV cache is in FP8, with half of the bytes", directory.name)
    context = _context(spec, options)
    kept_free = options.adapter_bytes * (ranks if device.type == "cpu" else 1)
    kept_free += training_bytes

    def count_pages(reserved: int = 0) -> int:
        return _num_pages(
            options,
            spec,
            shard,
            context=context,
            page_size=page_size,
            dtype=page_dtype,
            device=device,
            reserved=reserved + kept_free,
        )

    # A GPU's pages are counted once the largest pass has shown what it needs itself.
    needs_trial = device.type == "cuda" and not options.pages and not spec.is_encoder_decoder
    largest = LargestPass.from_limits(
        max_rows=options.max_rows,
        max_sequences=options.max_sequences,
        max_gamma=options.max_gamma,
        context=context,
    )
    if needs_trial:
        cache = make_cache(spec, largest.num_pages(page_size))
    else:
        cache = make_cache(spec, options.pages or count_pages())
    with torch.inference_mode(), linear_weights(packed or PrivateWeights(options.kernel)):
        attention = attention_for(loaded)
        net = build(loaded, cache, attention)
    if packed is not None:
        packed.check_finished()
    if isinstance(net, T5Network):
        runner = Runner(net, cache, device=device, encoder=net, sharded_head=net.sharded_head)
        return Model(runner, spec, context)
    adapters = None
    if options.adapter_bytes:
        assert isinstance(net, LibraryNetwork)
        adapters = AdapterStore(
            directory,
            loaded.config,
            net.module,
            max_bytes=options.adapter_bytes,
            dtype=dtype,
            device=device,
            shard=shard,
            kernel=options.kernel,
        )
    plain = Runner(net, cache, device=device, adapters=adapters, sharded_head=net.sharded_head)
    if needs_trial:
        taken = largest_pass_bytes(plain, largest)
        cache.resize(1)
        torch.cuda.empty_cache()
        cache.resize(count_pages(reserved=taken))
    is_captured = device.type == "cuda" and adapters is None  # whose products differ by pass

    def rebuild(weights: Mapping[str, Tensor]) -> Network:
        fresh = load()
        _set_weights(fresh.module, weights)
        with torch.inference_mode(), linear_weights(PrivateWeights(options.kernel)):
            other = build(fresh, cache, attention)
        assert not isinstance(other, T5Network)
        if not is_captured:
            return other
        return with_graphs(
            other, attention, cache, spec, context=context, shard=shard, taps=taps
        ).runner.network

    model = (
        with_graphs(net, attention, cache, spec, context=context, shard=shard, taps=taps)
        if is_captured
        else Model(plain, spec, context, net, adapters)
    )
    return replace(model, rebuild=rebuild)


def _num_training_bytes(directory: Path, options: ModelOptions, dtype: torch.dtype) -> int:
    """Return the bytes to keep free for a model that is trained, or for a head beside it."""
    if options.is_trained:
        return num_training_bytes(directory, dtype)
    if options.trained_head is None:
        return 0
    return num_head_training_bytes(options.trained_head, dtype) + SERVED_STATES_BYTES


def _set_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give a module copies of these weights, in its own number format."""
    for name, parameter in module.named_parameters():
        parameter.data = weights[name].to(parameter.device, parameter.dtype, copy=True)


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
        runner = Runner(network, cache, device=device, sharded_head=network.sharded_head)
        return Model(runner, spec, context, network)
    graphed = GraphedNetwork(network, device, taps)
    runner = Runner(graphed, cache, device=device, pad_to_bucket=pad_to_bucket)
    return Model(runner, spec, context, graphed)


def _context(spec: Architecture, options: ModelOptions) -> int:
    """Return the longest context.

    Relative positions have no end, so `limits.max_context` may exceed what an encoder-decoder's
    checkpoint states.
    """
    wanted = options.max_context or spec.max_context
    return wanted if spec.is_encoder_decoder else min(spec.max_context, wanted)


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


def resolve_device(name: str) -> torch.device:
    """Return the device of that name, with its number if it is a CUDA device.

    Raises ConfigError for one that is not there.
    """
    count = torch.cuda.device_count()
    if name == "auto":
        name = "cuda" if count else "cpu"
    device = torch.device(name)
    if device.type != "cuda":
        return device
    number = device.index or 0
    if number >= count:
        there = f"only {count} can be seen" if count else "no CUDA device is visible"
        raise ConfigError(
            f"device {name} was asked for, and {there}; set target.device or draft.device to cpu "
            "(`specserve doctor` says more)."
        )
    return torch.device("cuda", number)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the number format `name`; `auto` is the one that the device computes fast."""
    if name != "auto":
        return DTYPES[name]
    fast = device.type == "cuda" or multiplies_bf16()
    return torch.bfloat16 if fast else torch.float32


def resolve_page_dtype(
    directory: Path, name: str, dtype: torch.dtype, device: torch.device
) -> torch.dtype:
    """Return the number format of a model's pages; `auto` is what its checkpoint says.

    Reads config.json only. Raises ConfigError for FP8 that is asked for where there is none.
    """
    is_stated = states_float8_pages(directory)
    if name == "auto" and not is_stated:
        return dtype
    if is_encoder_decoder(read_config(directory)):
        reason = "an encoder-decoder's keys and values are in the model's"
    elif device.type == "cpu":
        reason = "the target's device is the CPU, where pages are in the model's"
    else:
        return FLOAT8
    if name == FP8:
        raise ConfigError(
            f"cache.dtype: fp8 cannot be had for {directory}: {reason} number format; "
            "leave cache.dtype out"
        )
    log.info("%s states a KV cache in FP8; %s number format", directory.name, reason)
    return dtype


def require_device_for(round_to: str | None, device: torch.device) -> None:
    """Raise ConfigError if the device computes with no weights that are rounded to this."""
    if round_to == FP8 and device.type == "cpu":
        raise ConfigError(
            "draft.quantize: fp8 needs a GPU, and the draft's device is the CPU, which multiplies "
            "no FP8; use int8"
        )


def _report_float8(
    directory: Path, dtype: torch.dtype, device: torch.device, num_bytes: int
) -> None:
    """Log whether FP8 weights are kept as such, and what they take."""
    whole = num_weight_bytes(directory, dtype)
    if (fault := float8_fault(device, dtype)) is None:
        log.info(
            "%s in FP8: its weights take %.1f GB, and would take %.1f GB whole",
            *(directory.name, num_bytes / 1e9, whole / 1e9),
        )
        return
    log.warning(
        "draft.quantize: fp8 gains nothing: %s. Its weights are rounded and widened again, take "
        "%.1f GB as whole ones do, and a pass reads all of it",
        *(fault, whole / 1e9),
    )


def codes_kept(
    directory: Path,
    kernel: str,
    dtype: torch.dtype,
    device: torch.device,
    round_to: str | None = None,
) -> Codes | None:
    """Return which quantised weights linear layers compute with as they are; None: with none.

    They are those of the checkpoint, or what its weights are rounded to as they are read.
    """
    if device.type == "cpu":
        return Codes.INTEGERS if _compiles(kernel, dtype, device) else None
    is_float8 = round_to == FP8 or (round_to is None and multiplies_float8(directory))
    return Codes.FLOAT8 if is_float8 and float8_fault(device, dtype) is None else None


def _compiles(kernel: str, dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether what runs on a device is compiled here."""
    return (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and isinstance(linear_kernel(kernel), CompiledKernel)
    )


def _attention_name(options: ModelOptions, device: torch.device, dtype: torch.dtype) -> str:
    """Return which attention is wanted: on GPUs `auto` until the model is there to try it with.

    Raises ConfigError for one that does not run here.
    """
    name = options.attention
    if name not in ("auto", FLASHINFER, *KERNELS):
        known = ", ".join(("auto", FLASHINFER, *KERNELS))
        raise ConfigError(f"attention: {name} is none of {known}.")
    if name == FLASHINFER and device.type != "cuda":
        raise ConfigError("attention: flashinfer needs a CUDA device; use attention: auto.")
    if name != "auto":
        return name
    if device.type == "cuda":
        return "auto"
    return "compiled" if _compiles(options.kernel, dtype, device) else "invariant"


def _attention(
    name: str,
    options: ModelOptions,
    loaded: LoadedModel,
    dtype: torch.dtype,
    device: torch.device,
    page_dtype: torch.dtype,
) -> Attention:
    """Return the attention of that name; heads that compiled code cannot take get `invariant`.

    On a GPU, `auto` is FlashInfer's if it is there and computes the right numbers, else torch's.
    """
    spec = loaded.spec
    if name in ("auto", FLASHINFER):
        try:
            return open_flashinfer(loaded, options.page_size, dtype, device, page_dtype)
        except FlashInferUnusable as error:
            if name == FLASHINFER:
                raise ConfigError(
                    f"attention: flashinfer cannot be used: {error}; use auto."
                ) from error
            log.info("Attention: torch's own (sdpa); FlashInfer cannot be used: %s", error)
            return GroupedAttention(sdpa_kernel)
    if name != "compiled":
        return GroupedAttention(KERNELS[name])
    from specserve.models.compiled_attention import CompiledAttention, fits

    kernel = linear_kernel(options.kernel)
    assert isinstance(kernel, CompiledKernel)
    if not fits(spec):
        return GroupedAttention(invariant_kernel)
    shared = spec.num_heads // spec.kv_heads
    return CompiledAttention(kernel.functions.attention, shared=shared, page_size=options.page_size)


def _num_pages(
    options: ModelOptions,
    spec: Architecture,
    shard: Shard | None,
    *,
    context: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    reserved: int,
) -> int:
    """Return how many pages fit into memory beside the reserved bytes.

    They are no more than full contexts could fill, and on all ranks as many as on the one with the
    least memory.
    """
    # Ranks on CPUs may share one memory.
    sharers = 1 if shard is None or device.type == "cuda" else shard.size
    pages = num_pages_for(
        int((free_memory(device) - reserved) * options.memory_fraction) // sharers,
        num_layers=spec.num_layers,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        v_head_dim=spec.v_head_dim,
        dtype=dtype,
        page_size=page_size,
    )
    pages = max(1, pages - num_spare_pages(device))
    if shard is not None:
        pages = shard.minimum(pages, device=device)
    # An encoder-decoder has the encoder input's pages, and the text's.
    full = -(-context // page_size) * (2 if spec.is_encoder_decoder else 1)
    return min(pages, options.max_sequences * full)
