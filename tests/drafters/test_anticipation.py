"""Anticipation: prepared proposals equal those drafted later, and branches free their pages."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from specserve.config.tree import DEMO
from specserve.drafters.anticipation import Anticipation
from specserve.drafters.base import NO_TOKEN, ForkableDrafter, OutcomeForecast
from specserve.drafters.branch_budget import BranchBudget, IdleTime
from specserve.drafters.branches import Fanout, ObservedOutcome
from specserve.drafters.neural.drafter import NeuralDrafter
from specserve.drafters.prepared_branches import PreparedBranches
from specserve.models.model import ModelOptions, open_model
from specserve.types import DraftStep, Policy, Proposal, Warp

NEVER, LATER, AT_ONCE = float("inf"), 1.0, 0.0  # by the clock of these tests, which stands at 0
VOCAB = 4096


def neural(*, pages: int = 400) -> NeuralDrafter:
    """Return a drafter in bf16, where a row's bits do not depend on the batch."""
    opened = open_model(
        Path(DEMO / "draft"), ModelOptions(dtype="bfloat16", device="cpu", pages=pages)
    )
    return NeuralDrafter(
        opened.runner, vocab_size=VOCAB, target_vocab_size=VOCAB, context=1024, support=16
    )


def anticipating(drafter: ForkableDrafter, *, per_position: int | None = None) -> Anticipation:
    return Anticipation(drafter, Fanout(width=8, per_position=per_position), clock=lambda: 0.0)


class Text:
    """A sequence as the coordinator keeps it, with random verdicts: likely and unlikely tokens."""

    def __init__(self, seq_id: int, policy: Policy, chance: random.Random) -> None:
        self.seq_id, self.policy, self.chance = seq_id, policy, chance
        self.committed = [chance.randrange(VOCAB) for _ in range(policy.prompt_length)]
        self.num_cached = 0

    def step(self, gamma: int) -> DraftStep:
        return DraftStep(
            self.seq_id,
            self.num_cached,
            tuple(self.committed[self.num_cached :]),
            gamma,
            self.policy,
        )

    def commit(self, proposal: Proposal, likely: Sequence[int]) -> None:
        accepted = self.chance.randint(0, len(proposal.tokens))
        after = self.chance.choice([*likely, self.chance.randrange(VOCAB)])
        self.num_cached = min(proposal.num_cached, len(self.committed) + accepted)
        self.committed += [*proposal.tokens[:accepted], after]


WARPS = (Warp(temperature=0.0), Warp(), Warp(temperature=0.7, top_p=0.9))
PENALISED = (Warp(frequency_penalty=0.5, temperature=0.0), Warp(presence_penalty=0.5))


def texts(chance: random.Random, warps: Sequence[Warp]) -> list[Text]:
    kinds = [(warp, verifier) for warp in warps for verifier in ("block", "coupled")]
    return [
        Text(i, Policy(warp, verifier, i, chance.randint(3, 40)), chance)
        for i, (warp, verifier) in enumerate(kinds)
    ]


def next_or_false(answers: list[bool]) -> bool:
    """Remove and return the last answer; False once there are none."""
    return bool(answers) and answers.pop()


def comparable(proposal: Proposal, length: int | None = None) -> object:
    """Return what the first draft tokens of a proposal are, by default all of them."""
    q = proposal.q
    return (
        proposal.start,
        proposal.tokens[:length],
        None if q is None or length == 0 else (q.ids[:length].tolist(), q.probs[:length].tolist()),
    )


@pytest.mark.parametrize(("seed", "warps"), [(0, WARPS), (1, WARPS), (2, PENALISED)])
def test_prepared_proposals_equal_those_drafted_later_whenever_interrupted(
    seed: int, warps: Sequence[Warp]
) -> None:
    """Compare with a drafter that does not anticipate, all sequences with penalties or none.

    What was prepared may be shorter, and some messages leave no time for what was not. A penalty in
    the batch changes how the others' q is computed, in its last bits.
    """
    chance = random.Random(seed)
    model, alone = neural(), neural()
    ahead = anticipating(model)
    running = texts(chance, warps)
    undrafted: set[int] = set()  # in the round before
    num_hits_after_none = 0
    for number in range(50):
        steps = [text.step(chance.randint(0, 5)) for text in running if chance.random() < 0.9]
        deadline = chance.choice((NEVER, LATER, AT_ONCE))
        ready, fresh = ahead.propose(steps, deadline), alone.propose(steps, NEVER)
        for step, one, other in zip(steps, ready, fresh, strict=True):
            length = len(one.tokens)
            assert comparable(one, length) == comparable(other, length)
            assert (
                length == len(other.tokens)
                or deadline == AT_ONCE
                or (deadline == LATER and one.anticipated)
            )
            if length == len(other.tokens):
                assert one.num_cached == other.num_cached, (
                    "the coordinator would hear of other tokens than were sent"
                )
            num_hits_after_none += one.anticipated is True and step.seq_id in undrafted
        undrafted = {
            step.seq_id
            for step, one in zip(steps, ready, strict=True)
            if step.gamma and not one.tokens
        }
        messages = [chance.random() < 0.1 for _ in range(20)]
        ahead.prepare(partial(next_or_false, messages))
        by_id = {text.seq_id: text for text in running}
        for proposal in ready:
            prepared = ahead._branches.prepared.get(proposal.seq_id)
            likely = (
                []
                if prepared is None
                else [
                    token
                    for next_tokens in prepared.forecast.next_tokens
                    for token in map(int, next_tokens[:2])
                    if token != NO_TOKEN
                ]
            )
            by_id[proposal.seq_id].commit(proposal, likely)
        if number == 20:  # some sequences end
            ahead.release([0, 1])
            alone.release([0, 1])
            running = running[2:]
        model.runner.cache.check()
    assert ahead.num_hits > 10
    assert ahead.num_misses > 10
    assert num_hits_after_none > 3, "what follows no draft tokens was never prepared"
    ahead.release([text.seq_id for text in running])
    ahead.prepare(bool)
    assert model.runner.cache.num_used == 0, "branches are left behind"


def test_a_draft_whose_logits_are_not_finite_prepares_nothing_and_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chance, model = random.Random(0), neural()
    network: Any = model.runner
    logits = network.network.logits
    monkeypatch.setattr(
        network.network, "logits", lambda *given: logits(*given).fill_(float("nan"))
    )
    ahead, running = anticipating(model), texts(chance, WARPS)
    for _ in range(5):
        proposals = ahead.propose([text.step(3) for text in running], NEVER)
        ahead.prepare(bool)
        assert all(len(proposal.tokens) == 3 for proposal in proposals)
        for text, proposal in zip(running, proposals, strict=True):
            text.commit(proposal, ())
    model.runner.cache.check()


def test_a_prepared_answer_takes_no_pass() -> None:
    model = neural()
    ahead = anticipating(model, per_position=8)
    text = Text(0, Policy(WARPS[0], "block", 1, 20), random.Random(1))
    (first,) = ahead.propose([text.step(5)], NEVER)
    ahead.prepare(lambda: False)
    (prepared,) = ahead._branches.prepared.values()
    text.num_cached, text.committed = (
        min(first.num_cached, 22),
        [*text.committed, *first.tokens[:2], int(prepared.forecast.next_tokens[2][7])],
    )
    runner: Any = model.runner
    runner.network = None
    (second,) = ahead.propose([text.step(5)], NEVER)
    assert second.anticipated is True
    assert len(second.tokens) == 5


def test_branches_never_take_the_room_of_a_requested_proposal() -> None:
    model = neural(pages=9)  # the text takes up to six; two may be counted twice
    ahead = anticipating(model, per_position=8)
    text = Text(0, Policy(WARPS[0], "block", 1, 40), random.Random(1))
    for _ in range(30):
        (proposal,) = ahead.propose([text.step(4)], NEVER)
        assert len(proposal.tokens) == 4
        ahead.prepare(lambda: False)
        text.commit(proposal, [])
        if len(text.committed) > 80:
            ahead.release([0])
            text.committed, text.num_cached = text.committed[:40], 0
    model.runner.cache.check()


def test_prefill_is_postponed_until_after_the_answer_and_always_done() -> None:
    model = neural()
    ahead = anticipating(model)
    text = Text(0, Policy(WARPS[0], "block", 1, 40), random.Random(1))
    (promise,) = ahead.propose([text.step(0)], NEVER)
    assert (promise.tokens, promise.num_cached, model.runner.cache.length(0)) == ((), 40, 0)
    text.num_cached = 39  # the coordinator keeps the newest token for the step that follows
    (proposal,) = ahead.propose([text.step(3)], NEVER)
    assert (
        proposal.tokens
        == neural()
        .propose([DraftStep(0, 0, tuple(text.committed), 3, text.policy)], NEVER)[0]
        .tokens
    )


def test_the_outcome_is_inferred_from_the_step_that_follows() -> None:
    policy = Policy(Warp(), "block", 0, 1)
    prepared = PreparedBranches(
        OutcomeForecast(0, 10, (5, 6, 7), ((1,), (1,), (1,), (1,))),
        DraftStep(0, 9, (4,), 3, policy),
    )

    def outcome(start: int, tokens: tuple[int, ...]) -> tuple[int, int] | None:
        return prepared.infer_outcome(DraftStep(0, start, tokens, 3, policy))

    assert outcome(10, (9,)) == (0, 9)
    assert outcome(12, (9,)) == (2, 9)
    assert outcome(12, (7, 9)) == (3, 9), "the last draft token was never cached"
    assert outcome(10, (5, 6, 9)) == (2, 9)
    assert outcome(10, (5, 8, 9)) is None, "another text"
    assert outcome(13, (7, 9)) is None, "beyond all that was drafted"
    assert outcome(14, (9,)) is None
    assert outcome(0, (9,) * 11) == (0, 9), "prefilled from its start after a preemption"


def test_no_greedy_branch_is_made_for_a_rejected_token() -> None:
    model = neural()
    policy = Policy(WARPS[0], "block", 1, 20)
    (proposal,) = model.propose([DraftStep(0, 0, tuple(range(20)), 4, policy)], NEVER)
    (forecast,) = model.forecast_outcomes([0], 8)
    assert forecast.drafts == proposal.tokens
    assert forecast.num_positions == 5
    assert all(
        draft not in next_tokens
        for draft, next_tokens in zip(proposal.tokens, forecast.next_tokens, strict=False)
    )
    assert all(len(set(next_tokens)) == 8 for next_tokens in forecast.next_tokens)
    (bonus,) = model.propose([DraftStep(1, 0, (*range(20), *proposal.tokens), 1, policy)], NEVER)
    assert forecast.next_tokens[-1][0] == bonus.tokens[0], (
        "behind all draft tokens the draft model's own next token is the likeliest"
    )


def test_coupled_next_tokens_are_ranked_by_the_targets_noise() -> None:
    """Compare with the token drawn there.

    The drafter draws from its 16 likeliest tokens only; the noise may lift a less likely one above
    all of them.
    """
    model, firsts = neural(), 0
    for seed in range(8):
        policy = Policy(Warp(), "coupled", seed, 20)
        model.propose([DraftStep(seed, 0, tuple(range(20)), 3, policy)], NEVER)
        (forecast,) = model.forecast_outcomes([seed], 8)
        (bonus,) = model.propose(
            [DraftStep(100 + seed, 0, (*range(20), *forecast.drafts), 1, policy)], NEVER
        )
        assert bonus.tokens[0] in forecast.next_tokens[-1][:4]
        firsts += forecast.next_tokens[-1][0] == bonus.tokens[0]
    assert firsts >= 5


def test_the_fanout_learns_how_reliable_a_drafters_confidence_is() -> None:
    fanout = Fanout(width=2)
    forecast = OutcomeForecast(
        0,
        10,
        (5, 6),
        ((1, 2), (3, 4), (8, 9)),
        confidence=(0.9, 0.3),
        next_probs=((0.6, 0.1), (0.6, 0.1), (0.6, 0.1)),
        mode="greedy",
    )
    (before, *_) = fanout.choose([forecast], 6)
    assert (before.accepted, before.token) == (1, 3), (
        "by its own confidence: the first draft token is sure, the second is not"
    )
    for _ in range(200):
        fanout.observe(
            [ObservedOutcome(forecast, 0, 2)]
        )  # its sure drafts are rejected, and its second choice comes
    (after, *_) = fanout.choose([forecast], 6)
    assert (after.accepted, after.token) == (0, 2)
    assert abs(float(fanout.position_probs(forecast).sum()) - 1) < 1e-9
    other = OutcomeForecast(
        0,
        10,
        (5, 6),
        forecast.next_tokens,
        forecast.confidence,
        forecast.next_probs,
        mode="coupled",
    )
    assert fanout.choose([other], 6)[0].accepted == 1, "another mode is calibrated separately"


def test_uncertain_sequences_get_more_branches() -> None:
    sure = OutcomeForecast(
        0,
        10,
        (5,),
        ((1, 2, 3), (4, 5, 6)),
        confidence=(0.99,),
        next_probs=((0.5, 0.2, 0.1), (0.98, 0.001, 0.001)),
    )
    torn = OutcomeForecast(
        1,
        10,
        (5,),
        ((1, 2, 3), (4, 5, 6)),
        confidence=(0.5,),
        next_probs=((0.3, 0.3, 0.2), (0.3, 0.3, 0.2)),
    )
    chosen = Fanout(width=3).choose([sure, torn], 7)
    assert (
        [branch.seq_id for branch in chosen].count(1)
        > [branch.seq_id for branch in chosen].count(0)
        >= 1
    )


def test_a_drafter_without_confidence_gets_its_branches_by_rank() -> None:
    chosen = Fanout(width=3).choose([OutcomeForecast(0, 10, (5,), ((1, 2, 3), (4, 5, 6)))], 2)
    assert {branch.token for branch in chosen} == {1, 4}
    everywhere = Fanout(per_position=3).choose(
        [
            OutcomeForecast(
                0,
                10,
                (5,),
                ((1, 2, 3), (4, 5, 6)),
                confidence=(1.0,),
                next_probs=((0.0,) * 3, (1.0, 0.0, 0.0)),
            )
        ],
        128,
    )
    assert len(everywhere) == 6, "a configured fan-out is kept"


@pytest.mark.parametrize(
    ("per_branch", "at_least", "at_most"), [(0.0, 120, 128), (0.1, 18, 34), (1.0, 4, 5)]
)
def test_as_many_branches_are_drafted_as_there_is_time_for(
    per_branch: float, at_least: int, at_most: int
) -> None:
    """Prepare in a window of 10 ms, by 4 passes of 0.1 ms and `per_branch` for each branch."""
    budget, now, reached = BranchBudget(Fanout()), 0.0, []
    idle = IdleTime(lambda: now)
    for _ in range(300):
        idle.begin()
        start = now
        num_branches = int(budget.num_branches)
        seconds = 0.1 + per_branch * num_branches + 3.0 * (per_branch == 0)
        budget.on_passes(num_branches, seconds)
        if 4 * seconds < 10:
            now = start + 4 * seconds
            idle.on_prepared()
        now = start + 10
        busy_fraction = idle.end()
        assert busy_fraction is not None
        budget.adapt(busy_fraction)
        reached.append(num_branches)
    assert at_least <= median(reached[150:]) <= at_most


def test_prepared_proposals_are_sent_only_while_all_sequences_probably_hit() -> None:
    model = neural()
    ahead = anticipating(model, per_position=8)
    text = Text(0, Policy(WARPS[0], "block", 1, 20), random.Random(1))
    sent = []
    for likely in [True] * 12 + [False] * 30:
        (proposal,) = ahead.propose([text.step(4)], NEVER)
        ahead.prepare(lambda: False)
        sent.append(len(ahead.prepared_proposals()) > 0)
        forecast = ahead._branches.prepared[0].forecast
        after = (
            int(forecast.next_tokens[1][0])
            if likely
            else next(token for token in range(VOCAB) if token not in forecast.next_tokens[1])
        )
        text.num_cached, text.committed = (
            min(proposal.num_cached, len(text.committed) + 1),
            [*text.committed, proposal.tokens[0], after],
        )
    assert (sent[0], sent[11], sent[-1]) == (False, True, False)


def test_a_text_that_is_new_to_the_drafter_is_prepared_for_although_it_has_penalties() -> None:
    """The first step leaves no time to draft, so nothing of it is cached when it is forecast."""
    drafter = neural()
    ahead = anticipating(drafter, per_position=2)
    policy = Policy(Warp(presence_penalty=0.5), "speculative", 1, prompt_length=9)
    step = DraftStep(3, 0, tuple(range(40, 50)), 3, policy)
    (proposal,) = ahead.propose([step], -1.0)
    assert not proposal.tokens
    ahead.prepare(lambda: False)
    assert ahead._branches.prepared[3].branches
