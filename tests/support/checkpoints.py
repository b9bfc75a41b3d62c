"""Tiny checkpoints with random weights, one for each architecture that the tests cover.

Each is written in a second or less.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    MT5Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    T5Config,
)

VOCAB, CONTEXT, WINDOW = 289, 1024, 16  # an odd vocabulary: no number of ranks divides it
PAD, BOS, EOS = 0, 1, 2
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
TOKENS: dict[str, Any] = {
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
SIZES: dict[str, Any] = {
    **TOKENS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
GROUPED: dict[str, Any] = {**SIZES, "num_key_value_heads": 2}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA: dict[str, Any] = {
    **GROUPED,
    "num_hidden_layers": 3,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": WINDOW,
    "layer_types": ALTERNATING,
}
GPT_OSS: dict[str, Any] = {
    **GROUPED,
    "num_hidden_layers": 3,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": WINDOW,
    "layer_types": ALTERNATING,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}

CONFIGS: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**GROUPED),
    "llama_four_kv_heads": lambda: LlamaConfig(**SIZES, num_key_value_heads=4),
    "qwen2": lambda: Qwen2Config(**GROUPED),
    "qwen3": lambda: Qwen3Config(**GROUPED, head_dim=16, tie_word_embeddings=True),
    "mistral": lambda: MistralConfig(**GROUPED, sliding_window=WINDOW),
    "gemma2": lambda: Gemma2Config(
        **GEMMA, attn_logit_softcapping=5.0, final_logit_softcapping=20.0
    ),
    "gemma3": lambda: Gemma3TextConfig(**GEMMA),
    "phi3": lambda: Phi3Config(**GROUPED, original_max_position_embeddings=CONTEXT),
    "gpt2": lambda: GPT2Config(**SIZES),
    "gpt_neox": lambda: GPTNeoXConfig(**SIZES),
    "mixtral": lambda: MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2),
    # The second layer is dense.
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **{**GROUPED, "head_dim": 16},
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        mlp_only_layers=[1],
    ),
    "gpt_oss": lambda: GptOssConfig(**GPT_OSS),
}
ARCHITECTURES = tuple(name for name in CONFIGS if name != "llama_four_kv_heads")

T5: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 16,
    "relative_attention_max_distance": 40,
    "n_positions": CONTEXT,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "decoder_start_token_id": PAD,
}
ENCODER_DECODERS: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "t5": lambda: T5Config(**T5),
    "t5_v1_1": lambda: T5Config(
        **{**T5, "tie_word_embeddings": False}, feed_forward_proj="gated-gelu"
    ),
    "mt5": lambda: MT5Config(**T5, num_decoder_layers=3),
}


def make(name: str, directory: Path, *, seed: int = 0, shard_bytes: int | str = "1GB") -> Path:
    """Write the checkpoint `name` of CONFIGS into `directory`, in fp32 safetensors.

    A small `shard_bytes` makes several files.
    """
    return write(CONFIGS[name](), directory, seed=seed, shard_bytes=shard_bytes)


# Scales of matrices, by a part of their names. T5's scores are not scaled down, so its queries are;
# its attention must have an effect on the text.
SCALES = {"ttention.q.": 0.5, "ttention.o.": 5.0, ".wi_": 1.0, "lm_head": 3.0}


def write(
    config: PreTrainedConfig, directory: Path, *, seed: int = 0, shard_bytes: int | str = "1GB"
) -> Path:
    library: Any = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = library.from_config(config, dtype=torch.float32)
    randomise(model, torch.Generator().manual_seed(seed))
    model.save_pretrained(directory, max_shard_size=shard_bytes)
    if getattr(config, "scale_decoder_outputs", True) is False:
        untie(directory, seed=seed)
    return directory


def untie(directory: Path, *, seed: int) -> None:
    """Add a vocabulary head of its own beside T5's embedding.

    The later T5s have one, and the library cannot save it.
    """
    path = directory / "model.safetensors"
    weights = load_file(path)
    shape = weights["shared.weight"].shape
    weights["lm_head.weight"] = (
        torch.randn(shape, generator=torch.Generator().manual_seed(seed + 1))
        * 3.0
        * shape[1] ** -0.5
    )
    save_file(weights, path, metadata={"format": "pt"})


@torch.no_grad()
def randomise(model: Any, generator: torch.Generator) -> None:
    """Set weights that are large enough for texts to be worth comparing.

    Logits are peaked, argmax ties do not occur, and each token affects the text that follows.
    """
    # Gemma's embedding is scaled up and tied to the head: the text would be one token repeated.
    # T5's is tied, too.
    gemma = "gemma" in model.config.model_type
    t5 = model.config.is_encoder_decoder
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1:
            large = (
                gemma and ("post_" in name or name == "model.norm.weight")
            ) or name == "decoder.final_layer_norm.weight"
            parameter.add_(noise * 0.3 + (3.0 if large else 0.0))
        elif parameter is model.get_input_embeddings().weight:
            parameter.copy_(noise * (0.15 if gemma else 0.1 if t5 else 0.4))
        else:
            fan_in = parameter.shape[0] if ".c_" in name else parameter.shape[-1]
            scale = next((scale for part, scale in SCALES.items() if part in name), 2.0)
            parameter.copy_(noise * scale * fan_in**-0.5)


def perturb(directory: Path, out: Path, noise: float, *, seed: int = 1) -> Path:
    """Write a copy whose weights are off by `noise` of their standard deviation.

    As a draft it agrees with the original in part.
    """
    shutil.copytree(directory, out)
    generator = torch.Generator().manual_seed(seed)
    for path in sorted(out.glob("*.safetensors")):
        weights = load_file(path)
        for name in sorted(weights):
            weight = weights[name]
            if weight.numel() > 1:
                weight += noise * weight.std() * torch.randn(weight.shape, generator=generator)
        save_file(weights, path, metadata={"format": "pt"})
    return out


def add_tokenizer(directory: Path, *, ends: bool = False) -> PreTrainedTokenizerFast:
    """Add a tokenizer with one token a byte after the four special ones.

    It fits every checkpoint made here. With `ends` every text gets an end token, as T5's do.
    """
    alphabet = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    pad, bos, eos, unknown = SPECIAL
    if ends:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"$A {eos}", special_tokens=[(eos, EOS)]
        )
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        unk_token=unknown,
        model_max_length=CONTEXT,
    )
    fast.save_pretrained(directory)
    return fast
