"""GGUF files have the tensors, shares and logits of the checkpoints that they were made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    Phi3Config,
    PreTrainedConfig,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from specserve.errors import UnsupportedModel
from specserve.models.checkpoints.find import find_checkpoint
from specserve.models.checkpoints.gguf.integers import GROUPS, WITH_MINIMA
from specserve.models.checkpoints.gguf.tensors import GgufPart, GgufTensor, Place
from specserve.models.checkpoints.load import load_model
from specserve.models.checkpoints.weights import Codes
from specserve.models.coded_weight import CodedWeight
from specserve.models.shard import Shard
from tests.support import checkpoints, gguf_files
from tests.support.checkpoints import CONFIGS, GROUPED, WINDOW

IDS = torch.arange(3, 43)[None]
GEMMA: dict[str, Any] = {
    **GROUPED,
    "num_hidden_layers": 6,
    "head_dim": 32,
    "sliding_window": WINDOW,
}
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
DEFAULT: dict[str, Any] = {"rope_type": "default", "rope_theta": 500000.0}
LINEAR: dict[str, Any] = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
LINEAR_METADATA: dict[str, Any] = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
MODELS: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "llama": CONFIGS["llama"],
    "llama_tied": lambda: LlamaConfig(**GROUPED, tie_word_embeddings=True),
    "qwen2": CONFIGS["qwen2"],
    "qwen3": CONFIGS["qwen3"],
    "gemma2": lambda: Gemma2Config(
        **GEMMA, query_pre_attn_scalar=32, attn_logit_softcapping=5.0, final_logit_softcapping=20.0
    ),
    "gemma3": lambda: Gemma3TextConfig(**GEMMA, query_pre_attn_scalar=32),
    "phi3": CONFIGS["phi3"],
    "phi3_partial": lambda: Phi3Config(
        **GROUPED,
        sliding_window=WINDOW,
        original_max_position_embeddings=checkpoints.CONTEXT,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
        },
    ),
}


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    cache = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return cache / "specserve"


def load(path: Path, shard: Shard | None = None) -> Any:
    return load_model(
        find_checkpoint(path), dtype=torch.float32, device="cpu", shard=shard, attention="eager"
    ).module


def make(name: str, directory: Path) -> Path:
    """Write a checkpoint whose norms are the same after llama.cpp's addition of 1."""
    checkpoints.write(MODELS[name](), directory)
    file = directory / "model.safetensors"
    weights = load_file(file)
    kept = {key: one + 1 - 1 if one.ndim == 1 else one for key, one in weights.items()}
    save_file(kept, file, metadata={"format": "pt"})
    return directory


def require_same_tensors(found: Any, wanted: Any) -> None:
    ours, theirs = found.state_dict(), wanted.state_dict()
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("name", MODELS)
def test_a_file_has_the_tensors_shares_and_logits_of_the_checkpoint_it_was_made_of(
    name: str, tmp_path: Path
) -> None:
    original = make(name, tmp_path / "original")
    file = gguf_files.write(original, tmp_path / f"{name}.gguf")
    whole, wanted = load(file), load(original)
    require_same_tensors(whole, wanted)
    assert torch.equal(whole(IDS).logits, wanted(IDS).logits)
    assert find_checkpoint(file).parent.name == "specserve"
    for rank in range(2):
        require_same_tensors(load(file, Shard(rank, 2)), load(original, Shard(rank, 2)))


def test_the_rotary_factors_of_llama_3_are_found_again_and_others_are_refused(
    tmp_path: Path,
) -> None:
    config = LlamaConfig(**GROUPED, head_dim=64, rope_parameters=LLAMA3)
    original = checkpoints.write(config, tmp_path / "original")
    plain: Any = LlamaRotaryEmbedding(LlamaConfig(**GROUPED, head_dim=64, rope_parameters=DEFAULT))
    factors = (plain.inv_freq / LlamaRotaryEmbedding(config).inv_freq).numpy()
    assert 1 == factors.min() < factors.max() == 8
    file = gguf_files.write(original, tmp_path / "a.gguf", extra={"rope_freqs.weight": factors})
    far = torch.arange(3, 103)[None] % 256
    assert torch.equal(load(file)(far).logits, load(original)(far).logits)
    extra = {"rope_freqs.weight": factors * np.float32(1.5)}
    other = gguf_files.write(original, tmp_path / "b.gguf", extra=extra)
    with pytest.raises(UnsupportedModel, match=r"rope_freqs.weight.* another way than Llama 3"):
        find_checkpoint(other)


@pytest.mark.parametrize(
    ("name", "rotary"),
    [
        ("llama", LINEAR),
        (
            "gemma3",
            {
                "full_attention": LINEAR,
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        ),
    ],
)
def test_linear_scaling_is_of_the_full_attention(
    name: str, rotary: dict[str, Any], tmp_path: Path
) -> None:
    config = MODELS[name]()
    config.rope_parameters = rotary
    original = checkpoints.write(config, tmp_path / "original")
    file = gguf_files.write(original, tmp_path / "a.gguf", metadata=LINEAR_METADATA)
    found = load(file)(IDS).logits
    torch.testing.assert_close(found, load(original)(IDS).logits)
    assert not torch.allclose(
        found, load(gguf_files.write(original, tmp_path / "b.gguf"))(IDS).logits
    )


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_each_type_has_the_numbers_that_transformers_reads_whole_and_in_shares(
    kind: str, tmp_path: Path
) -> None:
    """The rows of two matrices have 96 numbers, so that shares end within blocks of 32."""
    original = make("llama", tmp_path / "original")
    file = gguf_files.write(original, tmp_path / "a.gguf", kind=kind)
    wanted = library_model(file)
    assert not torch.equal(
        wanted.state_dict()["lm_head.weight"], load(original).state_dict()["lm_head.weight"]
    )
    require_same_tensors(load(file), wanted)
    save_file(wanted.state_dict(), original / "model.safetensors", metadata={"format": "pt"})
    for rank in range(2):
        require_same_tensors(load(file, Shard(rank, 2)), load(original, Shard(rank, 2)))


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "IQ4_XS"])
def test_blocks_of_256_are_widened_also_where_a_share_ends_within_one(kind: str) -> None:
    place, data, wanted = random_blocks(kind)
    found = GgufTensor(place, GgufPart.NUMBERS, data)
    require_same(found[()], wanted)
    require_same(found[slice(2, 5), slice(100, 300)], wanted[2:5, 100:300])
    require_same(found[slice(None), slice(256, 300)], wanted[:, 256:300])


@pytest.mark.parametrize("kind", GROUPS)
def test_integers_scales_and_minima_make_the_numbers_of_their_own_library(kind: str) -> None:
    place, data, wanted = random_blocks(kind)
    integers, scales, minima = (
        GgufTensor(place, part, data)
        for part in (GgufPart.INTEGERS, GgufPart.SCALES, GgufPart.MINIMA)
    )
    assert scales.get_shape() == minima.get_shape() == (6, 512 // GROUPS[kind])
    numbers = integers[()] * scales[()].repeat_interleave(GROUPS[kind], 1)
    if kind in WITH_MINIMA:
        numbers = numbers + minima[()].repeat_interleave(GROUPS[kind], 1)
        require_same(minima[slice(1, 3), slice(3, 9)], minima[()][1:3, 3:9])
    require_same(numbers, wanted)
    require_same(integers[slice(2, 5), slice(70, 300)], integers[()][2:5, 70:300])
    require_same(scales[slice(1, 3), slice(3, 9)], scales[()][1:3, 3:9])


def random_blocks(kind: str) -> tuple[Place, NDArray[np.uint8], Tensor]:
    """Return six rows of 512 numbers in random blocks, and what `gguf` makes of them."""
    number = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[number]
    data = np.random.default_rng(0).integers(0, 256, (6, 512 // block * size), np.uint8)
    with np.errstate(invalid="ignore"):
        wanted = torch.from_numpy(gguf.dequantize(data, number))
    return Place(kind, (6, 512), 0), data, wanted


def require_same(found: Tensor, wanted: Tensor) -> None:
    """Random scales may be no numbers, or too large ones."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("kind", "bits"), [("Q8_0", 8), ("Q5_0", 8), ("Q4_0", 4), ("Q4_1", 4), ("Q5_1", 8)]
)
def test_linear_layers_keep_integers_with_their_scales_and_minima(
    kind: str, bits: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tied = {"intermediate_size": 128, "tie_word_embeddings": True}
    original = checkpoints.write(LlamaConfig(**{**GROUPED, **tied}), tmp_path / "original")
    file = find_checkpoint(gguf_files.write(original, tmp_path / "tiny.gguf", kind=kind))
    for shard in (None, Shard(0, 2), Shard(1, 2)):
        caplog.clear()
        with caplog.at_level("INFO"):
            kept, widened = (
                load_model(file, dtype=torch.bfloat16, device="cpu", shard=shard, keeps=keeps)
                for keeps in (Codes.INTEGERS, None)
            )
        own: Any = kept.module.get_submodule("model.layers.1")
        wanted: Any = widened.module.get_submodule("model.layers.1")
        for name in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"):
            weight = own.get_submodule(name).weight
            assert isinstance(weight, CodedWeight)
            assert weight.bits == bits
            assert torch.equal(weight + 0, wanted.get_submodule(name).weight)
        if shard is None:
            tied_model: Any = kept.module
            head, embedding = tied_model.lm_head.weight, tied_model.model.embed_tokens.weight
            assert isinstance(head, CodedWeight)
            assert torch.equal(head + 0, embedding)
        said = f"tiny.gguf-{file.name[-16:]} is quantized (gguf): its weights take"
        assert said in caplog.messages[0]
        assert "its weights are widened to bfloat16" in caplog.messages[-1]


def library_model(file: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
