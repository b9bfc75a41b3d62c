"""Attention over pages: the numbers of the formula, and on CPU in bf16 the same bits for a query whatever is attended beside it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from specserve.models.attention import Kernel, Rule, attend, invariant, sdpa
from specserve.models.layout import FEW_QUERIES, Geometry, Planner, Writes, key_block

PAGE_SIZE = 16
STRETCH = 128  # keys; every block is a multiple of it
SPAN = 40  # keys that cancel before the tail, where a window hides the others
TAIL = 16  # the queries at the end of a text, which see all that cancels before them
LOOKED_AT = (
    100,
    330,
    1500,
)  # lengths: of one block, of a few, and of more keys than oneDNN sums at a stretch
COMPANY = (40, 129, 256, 257, 383, 550, 2000)
LENGTHS = (*LOOKED_AT, *COMPANY)
MAX_LENGTH = 4096


@dataclass(frozen=True, slots=True)
class Shape:
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
    q: Tensor  # [length, heads, dim]
    k: Tensor  # [length, kv_heads, dim]
    v: Tensor  # [length, kv_heads, v_dim]

    @property
    def length(self) -> int:
        return len(self.q)


def random_text(shape: Shape, length: int, generator: torch.Generator) -> Text:
    def normal(heads: int, dim: int) -> Tensor:
        return torch.randn(length, heads, dim, generator=generator)

    return Text(
        normal(shape.heads, shape.dim),
        normal(shape.kv_heads, shape.dim),
        normal(shape.kv_heads, shape.v_dim or shape.dim),
    )


def with_cancelling_values(text: Text, *, span: int | None = None) -> Text:
    """Keys in pairs, strewn over what all the tail's queries see (`span` positions), weigh the same and have opposite values.

    What is left of a sum over them is its rounding, so that summing in another order shows. The two of a pair lie in the same
    STRETCH positions, because sums over blocks of keys are rounded before they are added up.
    """
    generator = torch.Generator().manual_seed(1)
    body = text.length - TAIL
    k, v = text.k.clone(), torch.zeros_like(text.v)
    for seen in torch.arange(0 if span is None else max(0, body - span), body).split(STRETCH):
        one, other = seen[torch.randperm(len(seen), generator=generator)][
            : len(seen) // 2 * 2
        ].view(2, -1)
        sizes = torch.randint(-8, 8, (len(one), 1, 1), generator=generator).exp2()
        k[other] = k[one]
        v[one], v[other] = sizes * text.v[one], -sizes * text.v[one]
    return Text(text.q, k, v)


def with_cancelling_scores(text: Text) -> Text:
    """The products of each query with each key cancel in pairs; a scaling of SCORES makes what is left of them matter."""
    dims = torch.randperm(text.q.shape[2], generator=torch.Generator().manual_seed(2)).view(2, -1)
    q, k = text.q.clone(), text.k.clone()
    q[..., dims[1]] = q[..., dims[0]]
    k[..., dims[1]] = -k[..., dims[0]]
    return Text(q, k, text.v)


SCORES = 1e6


class Paged:
    """Texts in pages that lie in disorder, every position written already."""

    def __init__(self, texts: Sequence[Text], dtype: torch.dtype) -> None:
        self.texts = [Text(text.q.to(dtype), text.k.to(dtype), text.v.to(dtype)) for text in texts]
        kv_heads, dim, v_dim = *texts[0].k.shape[1:], texts[0].v.shape[2]
        per_text = MAX_LENGTH // PAGE_SIZE
        pages = (
            np.random.default_rng(0)
            .permutation(len(texts) * per_text)
            .reshape(len(texts), per_text)
        )
        self.table = pages.astype(np.int64)
        self.keys, self.values = (
            torch.zeros(self.table.size * PAGE_SIZE, kv_heads, width, dtype=dtype)
            for width in (dim, v_dim)
        )
        self.geometry = Geometry(
            PAGE_SIZE, kv_heads, key_block(kv_heads * min(dim, v_dim)), torch.device("cpu")
        )
        for text, own in zip(self.texts, self.table, strict=True):
            positions = np.arange(text.length)
            slots = own[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
            self.keys[slots], self.values[slots] = text.k, text.v

    def attended(
        self,
        parts: Sequence[tuple[int, int, int]],
        rule: Rule,
        *,
        kernel: Kernel = invariant,
        context: int | None = None,
    ) -> list[Tensor]:
        """Of each part (text, start, stop) what its queries get, all in one pass."""
        which, starts, stops = (np.array(column) for column in zip(*parts, strict=True))
        layout = Planner(self.geometry).lay_out(
            Writes(starts, stops - starts, self.table[which], context)
        )
        q, k, v = (
            torch.cat([getattr(self.texts[i], name)[start:stop] for i, start, stop in parts])
            for name in "qkv"
        )
        out = attend(layout, self.keys, self.values, q, k, v, rule=rule, kernel=kernel)
        return list(out.split((stops - starts).tolist()))


# The numbers


def formula(text: Text, rule: Rule) -> Tensor:
    """Softmax attention as it is written, in float64, query by query. [length, heads, v_dim]"""
    shared = text.q.shape[1] // text.k.shape[1]
    q, k, v = (
        text.q.double(),
        text.k.double().repeat_interleave(shared, 1),
        text.v.double().repeat_interleave(shared, 1),
    )
    rows = []
    for position in range(text.length):
        first = 0 if rule.window is None else max(0, position + 1 - rule.window)
        scores = torch.einsum("hd,khd->hk", q[position], k[first : position + 1]) * rule.scaling
        if rule.softcap is not None:
            scores = torch.tanh(scores / rule.softcap) * rule.softcap
        if rule.sinks is not None:
            scores = torch.cat([scores, rule.sinks.double()[:, None]], 1)
        weights = scores.softmax(-1)[:, : position + 1 - first]
        rows.append(torch.einsum("hk,khd->hd", weights, v[first : position + 1]))
    return torch.stack(rows)


RULES = {
    "plain": Rule(0.2),
    "window": Rule(0.2, window=16),
    "window_of_one": Rule(0.2, window=1),
    "softcap": Rule(0.5, softcap=2.0),
    "sinks": Rule(0.2, sinks=torch.linspace(-1, 3, 4)),
    "all": Rule(0.4, window=50, softcap=3.0, sinks=torch.linspace(-1, 3, 4)),
}


@pytest.mark.parametrize("kernel", [invariant, sdpa])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize(
    "shape",
    [
        Shape(16),
        Shape(24, kv_heads=4, shared=1),
        Shape(32, kv_heads=1, shared=4),
        Shape(24, v_dim=16),
    ],
    ids=str,
)
def test_the_numbers_are_those_of_the_formula(shape: Shape, rule: Rule, kernel: Kernel) -> None:
    generator = torch.Generator().manual_seed(0)
    texts = [random_text(shape, length, generator) for length in (45, 1, 150)]
    paged, expected = Paged(texts, torch.float32), [formula(text, rule) for text in texts]
    whole = paged.attended(
        [(i, 0, text.length) for i, text in enumerate(texts)], rule, kernel=kernel
    )
    last = paged.attended([(0, 42, 45), (1, 0, 1), (2, 145, 150)], rule, kernel=kernel)
    for got, want in [
        *zip(whole, expected, strict=True),
        *zip(last, [expected[0][42:], expected[1], expected[2][145:]], strict=True),
    ]:
        torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)


def test_a_query_sees_what_its_own_pass_writes_and_nothing_past_itself() -> None:
    generator = torch.Generator().manual_seed(0)
    old, new = (random_text(Shape(16), 40, generator) for _ in range(2))
    paged = Paged([old], torch.float32)
    paged.texts[0] = Text(
        torch.cat([old.q[:30], new.q[30:]]),
        torch.cat([old.k[:30], new.k[30:]]),
        torch.cat([old.v[:30], new.v[30:]]),
    )
    (out,) = paged.attended([(0, 30, 35)], Rule(0.2))  # 35 to 40 still hold what was refused
    torch.testing.assert_close(
        out.double(), formula(paged.texts[0], Rule(0.2))[30:35], atol=1e-5, rtol=1e-5
    )


# The bits

SHAPES = [
    *(Shape(dim) for dim in (16, 32, 64, 80, 96, 128, 256)),
    Shape(16, kv_heads=1, shared=1),
    Shape(32, kv_heads=1, shared=1),
    Shape(64, kv_heads=8, shared=1),
    Shape(64, kv_heads=1, shared=8),
    Shape(128, kv_heads=2, shared=7),
]
COMPANIES: dict[str, list[tuple[int, int, int]]] = {  # (text, start, stop)
    "one as short": [(3, 39, 40)],
    "shorter": [(4, 120, 129), (3, 30, 40)],
    "longer": [(7, 372, 383), (9, 1998, 2000)],
    "a block's end": [(5, 251, 256), (6, 256, 257)],
    "prompts": [(7, 0, 383), (3, 0, 40)],
    "many": [(i, LENGTHS[i] - i, LENGTHS[i]) for i in range(3, len(LENGTHS))],
}
KINDS = ("values", "values, with all rules", "scores")


def cancelling(shape: Shape, kind: str) -> tuple[Paged, Rule]:
    generator = torch.Generator().manual_seed(0)
    texts = [random_text(shape, length, generator) for length in LENGTHS]
    plain = shape.dim**-0.5
    if kind == "scores":
        return Paged([with_cancelling_scores(text) for text in texts], torch.bfloat16), Rule(
            plain * SCORES
        )
    if kind == "values":
        return Paged([with_cancelling_values(text) for text in texts], torch.bfloat16), Rule(plain)
    sinks = torch.linspace(-2, 2, shape.heads).bfloat16()
    return Paged([with_cancelling_values(text, span=SPAN) for text in texts], torch.bfloat16), Rule(
        plain, SPAN + TAIL, softcap=3.0, sinks=sinks
    )


def one_by_one(paged: Paged, rule: Rule, which: int) -> Tensor:  # [TAIL, heads, dim]
    """What the last queries of a text get, each in a pass of its own."""
    stop = paged.texts[which].length
    return torch.cat(
        [
            paged.attended([(which, position, position + 1)], rule)[0]
            for position in range(stop - TAIL, stop)
        ]
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_query_s_bits_do_not_depend_on_what_is_attended_beside_it(
    shape: Shape, kind: str
) -> None:
    paged, rule = cancelling(shape, kind)
    for which, length in enumerate(LOOKED_AT):
        alone, start = one_by_one(paged, rule, which), length - TAIL
        for name, others in COMPANIES.items():
            for queries, place in itertools.product(
                (1, 2, 5, TAIL), (0, len(others))
            ):  # before and behind the others
                parts = [*others[:place], (which, start, start + queries), *others[place:]]
                out = paged.attended(parts, rule)[place]
                assert torch.equal(out, alone[:queries]), (
                    f"length {length}, {queries} queries, company: {name}, place {place}"
                )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_query_s_bits_do_not_depend_on_the_chunk_or_on_padding(shape: Shape, kind: str) -> None:
    paged, rule = cancelling(shape, kind)
    for which, length in enumerate(LOOKED_AT):
        alone = one_by_one(paged, rule, which)
        for queries in (2, 5, TAIL, FEW_QUERIES, FEW_QUERIES + 1, 100):
            out = paged.attended([(which, length - queries, length)], rule)[0][-TAIL:]
            assert torch.equal(out, alone[-len(out) :]), f"length {length}, {queries} queries"
        for context in (2048, MAX_LENGTH):
            out = paged.attended([(which, length - TAIL, length)], rule, context=context)[0]
            assert torch.equal(out, alone), f"length {length}, padded to {context}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [16, 64, 256])
def test_these_texts_would_show_another_order_of_summing(dim: int, kind: str) -> None:
    paged, rule = cancelling(Shape(dim), kind)
    shuffled = shuffle(paged, kind)
    for which in range(len(LOOKED_AT)):
        assert (
            float(
                (one_by_one(shuffled, rule, which) != one_by_one(paged, rule, which)).float().mean()
            )
            > 0.5
        )


def shuffle(paged: Paged, kind: str) -> Paged:
    """The same sums in another order: of the dimensions for scores, of the positions before the tail for values."""
    dims = torch.randperm(paged.keys.shape[2], generator=torch.Generator().manual_seed(3))
    if kind == "scores":
        return Paged(
            [Text(text.q[..., dims], text.k[..., dims], text.v) for text in paged.texts],
            torch.bfloat16,
        )
    return Paged([in_another_order(text) for text in paged.texts], torch.bfloat16)


def in_another_order(text: Text) -> Text:
    body = text.length - TAIL
    first = max(0, body - SPAN)
    order = torch.arange(text.length)
    order[first:body] = first + torch.randperm(
        body - first, generator=torch.Generator().manual_seed(3)
    )
    return Text(text.q, text.k[order], text.v[order])
