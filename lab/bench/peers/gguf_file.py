"""Write a checkpoint of the Llama family as GGUF in bfloat16.

Runs in llama.cpp's environment, with `gguf` and numpy alone. Knows byte-level BPE vocabularies.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

BF16 = gguf.GGMLQuantizationType.BF16
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTER_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def write(checkpoint: Path, file: Path) -> None:
    """Convert weights, shapes and vocabulary; the weights keep their bits."""
    config = json.loads((checkpoint / "config.json").read_text())
    if config["model_type"] != "llama":
        raise ValueError(f"{config['model_type']} is not written as GGUF, only llama is")
    writer = gguf.GGUFWriter(file, "llama")
    _add_shape(writer, config)
    _add_vocabulary(writer, checkpoint, config)
    for name, weight in tensors(checkpoint):
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue
        _add_tensor(writer, name, weight, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors(checkpoint: Path) -> Iterator[tuple[str, NDArray[np.uint16]]]:
    """Yield the names and the bits of all tensors, which must be bfloat16."""
    for path in sorted(checkpoint.glob("*.safetensors")):
        raw = np.memmap(path, dtype=np.uint8, mode="r")
        size = struct.unpack("<Q", raw[:8].tobytes())[0]
        for name, entry in json.loads(raw[8 : 8 + size].tobytes()).items():
            if name == "__metadata__":
                continue
            if entry["dtype"] != "BF16":
                raise ValueError(f"{name} is {entry['dtype']}, and only BF16 is converted")
            start, stop = (8 + size + offset for offset in entry["data_offsets"])
            yield name, raw[start:stop].view(np.uint16).reshape(entry["shape"])


def interleave_heads(weight: NDArray[np.uint16], heads: int) -> NDArray[np.uint16]:
    """Reorder the rows of a query or key projection: llama.cpp rotates neighbours, not halves."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def _add_shape(writer: gguf.GGUFWriter, config: Mapping[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


def _add_vocabulary(writer: gguf.GGUFWriter, checkpoint: Path, config: Mapping[str, Any]) -> None:
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text(encoding="utf-8"))
    special = {entry["id"]: entry["content"] for entry in tokenizer["added_tokens"]}
    tokens = {number: token for token, number in tokenizer["model"]["vocab"].items()} | special
    kinds = gguf.TokenType
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(
        [tokens.get(number, f"<unused{number}>") for number in range(config["vocab_size"])]
    )
    writer.add_token_types(
        [
            kinds.CONTROL if number in special else kinds.NORMAL
            for number in range(config["vocab_size"])
        ]
    )
    writer.add_token_merges(
        [
            merge if isinstance(merge, str) else " ".join(merge)
            for merge in tokenizer["model"]["merges"]
        ]
    )
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def _add_tensor(
    writer: gguf.GGUFWriter, name: str, weight: NDArray[np.uint16], config: Mapping[str, Any]
) -> None:
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    for projection, key in heads.items():
        if projection in name:
            weight = interleave_heads(weight, config[key])
    if weight.ndim == 1:  # llama.cpp keeps norms in float32
        as_float = (weight.astype(np.uint32) << 16).view(np.float32)
        writer.add_tensor(_gguf_name(name), as_float)
        return
    bits = np.ascontiguousarray(weight).view(np.uint8)
    writer.add_tensor(_gguf_name(name), bits, raw_dtype=BF16)


def _gguf_name(name: str) -> str:
    if name in OUTER_NAMES:
        return OUTER_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]))
