"""Keys of EAGLE-3 heads and draft heads: what contradicts is refused, and heads stay together."""

from __future__ import annotations

from pathlib import Path

import pytest

from specserve.cluster.placement import bundles, with_draft_placement, with_drafts_that_fit
from specserve.config.tree import DEMO, config_from_keys
from specserve.errors import ConfigError, ModelError
from specserve.tools.doctor import models
from tests.support import checkpoints


def test_heads_cannot_be_apart() -> None:
    with pytest.raises(ConfigError, match="together with it"):
        config_from_keys({"draft.placement": "apart", "draft.kind": "heads"})


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"draft.kind": "heads"}, "draft.kind heads needs draft.path"),
        ({"draft.kind": "eagle"}, "draft.kind eagle needs draft.path"),
        (
            {"draft.kind": "heads", "draft.path": "h", "target.tensor_parallel": 2},
            "target.tensor_parallel is 2; set it to 1",
        ),
    ],
)
def test_heads_without_files_or_on_several_ranks_are_refused(
    keys: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_keys({"target.path": "t", **keys})


def test_a_head_without_files_is_named_with_its_entry_of_several_models() -> None:
    with pytest.raises(ConfigError, match=r"models\[1\] \(b\): draft.kind eagle needs draft.path"):
        config_from_keys({"models": [{"name": "a"}, {"name": "b", "draft": {"kind": "eagle"}}]})


def test_the_placement_of_heads_stays_auto() -> None:
    config = config_from_keys({"draft.kind": "heads"})
    settled = with_draft_placement(config, bundles(config, has_gpus=False))
    assert settled.draft.placement == "auto"
    assert with_drafts_that_fit(config, num_gpus=1).draft.placement == "auto"


def test_the_doctor_looks_at_heads_as_serving_does(tmp_path: Path) -> None:
    other = checkpoints.make("llama", tmp_path / "target")
    checkpoints.add_tokenizer(other)
    keys = {"draft.kind": "heads", "draft.path": str(DEMO / "heads"), "target.path": str(other)}
    with pytest.raises(ModelError, match="another target"):
        list(models.pair(config_from_keys(keys)))
