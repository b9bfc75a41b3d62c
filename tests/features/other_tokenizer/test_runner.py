"""A translated runner truncates, forks and computes at any position of the target's text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from specserve.features.other_tokenizer.runner import TranslatedRunner
from specserve.models.cache import Fork
from specserve.models.model import open_model
from specserve.types import Step
from tests.support import checkpoints
from tests.support.continuations import SIZES, TOKENS, make_translation
from tests.support.engines import model_options

TARGET_VOCAB = 8


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = LlamaConfig(**SIZES, **TOKENS | {"vocab_size": 7, "max_position_embeddings": 256})
    return checkpoints.write(config, tmp_path_factory.mktemp("draft") / "draft", seed=1)


@pytest.fixture
def runner(directory: Path) -> TranslatedRunner:
    opened = open_model(directory, model_options(pages=200, page_size=4))
    return TranslatedRunner(opened.runner, make_translation(), target_vocab=TARGET_VOCAB)


def fresh(runner: TranslatedRunner, tokens: list[int]) -> torch.Tensor:
    """Return the logits after a text that is computed in one step."""
    logits = runner.run([Step(99, 0, tuple(tokens))], [1])[0]
    runner.release([99])
    return logits


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, atol=1e-4)


def test_any_truncation_gives_the_logits_of_the_text_computed_whole(
    runner: TranslatedRunner,
) -> None:
    rng = np.random.default_rng(0)
    text: list[int] = []
    for _ in range(60):
        start = int(rng.integers(0, len(text) + 1))
        new = rng.integers(0, TARGET_VOCAB, int(rng.integers(1, 6))).tolist()
        text = [*text[:start], *new]
        logits = runner.run([Step(1, start, tuple(new))], [1])[0]
        assert close(logits, fresh(runner, text))
        assert runner.cache.length(1) == len(text)
        assert runner.cache.tokens(1).tolist() == text
        assert runner.cache.holds(1, start, new)
        runner.cache.check()


def test_logits_behind_several_tokens_are_those_behind_each(runner: TranslatedRunner) -> None:
    first, second = (4, 6, 0, 4, 5), (6, 6, 1, 4)
    logits = runner.run([Step(1, 0, first), Step(2, 0, second), Step(3, 0, (1,))], [3, 0, 1])
    expected = [fresh(runner, list(first[:stop])) for stop in (3, 4, 5)]
    for row, wanted in zip(logits, [*expected, fresh(runner, [1])], strict=True):
        assert close(row, wanted)


def test_only_shared_tokens_have_logits(runner: TranslatedRunner) -> None:
    logits = runner.run([Step(1, 0, (4, 6))], [1])
    assert (logits[0] > -torch.inf).tolist() == runner.drawable.tolist()
    assert np.flatnonzero(~runner.drawable).tolist() == [4, 6]


def test_a_fork_continues_the_text_up_to_its_length(runner: TranslatedRunner) -> None:
    text = [4, 6, 0, 4, 6, 5]
    runner.run([Step(1, 0, tuple(text))], [1])
    for length in range(len(text) + 1):
        runner.fork_many([Fork(1, 10 + length, length)])
        logits = runner.run([Step(10 + length, length, (6, 1))], [1])[0]
        assert close(logits, fresh(runner, [*text[:length], 6, 1]))
    assert close(runner.run([Step(1, 6, (7,))], [1])[0], fresh(runner, [*text, 7]))
    runner.promote_branch(1, 13)
    assert runner.cache.tokens(1).tolist() == [4, 6, 0, 6, 1]
    assert close(runner.run([Step(1, 5, (7,))], [1])[0], fresh(runner, [4, 6, 0, 6, 1, 7]))


def test_decode_passes_continue_the_text(runner: TranslatedRunner) -> None:
    runner.run([Step(1, 0, (4, 6)), Step(2, 0, (6,))], [1, 1])
    passes = runner.decode_passes([1, 2], [2, 2])
    passes.logits(torch.tensor([5, 7]))
    logits = passes.logits(torch.tensor([3, 0]))
    runner.cache.append(1, [5, 3])
    runner.cache.append(2, [7, 0])
    assert close(logits[0], fresh(runner, [4, 6, 5, 3]))
    assert close(logits[1], fresh(runner, [6, 7, 0]))
    assert close(runner.run([Step(2, 2, (4,))], [1])[0], fresh(runner, [6, 7, 4]))


def test_a_step_says_which_positions_of_the_draft_it_writes(runner: TranslatedRunner) -> None:
    assert runner.positions(Step(1, 0, (4, 6, 0))) == range(1 + 2 + 3 + 1)
    runner.run([Step(1, 0, (4, 6, 0))], [0])
    assert runner.positions(Step(1, 2, (6,))) == range(1 + 2 + 3, 1 + 2 + 3 + 3)


def test_ids_that_a_model_lacks_are_left_out() -> None:
    limited = make_translation().limited_to(target_vocab=10, draft_vocab=4)
    assert dict(zip(limited.target_ids.tolist(), limited.draft_ids.tolist(), strict=True)) == {
        0: 2,
        2: 3,
        3: 1,
        7: 0,
    }
    assert len(limited.spellings) == 10
    assert max(max(spelling) for spelling in limited.spellings) < 4
