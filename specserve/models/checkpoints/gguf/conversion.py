"""Write the directory that a GGUF file is opened as: config.json, tokenizer, index of tensors."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from specserve.errors import ModelError, SpecserveError, UnsupportedModel
from specserve.models.checkpoints.gguf.config import ROTARY_FACTORS, end_ids, gguf_config
from specserve.models.checkpoints.gguf.files import INDEX, WEIGHTS, gguf_package
from specserve.models.checkpoints.gguf.header import Header
from specserve.models.checkpoints.gguf.tensors import PLAIN, Place
from specserve.models.checkpoints.library import (
    empty_module,
    library_errors,
    quiet_library,
    save_gguf_tokenizer,
)
from specserve.models.checkpoints.sizes import check_numbers

SPLITS = (
    *("default", "gpt-2", "smollm", "starcoder", "refact"),
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "smaug-bpe", "dbrx", "pixtral"),
    *("qwen2", "deepseek-r1-qwen", "tekken", "gpt-4o"),
)
"""Rules by which a byte-level vocabulary splits texts before its merges, as far as transformers
converts them. It has GPT-2's for the first five: `smollm` and the next two also split digits, and
no merge of theirs joins any."""


def convert(file: Path, out: Path) -> None:
    """Write the directory of a file. Raises ModelError or UnsupportedModel."""
    header = Header.from_file(file)
    _check_vocabulary(header)
    out.mkdir()
    (out / WEIGHTS).symlink_to(file.resolve())
    with library_errors(file, "has metadata that no config can be made of", UnsupportedModel):
        config = gguf_config(header)
    check_numbers(file, config)
    places = dict(_places(config, header))
    stated: dict[str, Any] = {name: asdict(place) for name, place in places.items()}
    (out / INDEX).write_text(json.dumps(stated), encoding="utf-8")
    if any(place.kind not in PLAIN for place in places.values()):
        config.quantization_config = {"quant_method": "gguf"}
    config.save_pretrained(out)
    ends = {"eos_token_id": end_ids(header)}
    (out / "generation_config.json").write_text(json.dumps(ends), encoding="utf-8")
    with library_errors(file, "has a tokenizer that transformers cannot convert"):
        save_gguf_tokenizer(out / WEIGHTS)


def _check_vocabulary(header: Header) -> None:
    """Raise UnsupportedModel for a tokenizer that would be converted to another one."""
    split = header.values.get("tokenizer.ggml.pre", "default")
    if header.values.get("tokenizer.ggml.model") == "gpt2" and split not in SPLITS:
        raise UnsupportedModel(
            f"{header.file} has a tokenizer that splits texts by {split[:40]!r}, a rule that "
            f"transformers does not convert; it converts {', '.join(SPLITS)}"
        )


def _places(config: Any, header: Header) -> Iterator[tuple[str, Place]]:
    """Yield the parameters of the library's module, and where the file has them."""
    with quiet_library(), library_errors(header.file):
        module = empty_module(config, dtype=config.dtype, attention="eager")
    package = gguf_package()
    number = next(n for n, name in package.MODEL_ARCH_NAMES.items() if name == header.architecture)
    names = package.get_tensor_name_map(number, config.num_hidden_layers)
    left = {**header.tensors}
    left.pop(ROTARY_FACTORS, None)
    missing = []
    for parameter, empty in module.state_dict().items():
        owner, _, leaf = parameter.rpartition(".")
        name = f"{names.get_name(owner)}.{leaf}"
        stored = left.pop(name, None)
        if stored is None:
            if parameter not in module.all_tied_weights_keys:
                missing.append(name)
            continue
        if stored.shape != tuple(empty.shape):
            raise ModelError(
                f"{header.file} holds {name} in another shape than its metadata imply: "
                f"{list(stored.shape)} instead of {list(empty.shape)}"
            )
        heads, added = _changes(header.architecture, name, config)
        yield parameter, replace(stored, heads=heads, added=added)
    for found, what in ((missing, "lacks"), (sorted(left), "has, beside the model's,")):
        if found:
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            raise ModelError(
                f"{header.file} {what} the tensors {', '.join(found[:3])}{more}, so that "
                f"{header.architecture} of transformers cannot be made of it"
            )


def _changes(architecture: str, name: str, config: Any) -> tuple[int, float]:
    """Return the heads whose rows llama.cpp has interleaved, and what it has added to numbers."""
    if architecture == "llama" and ".attn_q." in name:
        return config.num_attention_heads, 0.0
    if architecture == "llama" and ".attn_k." in name:
        return config.num_key_value_heads, 0.0
    return 0, 1.0 if architecture.startswith("gemma") and name.endswith("norm.weight") else 0.0


if __name__ == "__main__":
    try:
        convert(*map(Path, sys.argv[1:]))
    except SpecserveError as error:
        sys.exit(str(error))
