"""The table of features: what needs one that is not installed is refused when it is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from specserve.config import features
from specserve.config.sections import DRAFT_KINDS
from specserve.config.tree import config_from_keys
from specserve.errors import ConfigError


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "has", lambda feature: False)


@pytest.mark.parametrize("kind", features.FEATURE_OF_KIND)
@pytest.mark.usefixtures("without")
def test_a_kind_of_a_missing_feature_is_refused_by_its_folder(kind: str) -> None:
    assert kind in DRAFT_KINDS
    with pytest.raises(
        ConfigError, match=f"specserve/features/{features.FEATURE_OF_KIND[kind]} is missing"
    ):
        config_from_keys({"draft.kind": kind})


@pytest.mark.parametrize(
    ("keys", "feature"),
    [
        ({"adapters.load_from": "a"}, "adapters"),
        ({"draft.stages": [{"kind": "unigram"}]}, "cascade"),
        ({"draft.k": [[4]]}, "cascade"),
        ({"draft.lenience": 2}, "cascade"),
        ({"draft.pool.name": "shared"}, "draft_pools"),
        ({"draft.skip": [1]}, "layer_skip"),
    ],
)
@pytest.mark.usefixtures("without")
def test_a_key_of_a_missing_feature_is_refused_by_its_folder(
    keys: dict[str, object], feature: str
) -> None:
    with pytest.raises(ConfigError, match=f"specserve/features/{feature} is missing"):
        config_from_keys(keys)


@pytest.mark.usefixtures("without")
def test_a_config_that_needs_no_feature_is_read_without_any() -> None:
    assert config_from_keys({}).draft.kind == "neural"


def test_every_folder_is_a_feature_of_the_table() -> None:
    root = Path(features.__file__).parents[1] / "features"
    folders = {file.parent.name for file in root.glob("*/__init__.py")}
    assert folders <= set(features.FEATURES)
