"""Keys of a drafter that skips layers: what contradicts is refused."""

from __future__ import annotations

import pytest

from specserve.cluster.placement import with_drafts_that_fit
from specserve.config.tree import config_from_keys
from specserve.errors import ConfigError
from specserve.tools.doctor import models

TWO_RANKS = {"draft.kind": "layer_skip", "draft.path": None, "target.tensor_parallel": 2}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({**TWO_RANKS, "draft.placement": "together"}, "one rank"),
        ({"draft.kind": "layer_skip", "draft.path": "d"}, "leave draft.path out"),
        ({"draft.kind": "none", "draft.skip": [1]}, "draft.skip belongs to the kind layer_skip"),
        ({"draft.kind": "layer_skip", "draft.skip": [1, 1]}, "draft.skip names a layer twice"),
    ],
)
def test_keys_of_skipped_layers_that_contradict_others_are_refused(
    keys: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_keys({"target.path": "t", **keys})


def test_the_placement_stays_auto_where_layers_cannot_be_skipped_together() -> None:
    fitted = with_drafts_that_fit(config_from_keys(TWO_RANKS), num_gpus=2)
    assert fitted.draft.placement == "auto"


def test_the_doctor_looks_at_skipped_layers_as_serving_does() -> None:
    findings = list(models.pair(config_from_keys({"draft.kind": "layer_skip"})))
    assert any("layer_skip, which fits" in finding.found for finding in findings)
