"""Drafters without a model: their proposals, cached positions and branches."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.drafters.ngram.build import KINDS, open_ngram_drafter
from specserve.drafters.ngram.drafter import NgramDrafter
from specserve.drafters.ngram.online_counts import OnlineTable
from specserve.drafters.ngram.tables import TABLES_FILE, BigramTable, count_texts, save_tables
from specserve.errors import ConfigError, TokenizerMismatch
from specserve.llm.inprocess import LocalDrafter
from specserve.sampling import Purpose, exponential, row_keys
from specserve.types import DraftStep, Policy, Proposal, Request, Warp
from tests.support.chi_square import Fit
from tests.support.fakes import VOCAB as FAKE_VOCAB
from tests.support.fakes import model_info, text
from tests.support.served import Served

VOCAB = 8
GREEDY, SAMPLED = Warp(temperature=0.0), Warp()
CORPUS = [[1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 6, 6, 6, 7, 0, 1, 2, 3], [5, 1, 5, 2, 5, 3, 1, 2, 4]]
WITH_TABLES = ("unigram", "bigram", "max_gram")


def opened(
    kind: str,
    *,
    learn: bool | None = None,
    vocab: int = VOCAB,
    path: Path | None = None,
    support: int = 64,
) -> NgramDrafter:
    return open_ngram_drafter(kind, path=path, learn=learn, support=support, vocab_size=vocab)


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tables")
    save_tables(count_texts(CORPUS, keep=8), directory / TABLES_FILE)
    return directory


def of_kind(kind: str, tables: Path, **options: Any) -> NgramDrafter:
    return opened(kind, path=tables if kind in WITH_TABLES else None, **options)


def step(
    tokens: Sequence[int],
    *,
    seq_id: int = 0,
    start: int = 0,
    gamma: int = 4,
    warp: Warp = GREEDY,
    seed: int = 1,
    verifier: str = "block",
) -> DraftStep:
    return DraftStep(
        seq_id, start, tuple(tokens), gamma, Policy(warp, verifier, seed, prompt_length=1)
    )


def ask(drafter: NgramDrafter, *steps: DraftStep) -> list[Proposal]:
    return list(drafter.propose(steps, 0.0))


def test_greedy_tables_take_what_came_most_often(tables: Path) -> None:
    (one,), (two,) = (ask(of_kind(kind, tables), step([7, 5])) for kind in ("unigram", "bigram"))
    assert (one.tokens, one.q) == ((1, 1, 1, 1), None)
    assert (two.tokens, two.q) == ((1, 2, 3, 1), None)


def test_copies_follow_the_longest_match_and_one_token_is_no_match() -> None:
    drafter = opened("prompt_copy")
    assert ask(drafter, step([3, 1, 2, 7, 0, 1, 2, 6, 5, 1, 2]))[0].tokens == (6, 5, 1, 2)
    assert ask(drafter, step([3, 1, 2, 7, 5, 0, 1, 2, 6, 0, 1], seq_id=1))[0].tokens == (2, 6, 0, 1)
    assert ask(drafter, step([1, 2, 3, 1], seq_id=2))[0].tokens == ()


def test_max_gram_copies_and_falls_back_on_bigrams(tables: Path) -> None:
    drafter = of_kind("max_gram", tables)
    copied, counted = ask(drafter, step([7, 1, 4, 0, 7, 1]), step([7, 3, 7, 5], seq_id=1))
    assert copied.tokens == (4, 0, 7, 1)
    assert counted.tokens == (1, 2, 3, 1)


def test_sampled_draws_follow_the_row_that_is_stated(tables: Path) -> None:
    """Test by chi-square each verifier's noise at every depth, under several warps."""
    bigram = BigramTable(count_texts(CORPUS, keep=8), width=8)
    for verifier in ("block", "coupled"):
        for warp in (
            SAMPLED,
            Warp(temperature=0.6, top_k=2),
            Warp(top_p=0.7),
            Warp(temperature=0.2, min_p=0.3),
        ):
            steps = [
                step([5], seq_id=seed, gamma=2, warp=warp, seed=seed, verifier=verifier)
                for seed in range(3000)
            ]
            proposals = ask(of_kind("bigram", tables), *steps)
            fit, follower = Fit(), bigram.row(5, 0)
            assert follower is not None
            first = {int(p.tokens[0]) for p in proposals}
            for before in (None, *first):
                own = [p for p in proposals if before is None or p.tokens[0] == before]
                depth = 0 if before is None else 1
                q = own[0].q
                assert q is not None
                stated = np.bincount(q.ids[depth], q.probs[depth], minlength=VOCAB)
                counts = np.bincount([p.tokens[depth] for p in own], minlength=VOCAB)
                fit.add(counts, stated.astype(np.float64))
            assert fit.p_value > 1e-3, (verifier, warp)
            assert len(first) == follower.support or warp != SAMPLED


def test_the_support_bounds_what_is_drawn_and_q_is_renormalised(tables: Path) -> None:
    drafter = of_kind("bigram", tables, support=2)
    (proposal,) = ask(drafter, step([5], warp=SAMPLED, gamma=8))
    assert proposal.q is not None
    assert proposal.q.ids.shape == proposal.q.probs.shape == (8, 2)
    np.testing.assert_allclose(proposal.q.probs.sum(1), 1, atol=1e-6)
    assert all(token in ids for token, ids in zip(proposal.tokens, proposal.q.ids, strict=True))


def test_coupled_drafts_are_the_tables_own_sample_under_the_targets_noise(tables: Path) -> None:
    bigram = BigramTable(count_texts(CORPUS, keep=8), width=8)
    (proposal,) = ask(
        of_kind("bigram", tables), step([5, 1], warp=SAMPLED, verifier="coupled", seed=99, gamma=6)
    )
    token, expected = 1, []
    for position in range(2, 8):
        row = bigram.row(token, 0)
        assert row is not None
        keys = row_keys([99], [0], [position], Purpose.COUPLED)
        scores = torch.from_numpy(row.probs) / exponential(keys, torch.from_numpy(row.ids))[0]
        token = int(row.ids[int(scores.argmax())])
        expected.append(token)
    assert list(proposal.tokens) == expected
    assert len(set(expected)) > 1


def test_draws_do_not_depend_on_the_batch(tables: Path) -> None:
    warps = [GREEDY, SAMPLED, Warp(temperature=0.5), Warp(top_k=2), SAMPLED]
    verifiers = ["block", "coupled", "speculative", "coupled", "block"]
    for kind in KINDS:
        steps = [
            step(
                [1, 2, 3, 1, 2][: i + 1],
                seq_id=i,
                gamma=i + 1,
                warp=warp,
                seed=i,
                verifier=verifier,
            )
            for i, (warp, verifier) in enumerate(zip(warps, verifiers, strict=True))
        ]
        together = ask(of_kind(kind, tables), *steps)
        for own, proposal in zip(steps, together, strict=True):
            (alone,) = ask(of_kind(kind, tables), own)
            assert (proposal.tokens, proposal.num_cached) == (alone.tokens, alone.num_cached)
            assert len(proposal.tokens) in (own.gamma, 0)


def test_cached_positions_include_the_drafts_and_answer_a_gap(tables: Path) -> None:
    for kind in KINDS:
        drafter = of_kind(kind, tables)
        (gap,) = ask(drafter, step([1, 2], start=3))
        assert (gap.tokens, gap.num_cached) == ((), 0)
        (first,) = ask(drafter, step([1, 2, 3, 1, 2]))
        assert first.num_cached == 5 + len(first.tokens)
        (gap,) = ask(drafter, step([1], start=first.num_cached + 1))
        assert (gap.tokens, gap.num_cached) == ((), first.num_cached)
        (read,) = ask(drafter, step([4], start=5, gamma=0))
        assert (read.tokens, read.num_cached) == ((), 6)


def test_a_repeated_step_gets_the_same_answer(tables: Path) -> None:
    for kind in KINDS:
        drafter = of_kind(kind, tables)
        same = step([1, 2, 3, 1, 2], warp=SAMPLED)
        first, second = ask(drafter, same)[0], ask(drafter, same)[0]
        assert first.tokens == second.tokens
        assert len(first.tokens) == 4


def test_tokens_unknown_to_the_table_are_accepted_as_input_and_never_proposed(tables: Path) -> None:
    (proposal,) = ask(opened("bigram", path=tables, vocab=500), step([1, 400]))
    assert proposal.tokens == (1, 2, 3, 1)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("warp", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("verifier", ["block", "coupled"])
def test_a_branch_proposes_what_the_sequence_would_and_replaces_it(
    tables: Path, kind: str, warp: Warp, verifier: str
) -> None:
    """Fork a sequence many times and draft for all branches while the sequence continues."""
    prompt = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2]

    def asked(tokens: Sequence[int], **kind_of: int) -> DraftStep:
        return step(tokens, warp=warp, verifier=verifier, seed=7, **kind_of)

    drafter = of_kind(kind, tables)
    (proposal,) = ask(drafter, asked(prompt))
    drafts = proposal.tokens
    outcomes = [(accepted, token) for accepted in range(len(drafts) + 1) for token in range(3)]
    for i, (accepted, _) in enumerate(outcomes):
        assert drafter.fork(0, 100 + i, len(prompt) + accepted)
    branches = ask(
        drafter,
        *(
            asked([token], seq_id=100 + i, start=len(prompt) + accepted)
            for i, (accepted, token) in enumerate(outcomes)
        ),
    )
    for (accepted, token), branch in zip(outcomes, branches, strict=True):
        (plain,) = ask(of_kind(kind, tables), asked([*prompt, *drafts[:accepted], token]))
        assert (branch.start, branch.tokens, branch.num_cached) == (
            plain.start,
            plain.tokens,
            plain.num_cached,
        )
    ask(drafter, asked([0, 0], start=3))
    chosen = 100 + outcomes.index((len(drafts), 1))
    drafter.promote_branch(0, chosen)
    (after,) = ask(drafter, asked([1], start=len(prompt) + len(drafts)))
    (plain,) = ask(of_kind(kind, tables), asked([*prompt, *drafts, 1]))
    assert (after.start, after.tokens, after.num_cached) == (
        plain.start,
        plain.tokens,
        plain.num_cached,
    )
    drafter.release([0, *range(100, 100 + len(outcomes))])
    assert drafter._sequences == {}


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("warp", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_forecasts_cover_every_position_without_its_rejected_draft(
    tables: Path, kind: str, warp: Warp
) -> None:
    drafter = of_kind(kind, tables)
    asked = step([1, 2, 3, 4, 1, 2, 3, 5, 1, 2], warp=warp, verifier="coupled")
    (proposal,) = ask(drafter, asked)
    for _ in range(2):
        (forecast,) = drafter.forecast_outcomes([0], 3)
        assert (forecast.start, forecast.drafts, forecast.num_positions) == (10, proposal.tokens, 5)
        assert all(
            len(set(next_tokens)) == len(next_tokens) <= 3 for next_tokens in forecast.next_tokens
        )
        assert all(
            draft not in next_tokens
            for draft, next_tokens in zip(forecast.drafts, forecast.next_tokens, strict=False)
        )
        assert any(forecast.next_tokens)
    after = ask(
        drafter,
        step([forecast.next_tokens[4][0]], start=14, gamma=1, warp=warp, verifier="coupled"),
    )[0]
    assert after.num_cached == 16


def test_the_top_ranked_token_at_a_coupled_position_is_the_one_drawn_there(
    tables: Path,
) -> None:
    for seed in range(30):
        drafter = of_kind("bigram", tables)
        (proposal,) = ask(
            drafter, step([5, 1], warp=SAMPLED, verifier="coupled", seed=seed, gamma=5)
        )
        (forecast,) = drafter.forecast_outcomes([0], 2)
        (longer,) = ask(drafter, step([5, 1], warp=SAMPLED, verifier="coupled", seed=seed, gamma=6))
        assert longer.tokens[:5] == proposal.tokens
        assert forecast.next_tokens[5][0] == longer.tokens[5]


class RecordingTable(OnlineTable):
    """A table that records the tokens that it learns."""

    def __init__(self, *, width: int) -> None:
        super().__init__(width=width)
        self.learned: list[int] = []

    def learn(self, tokens: Sequence[int]) -> None:
        self.learned += tokens[1:] if self.learned else tokens
        super().learn(tokens)


def test_only_committed_tokens_are_learned() -> None:
    """Ignore rejected drafts and branches; count accepted drafts and a repeated step once."""
    table = RecordingTable(width=8)
    drafter = NgramDrafter(table=table, learner=table)
    (first,) = ask(drafter, step([1, 2, 3, 1, 2, 3, 1]))
    assert first.tokens == (2, 3, 1, 2)
    drafter.fork(0, 9, 8)
    ask(drafter, step([7], seq_id=9, start=8))
    assert table.learned == [1, 2, 3, 1, 2, 3, 1]
    ask(drafter, step([5], start=9), step([0, 0], seq_id=1))
    ask(drafter, step([5], start=9))
    assert table.learned == [1, 2, 3, 1, 2, 3, 1, 2, 3, 5, 0]
    drafter.fork(0, 9, 10)
    ask(drafter, step([7], seq_id=9, start=10))
    drafter.promote_branch(0, 9)
    ask(drafter, step([7], start=10))
    assert table.learned == [1, 2, 3, 1, 2, 3, 1, 2, 3, 5, 0, 7]


def test_bigrams_without_tables_learn_from_the_prompt_and_from_others() -> None:
    drafter = opened("bigram")
    assert ask(drafter, step([3]))[0].tokens == ()
    assert ask(drafter, step([1, 2, 1, 2, 1], seq_id=1))[0].tokens == (2, 1, 2, 1)
    assert ask(drafter, step([5, 1], seq_id=2))[0].tokens == (2, 1, 2, 1)


def test_missing_and_useless_keys_of_a_kind_are_named(tables: Path) -> None:
    for kind in ("unigram", "bigram"):
        with pytest.raises(ConfigError, match=r"draft\.path"):
            opened(kind, learn=False)
    for kind in ("random", "prompt_copy"):
        with pytest.raises(ConfigError, match=r"draft\.path"):
            opened(kind, path=tables)
        with pytest.raises(ConfigError, match=r"draft\.learn"):
            opened(kind, learn=True)
    with pytest.raises(TokenizerMismatch, match="8 tokens"):
        opened("bigram", path=tables, vocab=7)
    assert ask(opened("max_gram", learn=False), step([1, 2]))[0].tokens == ()


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_text_is_the_targets_own_when_gamma_changes_and_sequences_are_preempted(
    tables: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = of_kind(kind, tables, vocab=FAKE_VOCAB)
    served = Served(
        drafter=LocalDrafter(drafter),
        info=model_info(num_pages=120, page_size=4),
        max_batch_tokens=64,
        max_running=12,
    )
    chance = random.Random(0)
    monkeypatch.setattr(
        served.coordinator.pacer,
        "choose",
        lambda sequences, *_: [chance.randint(0, 6) for _ in sequences],
    )
    prompts = {}
    for length in range(1, 30, 2):
        start = tuple(chance.randrange(FAKE_VOCAB) for _ in range(length))
        # Half of the continuation is in the prompt.
        prompt = start + text(start, 40) if length % 3 else start
        prompts[served.coordinator.submit(Request(prompt, 40, Warp(), seed=length))] = prompt
    served.finish()
    assert served.coordinator.scheduler.num_preempted > 0
    assert drafter._sequences == {}
    for seq_id, prompt in prompts.items():
        assert served.tokens(seq_id) == text(prompt, 40)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_course_of_steps_forks_and_releases_equals_a_new_drafter(
    tables: Path, data: st.DataObject
) -> None:
    draw = data.draw
    kind = draw(st.sampled_from(list(KINDS)))
    drafter, texts = of_kind(kind, tables), dict[int, list[int]]()
    for number in range(draw(st.integers(1, 20))):
        action = draw(st.sampled_from(["step", "step", "step", "fork", "release"]))
        known = sorted(texts)
        if action == "step" or not known:
            seq_id = draw(st.sampled_from([*known, number]))
            whole = texts.setdefault(seq_id, [])
            start = draw(st.integers(0, len(whole)))
            tokens = draw(st.lists(st.integers(0, 3), min_size=1, max_size=10))
            asked = step(
                tokens,
                seq_id=seq_id,
                start=start,
                gamma=draw(st.integers(0, 4)),
                warp=SAMPLED,
                seed=3,
            )
            (proposal,) = ask(drafter, asked)
            whole[start:] = tokens
            (fresh,) = ask(
                of_kind(kind, tables), step(whole, gamma=asked.gamma, warp=SAMPLED, seed=3)
            )
            assert (proposal.tokens, proposal.num_cached) == (fresh.tokens, fresh.num_cached)
            whole += proposal.tokens
        elif action == "fork":
            seq_id = draw(st.sampled_from(known))
            length = draw(st.integers(0, len(texts[seq_id])))
            assert drafter.fork(seq_id, 1000 + number, length)
            texts[1000 + number] = texts[seq_id][:length]
        else:
            seq_id = draw(st.sampled_from(known))
            drafter.release([seq_id])
            del texts[seq_id]
    drafter.release(list(texts))
    assert drafter._sequences == {}


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_proposal_at_a_long_context_costs_microseconds(tables: Path, kind: str) -> None:
    """Draft within a generous bound, for a busy machine.

    `python -m lab.bench.drafters.proposal_time` measures.
    """
    drafter = of_kind(kind, tables)
    chance = random.Random(0)
    prompt = [chance.randrange(VOCAB) for _ in range(32_768)]
    ask(drafter, step(prompt, gamma=0))
    seconds: Callable[[], float] = time.process_time
    start, length = seconds(), len(prompt)
    for _ in range(100):
        (proposal,) = ask(drafter, step([chance.randrange(VOCAB)], start=length, gamma=8))
        length += 1
        assert proposal.start == length
    assert (seconds() - start) / 100 < 1e-3
