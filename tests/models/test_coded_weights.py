"""Weights of 8 and 4 bits: kernels compute with them as they are, and rows stay independent."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from specserve.models.checkpoints.load import load_model
from specserve.models.checkpoints.weights import Codes, num_weight_bytes
from specserve.models.coded_weight import CodedWeight
from specserve.models.cpu import linear_kernels
from specserve.models.cpu.compiled_layers import CompiledLayers
from specserve.models.cpu.linear_kernels import linear_kernel, missing_for_compiled
from specserve.models.llama import FusedNetwork
from specserve.models.model import Model, ModelOptions, open_model
from specserve.models.shard import Shard
from specserve.tools.plan.memory import MemoryPlan, share_here, whole_model_share
from specserve.types import Step
from tests.formats.check import MADE, Said
from tests.formats.make import PROMPT
from tests.support.forks import run_ranks

needs_compiled = pytest.mark.skipif(
    missing_for_compiled() is not None, reason=f"it needs {missing_for_compiled()}"
)
needs_bf16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="it needs a processor with bf16"
)
# (outputs, inputs, bits, groups, with minima): neither whole panels nor few groups, and spans that
# are cut.
Shape = tuple[int, int, int, int, bool]
SHAPES: list[Shape] = [
    *((*shape, False) for shape in ((100, 256, 8, 1), (33, 96, 8, 3), (64, 8192, 8, 1))),
    *((*shape, False) for shape in ((100, 256, 4, 8), (32, 64, 4, 1))),
    *((*shape, True) for shape in ((33, 48, 8, 2), (64, 8192, 8, 1), (100, 256, 4, 8))),
    *(
        (32, 64, bits, groups, minima)
        for bits in (8, 4)
        for groups in (8, 16)
        for minima in (False, True)
    ),
]
PRODUCT_ERROR = 4e-3
"""Of the largest result: a rounding to bf16, as with weights of bf16."""
KINDS = ("int8-w8a16", "int8-w8a8", "int4-w4a16", "int4-w4a16-asymmetric", "gptq", "awq")
LOGITS_ERROR = 0.02
"""Of the largest logit, for a pass in bf16 beside one in fp32."""


def coded(
    outputs: int,
    inputs: int,
    bits: int,
    groups: int,
    minima: bool = False,
    *,
    seed: int = 0,
    halves: bool = False,
) -> CodedWeight:
    generator = torch.Generator().manual_seed(seed)
    low, high = (-127, 128) if bits == 8 else (0, 16) if minima else (-8, 8)
    shape = outputs, inputs
    integers = torch.randint(low, high, shape, dtype=torch.int8, generator=generator)
    scales = torch.rand(outputs, groups, generator=generator) / 100 + 0.001
    added = torch.randn(outputs, groups, generator=generator) / 50 if minima else None
    if halves:
        scales = scales.half().float()
        added = None if added is None else added.half().float()
    weight = CodedWeight.from_integers(integers, scales, added)
    assert weight.bits == bits
    return weight


def exact(weight: CodedWeight) -> Tensor:
    groups = weight.scales.shape[1]
    by_groups = weight.integers.double().view(len(weight), groups, -1)
    numbers = by_groups * weight.scales.double().unsqueeze(-1)
    if weight.minima is not None:
        numbers += weight.minima.double().unsqueeze(-1)
    return numbers.flatten(1)


def random_rows(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).bfloat16()


def close(out: Tensor, expected: Tensor, error: float) -> bool:
    return bool((out.double() - expected).abs().max() < error * expected.abs().max())


@needs_compiled
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_of_the_exact_matrix(shape: Shape, halves: bool) -> None:
    kernel, weight = linear_kernel("compiled"), coded(*shape, halves=halves)
    outputs, inputs = weight.shape
    x, bias, residual = random_rows(29, inputs), random_rows(outputs), random_rows(29, outputs)
    packed = kernel.pack(weight)
    assert packed.nbytes < 0.66 * weight.numel() * weight.element_size() + 2 * packed[0].nbytes
    product = x.double() @ exact(weight).T
    full = product + bias.double() + residual.double()
    assert close(kernel.product(x, packed, outputs, None, None), product, PRODUCT_ERROR)
    assert close(kernel.product(x, packed, outputs, bias, residual), full, PRODUCT_ERROR)


@needs_compiled
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_beside_any_number_of_rows(shape: Shape) -> None:
    kernel, weight = linear_kernel("compiled"), coded(*shape)
    packed, x, before = kernel.pack(weight), random_rows(64, shape[1]), torch.get_num_threads()
    whole = kernel.product(x, packed, len(weight), None, None)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for rows in range(1, len(x) + 1):
                some = kernel.product(x[:rows], packed, len(weight), None, None)
                assert torch.equal(some, whole[:rows]), f"{rows} rows, {threads} threads"
    finally:
        torch.set_num_threads(before)


@needs_compiled
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[1] >= 16 * shape[3]])
def test_scales_and_minima_in_fp16_take_less_room_and_give_the_same_bits(
    shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, weight = linear_kernel("compiled"), coded(*shape, halves=True)
    x, short = random_rows(13, shape[1]), kernel.pack(weight)
    out = kernel.product(x, short, len(weight), None, None)
    monkeypatch.setattr(linear_kernels, "MIN_HALVES_SPAN", 1 << 20)
    long = kernel.pack(weight)
    numbers = 32 * short.shape[0] * short.shape[1] * (1 + shape[4])
    assert long.nbytes - short.nbytes == 2 * numbers
    monkeypatch.undo()
    assert torch.equal(kernel.product(x, long, len(weight), None, None), out)


@needs_compiled
@pytest.mark.parametrize("minima", [False, True])
@pytest.mark.parametrize("bits", [(8, 8), (4, 4), (8, 4)])
def test_the_gated_product_takes_two_weights_of_any_bits(
    bits: tuple[int, int], minima: bool
) -> None:
    kernel = linear_kernel("compiled")
    gate, up = (coded(40, 64, own, 2, minima, seed=own) for own in bits)
    both, x = kernel.interleave(gate, up), random_rows(5, 64)
    assert isinstance(both, CodedWeight)
    out = kernel.gated_product(x, kernel.pack(both), 40)
    halves = [x.double() @ exact(weight).T for weight in (gate, up)]
    assert close(out, F.silu(halves[0]) * halves[1], 2 * PRODUCT_ERROR)


@pytest.mark.parametrize("first", [(8, 1, False), (4, 2, False), (4, 6, True), (8, 2, True)])
@pytest.mark.parametrize("second", [(4, 2, False), (4, 2, True), (8, 6, False)])
def test_weights_of_any_kinds_are_joined_in_the_smallest_groups(
    first: tuple[int, int, bool], second: tuple[int, int, bool]
) -> None:
    parts = [coded(8, 96, *first), coded(8, 96, *second)]
    joined = torch.cat(list(parts))
    assert isinstance(joined, CodedWeight)
    assert joined.bits == (first[0] if first[::2] == second[::2] else 8)
    assert torch.equal(joined.widen(), torch.cat([part.widen() for part in parts]))


def test_weights_whose_groups_lie_across_one_another_are_joined_as_plain_matrices() -> None:
    parts = [coded(8, 96, 8, 3), coded(8, 96, 4, 2)]
    joined = torch.cat(list(parts))
    assert not isinstance(joined, CodedWeight)
    assert torch.equal(joined, torch.cat([part.widen() for part in parts]))


# Models


def open_kind(kind: str, *, kernel: str = "auto", shard: Shard | None = None) -> Model:
    options = ModelOptions(dtype="bfloat16", device="cpu", pages=16, kernel=kernel)
    return open_model(MADE / kind, options, shard=shard)


def logits(model: Model, chunks: Sequence[int] = (len(PROMPT),)) -> Tensor:  # [tokens, vocab]
    parts, start = [], 0
    for size in chunks:
        ids = tuple(PROMPT[start : start + size])
        parts.append(model.runner.run([Step(0, start, ids)], [size]))
        start += size
    model.runner.release([0])
    return torch.cat(parts)


@needs_compiled
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_says_what_its_library_s_matrices_say_however_it_is_fed(kind: str) -> None:
    model, expected = open_kind(kind), Said.expected(MADE / kind).logits
    network = cast(Any, model.runner.network)
    assert isinstance(network, FusedNetwork)
    said = logits(model)
    assert isinstance(network._compiled, CompiledLayers)
    assert network.layers[0].qkv.weight.dtype == torch.uint8, "its weights were widened"
    assert close(said[-1], expected.double(), LOGITS_ERROR)
    for chunks in ([1] * 20, [3, 1, 16], [13, 7]):
        assert torch.equal(logits(model, chunks), said)
    network._compiled = False  # operations one by one
    assert torch.equal(logits(model), said)


@needs_compiled
def test_shared_weights_are_small_and_give_the_same_bits(tmp_path: Path) -> None:
    private = logits(open_kind("int4-w4a16"))
    options = ModelOptions("bfloat16", "cpu", pages=16, shares_weights=True)
    for _ in range(2):  # written, then mapped
        shared = open_model(MADE / "int4-w4a16", options)
        assert cast(Any, shared.runner.network).layers[0].qkv.weight.dtype == torch.uint8
        assert torch.equal(logits(shared), private)


@needs_bf16
@pytest.mark.parametrize("kind", ["int8-w8a16", "int4-w4a16"])
def test_a_processor_without_the_kernel_gets_bf16(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    said = logits(open_kind(kind, kernel="onednn"))[-1]
    assert close(said, Said.expected(MADE / kind).logits.double(), LOGITS_ERROR)
    assert "its weights are widened to bfloat16" in caplog.text


@pytest.mark.parametrize("kind", ["int8-w8a16", "int4-w4a16", "awq", "fp8-dynamic"])
def test_memory_is_estimated_as_it_is_taken(kind: str) -> None:
    directory = MADE / kind
    module = load_model(directory, dtype=torch.bfloat16, device="cpu", keeps=Codes.INTEGERS).module
    taken = sum(
        weight.num_bytes if isinstance(weight, CodedWeight) else weight.nbytes
        for weight in module.parameters()
    )
    assert num_weight_bytes(directory, torch.bfloat16, keeps_codes=True) == taken
    assert (num_weight_bytes(directory, torch.bfloat16) > taken) == (kind != "fp8-dynamic")


@needs_compiled
def test_a_plan_counts_small_weights_as_they_are() -> None:
    plan = MemoryPlan(torch.bfloat16, 16, 0.5, 64)
    for kind, is_small in (("int4-w4a16", True), ("fp8-dynamic", False)):
        whole = whole_model_share(MADE / kind, plan)
        here = share_here(MADE / kind, whole, torch.bfloat16)
        assert (here.weight_bytes < whole.weight_bytes) == is_small
        assert share_here(MADE / kind, whole, torch.float32) == whole


@needs_compiled
def test_two_ranks_say_what_one_says(tmp_path: Path) -> None:
    run_ranks(_rank_main, tmp_path, ranks=2)
    for kind, said in torch.load(tmp_path / "said.pt").items():
        assert close(said, Said.expected(MADE / kind).logits.double(), LOGITS_ERROR)


def _rank_main(rank: int, scratch: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{scratch}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=120),
    )
    said = {}
    for kind in ("int8-w8a16", "int4-w4a16"):
        model = open_kind(kind, shard=Shard(rank, 2))
        layer = cast(Any, model.runner.network).layers[0]
        assert {layer.qkv.weight.dtype, layer.down.weight.dtype} == {torch.uint8}
        said[kind] = logits(model)[-1]
    if rank == 0:
        torch.save(said, f"{scratch}/said.pt")
    dist.destroy_process_group()
