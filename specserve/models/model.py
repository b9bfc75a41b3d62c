"""From a checkpoint to a runner: device, number format, attention kernel and pages are settled here, once, before anything runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from specserve.config.tree import Config, Draft, Target
from specserve.errors import ConfigError
from specserve.models.attention import Kernel, invariant, sdpa
from specserve.models.cache import PagedCache
from specserve.models.checkpoints.load import Architecture, load_model, register_attention
from specserve.models.flash import PAGE_MULTIPLE, flash, is_installed
from specserve.models.graphs import GraphedNetwork, round_up
from specserve.models.memory import free_memory, keep_freed_memory, pages_for, require_room
from specserve.models.network import Lending, library_attention, network
from specserve.models.runner import Runner
from specserve.models.shard import Shard
from specserve.models.t5 import T5Network

ATTENTION = "specserve"  # the name under which the library's modelling code finds ours
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MEMORY_SHARE = (
    0.5  # of what is free, for the pages of one model, unless cache.memory_fraction says otherwise
)
KERNELS: Mapping[str, Kernel] = {"invariant": invariant, "sdpa": sdpa}  # those that run everywhere


@dataclass(frozen=True, slots=True)
class Placement:
    """Where and how a model runs. `auto` leaves the choice to what the machine can do."""

    dtype: str = "auto"
    device: str = "auto"
    attention: str = "auto"
    page_size: int = 16
    pages: int | None = None
    memory_fraction: float = 0.9  # of what is free once the weights are there
    prefix_caching: bool = True
    max_context: int | None = None
    max_sequences: int = 64  # no more pages than that many full contexts

    @classmethod
    def of(cls, own: Target | Draft, config: Config) -> Placement:
        """What a config says of its target or of its draft."""
        return cls(
            dtype=own.dtype,
            device=own.device,
            attention=own.attention if isinstance(own, Target) else "auto",
            page_size=config.cache.page_size,
            pages=config.cache.pages,
            memory_fraction=config.cache.memory_fraction or MEMORY_SHARE,
            prefix_caching=config.cache.prefix_caching,
            max_context=config.limits.max_context,
            max_sequences=config.limits.max_running,
        )


@dataclass(frozen=True, slots=True)
class Opened:
    runner: Runner
    spec: Architecture
    max_context: int
    network: Lending | None = None  # the runner's, if others can draft with it


def open_model(
    directory: Path,
    placement: Placement,
    *,
    shard: Shard | None = None,
    skip: Collection[int] = (),
    tells_hidden: bool = False,
) -> Opened:
    """Without the layers to `skip`. Raises ModelError for what cannot be served, TooLittleMemory when not one sequence fits."""
    device = torch.device(_device(placement.device))
    dtype = dtype_of(placement.dtype, device)
    kernel, page_size = _kernel(placement, device)
    if device.type == "cpu":
        keep_freed_memory()
    register_attention(ATTENTION, library_attention)
    if not skip:
        require_room(
            directory, dtype=dtype, device=device, ranks=1 if shard is None else shard.size
        )
    loaded = load_model(
        directory, dtype=dtype, device=device, shard=shard, attention=ATTENTION, skip=skip
    )
    spec = loaded.spec
    context = _context(spec, placement)
    cache = PagedCache(
        num_layers=spec.num_layers,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        v_head_dim=spec.v_head_dim,
        num_pages=placement.pages
        or _num_pages(
            placement, spec, shard, context=context, page_size=page_size, dtype=dtype, device=device
        ),
        page_size=page_size,
        dtype=dtype,
        device=device,
        prefix_caching=placement.prefix_caching
        and not spec.encodes,  # what a text's keys are depends on its source, too
    )
    with torch.inference_mode():
        if spec.encodes:
            t5 = T5Network(loaded, cache, shard=shard)
            return Opened(Runner(t5, cache, device=device, encoder=t5), spec, context)
        net = network(loaded, cache, kernel=kernel, shard=shard, tells_hidden=tells_hidden)
    if device.type != "cuda" or shard is not None:
        return Opened(Runner(net, cache, device=device), spec, context, net)
    graphed = GraphedNetwork(net)
    return Opened(Runner(graphed, cache, device=device, round_up=round_up), spec, context, graphed)


def _context(spec: Architecture, placement: Placement) -> int:
    """Distances have no end, so of an encoder-decoder `limits.max_context` may say more than the checkpoint does."""
    wanted = placement.max_context or spec.max_context
    return wanted if spec.encodes else min(spec.max_context, wanted)


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(
            f"device {name} was asked for, and no CUDA device is visible; set target.device or draft.device to cpu (`specserve doctor` says more)."
        )
    return name


def dtype_of(name: str, device: torch.device) -> torch.dtype:
    """`auto` is what the device computes fast."""
    if name != "auto":
        return DTYPES[name]
    fast = device.type == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


def _kernel(placement: Placement, device: torch.device) -> tuple[Kernel, int]:
    """The attention kernel, and the page size that it wants. On CPU `auto` is the invariant one, on CUDA the fastest installed."""
    name = placement.attention
    if name == "auto":
        name = "invariant" if device.type == "cpu" else "flash" if is_installed() else "sdpa"
    if name == "flash":
        if device.type != "cuda" or not is_installed():
            raise ConfigError(
                "attention: flash needs a CUDA device and the flash-attn package; use attention: auto."
            )
        page_size = -(-placement.page_size // PAGE_MULTIPLE) * PAGE_MULTIPLE
        return flash(page_size), page_size
    if name not in KERNELS:
        raise ConfigError(f"attention: {name} is none of {', '.join(('auto', 'flash', *KERNELS))}.")
    return KERNELS[name], placement.page_size


def _num_pages(
    placement: Placement,
    spec: Architecture,
    shard: Shard | None,
    *,
    context: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """What the memory holds, but no more than every sequence at its longest could fill. All ranks have as many as the poorest."""
    sharers = (
        1 if shard is None or device.type == "cuda" else shard.size
    )  # ranks on CPUs may share one memory
    pages = pages_for(
        int(free_memory(device) * placement.memory_fraction) // sharers,
        num_layers=spec.num_layers,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        v_head_dim=spec.v_head_dim,
        dtype=dtype,
        page_size=page_size,
    )
    if shard is not None:
        pages = shard.least(pages, device=device)
    full = -(-context // page_size) * (2 if spec.encodes else 1)  # the source's, and the text's
    return min(pages, placement.max_sequences * full)
