"""An engine says that it is reproducible where every kernel in use passed its trial, or why not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specserve import LLM, Sampling
from specserve.models import layers, reproducibility
from specserve.models.model import ModelOptions, open_model
from specserve.models.reproducibility import ON_GPU, expected_reason, why_irreproducible
from tests.support import checkpoints

CONFIGS = {**checkpoints.CONFIGS, **checkpoints.ENCODER_DECODERS}


@pytest.fixture
def make(tmp_path: Path) -> Callable[[str], Path]:
    return lambda name: checkpoints.write(CONFIGS[name](), tmp_path / name)


def options(**keys: Any) -> ModelOptions:
    return replace(ModelOptions(dtype="float32", device="cpu", pages=16), **keys)


def both_reasons(checkpoint: Path, own: ModelOptions) -> tuple[str | None, str | None]:
    """Return the reason of a model that was opened, and what the doctor expects of it."""
    expected = expected_reason(
        checkpoint, dtype=own.dtype, attention=own.attention, kernel=own.kernel
    )
    return open_model(checkpoint, own).irreproducible, expected


def has_no_order(*_: object) -> bool:
    return False


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "t5"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_models_whose_kernels_all_passed_are_reproducible(
    make: Callable[[str], Path], name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Whether MKL has an order of its own is a property of the processor.
    monkeypatch.setattr(reproducibility, "is_batch_invariant", lambda *_: True)
    assert both_reasons(make(name), options(dtype=dtype)) == (None, None)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_experts_whose_products_are_not_tried_are_named(
    make: Callable[[str], Path], name: str, dtype: str
) -> None:
    opened, expected = both_reasons(make(name), options(dtype=dtype))
    assert opened is not None
    assert opened == expected
    assert opened.startswith("model.layers.0.mlp.")
    assert opened.endswith(" is multiplied by the library, whose products are not tried")


def test_a_shape_at_which_each_kernel_failed_is_named(
    make: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "is_row_invariant", has_no_order)
    for reason in both_reasons(make("llama"), options(dtype="bfloat16")):
        assert reason is not None
        assert reason.startswith("linear layers from 64 to ")


def test_attention_in_float32_without_an_order_of_its_own_is_a_reason(
    make: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reproducibility, "is_batch_invariant", has_no_order)
    for reason in both_reasons(make("llama"), options()):
        assert reason == "attention in float32 depends on its number of rows on this processor"
    assert both_reasons(make("gemma2"), options(dtype="bfloat16")) == (None, None)


def test_sdpa_amx_and_float16_are_reasons(
    make: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make("llama")
    for reason in both_reasons(checkpoint, options(attention="sdpa")):
        assert reason == "target.attention: sdpa depends on the number of rows"
    for reason in both_reasons(checkpoint, options(dtype="float16")):
        assert reason == "products in float16 depend on their number of rows"
    monkeypatch.setattr(reproducibility, "uses_amx", lambda: True)
    for reason in both_reasons(checkpoint, options()):
        assert reason == "oneDNN may use AMX, whose products depend on their number of rows"


def test_no_gpu_is_reproducible(make: Callable[[str], Path]) -> None:
    opened = open_model(make("llama"), options())
    assert (
        why_irreproducible(
            torch.nn.Linear(2, 2),
            opened.spec,
            device=torch.device("cuda"),
            dtype=torch.bfloat16,
            attention="flashinfer",
            failed=(),
        )
        == ON_GPU
    )


def test_the_stats_of_a_text_say_so(make: Callable[[str], Path]) -> None:
    keys: dict[str, Any] = {"draft.kind": "none", "cache.pages": 64, "target.threads": 1}
    checkpoint = make("mixtral")
    checkpoints.add_tokenizer(checkpoint)
    with LLM(checkpoint, **keys) as llm:
        (output,) = llm.generate([[3, 4, 5]], Sampling(max_tokens=2))
    assert output.stats is not None
    assert not output.stats.reproducible
    assert "is multiplied by the library" in str(output.stats.irreproducible)
