"""Copies of the demo draft that have another tokenizer.

They know the demo's tokens by other ids, and perhaps not all of them.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from specserve.api.tokenizer import Tokenizer
from specserve.config.tree import DEMO

END = "<|endoftext|>"


def renumbered_draft(out: Path, *, vocab: int = 4096, seed: int = 0) -> Path:
    """Write the demo draft with its first `vocab` tokens in another order.

    Of a byte-level BPE these are the special token, the bytes, and the first merges.
    """
    out.mkdir()
    for name in ("generation_config.json", "tokenizer_config.json"):
        (out / name).write_bytes((DEMO / "draft" / name).read_bytes())
    order = np.random.default_rng(seed).permutation(vocab)  # new id to old id
    _write_tokenizer(out, order)
    config = json.loads((DEMO / "draft" / "config.json").read_text())
    end = int(np.flatnonzero(order == 0)[0])
    config |= {"vocab_size": vocab, "bos_token_id": end, "eos_token_id": end}
    (out / "config.json").write_text(json.dumps(config))
    weights = load_file(DEMO / "draft" / "model.safetensors")
    name = "model.embed_tokens.weight"
    weights[name] = weights[name][torch.from_numpy(order)].contiguous()
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out


def _write_tokenizer(out: Path, order: np.ndarray) -> None:
    tokenizer: dict[str, Any] = json.loads((DEMO / "draft" / "tokenizer.json").read_text())
    names = {token: name for name, token in tokenizer["model"]["vocab"].items()}
    names[0] = END
    vocab = {names[int(old)]: new for new, old in enumerate(order)}
    tokenizer["added_tokens"][0]["id"] = vocab[END]
    tokenizer["model"]["vocab"] = vocab
    tokenizer["model"]["merges"] = [
        pair for pair in tokenizer["model"]["merges"] if {*pair, "".join(pair)} <= vocab.keys()
    ]
    (out / "tokenizer.json").write_text(json.dumps(tokenizer))


@cache
def demo_tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO / "target")
