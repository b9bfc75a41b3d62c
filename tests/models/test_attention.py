"""Attention over pages equals the formula; tests/proofs has its bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from specserve.models.attention import Attention, AttentionVariant, GroupedAttention, Rotation
from specserve.models.attention_kernels import invariant_kernel, sdpa_kernel
from specserve.models.cpu.linear_kernels import (
    CompiledKernel,
    linear_kernel,
    missing_for_compiled,
)
from specserve.models.layout import Geometry, Writes
from specserve.models.planner import Planner, key_block_size

PAGE_SIZE = 16
MAX_LENGTH = 4096


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """Sizes of attention heads."""

    dim: int
    kv_heads: int = 2
    shared: int = 2  # query heads to each key head
    v_dim: int | None = None

    def __str__(self) -> str:
        return f"{self.kv_heads}x{self.shared}x{self.dim}"

    @property
    def heads(self) -> int:
        return self.kv_heads * self.shared


@dataclass(frozen=True, slots=True)
class Text:
    """Queries, keys and values of one sequence."""

    q: Tensor  # [length, heads, dim]
    k: Tensor  # [length, kv_heads, dim]
    v: Tensor  # [length, kv_heads, v_dim]

    @property
    def length(self) -> int:
        return len(self.q)


def random_text(shape: HeadSizes, length: int, generator: torch.Generator) -> Text:
    def normal(heads: int, dim: int) -> Tensor:
        return torch.randn(length, heads, dim, generator=generator)

    return Text(
        normal(shape.heads, shape.dim),
        normal(shape.kv_heads, shape.dim),
        normal(shape.kv_heads, shape.v_dim or shape.dim),
    )


def make_attention(name: str, shared: int) -> Attention:
    if name != "compiled":
        return GroupedAttention({"invariant": invariant_kernel, "sdpa": sdpa_kernel}[name])
    from specserve.models.cpu.compiled_attention import CompiledAttention  # an optional dependency

    kernel = linear_kernel("compiled")
    assert isinstance(kernel, CompiledKernel)
    return CompiledAttention(kernel.functions.attention, shared=shared, page_size=PAGE_SIZE)


needs_compiled = pytest.mark.skipif(
    missing_for_compiled() is not None, reason=f"it needs {missing_for_compiled()}"
)
INVARIANT = [
    pytest.param("invariant", id="invariant"),
    pytest.param("compiled", marks=needs_compiled, id="compiled"),
]


class Paged:
    """Texts in pages in random order, every position written already."""

    def __init__(self, texts: Sequence[Text], dtype: torch.dtype) -> None:
        self.texts = [Text(text.q.to(dtype), text.k.to(dtype), text.v.to(dtype)) for text in texts]
        kv_heads, dim, v_dim = *texts[0].k.shape[1:], texts[0].v.shape[2]
        per_text = MAX_LENGTH // PAGE_SIZE
        pages = (
            np.random.default_rng(0)
            .permutation(len(texts) * per_text)
            .reshape(len(texts), per_text)
        )
        self.block_table = pages.astype(np.int64)
        self.keys, self.values = (
            torch.zeros(self.block_table.size * PAGE_SIZE, kv_heads, width, dtype=dtype)
            for width in (dim, v_dim)
        )
        self.shared = texts[0].q.shape[1] // kv_heads
        self.key_block = key_block_size(kv_heads * min(dim, v_dim))
        for text, own in zip(self.texts, self.block_table, strict=True):
            positions = np.arange(text.length)
            slots = own[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
            self.keys[slots], self.values[slots] = text.k, text.v

    def attend(
        self,
        parts: Sequence[tuple[int, int, int]],
        variant: AttentionVariant,
        *,
        kernel: str = "invariant",
        context: int | None = None,
    ) -> list[Tensor]:
        """Return what the queries of each part (text, start, stop) get, all in one pass."""
        which, starts, stops = (np.array(column) for column in zip(*parts, strict=True))
        attention = make_attention(kernel, self.shared)
        geometry = Geometry(
            PAGE_SIZE,
            self.keys.shape[1],
            self.key_block,
            torch.device("cpu"),
            attention.run_rows,
        )
        layout = Planner(geometry).lay_out(
            Writes(starts, stops - starts, self.block_table[which], context)
        )
        q, k, v = (
            torch.cat([getattr(self.texts[i], name)[start:stop] for i, start, stop in parts])
            for name in "qkv"
        )
        out = attention.attend(layout, self.keys, self.values, q, k, v, variant)
        return list(torch.split(out, (stops - starts).tolist()))


def formula(text: Text, variant: AttentionVariant) -> Tensor:
    """Return softmax attention [length, heads, v_dim] by its formula, in float64."""
    shared = text.q.shape[1] // text.k.shape[1]
    q, k, v = (
        text.q.double(),
        text.k.double().repeat_interleave(shared, 1),
        text.v.double().repeat_interleave(shared, 1),
    )
    rows = []
    for position in range(text.length):
        first = 0 if variant.window is None else max(0, position + 1 - variant.window)
        scores = torch.einsum("hd,khd->hk", q[position], k[first : position + 1]) * variant.scaling
        if variant.softcap is not None:
            scores = torch.tanh(scores / variant.softcap) * variant.softcap
        if variant.sinks is not None:
            scores = torch.cat([scores, variant.sinks.double()[:, None]], 1)
        weights = scores.softmax(-1)[:, : position + 1 - first]
        rows.append(torch.einsum("hk,khd->hd", weights, v[first : position + 1]))
    return torch.stack(rows)


VARIANTS = {
    "plain": AttentionVariant(0.2),
    "window": AttentionVariant(0.2, window=16),
    "window_of_one": AttentionVariant(0.2, window=1),
    "softcap": AttentionVariant(0.5, softcap=2.0),
    "sinks": AttentionVariant(0.2, sinks=torch.linspace(-1, 3, 4)),
    "all": AttentionVariant(0.4, window=50, softcap=3.0, sinks=torch.linspace(-1, 3, 4)),
}


@pytest.mark.parametrize("kernel", ["invariant", "sdpa"])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize(
    "shape",
    [
        HeadSizes(16),
        HeadSizes(24, kv_heads=4, shared=1),
        HeadSizes(32, kv_heads=1, shared=4),
        HeadSizes(24, v_dim=16),
    ],
    ids=str,
)
def test_the_numbers_are_those_of_the_formula(
    shape: HeadSizes, variant: AttentionVariant, kernel: str
) -> None:
    generator = torch.Generator().manual_seed(0)
    texts = [random_text(shape, length, generator) for length in (45, 1, 150)]
    paged, expected = Paged(texts, torch.float32), [formula(text, variant) for text in texts]
    whole = paged.attend(
        [(i, 0, text.length) for i, text in enumerate(texts)], variant, kernel=kernel
    )
    last = paged.attend([(0, 42, 45), (1, 0, 1), (2, 145, 150)], variant, kernel=kernel)
    for got, want in [
        *zip(whole, expected, strict=True),
        *zip(last, [expected[0][42:], expected[1], expected[2][145:]], strict=True),
    ]:
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


@needs_compiled
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize(
    "shape",
    [
        HeadSizes(16),
        HeadSizes(24, kv_heads=4, shared=1),
        HeadSizes(80, kv_heads=1, shared=4),
        HeadSizes(34, v_dim=18),
        HeadSizes(256, kv_heads=1, shared=71),
    ],
    ids=str,
)
def test_compiled_attention_computes_the_formula_of_bf16_numbers(
    shape: HeadSizes, variant: AttentionVariant
) -> None:
    generator = torch.Generator().manual_seed(0)
    texts = [random_text(shape, length, generator) for length in (45, 1, 150)]
    paged = Paged(texts, torch.bfloat16)
    if variant.sinks is not None:
        variant = replace(variant, sinks=torch.linspace(-1, 3, shape.heads))
    expected = [formula(text, variant) for text in paged.texts]
    parts = [(0, 0, 45), (1, 0, 1), (2, 0, 150), (0, 42, 45), (2, 145, 150)]
    outs = paged.attend(parts, variant, kernel="compiled")
    for (which, start, stop), out in zip(parts, outs, strict=True):
        # Weights and the result are rounded to 8 bits each.
        bound = 2**-7 * paged.texts[which].v.abs().max()
        assert (out.double() - expected[which][start:stop]).abs().max() < bound


@needs_compiled
@pytest.mark.parametrize("dim", [6, 32, 80])
def test_compiled_attention_rotates_queries_and_keys(dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    paged = Paged([random_text(HeadSizes(dim), 40, generator)], torch.bfloat16)
    text = paged.texts[0]
    angles = torch.rand(40, dim // 2, generator=generator).mul(6).repeat(1, 2)
    sines = angles.sin()
    sines[:, : dim // 2].neg_()
    table = torch.stack([angles.cos(), sines], dim=1).unsqueeze(2).bfloat16()
    attention = make_attention("compiled", 2)
    geometry = Geometry(PAGE_SIZE, 2, 256, torch.device("cpu"), attention.run_rows)
    layout = Planner(geometry).lay_out(
        Writes(np.array([0]), np.array([40]), paged.block_table[:, :16])
    )
    rotation = Rotation(table, layout.positions)
    variant = AttentionVariant(0.2)
    out = attention.attend(
        layout, paged.keys, paged.values, text.q, text.k, text.v, variant, rotation
    )
    rotated = Text(rotation.apply(text.q.double()), rotation.apply(text.k.double()), text.v)
    assert (out.double() - formula(rotated, variant)).abs().max() < 2**-6 * text.v.abs().max()


@needs_compiled
def test_a_number_that_is_not_one_shows_in_compiled_attention() -> None:
    paged = Paged(
        [random_text(HeadSizes(16), 20, torch.Generator().manual_seed(0))], torch.bfloat16
    )
    paged.texts[0].k[5, 0, 3] = float("nan")
    out = paged.attend([(0, 0, 20)], AttentionVariant(0.2), kernel="compiled")[0]
    assert out[5:, :2].isnan().all()
    assert not out[:, 2:].isnan().any()  # of the other key head


def test_a_query_sees_what_its_own_pass_writes_and_nothing_past_itself() -> None:
    generator = torch.Generator().manual_seed(0)
    old, new = (random_text(HeadSizes(16), 40, generator) for _ in range(2))
    paged = Paged([old], torch.float32)
    paged.texts[0] = Text(
        torch.cat([old.q[:30], new.q[30:]]),
        torch.cat([old.k[:30], new.k[30:]]),
        torch.cat([old.v[:30], new.v[30:]]),
    )
    (out,) = paged.attend(
        [(0, 30, 35)], AttentionVariant(0.2)
    )  # 35 to 40 still hold what was rejected
    torch.testing.assert_close(
        out.double(), formula(paged.texts[0], AttentionVariant(0.2))[30:35], atol=1e-5, rtol=1e-5
    )
