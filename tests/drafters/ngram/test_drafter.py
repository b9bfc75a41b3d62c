"""The drafters without a model, asked as the coordinator asks them: what they propose, what they hold, and their branches."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.drafters.ngram.build import KINDS, open_statistical
from specserve.drafters.ngram.drafter import StatisticalDrafter
from specserve.drafters.ngram.online_counts import Learnt
from specserve.drafters.ngram.tables import FILE, Bigram, count, save
from specserve.engine import Coordinator
from specserve.errors import ConfigError, TokenizerMismatch
from specserve.inprocess import LocalDrafter
from specserve.sampling import Purpose, exponential, row_keys
from specserve.types import Chunk, DraftStep, Policy, Proposal, Request, Warp
from tests.support.chi_square import Fit
from tests.support.fakes import VOCAB as FAKE_VOCAB
from tests.support.fakes import FakeTarget, model_info, text

VOCAB = 8
GREEDY, SAMPLED = Warp(temperature=0.0), Warp()
CORPUS = [[1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 6, 6, 6, 7, 0, 1, 2, 3], [5, 1, 5, 2, 5, 3, 1, 2, 4]]
TABLED = ("unigram", "bigram", "max_gram")


def opened(
    kind: str,
    *,
    learn: bool | None = None,
    vocab: int = VOCAB,
    path: Path | None = None,
    support: int = 64,
) -> StatisticalDrafter:
    return open_statistical(kind, path=path, learn=learn, support=support, vocab_size=vocab)


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tables")
    save(count(CORPUS, keep=8), directory / FILE)
    return directory


def of_kind(kind: str, tables: Path, **options: object) -> StatisticalDrafter:
    return opened(kind, path=tables if kind in TABLED else None, **options)  # type: ignore[arg-type]


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


def ask(drafter: StatisticalDrafter, *steps: DraftStep) -> list[Proposal]:
    return list(drafter.propose(steps, 0.0))


def test_greedy_tables_take_what_came_most_often(tables: Path) -> None:
    (one,), (two,) = (ask(of_kind(kind, tables), step([7, 5])) for kind in ("unigram", "bigram"))
    assert (one.tokens, one.q) == ((1, 1, 1, 1), None)
    assert (two.tokens, two.q) == ((1, 2, 3, 1), None)


def test_copies_follow_the_longest_earlier_ending_and_a_lone_token_is_none() -> None:
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
    """The chi-square of what was drawn, for each verifier's noise, at every depth of a proposal, under several warps."""
    bigram = Bigram(count(CORPUS, keep=8), width=8)
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
                fit.add(np.bincount([p.tokens[depth] for p in own], minlength=VOCAB), stated)
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
    bigram = Bigram(count(CORPUS, keep=8), width=8)
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


def test_draws_depend_on_no_company(tables: Path) -> None:
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
            assert (proposal.tokens, proposal.held) == (alone.tokens, alone.held)
            assert len(proposal.tokens) in (own.gamma, 0)


def test_what_is_held_includes_the_drafts_and_a_gap_is_answered_by_it(tables: Path) -> None:
    for kind in KINDS:
        drafter = of_kind(kind, tables)
        (gap,) = ask(drafter, step([1, 2], start=3))
        assert (gap.tokens, gap.held) == ((), 0)
        (first,) = ask(drafter, step([1, 2, 3, 1, 2]))
        assert first.held == 5 + len(first.tokens)
        (gap,) = ask(drafter, step([1], start=first.held + 1))
        assert (gap.tokens, gap.held) == ((), first.held)
        (read,) = ask(drafter, step([4], start=5, gamma=0))
        assert (read.tokens, read.held) == ((), 6)


def test_a_repeated_step_gets_the_same_answer(tables: Path) -> None:
    for kind in KINDS:
        drafter = of_kind(kind, tables)
        same = step([1, 2, 3, 1, 2], warp=SAMPLED)
        first, second = ask(drafter, same)[0], ask(drafter, same)[0]
        assert first.tokens == second.tokens
        assert len(first.tokens) == 4


def test_tokens_that_the_table_never_saw_are_read_and_never_proposed(tables: Path) -> None:
    (proposal,) = ask(opened("bigram", path=tables, vocab=500), step([1, 400]))
    assert proposal.tokens == (1, 2, 3, 1)


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("warp", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("verifier", ["block", "coupled"])
def test_a_branch_proposes_what_the_sequence_would_and_takes_its_place(
    tables: Path, kind: str, warp: Warp, verifier: str
) -> None:
    """Branches of one sequence, a branch of a branch, all alive while the sequence goes on elsewhere."""
    prompt = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2]

    def asked(tokens: Sequence[int], **kind_of: int) -> DraftStep:
        return step(tokens, warp=warp, verifier=verifier, seed=7, **kind_of)

    drafter = of_kind(kind, tables)
    (proposal,) = ask(drafter, asked(prompt))
    drafts = proposal.tokens
    places = [(accepted, token) for accepted in range(len(drafts) + 1) for token in range(3)]
    for i, (accepted, _) in enumerate(places):
        assert drafter.fork(0, 100 + i, len(prompt) + accepted)
    branches = ask(
        drafter,
        *(
            asked([token], seq_id=100 + i, start=len(prompt) + accepted)
            for i, (accepted, token) in enumerate(places)
        ),
    )
    for (accepted, token), branch in zip(places, branches, strict=True):
        (plain,) = ask(of_kind(kind, tables), asked([*prompt, *drafts[:accepted], token]))
        assert (branch.start, branch.tokens, branch.held) == (plain.start, plain.tokens, plain.held)
    ask(drafter, asked([0, 0], start=3))
    chosen = 100 + places.index((len(drafts), 1))
    drafter.become(0, chosen)
    (after,) = ask(drafter, asked([1], start=len(prompt) + len(drafts)))
    (plain,) = ask(of_kind(kind, tables), asked([*prompt, *drafts, 1]))
    assert (after.start, after.tokens, after.held) == (plain.start, plain.tokens, plain.held)
    drafter.release([0, *range(100, 100 + len(places))])
    assert drafter._followed == {}


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("warp", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_outlooks_name_every_stop_and_no_draft_after_its_own_refusal(
    tables: Path, kind: str, warp: Warp
) -> None:
    drafter = of_kind(kind, tables)
    asked = step([1, 2, 3, 4, 1, 2, 3, 5, 1, 2], warp=warp, verifier="coupled")
    (proposal,) = ask(drafter, asked)
    for _ in range(2):
        (outlook,) = drafter.outlooks([0], 3)
        assert (outlook.start, outlook.drafts, outlook.num_stops) == (10, proposal.tokens, 5)
        assert all(len(set(nexts)) == len(nexts) <= 3 for nexts in outlook.nexts)
        assert all(
            draft not in nexts for draft, nexts in zip(outlook.drafts, outlook.nexts, strict=False)
        )
        assert any(outlook.nexts)
    after = ask(
        drafter, step([outlook.nexts[4][0]], start=14, gamma=1, warp=warp, verifier="coupled")
    )[0]
    assert after.held == 16


def test_the_likeliest_next_token_of_a_coupled_stop_is_what_would_be_drawn_there(
    tables: Path,
) -> None:
    for seed in range(30):
        drafter = of_kind("bigram", tables)
        (proposal,) = ask(
            drafter, step([5, 1], warp=SAMPLED, verifier="coupled", seed=seed, gamma=5)
        )
        (outlook,) = drafter.outlooks([0], 2)
        (longer,) = ask(drafter, step([5, 1], warp=SAMPLED, verifier="coupled", seed=seed, gamma=6))
        assert longer.tokens[:5] == proposal.tokens
        assert outlook.nexts[5][0] == longer.tokens[5]


def test_learning_follows_what_is_committed_and_nothing_else() -> None:
    """Refused drafts and branches leave no trace, accepted drafts count once, a repeated step counts once."""
    learnt, seen = Learnt(width=8), list[int]()
    drafter = StatisticalDrafter(table=learnt, learner=learnt)
    tally = learnt.learn
    learnt.learn = lambda tokens: (seen.extend(tokens[1:] if seen else tokens), tally(tokens))  # type: ignore[method-assign,func-returns-value,assignment]
    (first,) = ask(drafter, step([1, 2, 3, 1, 2, 3, 1]))
    assert first.tokens == (2, 3, 1, 2)
    drafter.fork(0, 9, 8)
    ask(drafter, step([7], seq_id=9, start=8))
    assert seen == [1, 2, 3, 1, 2, 3, 1]
    ask(drafter, step([5], start=9), step([0, 0], seq_id=1))
    ask(drafter, step([5], start=9))
    assert seen == [1, 2, 3, 1, 2, 3, 1, 2, 3, 5, 0]
    drafter.fork(0, 9, 10)
    ask(drafter, step([7], seq_id=9, start=10))
    drafter.become(0, 9)
    ask(drafter, step([7], start=10))
    assert seen == [1, 2, 3, 1, 2, 3, 1, 2, 3, 5, 0, 7]


def test_bigrams_without_tables_learn_from_the_prompt_and_from_others() -> None:
    drafter = opened("bigram")
    assert ask(drafter, step([3]))[0].tokens == ()
    assert ask(drafter, step([1, 2, 1, 2, 1], seq_id=1))[0].tokens == (2, 1, 2, 1)
    assert ask(drafter, step([5, 1], seq_id=2))[0].tokens == (2, 1, 2, 1)


def test_what_a_kind_lacks_or_cannot_use_is_said_by_the_name_of_the_key(tables: Path) -> None:
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


class Served:
    """A coordinator over a fake target and a real drafter."""

    def __init__(self, drafter: StatisticalDrafter, **options: object) -> None:
        self.emitted: list[Chunk] = []
        info = model_info(num_pages=120, page_size=4)
        self.coordinator = Coordinator(
            FakeTarget(info),
            LocalDrafter(drafter),
            info=info,
            emit=self.emitted.extend,
            max_batch_tokens=64,
            max_running=12,
            **options,
        )  # type: ignore[arg-type]

    def finish(self) -> None:
        async def play() -> None:
            for _ in range(5000):
                if not self.coordinator.has_work:
                    return
                await self.coordinator.round()
            raise AssertionError("work is left")

        asyncio.run(play())

    def tokens(self, seq_id: int) -> tuple[int, ...]:
        return tuple(
            token for chunk in self.emitted if chunk.seq_id == seq_id for token in chunk.tokens
        )


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_text_is_the_targets_own_when_gamma_changes_and_sequences_are_preempted(
    tables: Path, kind: str
) -> None:
    drafter = of_kind(kind, tables, vocab=FAKE_VOCAB)
    served, source = Served(drafter), random.Random(0)
    served.coordinator.pacer.choose = lambda sequences, *_: [
        source.randint(0, 6) for _ in sequences
    ]  # type: ignore[method-assign,assignment]
    made = {}
    for length in range(1, 30, 2):
        start = tuple(source.randrange(FAKE_VOCAB) for _ in range(length))
        prompt = (
            start + text(start, 40) if length % 3 else start
        )  # half of what follows has been there
        made[served.coordinator.submit(Request(prompt, 40, Warp(), seed=length))] = prompt
    served.finish()
    assert served.coordinator.scheduler.num_preempted > 0
    assert drafter._followed == {}
    for seq_id, prompt in made.items():
        assert served.tokens(seq_id) == text(prompt, 40)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_course_of_steps_forks_and_releases_gets_what_a_new_drafter_says(
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
            assert (proposal.tokens, proposal.held) == (fresh.tokens, fresh.held)
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
    assert drafter._followed == {}


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_proposal_at_a_long_context_costs_microseconds(tables: Path, kind: str) -> None:
    """A generous bound for a busy machine; `python -m benchmarks.drafters.proposal_time` measures."""
    drafter = of_kind(kind, tables)
    source = random.Random(0)
    prompt = [source.randrange(VOCAB) for _ in range(32_768)]
    ask(drafter, step(prompt, gamma=0))
    seconds: Callable[[], float] = time.process_time
    begun, length = seconds(), len(prompt)
    for _ in range(100):
        (proposal,) = ask(drafter, step([source.randrange(VOCAB)], start=length, gamma=8))
        length += 1
        assert proposal.start == length
    assert (seconds() - begun) / 100 < 1e-3
