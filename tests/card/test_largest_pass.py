"""A GPU's pages leave room for the largest pass, which has been run."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch

from specserve.errors import TooLittleMemory
from specserve.models import model as model_module
from specserve.models.gpu.largest_pass import LargestPass, largest_pass_bytes
from specserve.models.model import Model, ModelOptions, open_model
from tests.support import checkpoints
from tests.support.card import emulated_cards

MEMORY = 96 * 2**20
OPTIONS = ModelOptions(
    dtype="float32",
    device="cuda",
    attention="sdpa",
    memory_fraction=1.0,
    max_sequences=256,
    max_rows=4096,
    max_gamma=8,
)
LARGEST = LargestPass.from_limits(max_rows=4096, max_sequences=256, max_gamma=8, context=1024)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("llama", tmp_path_factory.mktemp("largest") / "llama")


def open_all(checkpoint: Path) -> Model:
    return open_model(checkpoint, OPTIONS)


def test_the_largest_pass_fits_beside_all_pages(checkpoint: Path) -> None:
    with emulated_cards(memory_bytes=MEMORY):
        model = open_all(checkpoint)
        assert model.runner.cache.num_used == 0
        free, _ = torch.cuda.mem_get_info()
        taken = largest_pass_bytes(model.runner, LARGEST)
        assert taken <= free < 1.2 * taken, "no more is left free than it takes"


def test_without_the_trial_it_would_not_fit(checkpoint: Path) -> None:
    with (
        emulated_cards(memory_bytes=MEMORY),
        mock.patch.object(model_module, "largest_pass_bytes", return_value=0),
    ):
        model = open_all(checkpoint)
        with pytest.raises(TooLittleMemory, match=r"of 4096 positions .*limits\.max_batch_tokens"):
            largest_pass_bytes(model.runner, LARGEST)


def test_a_pass_that_never_fits_is_said_at_the_start(checkpoint: Path) -> None:
    with (
        emulated_cards(memory_bytes=MEMORY // 4),
        pytest.raises(TooLittleMemory, match=r"limits\.max_running"),
    ):
        open_all(checkpoint)


def test_pages_are_those_of_full_contexts_at_most(checkpoint: Path) -> None:
    with emulated_cards():
        model = open_all(checkpoint)
    assert model.runner.cache.num_pages == 256 * 1024 // 16


def test_the_largest_pass_follows_from_the_limits() -> None:
    def sizes(**limits: int) -> LargestPass:
        known = {"max_rows": 8192, "max_sequences": 64, "max_gamma": 16, "context": 4096}
        return LargestPass.from_limits(**{**known, **limits})

    assert sizes() == LargestPass(64, 128, 17)
    assert sizes(context=100) == LargestPass(64, 100, 17)
    assert sizes(max_rows=20) == LargestPass(20, 1, 1), "fewer rows than sequences"
    assert sizes().num_pages(16) == 64 * 8
