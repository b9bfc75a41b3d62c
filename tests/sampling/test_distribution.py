"""The sampled distribution of a mixed batch against the logits processors of transformers.

Draws, truncation to a support, and logprobs.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy import stats
from transformers.generation import logits_process as hf

from specserve.sampling import (
    History,
    Purpose,
    WarpBatch,
    exponential,
    from_sparse_distribution,
    logprobs,
    row_keys,
    sample,
    to_sparse_distribution,
    truncate_to_support,
)
from specserve.types import TokenRule, Warp
from tests.support.card import emulated_cards

VOCAB = 300
WARPS = [
    Warp(),
    Warp(temperature=0.3),
    Warp(temperature=1.7, top_k=5),
    Warp(top_k=1),
    Warp(top_k=10_000),
    Warp(top_p=0.9),
    Warp(top_p=0.01),
    Warp(temperature=0.7, top_k=20, top_p=0.8),
    Warp(min_p=0.2),
    Warp(temperature=1.3, top_k=50, top_p=0.95, min_p=0.1),
    Warp(temperature=0.0),
    Warp(temperature=0.0, top_k=3, top_p=0.5),
    Warp(repetition_penalty=1.4),
    Warp(repetition_penalty=0.8, top_p=0.7),
    Warp(temperature=0.0, repetition_penalty=2.5),
    Warp(logit_bias=((3, 5.0), (7, -100.0))),
    Warp(temperature=0.0, logit_bias=((11, 100.0),)),
    Warp(rule=TokenRule(min_tokens=54, end_ids=(2, 250))),
    Warp(top_k=9, repetition_penalty=1.3, rule=TokenRule(bad_words=((4,), (30, 9), (30, 31, 8)))),
    Warp(top_p=0.9, rule=TokenRule(100, (2,), ((30, 31),), tuple(range(0, VOCAB, 7)))),
    Warp(temperature=0.0, rule=TokenRule(bad_words=tuple((token,) for token in range(290)))),
]


def some_logits(
    rows: int, *, seed: int = 0, scale: float = 3.0, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    return (torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale).to(
        dtype
    )


def transformers_p(row: torch.Tensor, warp: Warp, context: list[int]) -> torch.Tensor:
    """Return p of one row as transformers computes it, with the bias as a separate processor."""
    ids, x = torch.tensor([context]), row[None].float()
    processors: list[hf.LogitsProcessor] = [
        hf.RepetitionPenaltyLogitsProcessor(warp.repetition_penalty)
    ]
    if warp.logit_bias:
        processors.append(
            hf.SequenceBiasLogitsProcessor([[[token], bias] for token, bias in warp.logit_bias])
        )
    if warp.rule is not None:
        processors.extend(rule_processors(warp.rule))
    if warp.temperature == 0:
        processors.append(hf.TopKLogitsWarper(1))
    else:
        processors.append(hf.TemperatureLogitsWarper(warp.temperature))
        processors.extend([hf.TopKLogitsWarper(warp.top_k)] if warp.top_k else [])
        processors.extend([hf.TopPLogitsWarper(warp.top_p)] if warp.top_p < 1 else [])
        processors.extend([hf.MinPLogitsWarper(warp.min_p)] if warp.min_p else [])
    for processor in processors:
        x = processor(ids, x)
    return torch.softmax(x, -1)[0]


def rule_processors(rule: TokenRule, prompt_length: int = 5) -> list[hf.LogitsProcessor]:
    allowed = list(rule.allowed_ids) or list(range(VOCAB))
    found: list[hf.LogitsProcessor] = [
        hf.PrefixConstrainedLogitsProcessor(lambda *_: allowed, num_beams=1)
    ]
    if rule.min_tokens:
        found.append(
            hf.MinNewTokensLengthLogitsProcessor(
                prompt_length, rule.min_tokens, torch.tensor(rule.end_ids)
            )
        )
    if rule.bad_words:
        found.append(hf.NoBadWordsLogitsProcessor([list(word) for word in rule.bad_words]))
    return found


def history(length: int, drafts: tuple[int, ...] = (), *, prompt_length: int = 5) -> History:
    return History(np.random.default_rng(length).integers(0, VOCAB, length), prompt_length, drafts)


def test_a_card_warps_a_mixed_batch_as_the_cpu_does() -> None:
    penalised = Warp(presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.2)
    warps = [*WARPS, penalised, Warp(frequency_penalty=-0.5, logit_bias=((3, 2.0),))]
    drafts = [tuple(range(30, 30 + i % 4)) for i in range(len(warps))]
    histories = [history(40 + i, row_drafts) for i, row_drafts in enumerate(drafts)]
    num_rows = [len(row_drafts) + 1 for row_drafts in drafts]
    logits = some_logits(sum(num_rows))
    expected = WarpBatch(warps, num_rows, histories).probabilities(logits)
    one_row = WarpBatch(warps, [1] * len(warps), [history(40, (7,)) for _ in warps])
    drawn = torch.tensor([[30, 31, 30]]).expand(len(warps), -1)
    drafting = one_row.probabilities(logits[: len(warps)], drawn)
    with emulated_cards():
        found = WarpBatch(warps, num_rows, histories).probabilities(logits.to("cuda:0")).cpu()
        one_row = WarpBatch(warps, [1] * len(warps), [history(40, (7,)) for _ in warps])
        on_card = one_row.probabilities(logits[: len(warps)].to("cuda:0"), drawn.to("cuda:0")).cpu()
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-7)
    torch.testing.assert_close(on_card, drafting, rtol=2e-5, atol=1e-7)


def test_p_of_a_mixed_batch_equals_transformers_row_by_row() -> None:
    drafts = [tuple(range(30, 30 + i % 4)) for i in range(len(WARPS))]
    histories = [history(40 + i, row_drafts) for i, row_drafts in enumerate(drafts)]
    num_rows = [len(row_drafts) + 1 for row_drafts in drafts]
    logits = some_logits(sum(num_rows))
    p = WarpBatch(WARPS, num_rows, histories).probabilities(logits)
    rows = iter(range(len(p)))
    for warp, past, row_drafts in zip(WARPS, histories, drafts, strict=True):
        for j in range(len(row_drafts) + 1):
            row = next(rows)
            expected = transformers_p(logits[row], warp, [*past.tokens.tolist(), *row_drafts[:j]])
            torch.testing.assert_close(
                p[row], expected, rtol=2e-5, atol=1e-7, msg=f"{warp}, row {j}"
            )
            assert torch.equal(p[row] > 0, expected > 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_row_has_the_same_bits_alone_and_in_a_batch_and_the_logits_are_unchanged(
    dtype: torch.dtype,
) -> None:
    histories = [history(50)] * len(WARPS)
    logits = some_logits(len(WARPS), dtype=dtype)
    before = logits.clone()
    together = WarpBatch(WARPS, [1] * len(WARPS), histories).probabilities(logits)
    assert together.dtype == torch.float32
    assert torch.equal(logits, before)
    for row, warp in enumerate(WARPS):
        alone = WarpBatch([warp], [1], histories[:1]).probabilities(logits[row : row + 1])
        assert torch.equal(alone[0], together[row]), warp


def test_presence_and_frequency_count_the_text_with_earlier_drafts_but_not_the_prompt() -> None:
    warp = Warp(presence_penalty=0.5, frequency_penalty=0.25)
    past = History(np.array([1, 2, 3, 3, 4]), prompt_length=2, drafts=(3, 1, 9))
    p = WarpBatch([warp], [4], [past]).probabilities(torch.zeros(4, 12))
    counts = np.zeros((4, 12))
    counts[:, 3], counts[:, 4] = 2, 1
    counts[1:, 3] += 1
    counts[2:, 1] += 1
    counts[3:, 9] += 1
    expected = torch.softmax(torch.tensor(-0.5 * (counts > 0) - 0.25 * counts), -1).float()
    torch.testing.assert_close(p, expected)


def test_a_drafters_single_row_sees_all_the_drafts_so_far() -> None:
    warp = Warp(repetition_penalty=1.5, frequency_penalty=0.3)
    logits = some_logits(4)
    together = WarpBatch([warp], [4], [history(20, (8, 9, 8))]).probabilities(logits)
    for j in range(4):
        alone = WarpBatch([warp], [1], [history(20, (8, 9, 8)[:j])]).probabilities(
            logits[j : j + 1]
        )
        assert torch.equal(alone[0], together[j])


def test_penalties_come_in_the_order_repetition_then_presence_then_bias() -> None:
    warp = Warp(repetition_penalty=2.0, presence_penalty=1.0, logit_bias=((1, 3.0),))
    logits = torch.tensor([[4.0, -2.0, 0.0]])
    p = WarpBatch([warp], [1], [History(np.array([0, 1]), prompt_length=1)]).probabilities(logits)
    torch.testing.assert_close(p[0], torch.softmax(torch.tensor([2.0, -4.0 - 1.0 + 3.0, 0.0]), -1))


def test_greedy_is_a_one_hot_of_the_lowest_of_the_likeliest_and_the_shortcut_agrees() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0]], dtype=torch.bfloat16)
    batch = WarpBatch([Warp(temperature=0)] * 2, [1, 1])
    assert batch.all_greedy
    assert batch.greedy_tokens(logits).tolist() == [1, 0]
    assert batch.probabilities(logits).tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]
    assert not WarpBatch([Warp(temperature=0), Warp()], [1, 1]).all_greedy


def test_the_greedy_shortcut_sees_penalties_and_bias() -> None:
    logits = torch.tensor([[5.0, 4.0, 0.0]]).repeat(2, 1)
    warps = [
        Warp(temperature=0, frequency_penalty=2.0),
        Warp(temperature=0, logit_bias=((2, 9.0),)),
    ]
    batch = WarpBatch(warps, [1, 1], [History(np.array([0]), prompt_length=0), None])
    assert batch.greedy_tokens(logits).tolist() == [1, 2]


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 5e-324])
def test_a_tiny_temperature_is_greedy_and_not_nan(temperature: float) -> None:
    logits = some_logits(3, scale=50)
    p = WarpBatch(
        [Warp(temperature=temperature, top_p=0.9, top_k=7, min_p=0.1)], [3]
    ).probabilities(logits)
    assert torch.equal(p.argmax(-1), logits.argmax(-1))
    assert p.amax(-1).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("warp", WARPS)
def test_masked_logits_stay_impossible(warp: Warp) -> None:
    logits = some_logits(2)
    logits[:, 20:] = -torch.inf
    p = WarpBatch([warp], [2], [history(30)]).probabilities(logits)
    assert not p.isnan().any()
    assert float(p[:, 20:].sum()) == 0
    torch.testing.assert_close(p.sum(-1), torch.ones(2))


def test_top_p_keeps_the_smallest_set_even_when_all_are_equal_and_top_k_keeps_ties() -> None:
    p = WarpBatch(
        [Warp(top_p=0.5), Warp(top_p=0.51), Warp(top_p=1e-9), Warp(top_k=2)], [1] * 4
    ).probabilities(torch.zeros(4, 4))
    assert [(row > 0).tolist() for row in p] == [
        [True, True, False, False],
        [True, True, True, False],
        [True, False, False, False],
        [True] * 4,
    ]


def test_top_p_reaches_its_mass_with_bfloat16_ties() -> None:
    logits = some_logits(64, dtype=torch.bfloat16, scale=0.5)
    full = torch.softmax(logits.double(), -1)
    kept = WarpBatch([Warp(top_p=0.6)], [64]).probabilities(logits) > 0
    for row, mask in zip(full, kept, strict=True):
        assert float(row[mask].sum()) >= 0.6 - 1e-6
        assert float(row[mask].sum() - row[mask].min()) < 0.6 + 1e-6
        assert float(row[mask].min()) >= float(row[~mask].max())


def test_sample_draws_from_unnormalised_weights() -> None:
    weights = torch.tensor([0.0, 1.0, 2.0, 0.5, 0.0, 4.5])
    noise = exponential(row_keys([9], [1], range(100_000), Purpose.NEXT), torch.arange(6))
    drawn = np.bincount(sample(weights.expand(100_000, -1), noise).numpy(), minlength=6)
    assert drawn[0] == drawn[4] == 0
    possible = weights.numpy() > 0
    assert (
        stats.chisquare(
            drawn[possible], (weights / weights.sum()).double().numpy()[possible] * 100_000
        ).pvalue
        > 1e-4
    )


def test_truncate_to_support_keeps_the_likeliest_renormalised() -> None:
    q = torch.softmax(some_logits(5), -1)
    ids, probs = truncate_to_support(q, 8)
    for row, row_ids, row_probs in zip(q, ids, probs, strict=True):
        best = row.sort(descending=True)
        assert row_ids.tolist() == best.indices[:8].tolist()
        torch.testing.assert_close(row_probs, best.values[:8] / best.values[:8].sum())
    assert truncate_to_support(q, 1000)[0].shape == (5, VOCAB)


def test_sparse_distributions_convert_both_ways_unchanged() -> None:
    ids, probs = truncate_to_support(torch.softmax(some_logits(3), -1), 8)
    back_ids, back_probs = from_sparse_distribution(to_sparse_distribution(ids, probs))
    assert torch.equal(ids, back_ids)
    assert torch.equal(probs, back_probs)


def test_logprobs_are_those_of_the_unwarped_distribution() -> None:
    logits = some_logits(4, dtype=torch.bfloat16)
    tokens = torch.tensor([0, 5, 299, 17])
    expected = torch.log_softmax(logits.double(), -1)
    for row, (token, found) in enumerate(
        zip(tokens.tolist(), logprobs(logits, tokens, 3), strict=True)
    ):
        assert found.token == pytest.approx(expected[row, token].item(), abs=1e-5)
        assert found.top == pytest.approx(
            expected[row].sort(descending=True).values[:3].tolist(), abs=1e-5
        )
        assert all(a >= b for a, b in itertools.pairwise(found.top))
        assert [expected[row, i].item() for i in found.top_ids] == pytest.approx(
            list(found.top), abs=1e-5
        )
    assert logprobs(logits, tokens, 0)[0].top == ()
    assert len(logprobs(logits, tokens, 10_000)[0].top) == VOCAB


def test_an_empty_batch_has_an_empty_distribution() -> None:
    assert WarpBatch([], []).probabilities(torch.zeros(0, 10)).shape == (0, 10)
    assert WarpBatch([], []).greedy_tokens(torch.zeros(0, 10)).shape == (0,)
