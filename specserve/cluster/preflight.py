"""Refuse, before a Ray of our own starts, what cannot be served on this machine.

It reads names of files, config.json, headers of adapters and numbers of the config, without the
library, whose import takes seconds. What it lets pass is examined in full beside Ray's start
(`checkpoint_check`) and by the workers.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from specserve.api.keys import ApiKeys
from specserve.cluster.model_paths import local_models, path_trouble
from specserve.cluster.placement import NodeResources, gateway_bundle, require_places
from specserve.cluster.ray_session import SHORT_TMP, default_resources
from specserve.config import features
from specserve.config.demo import BYTES_A_PARAMETER
from specserve.config.hub_models import CHECKPOINT_REMEDY
from specserve.config.tree import Config
from specserve.errors import AdapterError, ModelNotFound, TooLittleMemory, Unavailable
from specserve.host import available_memory
from specserve.models.checkpoints.generation_config import sampling_defaults
from specserve.models.checkpoints.gguf.files import find_gguf
from specserve.models.checkpoints.gguf.opening import open_gguf
from specserve.models.plans import require_even_heads

MIN_RAY_BYTES = 64 * 2**20
"""A session of Ray that has just started takes 3 MiB; its logs grow."""
DRAFTER_REMEDY = "give what `specserve tables` or `specserve heads` has written"


def require_serve() -> None:
    """Raise Unavailable if grpcio is older than the code that Ray Serve imports."""
    try:
        import grpc_reflection.v1alpha.reflection  # type: ignore[import-untyped]  # noqa: F401
    except RuntimeError as error:
        needed = re.search(r"grpcio>=[\d.]*\d", str(error))
        if needed is None:
            raise
        raise Unavailable(
            f"Ray Serve cannot be imported with grpcio {metadata.version('grpcio')}; "
            f"pip install '{needed[0]}'"
        ) from error


def ray_directory() -> Path:
    """Return where a Ray that starts here would keep its sessions."""
    from ray._common.utils import get_default_ray_temp_dir

    return Path(get_default_ray_temp_dir())


def require_disk_for_ray() -> None:
    """Raise Unavailable if a Ray that starts here could not write its files."""
    _require_disk(
        ray_directory(),
        "Ray's sessions and logs; remove old ones, or name another disk's directory by RAY_TMPDIR",
    )
    if SHORT_TMP is not None:
        _require_disk(Path(SHORT_TMP), "the sockets of this server; make room there")


def _require_disk(directory: Path, purpose: str) -> None:
    there = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < MIN_RAY_BYTES:
        raise Unavailable(f"{directory} has {free / 2**20:.0f} MiB free for {purpose}")


def require_possible_here(config: Config) -> None:
    """Raise a SpecserveError for what cannot be served here.

    Places with labels are left to Ray, which gives its nodes some of its own.
    """
    require_disk_for_ray()
    if config.http.api_keys_file is not None:
        ApiKeys.from_file(Path(config.http.api_keys_file))
    num_gpus = _num_gpus()
    here = default_resources(config, num_gpus=num_gpus)
    if not _has_labels(config):
        node = NodeResources("this machine", here, here, {})
        require_places(config, (node,), gateway=gateway_bundle(config))
    for part in config.each_model:
        for model in local_models(part, has_gpus=num_gpus > 0):
            if (trouble := path_trouble(model.path, is_checkpoint=model.is_checkpoint)) is not None:
                remedy = CHECKPOINT_REMEDY if model.is_checkpoint else DRAFTER_REMEDY
                raise ModelNotFound(
                    f"{model.key} {model.path} {trouble}; {remedy}", param=model.key
                )
            if model.is_checkpoint:
                _local_directory(model.path)  # raises for a GGUF file that cannot be opened
        for name, path in part.adapters.paths.items():
            _require_adapter(name, path)
        sampling_defaults(_local_directory(part.target.path), part.target)  # raises for bad values
        described = _described(part.target.path)
        if isinstance(heads := described.get("num_attention_heads"), int):
            require_even_heads(heads, part.target.tensor_parallel)
        if part.target.device == "cpu" or not num_gpus:
            _require_memory(part, described)


def _require_adapter(name: str, path: str) -> None:
    try:
        features.part("adapters.files:AdapterFiles").open(Path(path).expanduser())
    except AdapterError as error:
        raise AdapterError(f"adapters.paths.{name}: {error}") from error


def _num_gpus() -> int:
    """Return the number of GPUs that a Ray started here would find."""
    from ray._private.accelerators import get_accelerator_manager_for_resource

    manager: Any = get_accelerator_manager_for_resource("GPU")  # Ray has one of every kind
    visible = manager.get_current_process_visible_accelerator_ids()
    there: int = manager.get_current_node_num_accelerators()
    return there if visible is None else min(there, len(visible))


def _has_labels(config: Config) -> bool:
    return bool(config.http.label_selector) or any(
        part.target.label_selector or part.draft.label_selector for part in config.each_model
    )


def _local_directory(path: str) -> Path:
    """Return the directory of a local checkpoint, or the one that a GGUF file is opened as."""
    directory = Path(path).expanduser()
    file = find_gguf(directory)
    return directory if file is None else open_gguf(file)


def _described(path: str) -> Mapping[str, object]:
    """Return the text model's part of config.json; nothing if it cannot be read here."""
    try:
        found = json.loads((_local_directory(path) / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    text = found.get("text_config", found) if isinstance(found, dict) else {}
    return text if isinstance(text, dict) else {}


def _require_memory(config: Config, described: Mapping[str, object]) -> None:
    """Raise TooLittleMemory for a size of the demo, or a number of pages, beyond this machine."""
    free, size = available_memory(), config.demo.size or 0
    if size * BYTES_A_PARAMETER > free:
        raise TooLittleMemory(
            f"demo.size {size:,} takes {_gib(size * BYTES_A_PARAMETER)} of memory, and "
            f"{_gib(free)} are free; choose a smaller one"
        )
    pages = (config.cache.pages or 0) * config.cache.page_size * _position_bytes(described)
    if pages > free:
        raise TooLittleMemory(
            f"cache.pages {config.cache.pages:,} take {_gib(pages)} of memory or more, and "
            f"{_gib(free)} are free; lower it, or leave it out for as many as fit"
        )


def _position_bytes(described: Mapping[str, object]) -> int:
    """Return the fewest bytes that keys and values of one position can take; 0 if not known.

    That is a byte for a number, in each layer that does not share the keys of another.
    """
    names = ("num_hidden_layers", "num_attention_heads", "hidden_size")
    sizes = [size for name in names if isinstance(size := described.get(name), int) and size > 0]
    if len(sizes) < len(names) or "num_kv_shared_layers" in described:
        return 0
    layers, heads, hidden = sizes
    kv_heads, head_dim = described.get("num_key_value_heads"), described.get("head_dim")
    return (
        2
        * layers
        * (kv_heads if isinstance(kv_heads, int) else heads)
        * (head_dim if isinstance(head_dim, int) else hidden // heads)
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
