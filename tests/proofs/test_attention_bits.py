"""A query's bits in bf16 on CPUs depend on it alone, whatever is attended beside it."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from specserve.models.attention import AttentionVariant
from specserve.models.cpu.linear_kernels import multiplies_bf16
from specserve.models.planner import MAX_BATCHED_QUERIES
from tests.models.test_attention import (
    INVARIANT,
    MAX_LENGTH,
    HeadSizes,
    Paged,
    Text,
    needs_compiled,
    random_text,
)

STRETCH = 128  # keys; every block is a multiple of it
SPAN = 40  # keys that cancel before the tail, where a window hides the others
TAIL = 16  # the queries at the end of a text, which see all that cancels before them
# Lengths of tested texts: of one block, of a few, and of more keys than oneDNN sums at once.
TESTED = (100, 330, 1500)
LENGTHS = (*TESTED, 40, 129, 256, 257, 383, 550, 2000)
SCORES = 1e6

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
            # Before and after the others.
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
        # Compiled sums, and sums of processors that do not multiply bf16, are rounded less, so
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
