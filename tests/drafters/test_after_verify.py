"""A drafter in the target's worker: the texts, what is drafted when, and a drafter that fails."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from specserve.config.sections import MAX_CATCH_UP
from specserve.drafters.after_verify import DraftAfterVerify
from specserve.errors import OutOfPages
from specserve.models.target import TargetModel
from specserve.types import DraftStep, Policy, Proposal, Verdict, VerifyStep, Warp
from tests.support import checkpoints
from tests.support.engines import (
    Engine,
    RandomPacer,
    greedy,
    library_greedy,
    load_target,
    model_options,
)
from tests.support.local_worker import run_together

PROMPTS = [[7, 11, 13], [5] * 40, list(range(3, 90)), [9, 8], list(range(100, 130))]
POLICY = Policy(Warp(temperature=0), "speculative", seed=0, prompt_length=3)
NUM_TOKENS = 48


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("pair")
    target = checkpoints.make("llama", root / "target")
    return target, checkpoints.perturb(target, root / "draft", 0.05)


@pytest.fixture(scope="module")
def expected(pair: tuple[Path, Path]) -> list[tuple[int, ...]]:
    return library_greedy(pair[0], PROMPTS, max_tokens=NUM_TOKENS)


@pytest.mark.parametrize("pages", [400, 12], ids=["with room", "with preemptions"])
@pytest.mark.parametrize("max_batch_tokens", [None, 12], ids=["whole prompts", "chunks"])
def test_greedy_texts_are_the_library_s_whatever_gamma_each_round_has(
    pair: tuple[Path, Path],
    expected: list[tuple[int, ...]],
    pages: int,
    max_batch_tokens: int | None,
) -> None:
    engine = Engine(*pair, pages=pages)
    assert engine.drafter is not None
    run = run_together(
        engine.target,
        engine.drafter,
        greedy(PROMPTS, max_tokens=NUM_TOKENS),
        pacer=RandomPacer(max_gamma=5),
        max_batch_tokens=max_batch_tokens,
    )
    assert run.texts == expected
    assert run.accepted > 10
    assert (run.num_preempted > 0) == (pages == 12)
    engine.check_idle()


def test_every_round_of_decoding_has_as_many_draft_tokens_as_were_wanted(
    pair: tuple[Path, Path],
) -> None:
    engine = Engine(pair[0], pair[0])
    assert engine.drafter is not None
    run = run_together(engine.target, engine.drafter, greedy([[1, 2, 3]], max_tokens=33), gamma=3)
    # One token after the prompt, then rounds of three draft tokens and a bonus.
    assert run.num_rounds == 1 + 8 + 1
    assert run.drafted == run.accepted == 24


def test_draft_tokens_are_those_of_a_drafter_that_is_asked(pair: tuple[Path, Path]) -> None:
    engine = Engine(*pair)
    assert engine.drafter is not None
    requests = greedy(PROMPTS, max_tokens=NUM_TOKENS)
    asked = engine.run(requests, gamma=3)
    pushed = run_together(engine.target, engine.drafter, requests, gamma=3)
    assert pushed.texts == asked.texts
    assert (pushed.drafted, pushed.accepted) == (asked.drafted, asked.accepted)
    assert 0 < asked.accepted < asked.drafted


class CountingDrafter:
    """Drafter that records its steps and caches whatever it is given."""

    def __init__(self) -> None:
        self.steps: list[DraftStep] = []
        self.released: list[int] = []
        self.error: Exception | None = None

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]:
        self.steps += steps
        if self.error is not None:
            raise self.error
        return [
            Proposal(step.seq_id, step.stop, (4,) * step.gamma, None, step.stop) for step in steps
        ]

    def release(self, seq_ids: Sequence[int]) -> None:
        self.released += seq_ids


class Worker:
    """A target and a counting drafter beside it."""

    def __init__(self, target: TargetModel) -> None:
        self.target, self.drafter = target, CountingDrafter()
        self.after = DraftAfterVerify(self.drafter, target.runner.cache)

    def round(self, *steps: VerifyStep) -> list[int]:
        """Verify and draft; return the numbers of draft tokens."""
        verdicts: Sequence[Verdict] = self.target.verify(steps)
        pushed = self.after.draft_after(steps, verdicts)
        return [len(prepared.proposal.tokens) for prepared in pushed]


@pytest.fixture
def worker(pair: tuple[Path, Path]) -> Worker:
    return Worker(load_target(pair[0], model_options()))


def step(start: int, tokens: Sequence[int], *, gamma: int, last: bool = True) -> VerifyStep:
    return VerifyStep(3, start, tuple(tokens), (), None, POLICY, needs_verdict=last, gamma=gamma)


def test_chunks_of_a_prompt_are_prefilled_as_they_come_if_draft_tokens_will_be_wanted(
    worker: Worker,
) -> None:
    assert worker.round(step(0, [5, 6], gamma=2, last=False)) == []
    assert worker.round(step(2, [7], gamma=2)) == [2]
    first, second = worker.drafter.steps
    assert (first.start, first.tokens, first.gamma) == (0, (5, 6), 0)
    assert (second.start, second.tokens[0], second.gamma) == (2, 7, 2)


def test_a_sequence_that_wants_no_draft_tokens_costs_no_pass_and_catches_up_later(
    worker: Worker,
) -> None:
    prompt = [5] * (MAX_CATCH_UP - 100)
    assert worker.round(step(0, prompt, gamma=0)) == []
    assert not worker.drafter.steps
    long = [6] * 200
    # The draft is behind by more than it catches up at once: no draft tokens in this pass.
    assert worker.round(step(len(prompt), long, gamma=2)) == []
    assert len(worker.drafter.steps[0].tokens) == MAX_CATCH_UP
    assert worker.round(step(len(prompt) + len(long), [7], gamma=2)) == [2]
    assert worker.drafter.steps[1].start == MAX_CATCH_UP


def test_a_sequence_that_starts_again_is_drafted_for_from_its_beginning(worker: Worker) -> None:
    worker.round(step(0, [5, 6], gamma=2))
    worker.round(step(0, [5, 6, 9], gamma=2))
    assert [each.start for each in worker.drafter.steps] == [0, 0]


def test_a_drafter_that_fails_is_left_alone_for_longer_and_longer(worker: Worker) -> None:
    worker.drafter.error = OutOfPages("no room")
    length, calls = 2, list[int]()
    worker.round(step(0, [5, 6], gamma=2))
    for _ in range(12):
        before = len(worker.drafter.steps)
        assert worker.round(step(length, [7], gamma=2)) == []
        calls.append(len(worker.drafter.steps) - before)
        length += 1
    assert calls == [1, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0]
    assert 3 in worker.drafter.released, "what it had of the sequence is not relied on"
