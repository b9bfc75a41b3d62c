"""Opening a model: the defaults, and options that are refused before any weight is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Phi3Config

from specserve.errors import ConfigError, NoShardingPlan, TooLittleMemory
from specserve.models.attention import GroupedAttention
from specserve.models.attention_kernels import invariant_kernel, sdpa_kernel
from specserve.models.cpu.linear_kernels import linear_kernel
from specserve.models.llama import FusedNetwork
from specserve.models.model import Model, ModelOptions, open_model
from specserve.models.network import LLAMA_SHAPED, LibraryNetwork
from specserve.models.shard import Shard
from specserve.types import Step
from tests.support import checkpoints

FEW: dict[str, Any] = {"device": "cpu", "pages": 8}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("llama", tmp_path_factory.mktemp("open") / "llama")


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def without_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        pytest.fail("weights were read before the mistake was found")

    monkeypatch.setattr("specserve.models.model.load_model", refuse)


def open_quickly(directory: Path, **options: Any) -> Model:
    return open_model(directory, ModelOptions(**FEW | options))


@pytest.mark.usefixtures("without_gpu", "without_reading")
@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"device": "cuda"}, "no CUDA device is visible"),
        ({"device": "cuda:1"}, "no CUDA device is visible"),
        ({"attention": "flashinfer"}, "flashinfer needs a CUDA device"),
        ({"attention": "fancy"}, "fancy is none of auto, flashinfer, invariant, sdpa"),
    ],
)
def test_options_the_machine_cannot_run_are_refused_before_any_weight_is_read(
    tmp_path: Path, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        open_quickly(tmp_path, **options)


def test_a_model_that_cannot_be_divided_is_refused(llama: Path) -> None:
    with pytest.raises(NoShardingPlan, match="3 ranks"):
        open_model(llama, ModelOptions(**FEW), shard=Shard(0, 3))


def test_memory_for_less_than_a_page_is_refused(llama: Path) -> None:
    with pytest.raises(TooLittleMemory, match="does not hold a single page"):
        open_quickly(llama, pages=None, memory_fraction=1e-12)


def test_pages_fill_the_memory_but_no_more_than_the_sequences_could_use(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page_bytes = 2 * 2 * 2 * 16 * 16 * 4  # keys and values, layers, heads, width, positions, fp32
    monkeypatch.setattr("specserve.models.model.free_memory", lambda device: 100 * page_bytes)
    half = open_quickly(llama, dtype="float32", pages=None, memory_fraction=0.5)
    assert half.runner.cache.num_pages == 50
    bounded = open_quickly(
        llama, dtype="float32", pages=None, memory_fraction=0.5, max_sequences=3, max_context=100
    )
    assert (bounded.runner.cache.num_pages, bounded.max_context) == (3 * 7, 100)


def test_the_context_is_the_model_s_unless_a_shorter_one_is_asked_for(llama: Path) -> None:
    assert open_quickly(llama).max_context == checkpoints.CONTEXT
    assert open_quickly(llama, max_context=50).max_context == 50
    assert open_quickly(llama, max_context=10**6).max_context == checkpoints.CONTEXT


def test_the_context_ends_where_a_long_text_would_change_the_rotary_frequencies_of_all(
    tmp_path: Path,
) -> None:
    # One factor for each pair of a head's 16 dimensions.
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "original_max_position_embeddings": 64,
        **factors,
    }
    config = Phi3Config(
        **checkpoints.GROUPED, original_max_position_embeddings=64, rope_parameters=rope
    )
    assert open_quickly(checkpoints.write(config, tmp_path)).max_context == 64


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize(
    ("name", "kernel"),
    [("auto", invariant_kernel), ("invariant", invariant_kernel), ("sdpa", sdpa_kernel)],
)
def test_on_cpu_attention_is_invariant_unless_another_is_chosen(
    llama: Path, name: str, kernel: object
) -> None:
    options = {"device": "auto", "attention": name, "kernel": "onednn"}
    network = open_quickly(llama, **options).runner.network
    assert isinstance(network, FusedNetwork)
    attention = network.layers[0].attention
    assert isinstance(attention, GroupedAttention)
    assert attention.kernel is kernel


@pytest.mark.parametrize(("fast", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_the_default_dtype_is_bf16_where_the_cpu_has_it(
    llama: Path, monkeypatch: pytest.MonkeyPatch, fast: bool, dtype: torch.dtype
) -> None:
    linear_kernel("onednn")  # chosen once, by what the processor really has
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: fast)
    runner = open_quickly(llama).runner
    assert runner.cache.keys[0].dtype == dtype
    logits = runner.run([Step(0, 0, (5, 6, 7))], [1])
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.bfloat16().float()), "they are not rounded"


@pytest.mark.parametrize("name", checkpoints.ARCHITECTURES)
def test_the_llama_shaped_models_are_fused_and_no_others(tmp_path: Path, name: str) -> None:
    fused = isinstance(open_quickly(checkpoints.make(name, tmp_path)).runner.network, FusedNetwork)
    assert fused == (name in LLAMA_SHAPED)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": "gelu"},
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            }
        },
    ],
)
def test_a_llama_that_differs_from_the_fused_form_runs_the_library_s_code(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    config = checkpoints.CONFIGS["llama"]()
    for key, value in change.items():
        setattr(config, key, value)
    assert isinstance(
        open_quickly(checkpoints.write(config, tmp_path)).runner.network, LibraryNetwork
    )
