"""Models of published sizes with random weights, or with shapes instead of weights, on a card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from specserve.models.attention import Attention, GroupedAttention
from specserve.models.attention_kernels import sdpa_kernel
from specserve.models.cache import PagedCache
from specserve.models.checkpoints.architecture import architecture
from specserve.models.checkpoints.library import empty_module, register_attention
from specserve.models.checkpoints.load import LoadedModel
from specserve.models.gpu.flashinfer_attention import FlashInferUnusable, open_flashinfer
from specserve.models.model import ATTENTION_NAME, Model, with_graphs
from specserve.models.network import build_network, library_attention
from specserve.models.runner import Runner
from specserve.models.shard import Shard

PAGE_SIZE, STD = 16, 0.02
VOCAB, CONTEXT = 128_256, 8192


def llama_config(
    hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, **options: Any
) -> LlamaConfig:
    options = {"vocab_size": VOCAB, "head_dim": hidden // heads, **options}
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=None,
        **options,
    )


LLAMA_70B = llama_config(8192, 28672, 80, 64, 8)
# One rank of four; its head is whole, so that all of it can be sampled from.
LLAMA_70B_RANK = llama_config(8192, 7168, 80, 16, 2, head_dim=128)
LLAMA_8B = llama_config(4096, 14336, 32, 32, 8)
LLAMA_1B = llama_config(2048, 8192, 16, 32, 8, tie_word_embeddings=True)
TINY = llama_config(64, 96, 2, 4, 2, vocab_size=512)


def load_shapes(config: LlamaConfig) -> LoadedModel:
    """Return a model with shapes instead of weights."""
    register_attention(ATTENTION_NAME, library_attention)
    module = empty_module(config, dtype=torch.bfloat16, attention=ATTENTION_NAME)
    spec = architecture(Path("/nowhere"), config, 1)
    return LoadedModel(module, config, spec, tuple(range(spec.num_layers)))


def open_random(
    config: LlamaConfig,
    device: torch.device,
    *,
    num_pages: int,
    attention: str = "auto",
    shard: Shard | None = None,
    captures: bool = True,
) -> Model:
    """Open a model whose weights are made on the card."""
    loaded = load_shapes(config)
    module: Any = loaded.module
    torch.manual_seed(0)
    for part in module.modules():
        for name, weight in list(part._parameters.items()):
            if weight is not None:
                made = torch.empty(weight.shape, dtype=torch.bfloat16, device=device)
                made.normal_(0.0, STD) if weight.dim() > 1 else made.fill_(1.0)
                part._parameters[name] = torch.nn.Parameter(made, requires_grad=False)
    module.tie_weights()
    module.model.rotary_emb.to(device)
    return assemble(
        loaded,
        find_attention(loaded, attention, device),
        device,
        num_pages=num_pages,
        shard=shard,
        captures=captures,
    )


def find_attention(loaded: LoadedModel, name: str, device: torch.device) -> Attention:
    """Return FlashInfer's attention if that or `auto` is meant and it works, else torch's."""
    if name in ("auto", "flashinfer"):
        try:
            return open_flashinfer(loaded, PAGE_SIZE, torch.bfloat16, device)
        except FlashInferUnusable:
            if name == "flashinfer":
                raise
    return GroupedAttention(sdpa_kernel)


def assemble(
    loaded: LoadedModel,
    attention: Attention,
    device: torch.device,
    *,
    num_pages: int,
    shard: Shard | None = None,
    captures: bool = True,
) -> Model:
    """Return a model that runs, as `open_model` makes it of a checkpoint."""
    spec = loaded.spec
    cache = PagedCache(
        num_layers=spec.num_layers,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        dtype=torch.bfloat16,
        device=device,
    )
    with torch.inference_mode():
        network = build_network(loaded, cache, attention=attention, shard=shard)
    if not captures:
        return Model(Runner(network, cache, device=device), spec, spec.max_context, network)
    return with_graphs(network, attention, cache, spec, context=spec.max_context, shard=shard)
