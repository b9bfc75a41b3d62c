"""The memory that a draft takes to learn is kept free of pages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from specserve.config.tree import config_from_keys
from specserve.errors import TooLittleMemory
from specserve.models import memory as memory_module
from specserve.models import model as model_module
from specserve.models import target as target_module
from specserve.models.checkpoints.weights import num_training_bytes, num_weight_bytes
from specserve.models.hidden_taps import SERVED_STATES_BYTES
from specserve.models.model import ModelOptions, open_model
from tests.support import checkpoints

ROOM = 2**25
OPTIONS = ModelOptions("float32", "cpu", memory_fraction=1.0, max_sequences=10_000)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("llama", tmp_path_factory.mktemp("room") / "draft")


def have(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    for module in (memory_module, model_module):
        monkeypatch.setattr(module, "free_memory", lambda device: num_bytes)


def test_pages_leave_room_for_training(draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, ROOM)
    plain, trained = (
        open_model(draft, replace(OPTIONS, is_trained=is_trained)).runner.cache
        for is_trained in (False, True)
    )
    page_bytes = ROOM // plain.num_pages
    left = (plain.num_pages - trained.num_pages) * page_bytes
    assert abs(left - num_training_bytes(draft, torch.float32)) < 2 * page_bytes


def test_a_draft_that_fits_and_has_no_room_to_learn_is_refused(
    draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have(monkeypatch, 3 * num_weight_bytes(draft, torch.float32))
    open_model(draft, replace(OPTIONS, pages=4))
    with pytest.raises(TooLittleMemory, match=r"draft\.learn takes .* or leave draft\.learn out"):
        open_model(draft, replace(OPTIONS, pages=4, is_trained=True))


def test_pages_leave_room_for_a_head_that_learns_beside_its_target(
    draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file({"weight": torch.zeros(1000, 7)}, tmp_path / "heads.safetensors")
    have(monkeypatch, SERVED_STATES_BYTES + ROOM)
    options = replace(OPTIONS, max_sequences=10**6)
    plain, beside = (
        open_model(draft, replace(options, trained_head=head)).runner.cache
        for head in (None, tmp_path)
    )
    page_bytes = (SERVED_STATES_BYTES + ROOM) // plain.num_pages
    left = (plain.num_pages - beside.num_pages) * page_bytes
    training = 7000 * (7 * 4 + 2 * 4)
    assert abs(left - SERVED_STATES_BYTES - training) < 3 * page_bytes


@pytest.mark.parametrize(
    ("keys", "is_beside"),
    [
        ({"draft.kind": "heads", "draft.learn": True}, True),
        ({"draft.kind": "heads"}, False),
        ({"draft.learn": True}, False),
    ],
)
def test_the_target_knows_of_a_head_that_learns(
    draft: Path, keys: dict[str, object], is_beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[ModelOptions] = []

    def refuse(directory: Path, options: ModelOptions, **_: object) -> None:
        asked.append(options)
        raise TooLittleMemory("enough seen")

    monkeypatch.setattr(target_module, "open_model", refuse)
    config = config_from_keys({"target.path": str(draft), "draft.path": "a-head", **keys})
    with pytest.raises(TooLittleMemory, match="enough seen"):
        target_module.open_target(draft, config)
    assert [one.trained_head for one in asked] == [Path("a-head") if is_beside else None]


@pytest.mark.parametrize(
    ("keys", "is_trained"),
    [
        ({"draft.learn": True}, True),
        ({}, False),
        ({"draft.kind": "eagle", "draft.learn": True}, False),  # its head is trained, no model
    ],
)
def test_the_config_says_what_is_trained(keys: dict[str, object], is_trained: bool) -> None:
    config = config_from_keys({"target.path": "target", "draft.path": "draft", **keys})
    assert ModelOptions.from_config(config.draft, config).is_trained is is_trained
    assert not ModelOptions.from_config(config.target, config).is_trained
