"""GGUF files of tiny checkpoints, written as llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.torch import load_file
from transformers import AutoConfig

from tests.support.checkpoints import BOS, EOS, SPECIAL, add_tokenizer


def write(
    checkpoint: Path,
    file: Path,
    *,
    kind: str = "F32",
    architecture: str | None = None,
    vocabulary: str = "gpt2",
    split: str = "gpt-2",
    tokens: Mapping[int, str] = MappingProxyType({}),
    template: str | None = None,
    metadata: Mapping[str, int | float | str] = MappingProxyType({}),
    extra: Mapping[str, NDArray[np.float32]] = MappingProxyType({}),
    left_out: str | None = None,
) -> Path:
    """Write a checkpoint as GGUF, its matrices in numbers of `kind` where rows have whole blocks.

    `metadata` and `tokens` replace the checkpoint's. `extra` are further tensors, and tensors with
    `left_out` in their names are not written.
    """
    config: Any = AutoConfig.from_pretrained(checkpoint)
    own = {"gemma3_text": "gemma3"}.get(config.model_type, config.model_type)
    stated_architecture = architecture or own
    file.parent.mkdir(exist_ok=True)
    writer = gguf.GGUFWriter(file, stated_architecture)
    adders = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for name, value in {**_metadata(config), **metadata}.items():
        is_general = name.startswith(("general.", "tokenizer.", "split."))
        adders[type(value)](name if is_general else f"{stated_architecture}.{name}", value)
    writer.add_tokenizer_model(vocabulary)
    writer.add_tokenizer_pre(split)
    _add_vocabulary(writer, checkpoint, config.vocab_size, tokens)
    if template is not None:
        writer.add_chat_template(template)
    tensors = {**_tensors(checkpoint, own, config), **extra}
    for name, numbers in tensors.items():
        if left_out is None or left_out not in name:
            _add(writer, name, numbers, "F32" if name in extra else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _tensors(checkpoint: Path, architecture: str, config: Any) -> dict[str, NDArray[np.float32]]:
    """Return the tensors by llama.cpp's names, and as it keeps them."""
    number = next(n for n, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    kept = {}
    for parameter, tensor in load_file(checkpoint / "model.safetensors").items():
        owner, _, leaf = parameter.rpartition(".")
        name = f"{names.get_name(owner)}.{leaf}"
        kept[name] = _as_kept(architecture, name, tensor.numpy(), config)
    return kept


def _metadata(config: Any) -> dict[str, int | float | str]:
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    rotary = config.rope_parameters
    rotary = rotary.get("full_attention", rotary)
    stated: dict[str, Any] = {
        "general.name": "tiny",
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": width,
        "attention.value_length": width,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": int(width * rotary.get("partial_rotary_factor", 1.0)),
        "rope.freq_base": float(rotary["rope_theta"]),
        "attention.sliding_window": getattr(config, "sliding_window", None),
        "attn_logit_softcapping": getattr(config, "attn_logit_softcapping", None),
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None),
    }
    return {name: value for name, value in stated.items() if value is not None}


def _add_vocabulary(writer: Any, checkpoint: Path, size: int, tokens: Mapping[int, str]) -> None:
    """Add the bytes of the tiny tokenizer, and a token that a merge makes."""
    named = {number: token for token, number in add_tokenizer(checkpoint).get_vocab().items()}
    named = {**named, len(named): "ab", **tokens}
    vocabulary = [named.get(number, f"[PAD{number}]") for number in range(size)]
    kinds = gguf.TokenType
    writer.add_token_list(vocabulary)
    writer.add_token_types(
        [kinds.CONTROL if token in SPECIAL else kinds.NORMAL for token in vocabulary]
    )
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_add_bos_token(False)


def _as_kept(
    architecture: str, name: str, numbers: NDArray[np.float32], config: Any
) -> NDArray[np.float32]:
    """Return a parameter as llama.cpp keeps it."""
    for projection, heads in (
        (".attn_q.", config.num_attention_heads),
        (".attn_k.", config.num_key_value_heads),
    ):
        if architecture == "llama" and projection in name:
            halves = numbers.reshape(heads, 2, -1, *numbers.shape[1:])
            return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(numbers.shape)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return numbers + 1
    return numbers


def _add(writer: Any, name: str, numbers: NDArray[np.float32], kind: str) -> None:
    number = gguf.GGMLQuantizationType[kind]
    if numbers.ndim == 1 or numbers.shape[-1] % gguf.GGML_QUANT_SIZES[number][0]:
        writer.add_tensor(name, numbers)
    else:
        writer.add_tensor(name, gguf.quantize(numbers, number), raw_dtype=number)


WORDS = "▁ ▁the ▁cat th the he t h e c a ca cat ▁t ▁th ▁c ▁ca".split()


def write_pieces(file: Path, architecture: str) -> Path:
    """Write a file without layers whose vocabulary is of SentencePiece: bytes, and a few words."""
    kinds = gguf.TokenType
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(
        ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    )
    writer.add_token_scores([0.0] * 259 + [-float(rank) for rank in range(len(WORDS))])
    special = [kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL]
    writer.add_token_types([*special, *256 * [kinds.BYTE], *len(WORDS) * [kinds.NORMAL]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
