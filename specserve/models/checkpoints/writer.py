"""Write a checkpoint's tensors in files of bounded size, and what lies beside them.

Knows no models.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from specserve.errors import ModelError

SHARD_BYTES = 2_000_000_000
INDEX = "model.safetensors.index.json"


def stored_files(directory: Path) -> list[Path]:
    """Return the files that the index names; others may repeat the weights in another layout."""
    if (directory / INDEX).is_file():
        index = json.loads((directory / INDEX).read_text())
        return [directory / name for name in sorted(set(index["weight_map"].values()))]
    if not (directory / "model.safetensors").is_file():
        raise ModelError(
            f"--model {directory} has no model.safetensors; other formats are not read."
        )
    return [directory / "model.safetensors"]


def write_tensors(tensors: Iterator[tuple[str, Tensor]], out_dir: Path) -> None:
    """Write files of at most SHARD_BYTES or one tensor.

    Their names contain their number, so they are renamed at the end.
    """
    shards = [
        _save(shard, out_dir / f"part-{number}") for number, shard in enumerate(_shards(tensors), 1)
    ]
    if len(shards) == 1:
        (out_dir / "part-1").rename(out_dir / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        (out_dir / f"part-{number}").rename(out_dir / file)
        weight_map.update(dict.fromkeys(names, file))
    (out_dir / INDEX).write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map}, indent=2) + "\n"
    )


def _shards(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard


def _save(shard: dict[str, Tensor], path: Path) -> list[str]:
    save_file(shard, path, metadata={"format": "pt"})
    return list(shard)


def companions(directory: Path) -> list[Path]:
    """Return tokenizer, generation config and licence: small files that are copied as they are."""
    fresh = {"config.json", INDEX}
    kinds = {".json", ".txt", ".model", ".jinja"}
    return [
        path
        for path in sorted(directory.iterdir())
        if (path.suffix in kinds and path.name not in fresh) or path.stem in ("LICENSE", "NOTICE")
    ]
