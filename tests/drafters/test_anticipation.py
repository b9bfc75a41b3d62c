"""Anticipation: what is prepared is what would be drafted, whoever interrupts it, and its pages are only borrowed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from specserve.config.tree import DEMO
from specserve.drafters.anticipation import Anticipation, Expected
from specserve.drafters.base import Outlook
from specserve.drafters.branches import Fanout
from specserve.drafters.neural.drafter import NeuralDrafter
from specserve.models.model import Placement, open_model
from specserve.types import DraftStep, Policy, Proposal, Warp

NEVER = float("inf")
VOCAB = 4096


def neural(*, pages: int = 400) -> NeuralDrafter:
    """In bf16, where a row's bits do not depend on its company."""
    opened = open_model(
        Path(DEMO / "draft"), Placement(dtype="bfloat16", device="cpu", pages=pages)
    )
    return NeuralDrafter(
        opened.runner, vocab_size=VOCAB, target_vocab_size=VOCAB, context=1024, support=16
    )


def anticipating(drafter: NeuralDrafter, *, per_stop: int | None = None) -> Anticipation:
    return Anticipation(drafter, Fanout(width=8, per_stop=per_stop), clock=lambda: 0.0)


class Text:
    """A sequence as the coordinator keeps it; verdicts are drawn at random, likely tokens and unlikely ones."""

    def __init__(self, seq_id: int, policy: Policy, chance: random.Random) -> None:
        self.seq_id, self.policy, self.chance = seq_id, policy, chance
        self.committed = [chance.randrange(VOCAB) for _ in range(policy.prompt_length)]
        self.held = 0

    def step(self, gamma: int) -> DraftStep:
        return DraftStep(
            self.seq_id, self.held, tuple(self.committed[self.held :]), gamma, self.policy
        )

    def take(self, proposal: Proposal, likely: Sequence[int]) -> None:
        accepted = self.chance.randint(0, len(proposal.tokens))
        after = self.chance.choice([*likely, self.chance.randrange(VOCAB)])
        self.held = min(proposal.held, len(self.committed) + accepted)
        self.committed += [*proposal.tokens[:accepted], after]


WARPS = (Warp(temperature=0.0), Warp(), Warp(temperature=0.7, top_p=0.9))
PENALISED = (Warp(frequency_penalty=0.5, temperature=0.0), Warp(presence_penalty=0.5))


def texts(chance: random.Random, warps: Sequence[Warp]) -> list[Text]:
    kinds = [(warp, verifier) for warp in warps for verifier in ("block", "coupled")]
    return [
        Text(i, Policy(warp, verifier, i, chance.randint(3, 40)), chance)
        for i, (warp, verifier) in enumerate(kinds)
    ]


def as_it_is(proposal: Proposal) -> object:
    q = proposal.q
    return (
        proposal.start,
        proposal.tokens,
        None if q is None else (q.ids.tolist(), q.probs.tolist()),
    )


@pytest.mark.parametrize(("seed", "warps"), [(0, WARPS), (1, WARPS), (2, PENALISED)])
def test_what_is_prepared_is_what_would_have_been_drafted_whenever_it_is_interrupted(
    seed: int, warps: Sequence[Warp]
) -> None:
    """All with penalties, or all without: a penalty in the batch changes how the others' q is computed, in its last bits."""
    chance = random.Random(seed)
    model, alone = neural(), neural()
    ahead = anticipating(model)
    running = texts(chance, warps)
    for number in range(30):
        steps = [text.step(chance.randint(0, 5)) for text in running if chance.random() < 0.9]
        ready, fresh = ahead.propose(steps, NEVER), alone.propose(steps, NEVER)
        assert [as_it_is(one) for one in ready] == [as_it_is(one) for one in fresh]
        for one, other in zip(ready, fresh, strict=True):
            assert one.held == other.held, (
                "the coordinator would be told of other tokens than were sent"
            )
        looks = [chance.random() < 0.1 for _ in range(20)]
        ahead.prepare(lambda looks=looks: bool(looks) and looks.pop())
        by_id = {text.seq_id: text for text in running}
        for proposal in fresh:
            expected = ahead._expected.get(proposal.seq_id)
            likely = (
                []
                if expected is None
                else [token for nexts in expected.outlook.nexts for token in nexts[:2]]
            )
            by_id[proposal.seq_id].take(proposal, likely)
        if number == 20:  # some end, and others start under ids of their own
            ahead.release([0, 1])
            alone.release([0, 1])
            running = running[2:]
        model.runner.cache.check()
    assert ahead.num_hits > 10
    assert ahead.num_misses > 10
    ahead.release([text.seq_id for text in running])
    ahead.prepare(bool)
    assert model.runner.cache.num_used == 0, "branches are left behind"


def test_an_answer_that_was_prepared_takes_no_pass() -> None:
    model = neural()
    ahead = anticipating(model, per_stop=8)
    text = Text(0, Policy(WARPS[0], "block", 1, 20), random.Random(1))
    (first,) = ahead.propose([text.step(5)], NEVER)
    ahead.prepare(lambda: False)
    (expected,) = ahead._expected.values()
    text.held, text.committed = (
        min(first.held, 22),
        [*text.committed, *first.tokens[:2], expected.outlook.nexts[2][7]],
    )
    model.runner.network = None  # type: ignore[assignment]
    (second,) = ahead.propose([text.step(5)], NEVER)
    assert second.anticipated is True
    assert len(second.tokens) == 5


def test_what_is_asked_for_is_never_refused_for_what_was_prepared() -> None:
    model = neural(pages=9)  # the text takes up to six, and two may be counted twice
    ahead = anticipating(model, per_stop=8)
    text = Text(0, Policy(WARPS[0], "block", 1, 40), random.Random(1))
    for _ in range(30):
        (proposal,) = ahead.propose([text.step(4)], NEVER)
        assert len(proposal.tokens) == 4
        ahead.prepare(lambda: False)
        text.take(proposal, [])
        if len(text.committed) > 80:
            ahead.release([0])
            text.committed, text.held = text.committed[:40], 0
    model.runner.cache.check()


def test_reading_along_is_put_off_until_the_answer_is_out_and_never_forgotten() -> None:
    model = neural()
    ahead = anticipating(model)
    text = Text(0, Policy(WARPS[0], "block", 1, 40), random.Random(1))
    (promise,) = ahead.propose([text.step(0)], NEVER)
    assert (promise.tokens, promise.held, model.runner.cache.length(0)) == ((), 40, 0)
    text.held = 39  # the coordinator keeps the newest token for the step that follows
    (proposal,) = ahead.propose([text.step(3)], NEVER)
    assert (
        proposal.tokens
        == neural()
        .propose([DraftStep(0, 0, tuple(text.committed), 3, text.policy)], NEVER)[0]
        .tokens
    )


def test_a_step_is_told_from_the_verdict_that_led_to_it() -> None:
    expected = Expected(Outlook(0, 10, (5, 6, 7), ((1,), (1,), (1,), (1,))))
    policy = Policy(Warp(), "block", 0, 1)

    def verdict(start: int, tokens: tuple[int, ...]) -> tuple[int, int] | None:
        return expected.verdict(DraftStep(0, start, tokens, 3, policy))

    assert verdict(10, (9,)) == (0, 9)
    assert verdict(12, (9,)) == (2, 9)
    assert verdict(12, (7, 9)) == (3, 9), "the last draft was never read"
    assert verdict(10, (5, 6, 9)) == (2, 9)
    assert verdict(10, (5, 8, 9)) is None, "another text"
    assert verdict(13, (7, 9)) is None, "beyond all that was drafted"
    assert verdict(14, (9,)) is None
    assert verdict(0, (9,) * 11) == (0, 9), (
        "read from its beginning, after its pages were taken away"
    )


def test_a_greedy_fork_is_not_made_for_the_token_that_was_refused() -> None:
    model = neural()
    policy = Policy(WARPS[0], "block", 1, 20)
    (proposal,) = model.propose([DraftStep(0, 0, tuple(range(20)), 4, policy)], NEVER)
    (outlook,) = model.outlooks([0], 8)
    assert outlook.drafts == proposal.tokens
    assert outlook.num_stops == 5
    assert all(
        draft not in nexts for draft, nexts in zip(proposal.tokens, outlook.nexts, strict=False)
    )
    assert all(len(set(nexts)) == 8 for nexts in outlook.nexts)
    (bonus,) = model.propose([DraftStep(1, 0, (*range(20), *proposal.tokens), 1, policy)], NEVER)
    assert outlook.nexts[-1][0] == bonus.tokens[0], (
        "behind all drafts the draft's own next token is the likeliest"
    )


def test_coupled_candidates_are_ranked_by_the_noise_that_the_target_will_use() -> None:
    """The draft itself draws from its 16 likeliest tokens alone; the noise may lift one from further down above all of them."""
    model, firsts = neural(), 0
    for seed in range(8):
        policy = Policy(Warp(), "coupled", seed, 20)
        model.propose([DraftStep(seed, 0, tuple(range(20)), 3, policy)], NEVER)
        (outlook,) = model.outlooks([seed], 8)
        (bonus,) = model.propose(
            [DraftStep(100 + seed, 0, (*range(20), *outlook.drafts), 1, policy)], NEVER
        )
        assert bonus.tokens[0] in outlook.nexts[-1][:4]
        firsts += outlook.nexts[-1][0] == bonus.tokens[0]
    assert firsts >= 5


def test_the_fanout_learns_how_far_a_draft_s_opinion_can_be_trusted() -> None:
    fanout = Fanout(width=2)
    outlook = Outlook(
        0,
        10,
        (5, 6),
        ((1, 2), (3, 4), (8, 9)),
        trust=(0.9, 0.3),
        shares=((0.6, 0.1), (0.6, 0.1), (0.6, 0.1)),
        mode="greedy",
    )
    (before, *_) = fanout.choose([outlook], 6)
    assert (before.accepted, before.token) == (1, 3), (
        "as it says itself: the first draft is sure, the second is not"
    )
    for _ in range(200):
        fanout.observe(outlook, 0, 2)  # its sure drafts are refused, and its second choice comes
    (after, *_) = fanout.choose([outlook], 6)
    assert (after.accepted, after.token) == (0, 2)
    assert abs(float(fanout.stops(outlook).sum()) - 1) < 1e-9
    other = Outlook(0, 10, (5, 6), outlook.nexts, outlook.trust, outlook.shares, mode="coupled")
    assert fanout.choose([other], 6)[0].accepted == 1, "another kind of opinion is judged by itself"


def test_branches_go_to_the_sequences_that_are_hard_to_tell() -> None:
    sure = Outlook(
        0,
        10,
        (5,),
        ((1, 2, 3), (4, 5, 6)),
        trust=(0.99,),
        shares=((0.5, 0.2, 0.1), (0.98, 0.001, 0.001)),
    )
    torn = Outlook(
        1, 10, (5,), ((1, 2, 3), (4, 5, 6)), trust=(0.5,), shares=((0.3, 0.3, 0.2), (0.3, 0.3, 0.2))
    )
    chosen = Fanout(width=3).choose([sure, torn], 7)
    assert (
        [branch.seq_id for branch in chosen].count(1)
        > [branch.seq_id for branch in chosen].count(0)
        >= 1
    )


def test_a_drafter_without_an_opinion_gets_its_branches_by_rank() -> None:
    chosen = Fanout(width=3).choose([Outlook(0, 10, (5,), ((1, 2, 3), (4, 5, 6)))], 2)
    assert {branch.token for branch in chosen} == {1, 4}
    everywhere = Fanout(per_stop=3).choose(
        [
            Outlook(
                0,
                10,
                (5,),
                ((1, 2, 3), (4, 5, 6)),
                trust=(1.0,),
                shares=((0.0,) * 3, (1.0, 0.0, 0.0)),
            )
        ],
        128,
    )
    assert len(everywhere) == 6, "a fan-out that was asked for is kept"


def test_what_is_foreseen_is_told_only_while_it_is_likely_to_spare_the_wait() -> None:
    model = neural()
    ahead = anticipating(model, per_stop=8)
    text = Text(0, Policy(WARPS[0], "block", 1, 20), random.Random(1))
    told = []
    for likely in [True] * 12 + [False] * 30:
        (proposal,) = ahead.propose([text.step(4)], NEVER)
        ahead.prepare(lambda: False)
        told.append(len(ahead.foreseen()) > 0)
        outlook = ahead._expected[0].outlook
        after = (
            outlook.nexts[1][0]
            if likely
            else next(token for token in range(VOCAB) if token not in outlook.nexts[1])
        )
        text.held, text.committed = (
            min(proposal.held, len(text.committed) + 1),
            [*text.committed, proposal.tokens[0], after],
        )
    assert (told[0], told[11], told[-1]) == (False, True, False)
