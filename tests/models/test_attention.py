"""Attention over pages equals the formula; on CPU in bf16 a query's bits depend on it alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from specserve.models.attention import (
    Attention,
    AttentionVariant,
    GroupedAttention,
    Rotation,
    invariant_kernel,
    sdpa_kernel,
)
from specserve.models.cpu.linear_kernels import (
    CompiledKernel,
    linear_kernel,
    missing_for_compiled,
    multiplies_bf16,
)
from specserve.models.layout import Geometry, Writes
from specserve.models.planner import MAX_BATCHED_QUERIES, Planner, key_block_size

PAGE_SIZE = 16
STRETCH = 128  # keys; every block is a multiple of it
SPAN = 40  # keys that cancel before the tail, where a window hides the others
TAIL = 16  # the queries at the end of a text, which see all that cancels before them
# Lengths of tested texts: of one block, of a few, and of more keys than oneDNN sums at once.
TESTED = (100, 330, 1500)
LENGTHS = (*TESTED, 40, 129, 256, 257, 383, 550, 2000)
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


def cancel_values(text: Text, *, span: int | None = None) -> Text:
    """Return the text with pairs of keys that weigh the same and have opposite values.

    The pairs are spread over the positions that all the tail's queries see (`span` of them). A sum
    over them leaves only its rounding, so that summing in another order shows. The two of a
    pair lie in the same STRETCH positions, because sums over blocks of keys are rounded before they
    are added up.
    """
    generator = torch.Generator().manual_seed(1)
    body = text.length - TAIL
    k, v = text.k.clone(), torch.zeros_like(text.v)
    all_seen = torch.arange(0 if span is None else max(0, body - span), body)
    for seen in torch.split(all_seen, STRETCH):
        one, other = seen[torch.randperm(len(seen), generator=generator)][
            : len(seen) // 2 * 2
        ].view(2, -1)
        sizes = torch.randint(-8, 8, (len(one), 1, 1), generator=generator).exp2()
        k[other] = k[one]
        v[one], v[other] = sizes * text.v[one], -sizes * text.v[one]
    return Text(text.q, k, v)


def cancel_scores(text: Text) -> Text:
    """Return the text with queries and keys whose products cancel in pairs of dimensions.

    A scaling of SCORES makes the rounding that is left of them matter.
    """
    dims = torch.randperm(text.q.shape[2], generator=torch.Generator().manual_seed(2)).view(2, -1)
    q, k = text.q.clone(), text.k.clone()
    q[..., dims[1]] = q[..., dims[0]]
    k[..., dims[1]] = -k[..., dims[0]]
    return Text(q, k, text.v)


SCORES = 1e6


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


# The numbers


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
def test_threads_do_not_change_the_bits_of_compiled_attention() -> None:
    paged, variant = cancelling_texts(HeadSizes(64), "values")
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(paged.attend([(2, 0, 1500), (1, 300, 330)], variant, kernel="compiled"))
    torch.set_num_threads(before)
    assert all(
        torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True)
    )


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


# The bits

SHAPES = [
    *(HeadSizes(dim) for dim in (16, 32, 64, 80, 96, 128, 256)),
    HeadSizes(16, kv_heads=1, shared=1),
    HeadSizes(32, kv_heads=1, shared=1),
    HeadSizes(64, kv_heads=8, shared=1),
    HeadSizes(64, kv_heads=1, shared=8),
    HeadSizes(128, kv_heads=2, shared=7),
]
OTHERS: dict[str, list[tuple[int, int, int]]] = {  # (text, start, stop)
    "one as short": [(3, 39, 40)],
    "shorter": [(4, 120, 129), (3, 30, 40)],
    "longer": [(7, 372, 383), (9, 1998, 2000)],
    "a block's end": [(5, 251, 256), (6, 256, 257)],
    "prompts": [(7, 0, 383), (3, 0, 40)],
    "many": [(i, LENGTHS[i] - i, LENGTHS[i]) for i in range(3, len(LENGTHS))],
}
KINDS = ("values", "values, with all rules", "scores")


def alternating_kernels(first: int) -> list[object]:
    """Return each shape with each kind of texts, the kernels in turn.

    So each kernel has every shape and every kind. The two tests of bits begin with different
    kernels: what one leaves out, the other runs.
    """
    return [
        pytest.param(
            shape, kind, *kernel.values, marks=kernel.marks, id=f"{shape}-{kind}-{kernel.id}"
        )
        for (i, shape), (j, kind) in itertools.product(enumerate(SHAPES), enumerate(KINDS))
        for kernel in [INVARIANT[(i + j + first) % len(INVARIANT)]]
    ]


def cancelling_texts(shape: HeadSizes, kind: str) -> tuple[Paged, AttentionVariant]:
    generator = torch.Generator().manual_seed(0)
    texts = [random_text(shape, length, generator) for length in LENGTHS]
    plain = shape.dim**-0.5
    if kind == "scores":
        return Paged([cancel_scores(text) for text in texts], torch.bfloat16), AttentionVariant(
            plain * SCORES
        )
    if kind == "values":
        return Paged([cancel_values(text) for text in texts], torch.bfloat16), AttentionVariant(
            plain
        )
    sinks = torch.linspace(-2, 2, shape.heads).bfloat16()
    return Paged(
        [cancel_values(text, span=SPAN) for text in texts], torch.bfloat16
    ), AttentionVariant(plain, SPAN + TAIL, softcap=3.0, sinks=sinks)


def one_by_one(
    paged: Paged, variant: AttentionVariant, which: int, kernel: str
) -> Tensor:  # [TAIL, heads, dim]
    """Return what the last queries of a text get, each in a pass of its own."""
    stop = paged.texts[which].length
    return torch.cat(
        [
            paged.attend([(which, position, position + 1)], variant, kernel=kernel)[0]
            for position in range(stop - TAIL, stop)
        ]
    )


@pytest.mark.parametrize(("shape", "kind", "kernel"), alternating_kernels(0))
def test_a_query_s_bits_do_not_depend_on_what_is_attended_beside_it(
    shape: HeadSizes, kind: str, kernel: str
) -> None:
    paged, variant = cancelling_texts(shape, kind)
    for which, length in enumerate(TESTED):
        alone, start = one_by_one(paged, variant, which, kernel), length - TAIL
        for name, others in OTHERS.items():
            # Before and behind the others.
            for queries, index in itertools.product((1, 2, 5, TAIL), (0, len(others))):
                parts = [*others[:index], (which, start, start + queries), *others[index:]]
                out = paged.attend(parts, variant, kernel=kernel)[index]
                assert torch.equal(out, alone[:queries]), (
                    f"length {length}, {queries} queries, others: {name}, index {index}"
                )


@pytest.mark.parametrize(("shape", "kind", "kernel"), alternating_kernels(1))
def test_a_query_s_bits_do_not_depend_on_the_chunk_or_on_padding(
    shape: HeadSizes, kind: str, kernel: str
) -> None:
    paged, variant = cancelling_texts(shape, kind)
    for which, length in enumerate(TESTED):
        alone = one_by_one(paged, variant, which, kernel)
        for queries in (2, 5, TAIL, MAX_BATCHED_QUERIES, MAX_BATCHED_QUERIES + 1, 100):
            part = (which, length - queries, length)
            out = paged.attend([part], variant, kernel=kernel)[0][-TAIL:]
            assert torch.equal(out, alone[-len(out) :]), f"length {length}, {queries} queries"
        for context in (2048, MAX_LENGTH):
            part = (which, length - TAIL, length)
            out = paged.attend([part], variant, kernel=kernel, context=context)[0]
            assert torch.equal(out, alone), f"length {length}, padded to {context}"


@pytest.mark.parametrize("kernel", INVARIANT)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [16, 64, 256])
def test_these_texts_would_show_another_order_of_summing(dim: int, kind: str, kernel: str) -> None:
    paged, variant = cancelling_texts(HeadSizes(dim), kind)
    shuffled = shuffle(paged, kind)
    for which in range(len(TESTED)):
        ours, others = (one_by_one(one, variant, which, kernel) for one in (paged, shuffled))
        # Compiled sums, and those of processors that do not multiply bf16, are rounded less, so
        # that more of them come out the same.
        is_rounded_often = kernel == "invariant" and multiplies_bf16()
        assert float((ours != others).float().mean()) > (0.5 if is_rounded_often else 0.3)


def shuffle(paged: Paged, kind: str) -> Paged:
    """Return the same texts with their sums in another order.

    It is another order of dimensions for scores, and of positions before the tail for values.
    """
    dims = torch.randperm(paged.keys.shape[2], generator=torch.Generator().manual_seed(3))
    if kind == "scores":
        return Paged(
            [Text(text.q[..., dims], text.k[..., dims], text.v) for text in paged.texts],
            torch.bfloat16,
        )
    return Paged([shuffle_positions(text) for text in paged.texts], torch.bfloat16)


def shuffle_positions(text: Text) -> Text:
    body = text.length - TAIL
    first = max(0, body - SPAN)
    order = torch.arange(text.length)
    order[first:body] = first + torch.randperm(
        body - first, generator=torch.Generator().manual_seed(3)
    )
    return Text(text.q, text.k[order], text.v[order])
