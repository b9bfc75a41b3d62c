"""Resources that a replica asks of the cluster, and the refusal when they are not available."""

from __future__ import annotations

import pytest

from specserve.cluster.placement import Bundle, bundles, check_fits, has_room
from specserve.config.tree import config_from_keys
from specserve.errors import ConfigError


def resources(keys: dict[str, object], *, has_gpus: bool) -> list[dict[str, float]]:
    return [dict(bundle.resources) for bundle in bundles(config_from_keys(keys), has_gpus=has_gpus)]


def test_the_coordinator_comes_first_and_the_draft_last() -> None:
    assert resources({"target.tensor_parallel": 2}, has_gpus=True) == [
        {"CPU": 1},
        *[{"CPU": 1, "GPU": 1}] * 2,
        {"CPU": 1, "GPU": 1},
    ]


def test_without_gpus_workers_get_as_many_cpus_as_they_have_threads() -> None:
    assert resources({"target.threads": 3}, has_gpus=False) == [{"CPU": 1}, {"CPU": 3}, {"CPU": 1}]


def test_a_draft_may_share_a_gpu_or_stay_on_a_cpu() -> None:
    assert resources({"draft.num_gpus": 0.25}, has_gpus=True)[-1] == {"CPU": 1, "GPU": 0.25}
    assert resources({"draft.device": "cpu"}, has_gpus=True)[-1] == {"CPU": 1}


def test_nothing_is_asked_for_a_draft_that_there_is_not() -> None:
    assert len(resources({"draft.kind": "none"}, has_gpus=True)) == 2


def test_each_bundle_has_the_labels_of_its_worker() -> None:
    asked = bundles(
        config_from_keys(
            {"target.label_selector": {"pool": "big"}, "draft.label_selector": {"pool": "small"}}
        ),
        has_gpus=True,
    )
    assert [dict(bundle.labels) for bundle in asked] == [{}, {"pool": "big"}, {"pool": "small"}]


def test_too_small_a_cluster_is_refused_with_what_is_asked_for_and_available() -> None:
    asked = bundles(
        config_from_keys(
            {"target.tensor_parallel": 4, "target.device": "cuda", "draft.device": "cuda"}
        ),
        has_gpus=True,
    )
    with pytest.raises(
        ConfigError, match=r"10 GPUs are asked for \(2 x \(0 \+ 1 \+ 1 \+ 1 \+ 1 \+ 1\).*has 8"
    ):
        check_fits(asked, {"GPU": 8, "CPU": 64}, replicas=2)
    check_fits(asked, {"GPU": 10, "CPU": 64}, replicas=2)


@pytest.mark.parametrize(
    ("cpus", "gpus", "room"), [(7.0, 3.0, True), (6.0, 3.0, False), (7.0, 2.0, False)]
)
def test_an_update_brings_a_new_replica_first_only_where_it_has_room(
    cpus: float, gpus: float, room: bool
) -> None:
    wanted = (
        Bundle({"CPU": 3.0}, {}),
        Bundle({"CPU": 1.0, "GPU": 2.0}, {}),
        Bundle({"CPU": 2.0, "GPU": 1.0}, {}),
    )
    assert has_room(wanted, {"CPU": cpus, "GPU": gpus}) is room
