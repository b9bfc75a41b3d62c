"""Draft heads that learn from served texts draft better, and the texts stay the target's."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from specserve import LLM, Sampling
from specserve.drafters.base import never
from specserve.drafters.heads import HeadsDrafter
from specserve.drafters.learning.idle_time import IdleTime
from specserve.drafters.learning.learner import LearningOptions
from specserve.drafters.learning.open import learning_heads
from specserve.drafters.learning.served_states import StatesWindow
from specserve.models.checkpoints.embedding import load_vocabulary_head
from specserve.types import Request
from tests.support import checkpoints
from tests.support.engines import GREEDY
from tests.support.self_speculative_engines import (
    LLM_KEYS,
    TEXT,
    SelfSpeculativeEngine,
    random_heads,
    small_gemma3,
    with_heads,
)

OPTIONS = LearningOptions(
    min_windows=4, min_held_out=2, steps_between=40, epochs=1000, num_errors=0, measured_tokens=100
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_gemma3(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def heads(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_heads(
        target,
        tmp_path_factory.mktemp("heads") / "heads",
        hidden_size=64,
        vocab_size=checkpoints.VOCAB,
    )


def requests() -> list[Request]:
    """Return requests for three texts: traffic of one kind, of which other copies are held out."""
    return [
        Request((1, i % 3 + 3, i % 3 + 7, 5), 60, GREEDY, i % 3, seeded=True, ignore_eos=True)
        for i in range(9)
    ]


def test_acceptance_rises_with_what_is_served(target: Path, heads: Path) -> None:
    engine = SelfSpeculativeEngine(target, with_heads(heads, support=8), pages=200)
    plain = engine.run(requests(), drafts=False, gamma=0).texts
    first = engine.run(requests(), gamma=3, max_gamma=3)
    own, network = engine.drafter, engine.target.network
    assert isinstance(own, HeadsDrafter)
    assert network is not None
    vocabulary_head = load_vocabulary_head(target, dtype=torch.float32)
    drafter = learning_heads(
        own, network.embed, vocabulary_head, learning_rate=3e-3, options=OPTIONS, new_tokens=48
    )
    learner, opened = drafter.learner, own.heads
    learner.idle = IdleTime(clock=time.perf_counter, share=1e9)
    for _ in range(60):
        run = engine.run(requests(), with_drafter=drafter, gamma=3, max_gamma=3)
        assert run.texts == plain
        if run.accepted / run.drafted > first.accepted / first.drafted + 0.2:
            break
        for _ in range(100):
            learner.step(never)
    else:
        raise AssertionError(f"after all runs: {learner.progress}")
    learner._builder.shutdown(wait=True)
    assert learner.progress.swaps > learner.progress.rollbacks
    assert own.heads is not opened
    windows = [*learner.texts.windows, *learner.texts.held_out]
    assert all(isinstance(window, StatesWindow) for window in windows)


def test_the_vocabulary_head_to_train_through_is_the_targets(target: Path, heads: Path) -> None:
    """Compare with what the network itself computes of a hidden state."""
    engine = SelfSpeculativeEngine(target, with_heads(heads))
    hidden = torch.randn(3, 64)
    weight = load_vocabulary_head(target, dtype=torch.float32)
    assert engine.target.network is not None
    with torch.inference_mode():
        expected = engine.target.network.head(hidden)
    torch.testing.assert_close(hidden @ weight.T, expected)


def test_texts_of_an_llm_whose_heads_learn_are_those_without_a_draft(
    target: Path, heads: Path
) -> None:
    texts = []
    learns = {"draft.kind": "heads", "draft.path": str(heads), "draft.learn": True}
    for keys in ({"draft.kind": "none"}, learns):
        with LLM(target, **{**LLM_KEYS, **keys}) as llm:
            outputs = llm.generate([TEXT, TEXT[5:]], Sampling(max_tokens=24, temperature=0))
        texts.append([tuple(output.token_ids) for output in outputs])
    assert texts[0] == texts[1]
