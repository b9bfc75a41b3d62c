"""Passes that run ahead give the verdicts of those that wait: for joins, ends, drafts, restarts."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from specserve.models.gpu.run_ahead import AheadPass
from specserve.models.model import ModelOptions, open_model
from specserve.models.runner import Runner
from specserve.models.target import TargetModel
from specserve.sampling.distribution import WarpBatch
from specserve.types import ModelInfo, Policy, Verdict, VerifyStep, Warp
from tests.support import checkpoints
from tests.support.card import emulated_cards

PAGES = 40
INFO = ModelInfo(checkpoints.VOCAB, checkpoints.CONTEXT, frozenset(), 16, PAGES)
WARPS = (Warp(temperature=0.0), Warp(temperature=1.0), Warp(temperature=0.7, top_k=40))
VERIFIERS = ("block", "coupled", "speculative")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("llama", tmp_path_factory.mktemp("ahead") / "target")


def open_runner(checkpoint: Path, pages: int = PAGES) -> Runner:
    options = ModelOptions(dtype="float32", device="cuda", pages=pages)
    return open_model(checkpoint, options).runner


def target(runner: Runner, *, runs_ahead: bool) -> TargetModel:
    return TargetModel(runner, replace(INFO, runs_ahead=runs_ahead))


@dataclass
class Text:
    """One sequence of a workload, as the coordinator would keep it."""

    seq_id: int
    tokens: list[int]
    policy: Policy
    cached: int = 0
    drafted: list[int] = field(default_factory=list)

    def step(self, drafts: tuple[int, ...] = (), *, gamma: int = 0) -> VerifyStep:
        tokens = tuple(self.tokens[self.cached :])
        self.drafted = list(drafts)
        return VerifyStep(self.seq_id, self.cached, tokens, drafts, None, self.policy, gamma=gamma)

    def commit(self, verdict: Verdict) -> None:
        assert verdict.seq_id == self.seq_id
        self.cached = len(self.tokens) + verdict.accepted
        self.tokens += [*self.drafted[: verdict.accepted], verdict.next_token]


def policy(rng: random.Random, **others: Any) -> Policy:
    warp, verifier = rng.choice(WARPS), rng.choice(VERIFIERS)
    return Policy(warp, verifier, rng.randrange(2**63), 1, **others)


def write_workload(model: TargetModel, seed: int) -> list[list[int]]:
    """Return the texts of a random workload, which does not depend on what is written."""
    rng, texts, done = random.Random(seed), dict[int, Text](), list[list[int]]()
    for number in range(60):
        if len(texts) < 4 and rng.random() < 0.3:
            prompt = [rng.randrange(3, checkpoints.VOCAB) for _ in range(rng.randrange(1, 40))]
            logprobs = 1 if rng.random() < 0.1 else None
            texts[number] = Text(number, prompt, policy(rng, logprobs=logprobs))
        for text in list(texts.values()):
            event = rng.random()
            if event < 0.04:  # it has ended, or was cancelled
                model.release([text.seq_id])
                done.append(texts.pop(text.seq_id).tokens)
            elif event < 0.06:  # preempted: recomputed from nothing
                model.release([text.seq_id])
                text.cached = 0
            elif event < 0.08:  # the same after a pass that failed, and not released
                text.cached = 0
        running = [text for text in texts.values() if rng.random() < 0.95]
        steps = []
        for text in running:
            drafts = tuple(rng.choices(range(3, checkpoints.VOCAB), k=2))
            steps.append(
                text.step(drafts if rng.random() < 0.1 else (), gamma=int(rng.random() < 0.1))
            )
        for text, verdict in zip(running, model.verify(steps), strict=True):
            text.commit(verdict)
        model.runner.cache.check()
    return done + [text.tokens for text in texts.values()]


@pytest.mark.parametrize("seed", range(4))
def test_workload_has_the_texts_of_one_that_waits(checkpoint: Path, seed: int) -> None:
    with emulated_cards():
        expected = write_workload(target(open_runner(checkpoint), runs_ahead=False), seed)
        found = write_workload(target(open_runner(checkpoint), runs_ahead=True), seed)
    assert found == expected
    assert sum(map(len, found)) > 100


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the order in which passes are enqueued and their tokens are read."""
    found: list[str] = []
    choose, read = WarpBatch.greedy_tokens, AheadPass.read

    def greedy_tokens(batch: WarpBatch, logits: Tensor) -> Tensor:
        found.append("pass")
        return choose(batch, logits)

    def read_tokens(ahead: AheadPass) -> list[int]:
        found.append("read")
        return read(ahead)

    monkeypatch.setattr(WarpBatch, "greedy_tokens", greedy_tokens)
    monkeypatch.setattr(AheadPass, "read", read_tokens)
    return found


def test_next_pass_is_enqueued_before_the_last_is_read(checkpoint: Path, order: list[str]) -> None:
    with emulated_cards():
        model = target(open_runner(checkpoint), runs_ahead=True)
        text = Text(0, [5, 6, 7], Policy(WARPS[0], "block", 1, 3))
        for _ in range(4):
            text.commit(*model.verify([text.step()]))
    assert order == ["pass", "pass", *("pass", "read") * 3]


def test_sequence_that_fills_its_context_is_not_run_past_it(checkpoint: Path) -> None:
    with emulated_cards():
        model = target(open_runner(checkpoint, pages=70), runs_ahead=True)
        text = Text(0, [5] * checkpoints.CONTEXT, Policy(WARPS[0], "block", 1, 3))
        text.commit(*model.verify([text.step()]))
        assert model.runner.cache.length(0) == checkpoints.CONTEXT


def test_room_of_a_pass_that_is_not_continued_is_free_again(checkpoint: Path) -> None:
    with emulated_cards():
        runner = open_runner(checkpoint, pages=6)
        model = target(runner, runs_ahead=True)
        texts = [Text(i, [5] * 32, Policy(WARPS[0], "block", 1, 32)) for i in range(2)]
        verdicts = model.verify([text.step() for text in texts])
        for text, verdict in zip(texts, verdicts, strict=True):
            text.commit(verdict)
        assert runner.cache.num_free == 0, "two pages of each, and one ahead"
        texts[0].commit(*model.verify([texts[0].step()]))
        assert runner.cache.num_free == 1, "that of the other, which waits"


def test_another_token_than_the_one_written_ahead_is_computed(checkpoint: Path) -> None:
    with emulated_cards():
        model, plain = (
            target(open_runner(checkpoint), runs_ahead=runs_ahead) for runs_ahead in (True, False)
        )
        greedy = Policy(WARPS[0], "block", 1, 3)
        first = VerifyStep(0, 0, (5, 6, 7), (), None, greedy)
        second = VerifyStep(0, 3, (9,), (), None, greedy)
        expected = [plain.verify([step])[0].next_token for step in (first, second)]
        found = [model.verify([step])[0].next_token for step in (first, second)]
    assert found == expected
