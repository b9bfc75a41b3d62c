"""Training and scoring at the temperature of a text: towards the target's own distribution."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn

from specserve.drafters.learning.served_texts import Window
from specserve.drafters.learning.trainer import (
    MAX_BATCH,
    MIN_TEMPERATURE,
    DraftTrainer,
    Predictions,
    Weights,
    call_with,
)

P = torch.tensor([0.5, 0.3, 0.15, 0.05])
NUM_TOKENS = 4000


class Unigram(nn.Module):
    """Predicts every token alike."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits.clone())

    def forward(self, count: int) -> torch.Tensor:
        return self.logits.expand(count, -1)


class TrainableUnigram:
    def __init__(self, logits: torch.Tensor) -> None:
        self.module: nn.Module = Unigram(logits)

    def predict(self, windows: Sequence[Window], weights: Weights | None) -> Predictions:
        labels = torch.tensor([token for window in windows for token in window.tokens])
        return Predictions(
            call_with(self.module, weights, count=len(labels)),
            labels,
            torch.arange(len(windows)).repeat_interleave(
                torch.tensor([len(window.tokens) for window in windows])
            ),
        )


def written(temperature: float) -> Window:
    """Return a text of the target P, drawn at a temperature."""
    torch.manual_seed(1)
    if temperature == 0:
        tokens = torch.full((NUM_TOKENS,), int(P.argmax()))
    else:
        tokens = torch.multinomial((P.log() / temperature).softmax(-1), NUM_TOKENS, True)
    return Window(0, array("i", tokens.tolist()), 1, temperature)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_sampled_texts_teach_the_distribution_that_they_were_drawn_from(temperature: float) -> None:
    trainer = DraftTrainer(TrainableUnigram(torch.zeros(4)), learning_rate=0.02)
    for _ in range(400):
        trainer.step([written(temperature)] * MAX_BATCH)
    assert trainer.num_steps == 400
    (logits,) = trainer.weights().values()
    assert torch.allclose(logits.softmax(-1), P, atol=0.03)


def test_short_steps_make_the_update_of_one_with_all_their_windows() -> None:
    windows = [replace(written(1.0), tokens=array("i", [token] * 9)) for token in range(MAX_BATCH)]
    windows[0] = replace(windows[0], tokens=array("i", [0] * 90))  # each token counts as much
    whole, parts = (DraftTrainer(TrainableUnigram(torch.zeros(4))) for _ in range(2))
    whole.step(windows)
    for window in windows:
        assert parts.num_steps == 0
        parts.step([window])
    assert parts.num_steps == whole.num_steps == 1
    (expected,), (found,) = (trainer.weights().values() for trainer in (whole, parts))
    assert torch.allclose(found, expected)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_a_draft_that_is_surer_than_the_target_has_a_worse_score(temperature: float) -> None:
    right, surer = (
        DraftTrainer(TrainableUnigram(factor * P.log())).scores([written(temperature)], None)[0]
        for factor in (1.0, 2.0)
    )
    assert right > surer


def test_greedy_texts_count_at_the_least_temperature() -> None:
    trainer = DraftTrainer(TrainableUnigram(P.log()))
    (score,) = trainer.scores([written(0.0)], None)
    expected = float((P.log() / MIN_TEMPERATURE).log_softmax(-1).max())
    assert score == pytest.approx(expected, abs=1e-3)
