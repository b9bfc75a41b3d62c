"""The verifiers: exact by enumeration in float64, and exact by sampling with the real noise.

Results do not depend on the other sequences of the batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from specserve import types
from specserve.sampling import (
    VERIFIERS,
    DraftBatch,
    Purpose,
    RandomStreams,
    WarpBatch,
    exponential,
    row_keys,
    sample,
    to_sparse_distribution,
    truncate_to_support,
    verify_greedy,
)
from specserve.sampling import verify as verifiers
from specserve.sampling.verify import block_acceptance, residual, verify
from specserve.types import SparseDistribution, Warp

LOSSLESS = ["speculative", "block", "coupled"]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Table = dict[tuple[int, ...], Floats]  # a distribution for each prefix


def drafts_of(tokens: Tensor, lengths: Tensor, q: Tensor, lenience: float = 1.0) -> DraftBatch:
    """Make a batch with whole q instead of sparse ones, in any precision.

    tokens [seqs, width - 1], lengths [seqs], q [seqs, width - 1, vocab].
    """
    seqs, width, vocab = tokens.shape[0], tokens.shape[1] + 1, q.shape[2]
    columns = torch.arange(width)
    valid = columns < lengths[:, None]
    q_probs = torch.zeros(seqs, width, vocab, dtype=q.dtype)
    q_probs[:, :-1] = q
    first = (lengths + 1).cumsum(0) - lengths - 1
    return DraftBatch(
        tokens=torch.nn.functional.pad(tokens, (0, 1)) * valid,
        lengths=lengths,
        rows=first[:, None] + torch.minimum(columns, lengths[:, None]),
        q_ids=torch.arange(vocab).expand(seqs, width, vocab),
        q_probs=q_probs * valid[:, :, None],
        lenience=torch.full((seqs, 1), lenience, dtype=q.dtype),
        valid=valid,
        host_lengths=lengths.numpy(),
    )


# Exactness by enumeration


def random_row(rng: np.random.Generator, vocab: int, kind: str) -> Floats:
    row: Floats
    if kind == "one-hot":
        row = np.eye(vocab)[rng.integers(vocab)]
        return row
    row = rng.dirichlet(np.ones(vocab)) if kind != "peaked" else rng.dirichlet(np.full(vocab, 0.1))
    if kind == "zeros":
        row[rng.permutation(vocab)[: vocab // 2]] = 0
    row /= row.sum()
    return row


def random_tables(seed: int, vocab: int, gamma: int, kinds: tuple[str, str]) -> tuple[Table, Table]:
    """Return p and q for every prefix.

    Kind `same` of q is p; `mixed` is a kind drawn for each prefix.
    """
    rng = np.random.default_rng(seed)
    p: Table = {}
    q: Table = {}
    for length in range(gamma + 1):
        for prefix in itertools.product(range(vocab), repeat=length):
            p_kind, q_kind = (
                rng.choice(["plain", "one-hot", "peaked", "zeros"]) if kind == "mixed" else kind
                for kind in kinds
            )
            p[prefix] = random_row(rng, vocab, p_kind)
            q[prefix] = p[prefix] if q_kind == "same" else random_row(rng, vocab, q_kind)
    return p, q


def num_accepted(name: str, p: Tensor, drafts: DraftBatch) -> tuple[Tensor, Tensor | None]:
    """Return the probability of each accepted length, [seqs, gamma + 1], and block's weights."""
    if name == "block":
        h, weight = block_acceptance(p, drafts)
        rejected_later = torch.cat(
            [(1 - h[:, :-1]).flip(1).cumprod(1).flip(1), torch.ones_like(h[:, :1])], 1
        )
        return torch.cat([torch.ones_like(h[:, :1]), h[:, :-1]], 1) * rejected_later, weight
    ratio = drafts.p_at_tokens(p) / drafts.q_at_tokens().clamp(min=torch.finfo(torch.float32).tiny)
    if name == "lenient":
        ratio = ratio * drafts.lenience
    h = ratio.clamp(max=1) * drafts.valid  # 2211.17192, Algorithm 1
    passed = torch.cat([torch.ones_like(h[:, :1]), h[:, :-1].cumprod(1)], 1)
    return passed * (1 - h), None


def enumerate_round(
    name: str, p: Table, q: Table, vocab: int, gamma: int, lenience: float = 1.0
) -> tuple[Floats, float]:
    """Return the exact distribution of a round's text, and the expected accepted length.

    The text that the round commits is completed by p to gamma + 1 tokens.
    """
    paths = list(itertools.product(range(vocab), repeat=gamma))
    q_rows = torch.tensor(
        np.array([[q[path[:i]] for i in range(gamma)] for path in paths])
    ).reshape(len(paths), gamma, vocab)
    p_rows = torch.tensor(np.array([p[path[:i]] for path in paths for i in range(gamma + 1)]))
    drafts = drafts_of(
        torch.tensor(paths, dtype=torch.long).reshape(len(paths), gamma),
        torch.full((len(paths),), gamma),
        q_rows,
        lenience,
    )
    drawn = np.array([np.prod([q[path[:i]][path[i]] for i in range(gamma)]) for path in paths])
    chances, weight = num_accepted(name, p_rows, drafts)
    text = np.zeros((vocab,) * (gamma + 1))
    for accepted in range(gamma + 1):
        left = residual(p_rows, drafts, torch.full((len(paths),), accepted), weight)
        # p where rounding leaves an empty residual
        left = torch.where(left.sum(-1, keepdim=True) > 0, left, p_rows[drafts.rows[:, accepted]])
        for path, chance, row in zip(
            paths, drawn * chances[:, accepted].numpy(), left.numpy(), strict=True
        ):
            if chance > 0:
                for token in range(vocab):
                    text[(*path[:accepted], token)] += (
                        chance
                        * row[token]
                        / row.sum()
                        * target_text(p, vocab, gamma, (*path[:accepted], token))
                    )
    return text, float((drawn[:, None] * chances.numpy() * np.arange(gamma + 1)).sum())


def target_text(p: Table, vocab: int, gamma: int, prefix: tuple[int, ...] = ()) -> Floats:
    """Return the distribution under p of the tokens that a prefix lacks to gamma + 1."""
    missing = gamma + 1 - len(prefix)
    chances = [
        np.prod([p[(*prefix, *rest[:i])][rest[i]] for i in range(missing)])
        for rest in itertools.product(range(vocab), repeat=missing)
    ]
    return np.array(chances).reshape((vocab,) * missing)


KINDS = [
    ("plain", "plain"),
    ("plain", "same"),
    ("zeros", "zeros"),
    ("plain", "one-hot"),
    ("one-hot", "plain"),
    ("peaked", "peaked"),
    ("mixed", "mixed"),
]


@pytest.mark.parametrize("name", ["speculative", "block"])
@pytest.mark.parametrize(("vocab", "gamma"), [(3, 0), (4, 1), (4, 2), (3, 3)])
@pytest.mark.parametrize("kinds", KINDS)
def test_the_committed_text_has_exactly_the_targets_distribution(
    name: str, vocab: int, gamma: int, kinds: tuple[str, str]
) -> None:
    for seed in range(4):
        p, q = random_tables(seed, vocab, gamma, kinds)
        text, _ = enumerate_round(name, p, q, vocab, gamma)
        assert np.abs(text - target_text(p, vocab, gamma)).max() < 1e-12


@pytest.mark.parametrize("kinds", KINDS)
def test_block_never_accepts_less_than_speculative_and_sometimes_more(
    kinds: tuple[str, str],
) -> None:
    gains = []
    for seed in range(4):
        p, q = random_tables(seed, 3, 3, kinds)
        gains.append(
            enumerate_round("block", p, q, 3, 3)[1] - enumerate_round("speculative", p, q, 3, 3)[1]
        )
    assert min(gains) > -1e-12
    if kinds == ("plain", "plain"):
        assert min(gains) > 0.001
    if kinds == ("plain", "one-hot"):
        assert max(gains) < 1e-12


def test_block_gains_nothing_with_a_single_draft_token() -> None:
    p, q = random_tables(5, 4, 1, ("plain", "plain"))
    assert enumerate_round("block", p, q, 4, 1)[1] == pytest.approx(
        enumerate_round("speculative", p, q, 4, 1)[1], abs=1e-12
    )


def test_expected_acceptance_of_speculative_is_the_formula_of_theory() -> None:
    p, q = random_tables(6, 4, 1, ("plain", "plain"))
    assert enumerate_round("speculative", p, q, 4, 1)[1] == pytest.approx(
        np.minimum(p[()], q[()]).sum(), abs=1e-12
    )


@pytest.mark.parametrize("kinds", KINDS)
def test_lenience_1_is_speculative_and_more_bounds_every_token_by_l_times_p(
    kinds: tuple[str, str],
) -> None:
    p, q = random_tables(7, 4, 2, kinds)
    exact, length = enumerate_round("speculative", p, q, 4, 2)
    same, same_length = enumerate_round("lenient", p, q, 4, 2, lenience=1.0)
    assert np.array_equal(exact, same)
    assert length == same_length
    lossy, longer = enumerate_round("lenient", p, q, 4, 2, lenience=1.5)
    assert longer >= length - 1e-12
    assert (lossy.sum((1, 2)) <= 1.5 * p[()] + 1e-12).all()
    assert lossy.sum() == pytest.approx(1, abs=1e-12)


# Exactness by sampling with the real noise, in consecutive ragged rounds

NUM_TEXTS = 100_000
LENGTH = 4
VOCAB = 3


def markov(seed: int) -> Tensor:
    """Return a distribution for each last token, [vocab, vocab]."""
    return torch.tensor(
        np.random.default_rng(seed).dirichlet(np.ones(VOCAB), VOCAB), dtype=torch.float32
    )


def draft(
    q: Tensor, last: Tensor, streams: RandomStreams, gamma: int, *, coupled: bool
) -> tuple[Tensor, Tensor]:
    """Draft as a drafter does: tokens [seqs, gamma] and their q, [seqs, gamma, vocab]."""
    tokens, rows = [last], []
    keys = streams.keys(Purpose.COUPLED if coupled else Purpose.DRAFT, gamma, q.device)
    for i in range(gamma):
        rows.append(q[tokens[-1]])
        tokens.append(sample(rows[-1], exponential(keys[:, i], torch.arange(VOCAB))))
    return torch.stack(tokens[1:], 1), torch.stack(rows, 1)


def generate(name: str, p: Tensor, q: Tensor, lenience: float = 1.0) -> Ints:
    """Generate many texts at once, each round with a random gamma of 0 to 3: [texts, LENGTH]."""
    rng = np.random.default_rng(0)
    texts = np.zeros((NUM_TEXTS, LENGTH + 5), dtype=np.int64)  # position 0 holds the prompt
    held = np.ones(NUM_TEXTS, dtype=np.int64)
    while (held <= LENGTH).any():
        running = np.flatnonzero(held <= LENGTH)
        streams = RandomStreams(seeds=running.astype(np.uint64), rounds=held[running])
        last = torch.from_numpy(texts[running, held[running] - 1])
        tokens, q_rows = draft(q, last, streams, 3, coupled=name == "coupled")
        drafts = drafts_of(
            tokens, torch.from_numpy(rng.integers(0, 4, len(running))), q_rows, lenience
        )
        p_rows = p[torch.cat([last[:, None], tokens], 1).flatten()[drafts.cells()]]
        result = verify([name] * len(running), p_rows, drafts, streams)
        accepted = result.accepted.numpy()
        for i in range(3):
            kept = i < accepted
            texts[running[kept], held[running[kept]] + i] = tokens.numpy()[kept, i]
        texts[running, held[running] + accepted] = result.next_token.numpy()
        held[running] += accepted + 1
    return texts[:, 1 : LENGTH + 1]


def chi_square_p(texts: Ints, p: Tensor) -> float:
    expected = np.ones(1)
    last = np.zeros(1, dtype=np.int64)
    for _ in range(LENGTH):
        expected = (expected[:, None] * p.double().numpy()[last]).ravel()
        last = np.tile(np.arange(VOCAB), len(last))
    counts = np.bincount(texts @ VOCAB ** np.arange(LENGTH)[::-1], minlength=VOCAB**LENGTH)
    return float(stats.chisquare(counts, expected / expected.sum() * len(texts)).pvalue)


@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("seed", [1, 2])
def test_texts_of_many_rounds_have_the_targets_distribution(name: str, seed: int) -> None:
    p, q = markov(seed), markov(seed + 100)
    assert chi_square_p(generate(name, p, q), p) > 1e-4


def test_lenient_has_the_distribution_that_enumeration_says_and_not_the_targets() -> None:
    p, q = markov(3), markov(103)
    texts = generate("lenient", p, q, lenience=1.5)
    assert chi_square_p(texts, p) < 1e-4
    table_p: Table = {(): p[0].double().numpy()}
    table_q: Table = {(): q[0].double().numpy()}
    table_p.update({(i,): p[i].double().numpy() for i in range(VOCAB)})
    with_drafts = enumerate_round("lenient", table_p, table_q, VOCAB, 1, lenience=1.5)[0].sum(1)
    first = 0.75 * with_drafts + 0.25 * table_p[()]  # gamma was 0 in a quarter of the first rounds
    assert (
        stats.chisquare(
            np.bincount(texts[:, 0], minlength=VOCAB), first / first.sum() * NUM_TEXTS
        ).pvalue
        > 1e-4
    )


def test_coupled_generates_the_same_text_for_any_drafts() -> None:
    p = markov(4)
    plain = generate("coupled", p, markov(1))
    assert np.array_equal(plain, generate("coupled", p, markov(2)))
    expected, last = np.zeros_like(plain), torch.zeros(NUM_TEXTS, dtype=torch.long)
    for i in range(LENGTH):
        noise = exponential(
            row_keys(range(NUM_TEXTS), [0], [i + 1], Purpose.COUPLED), torch.arange(VOCAB)
        )
        last = (p[last] / noise).argmax(-1)
        expected[:, i] = last.numpy()
    assert np.array_equal(plain, expected)


# The real shape of a round: sparse q, ragged drafts, mixed rules


def random_round(
    seed: int, lengths: list[int], vocab: int = 211, *, warp: Warp | None = None
) -> tuple[Tensor, list[tuple[int, ...]], list[SparseDistribution | None]]:
    """Return rows of p, draft tokens that are accepted in part, and their q.

    The supports of q differ, and some q are None.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(sum(lengths) + len(lengths), vocab, generator=generator) * 3
    p = WarpBatch([warp or Warp()], [len(logits)]).probabilities(logits)
    tokens, q, row = [], [], 0
    for i, length in enumerate(lengths):
        near = logits[row : row + length] + torch.randn(length, vocab, generator=generator)
        ids, probs = truncate_to_support(torch.softmax(near, -1), [8, 64, 500][i % 3])
        columns = (
            torch.multinomial(probs, 1, generator=generator)
            if length
            else torch.zeros(0, 1, dtype=torch.long)
        )
        tokens.append(tuple(ids.gather(1, columns)[:, 0].tolist()))
        q.append(to_sparse_distribution(ids, probs) if i % 4 else None)
        row += length + 1
    return p, tokens, q


def test_a_mixed_batch_gives_each_sequence_what_it_gets_alone() -> None:
    lengths = [0, 1, 5, 3, 7, 0, 2, 4, 6, 1, 3, 5, 2, 7, 1, 4] * 4
    p, tokens, q = random_round(1, lengths)
    names = [types.VERIFIERS[i % 4] for i in range(len(lengths))]
    lenience = [1.0 + i % 3 for i in range(len(lengths))]
    streams = RandomStreams.from_seeds(range(100, 100 + len(lengths)), range(40, 40 + len(lengths)))
    together = verify(names, p, DraftBatch.from_tokens(tokens, q, lenience=lenience), streams)
    row = 0
    for i, length in enumerate(lengths):
        alone = verify(
            names[i : i + 1],
            p[row : row + length + 1],
            DraftBatch.from_tokens(tokens[i : i + 1], q[i : i + 1], lenience=lenience[i : i + 1]),
            streams.select(np.array([i])),
        )
        assert alone.accepted.item() == together.accepted[i].item()
        assert alone.next_token.item() == together.next_token[i].item()
        row += length + 1
    assert 0 < int(together.accepted.sum()) < sum(lengths)


def test_the_bits_of_block_do_not_depend_on_the_support_of_the_neighbours() -> None:
    p, tokens, q = random_round(2, [5] * 12)
    together = block_acceptance(p, DraftBatch.from_tokens(tokens, q))
    for i in range(12):
        alone = block_acceptance(
            p[6 * i : 6 * i + 6], DraftBatch.from_tokens(tokens[i : i + 1], q[i : i + 1])
        )
        assert all(torch.equal(a[0], b[i]) for a, b in zip(alone, together, strict=True))


def test_certain_drafts_are_one_hot_q() -> None:
    p, tokens, _ = random_round(3, [4, 2, 3])
    one_hot = [
        SparseDistribution(np.array(row)[:, None], np.ones((len(row), 1), np.float32))
        for row in tokens
    ]
    for name in types.VERIFIERS:
        given, implied = (
            VERIFIERS[name](
                p, DraftBatch.from_tokens(tokens, q), RandomStreams.from_seeds([1, 2, 3], [9, 9, 9])
            )
            for q in (one_hot, [None] * 3)
        )
        assert torch.equal(given.accepted, implied.accepted)
        assert torch.equal(given.next_token, implied.next_token)


@pytest.mark.parametrize("name", types.VERIFIERS)
@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_draft_tokens_whose_q_is_not_finite_are_verified_as_certain_ones(
    name: str, wrong: float
) -> None:
    p, tokens, q = random_round(3, [3] * 40)
    broken = [
        None if own is None else SparseDistribution(own.ids, np.full_like(own.probs, wrong))
        for own in q
    ]
    streams = RandomStreams.from_seeds(range(40), [9] * 40)
    found, expected = (
        VERIFIERS[name](p, DraftBatch.from_tokens(tokens, each), streams)
        for each in (broken, [None] * 40)
    )
    assert torch.equal(found.accepted, expected.accepted)
    assert torch.equal(found.next_token, expected.next_token)


@pytest.mark.parametrize("name", types.VERIFIERS)
def test_a_token_of_probability_0_is_never_emitted(name: str) -> None:
    """The lenience accepts nearly everything else."""
    p, tokens, q = random_round(4, [3] * 500, vocab=40, warp=Warp(top_k=3))
    drafts = DraftBatch.from_tokens(tokens, q, lenience=[1e8] * 500)
    result = VERIFIERS[name](p, drafts, RandomStreams.from_seeds(range(500), [5] * 500))
    stopped = p[drafts.rows.gather(1, result.accepted[:, None])[:, 0]]
    assert bool((stopped.gather(1, result.next_token[:, None]) > 0).all())
    kept = torch.arange(drafts.width) < result.accepted[:, None]
    assert bool(kept.any())
    assert bool((drafts.p_at_tokens(p)[kept] > 0).all())


@pytest.mark.parametrize("name", types.VERIFIERS)
def test_nothing_is_rejected_where_p_equals_q_and_an_empty_residual_is_handled(
    name: str,
) -> None:
    p, tokens, _ = random_round(5, [4] * 200, vocab=30)
    q = [
        SparseDistribution(np.tile(np.arange(30), (4, 1)), p[5 * i : 5 * i + 4].numpy())
        for i in range(200)
    ]
    result = VERIFIERS[name](
        p, DraftBatch.from_tokens(tokens, q), RandomStreams.from_seeds(range(200), [5] * 200)
    )
    if name != "coupled":
        assert result.accepted.tolist() == [4] * 200
    assert bool((p[4::5].gather(1, result.next_token[:, None]) > 0)[result.accepted == 4].all())


def test_an_empty_residual_falls_back_to_p(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rejection is forced where p = q: the correction must still be possible under p."""
    p = torch.tensor([[0.0, 0.25, 0.75, 0.0], [0.25, 0.25, 0.25, 0.25]])
    q = SparseDistribution(np.arange(4)[None], p[:1].numpy())
    monkeypatch.setattr(
        verifiers, "_accept_noise", lambda drafts, _: torch.full(drafts.tokens.shape, 2.0)
    )
    drawn = [
        VERIFIERS["speculative"](
            p, DraftBatch.from_tokens([(2,)], [q]), RandomStreams.from_seeds([seed], [1])
        ).next_token.item()
        for seed in range(200)
    ]
    assert set(drawn) == {1, 2}


@pytest.mark.parametrize("name", types.VERIFIERS)
def test_the_smallest_noise_does_not_accept_an_impossible_token(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    drafts = DraftBatch.from_tokens(
        [(0,)], [SparseDistribution(np.array([[0, 1]]), np.array([[0.9, 0.1]], np.float32))]
    )
    monkeypatch.setattr(
        verifiers, "_accept_noise", lambda drafts, _: torch.full(drafts.tokens.shape, 2.0**-33)
    )
    result = VERIFIERS[name](p, drafts, RandomStreams.from_seeds([3], [1]))
    assert (result.accepted.item(), result.next_token.item()) == (0, 1)


@pytest.mark.parametrize("name", types.VERIFIERS)
def test_a_draft_token_of_probability_0_under_q_does_no_harm(name: str) -> None:
    """A faulty drafter reports q = 0 for its token: no NaN, and p decides on the token."""
    q = SparseDistribution(np.array([[1, 2]]), np.array([[0.5, 0.5]], np.float32))
    for p_row, possible in (([0.0, 0.5, 0.5], {1, 2}), ([1.0, 0.0, 0.0], {0})):
        p = torch.tensor([p_row, p_row])
        result = VERIFIERS[name](
            p, DraftBatch.from_tokens([(0,)], [q]), RandomStreams.from_seeds([3], [1])
        )
        assert result.next_token.item() in possible
        assert result.accepted.item() <= (0 in possible)


@pytest.mark.parametrize("name", types.VERIFIERS)
def test_without_drafts_the_next_token_is_a_draw_from_p(name: str) -> None:
    p, tokens, q = random_round(6, [0, 0, 0])
    result = verify(
        [name] * 3,
        p,
        DraftBatch.from_tokens(tokens, q),
        RandomStreams.from_seeds([1, 2, 3], [7, 8, 9]),
    )
    purpose = Purpose.COUPLED if name == "coupled" else Purpose.NEXT
    expected = sample(
        p, exponential(row_keys([1, 2, 3], [7, 8, 9], [7, 8, 9], purpose), torch.arange(211))
    )
    assert result.accepted.tolist() == [0, 0, 0]
    assert torch.equal(result.next_token, expected)


def test_an_empty_batch_has_an_empty_result() -> None:
    result = verify(
        [], torch.zeros(0, 5), DraftBatch.from_tokens([], []), RandomStreams.from_seeds([], [])
    )
    assert result.accepted.shape == result.next_token.shape == (0,)


@pytest.mark.parametrize("name", types.VERIFIERS)
def test_verify_greedy_equals_every_rule_under_one_hot_p(name: str) -> None:
    lengths = [0, 3, 5, 1, 4, 2] * 5
    logits = torch.randn(
        sum(lengths) + len(lengths), 50, generator=torch.Generator().manual_seed(7)
    )
    best = logits.argmax(-1).tolist()
    tokens, row = [], 0
    for i, length in enumerate(lengths):
        tokens.append(tuple(best[row + j] if j < i % 6 else 0 for j in range(length)))
        row += length + 1
    near = [
        truncate_to_support(torch.softmax(torch.randn(length, 50), -1), 16) for length in lengths
    ]
    q = [
        to_sparse_distribution(ids, probs) if i % 2 else None for i, (ids, probs) in enumerate(near)
    ]
    drafts, streams = (
        DraftBatch.from_tokens(tokens, q),
        RandomStreams.from_seeds(range(30), range(30)),
    )
    warps = WarpBatch([Warp(temperature=0)] * 30, [length + 1 for length in lengths])
    shortcut = verify_greedy(warps.greedy_tokens(logits).tolist(), tokens)
    full = verify([name] * 30, warps.probabilities(logits), drafts, streams)
    assert [accepted for accepted, _ in shortcut] == full.accepted.tolist()
    assert [token for _, token in shortcut] == full.next_token.tolist()
    assert sum(accepted for accepted, _ in shortcut) > 10


def test_every_verifier_that_requests_may_name_is_there() -> None:
    assert tuple(VERIFIERS) == types.VERIFIERS


@pytest.mark.parametrize("order", [list, lambda items: items[::-1]])
def test_the_order_of_the_sequences_does_not_matter(
    order: Callable[[list[int]], list[int]],
) -> None:
    lengths = [3, 0, 5, 2]
    p, tokens, q = random_round(9, lengths)
    first = np.cumsum([0, *(length + 1 for length in lengths)])
    names = ["block", "speculative", "coupled", "lenient"]
    whole = verify(
        names,
        p,
        DraftBatch.from_tokens(tokens, q),
        RandomStreams.from_seeds([1, 2, 3, 4], [5, 6, 7, 8]),
    )
    index = order([0, 1, 2, 3])
    rows = torch.cat([p[first[i] : first[i + 1]] for i in index])
    drafts = DraftBatch.from_tokens([tokens[i] for i in index], [q[i] for i in index])
    moved = verify(
        [names[i] for i in index],
        rows,
        drafts,
        RandomStreams.from_seeds([i + 1 for i in index], [i + 5 for i in index]),
    )
    assert moved.accepted.tolist() == [whole.accepted[i].item() for i in index]
    assert moved.next_token.tolist() == [whole.next_token[i].item() for i in index]
