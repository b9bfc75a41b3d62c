"""FP8 weights on an emulated card: its products, their trial, and whole models that keep them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specserve.errors import ConfigError, TooLittleMemory
from specserve.models.checkpoints.held_bytes import num_held_bytes
from specserve.models.checkpoints.load import load_model
from specserve.models.checkpoints.quantize import write_quantized
from specserve.models.checkpoints.rounding import round_to_float8
from specserve.models.checkpoints.weights import Codes
from specserve.models.float8_weight import FLOAT8, Float8Weight, join_float8
from specserve.models.gpu import float8_kernels
from specserve.models.gpu.float8_kernels import float8_fault, float8_product, scale_rows
from specserve.models.layers import Float8Linear
from specserve.models.memory import require_room
from specserve.models.model import ModelOptions, open_model
from specserve.types import Step
from tests.support import checkpoints
from tests.support.card import Ledger, emulated_cards

CARD = torch.device("cuda", 0)
TEXT = tuple(range(20, 60))
NAMES = ("llama", "qwen2", "gemma2")  # fused, fused with biases, and the library's code


@pytest.fixture
def card() -> Iterator[Ledger]:
    with emulated_cards() as ledger:
        yield ledger


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("llama", tmp_path_factory.mktemp("float8") / "llama")


def random_weight(outputs: int, inputs: int) -> Float8Weight:
    matrix = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0))
    codes, scales = round_to_float8(matrix, torch.bfloat16)
    return Float8Weight(codes, scales.float())


def random_rows(count: int, inputs: int) -> Tensor:
    """Return rows of very different sizes, one of zeros among them."""
    x = torch.randn(count, inputs, generator=torch.Generator().manual_seed(1))
    sizes = 10.0 ** torch.linspace(-4, 4, count).unsqueeze(1)
    sizes[count // 2] = 0
    return (x * sizes).bfloat16()


def test_a_product_is_that_of_the_widened_numbers() -> None:
    weight, x, bias = random_weight(80, 192), random_rows(9, 192), torch.randn(80).bfloat16()
    codes, scales = scale_rows(x)
    assert codes.dtype == FLOAT8
    assert codes.float().abs().amax(1).tolist() == [448.0 if i != 4 else 0.0 for i in range(9)]
    widened = codes.double() * scales.double()
    # Three bits after the first: rounded to the nearest, off by a sixteenth at most.
    assert bool(((widened - x.double()).abs() <= x.double().abs() / 16 + 1e-5 * scales).all())
    expected = widened @ weight.widen(torch.float64).T + bias.double()
    found = float8_product(x, weight, bias).double()
    assert float(((found - expected).abs() / expected.abs().amax(1, keepdim=True)).max()) < 2**-7


@pytest.mark.parametrize("count", [2, 5, 33])
def test_a_row_has_the_same_bits_whatever_shares_its_pass(count: int) -> None:
    weight, x = random_weight(80, 192), random_rows(count, 192)
    together = float8_product(x, weight, None)
    for row in range(count):
        own = scale_rows(x[row : row + 1]), scale_rows(x)
        assert torch.equal(own[0][0].float(), own[1][0][row : row + 1].float())
        alone = float8_product(x[row : row + 1], weight, None)
        assert torch.equal(alone[0], together[row])


def test_joined_weights_lie_below_one_another() -> None:
    first, second = random_weight(16, 32), random_weight(48, 32)
    joined = join_float8([first, second]).widen(torch.float32)
    assert torch.equal(joined, torch.cat([part.widen(torch.float32) for part in (first, second)]))


def test_a_card_is_tried_once(card: Ledger) -> None:
    assert float8_fault(CARD, torch.bfloat16) is None
    tried = card.kernels["_scaled_mm"]
    assert float8_fault(CARD, torch.bfloat16) is None
    assert tried == card.kernels["_scaled_mm"] == len(float8_kernels.ROWS)


def fails(*_: object, **__: object) -> Tensor:
    raise RuntimeError("no kernel image is available")


def without_bias(x: Tensor, weight: Float8Weight, bias: Tensor | None) -> Tensor:
    return float8_product(x, weight, None)


def scaled_by_the_first(x: Tensor, weight: Float8Weight, bias: Tensor | None) -> Tensor:
    scales = weight.scales[:1].expand_as(weight.scales).contiguous()
    return float8_product(x, replace(weight, scales=scales), bias)


@pytest.mark.parametrize(
    ("product", "fault"),
    [(fails, "fails on cuda:0: no kernel"), (without_bias, "off by"), (scaled_by_the_first, "off")],
)
def test_a_wrong_product_is_not_used(
    card: Ledger, product: Any, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(float8_kernels, "float8_product", product)
    assert fault in str(float8_fault(CARD, torch.bfloat16))


def test_older_cards_and_other_formats_are_named(
    card: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "dtype is float16" in str(float8_fault(CARD, torch.float16))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    assert "capability 8.6, and FP8 products begin at 8.9" in str(
        float8_fault(CARD, torch.bfloat16)
    )


def logits(directory: Path, device: str, round_to: str | None = None) -> Tensor:
    options = ModelOptions("bfloat16", device, pages=8, round_to=round_to)
    runner = open_model(directory, options).runner
    return runner.run([Step(0, 0, TEXT)], [len(TEXT)]).cpu().float()


@pytest.mark.parametrize("name", NAMES)
def test_a_model_in_fp8_computes_nearly_what_its_widened_copy_does(
    name: str, card: Ledger, tmp_path: Path
) -> None:
    plain = checkpoints.make(name, tmp_path / "plain")
    write_quantized(plain, "fp8", tmp_path / "copy")
    widened = logits(tmp_path / "copy", "cuda")
    products = card.kernels["_scaled_mm"]
    found = logits(plain, "cuda", "fp8")
    num_layers = 2 if name != "gemma2" else 3
    per_layer = 4 if name != "gemma2" else 7  # q, k and v are one, and gate and up, where fused
    trial = len(float8_kernels.ROWS)
    assert products == 0
    assert card.kernels["_scaled_mm"] - trial >= num_layers * per_layer
    # The copy's rows are not rounded. Random weights make more of that than trained ones.
    assert 0 < float((found - widened).abs().mean()) < 0.25 * float(widened.std())


def test_weights_are_held_in_eight_bits(card: Ledger, llama: Path) -> None:
    module = load_model(
        llama, dtype=torch.bfloat16, device=CARD, keeps=Codes.FLOAT8, round_to="fp8"
    ).module
    tensors = [*module.parameters(), *(b for n, b in module.named_buffers() if "scale" in n)]
    taken = sum(tensor.nbytes for tensor in tensors)
    counted = num_held_bytes(llama, torch.bfloat16, keeps=Codes.FLOAT8, round_to="fp8")
    assert counted == taken < num_held_bytes(llama, torch.bfloat16, keeps=Codes.FLOAT8)
    assert sum(tensor.dtype == FLOAT8 for tensor in tensors) == 2 * 7


def test_a_draft_has_room_where_only_its_fp8_weights_fit(
    card: Ledger, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = []

    def record(directory: Path, num_bytes: int, **keys: Any) -> None:
        needed.append(num_bytes)
        require_room(directory, num_bytes, **keys)

    monkeypatch.setattr("specserve.models.model.require_room", record)
    for round_to in (None, "fp8"):
        open_model(llama, ModelOptions("bfloat16", "cuda", pages=8, round_to=round_to))
    whole, small = needed
    assert small < 0.8 * whole
    monkeypatch.setattr("specserve.models.memory.free_memory", lambda device: small)
    open_model(llama, ModelOptions("bfloat16", "cuda", pages=8, round_to="fp8"))
    with pytest.raises(TooLittleMemory):
        open_model(llama, ModelOptions("bfloat16", "cuda", pages=8))


def test_weights_are_widened_where_a_card_cannot_multiply_them(
    card: Ledger, llama: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with caplog.at_level(logging.WARNING):
        model = open_model(llama, ModelOptions("bfloat16", "cuda", pages=8, round_to="fp8"))
    assert card.kernels["_scaled_mm"] == 0
    layers: Any = model.network
    assert not any(isinstance(layer.qkv, Float8Linear) for layer in layers.network.layers)
    assert "draft.quantize: fp8 gains nothing: cuda:0 has compute capability 8.0" in caplog.text


def test_a_draft_on_a_cpu_is_refused(llama: Path) -> None:
    with pytest.raises(ConfigError, match="fp8 needs a GPU, and the draft's device is the CPU"):
        open_model(llama, ModelOptions("bfloat16", "cpu", pages=8, round_to="fp8"))
