"""Resources that a replica asks of the cluster, and the refusal when they are not available."""

from __future__ import annotations

import pytest

from specserve.cluster.placement import (
    Bundle,
    NodeResources,
    bundles,
    check_fits,
    engine_deployments,
    explain_distance,
    explain_waiting,
    first_bundles,
    gateway_bundle,
    has_room,
    with_devices,
    with_draft_placement,
    with_drafts_that_fit,
)
from specserve.cluster.ray_session import default_resources
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


def test_a_draft_together_with_its_target_has_no_bundle_and_leaves_its_cpus_to_the_rank() -> None:
    keys: dict[str, object] = {"target.threads": 3, "draft.placement": "together"}
    assert resources(keys, has_gpus=False) == [{"CPU": 1}, {"CPU": 4}]
    assert resources(keys | {"draft.threads": 2}, has_gpus=False)[1] == {"CPU": 5}
    ranks = resources(keys | {"target.tensor_parallel": 2}, has_gpus=False)[1:]
    assert ranks == [{"CPU": 3}] * 2, "one rank of several has no use for more threads"
    assert resources(keys, has_gpus=True) == [{"CPU": 1}, {"CPU": 1, "GPU": 1}]


@pytest.mark.parametrize(
    ("keys", "has_gpus", "placement"),
    [
        ({}, False, "auto"),
        ({}, True, "apart"),
        ({"target.tensor_parallel": 2}, False, "apart"),
        ({"draft.label_selector": {"pool": "small"}}, False, "apart"),
        ({"draft.placement": "together"}, True, "together"),
    ],
    ids=["CPUs", "GPUs", "several ranks", "another node", "set"],
)
def test_auto_is_measured_where_both_placements_are_open_and_else_apart(
    keys: dict[str, object], has_gpus: bool, placement: str
) -> None:
    config = config_from_keys(keys)
    settled = with_draft_placement(config, bundles(config, has_gpus=has_gpus))
    assert settled.draft.placement == placement


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"draft.num_gpus": 1}, "where a draft apart lives"),
        ({"draft.label_selector": {"pool": "small"}}, "where a draft apart lives"),
        ({"draft.device": "cpu", "target.device": "cuda"}, "leave draft.device out"),
    ],
)
def test_what_cannot_be_together_is_refused(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_keys({"draft.placement": "together", **keys})


@pytest.mark.parametrize(
    ("keys", "has_gpus", "target", "draft"),
    [
        ({}, False, "cpu", "cpu"),
        ({}, True, "auto", "auto"),
        ({"target.device": "cuda"}, True, "cuda:0", "auto"),
        ({"target.device": "cpu"}, True, "cpu", "auto"),
        ({"draft.device": "cpu"}, True, "auto", "cpu"),
        ({"draft.num_gpus": 0}, True, "auto", "cpu"),
        ({"draft.num_gpus": 0.25}, True, "auto", "auto"),
        ({"draft.device": "cuda:1"}, True, "auto", "cuda:0"),
        ({"draft.placement": "together"}, True, "auto", "auto"),
        ({"draft.placement": "together", "target.device": "cuda"}, True, "cuda:0", "cuda:0"),
        ({"draft.placement": "together"}, False, "cpu", "cpu"),
    ],
)
def test_worker_runs_on_the_gpu_that_it_was_given_or_on_none(
    keys: dict[str, object], has_gpus: bool, target: str, draft: str
) -> None:
    config = config_from_keys(keys)
    settled = with_devices(config, bundles(config, has_gpus=has_gpus))
    assert (settled.target.device, settled.draft.device) == (target, draft)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"target.device": "cuda:1"}, "names one GPU of a machine, .* write cuda"),
        ({"draft.device": "cuda", "draft.num_gpus": 0}, "draft.num_gpus is 0, .* names cuda:0"),
    ],
)
def test_device_that_ray_cannot_give_is_refused(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bundles(config_from_keys(keys), has_gpus=True)


def test_ranks_whose_sums_cross_the_network_are_pointed_out() -> None:
    assert explain_distance("aaaa") is None
    assert explain_distance("") is None, "ranks on CPUs"
    found = explain_distance("aabb")
    assert found is not None
    assert "4 ranks of the target lie on 2 nodes" in found


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


def node(
    cpus: float, *, free: float | None = None, gpus: float = 0, **labels: str
) -> NodeResources:
    total = {"CPU": cpus, "GPU": float(gpus)}
    available = {**total, "CPU": cpus if free is None else free}
    return NodeResources(f"node-{cpus:g}", total, available, labels)


def check(keys: dict[str, object], *nodes: NodeResources, replicas: int = 1) -> None:
    config = config_from_keys(keys)
    has_gpus = any(node.total["GPU"] for node in nodes)
    check_fits(
        bundles(config, has_gpus=has_gpus),
        nodes,
        replicas=replicas,
        gateway=gateway_bundle(config),
    )


def test_too_small_a_cluster_is_refused_with_what_is_needed_and_available() -> None:
    keys: dict[str, object] = {
        "target.tensor_parallel": 4,
        "target.device": "cuda",
        "draft.device": "cuda",
    }
    with pytest.raises(
        ConfigError,
        match=r"needs 10 GPUs \(2 x \(target-0 1 \+ .* \+ draft 1\)\), the cluster has 8; lower",
    ):
        check(keys, node(64, gpus=8), replicas=2)
    check(keys, node(64, gpus=10), replicas=2)


def test_what_others_hold_is_not_available() -> None:
    with pytest.raises(
        ConfigError,
        match=r"needs 4 CPUs \(coordinator 1 \+ target-0 1 \+ draft 1 \+ gateway 1\), "
        r"the cluster has 3 free of 8; lower target.threads",
    ):
        check({"target.threads": 1}, node(8, free=3))
    check({"target.threads": 1}, node(8, free=4))


def test_a_rank_that_no_single_node_could_hold_is_refused() -> None:
    keys: dict[str, object] = {"target.threads": 6}
    with pytest.raises(
        ConfigError, match=r"no node has room for target-0 \(6 CPUs\): node-5 has 5 of 5 CPUs free"
    ):
        check(keys, node(5), node(5))
    check(keys, node(6), node(5))


def test_a_selector_that_no_node_satisfies_is_refused_with_the_labels() -> None:
    keys: dict[str, object] = {"target.threads": 1, "draft.label_selector": {"pool": "drafts"}}
    with pytest.raises(
        ConfigError, match=r"draft \(1 CPU; pool: drafts\): node-8 lacks the labels; start a node"
    ):
        check(keys, node(8, pool="targets"))
    check(keys, node(8, pool="drafts"))


@pytest.mark.parametrize(
    ("condition", "satisfied"),
    [("a", True), ("b", False), ("!b", True), ("!a", False), ("in(a, b)", True), ("!in(a)", False)],
)
def test_conditions_of_labels_are_read_as_ray_reads_them(condition: str, satisfied: bool) -> None:
    assert node(1, pool="a").has_labels({"pool": condition}) is satisfied


def test_waiting_bundles_are_explained_by_the_largest_that_fits_nowhere() -> None:
    wanted = bundles(config_from_keys({"target.threads": 4, "draft.threads": 3}), has_gpus=False)
    assert explain_waiting(wanted, [node(4), node(4)]) is None
    assert explain_waiting(wanted, [node(4, free=3), node(4, free=3)]) == (
        "no node has room for target-0 (4 CPUs): node-4 has 3 of 4 CPUs free, "
        "node-4 has 3 of 4 CPUs free; lower target.threads, draft.threads or replicas.min, "
        "end what holds them, or add nodes"
    )


def test_a_bundle_that_the_others_leave_no_room_for_is_explained_beside_them() -> None:
    wanted = bundles(config_from_keys({"target.threads": 2, "draft.threads": 2}), has_gpus=False)
    why = explain_waiting(wanted, [node(4)])
    assert why is not None
    assert why.startswith(
        "no node has room for coordinator (1 CPU) beside target-0, draft: "
        "node-4 has 0 of 4 CPUs free"
    )


@pytest.mark.parametrize(
    ("cpus", "gpus", "room"), [(7.0, 3.0, True), (6.0, 3.0, False), (7.0, 2.0, False)]
)
def test_an_update_brings_a_new_replica_first_only_where_it_has_room(
    cpus: float, gpus: float, room: bool
) -> None:
    wanted = (
        Bundle("coordinator", {"CPU": 3.0}, {}),
        Bundle("target-0", {"CPU": 1.0, "GPU": 2.0}, {}),
        Bundle("draft", {"CPU": 2.0, "GPU": 1.0}, {}),
    )
    assert has_room(wanted, {"CPU": cpus, "GPU": gpus}) is room


def test_the_engines_of_all_models_must_fit_together() -> None:
    models = [
        {"name": "small", "target": {"threads": 2}, "draft": {"kind": "none"}},
        {
            "name": "large",
            "target": {"threads": 3},
            "draft": {"kind": "none"},
            "replicas": {"min": 2, "max": 2},
        },
    ]
    config = config_from_keys({"models": models})
    wanted, times = first_bundles(config, has_gpus=False)
    assert times == 1
    assert [(bundle.name, bundle.resources["CPU"]) for bundle in wanted] == [
        ("small: coordinator", 1.0),
        ("small: target-0", 2.0),
        *[("large: coordinator", 1.0), ("large: target-0", 3.0)] * 2,
    ]
    nodes = [node(11)]
    with pytest.raises(ConfigError, match=r"needs 12 CPUs .*large: target-0 3.*has 11"):
        check_fits(wanted, nodes, replicas=times, gateway=gateway_bundle(config))
    assert set(engine_deployments(config)) == {"Engine-small", "Engine-large"}
    assert default_resources(config, num_gpus=0)["CPU"] >= 12


ONE_GPU: dict[str, object] = {"target.device": "cuda"}


@pytest.mark.parametrize(
    ("keys", "num_gpus", "placement"),
    [
        ({}, 1, "together"),
        (ONE_GPU, 1, "together"),
        ({"target.tensor_parallel": 4}, 4, "together"),
        ({"replicas.min": 2, "replicas.max": 2}, 3, "together"),
        ({}, 2, "auto"),
        ({"target.tensor_parallel": 4}, 5, "auto"),
        ({"target.tensor_parallel": 4}, 3, "auto"),
        (ONE_GPU, 0, "auto"),
        ({"draft.placement": "apart"}, 1, "apart"),
        ({"draft.num_gpus": 0.5}, 1, "auto"),
        ({"draft.label_selector": {"pool": "small"}}, 1, "auto"),
        ({"draft.device": "cpu"}, 1, "auto"),
        ({"target.device": "cpu"}, 0, "auto"),
    ],
)
def test_auto_is_together_where_the_cluster_has_gpus_for_the_ranks_alone(
    keys: dict[str, object], num_gpus: float, placement: str
) -> None:
    config = config_from_keys(keys)
    fitted = with_drafts_that_fit(config, num_gpus=num_gpus)
    assert fitted.draft.placement == placement
    if placement == "together":
        wanted = bundles(fitted, has_gpus=True)
        check_fits(
            wanted * max(1, config.replicas.min),
            [node(64, gpus=int(num_gpus))],
            replicas=1,
            gateway=gateway_bundle(config),
        )
        # Engines have the config as it was written, and find no bundle for the draft.
        assert with_draft_placement(config, wanted).draft.placement == "together"
        assert (
            with_devices(config, wanted).draft.device == with_devices(fitted, wanted).draft.device
        )


def test_each_model_s_draft_is_together_where_gpus_do_for_the_targets_alone() -> None:
    models = [{"name": name, "target": {"device": "cuda"}} for name in ("one", "other")]
    config = config_from_keys({"models": models})
    placements = {
        num_gpus: [
            part.draft.placement
            for part in with_drafts_that_fit(config, num_gpus=num_gpus).each_model
        ]
        for num_gpus in (1, 2, 4)
    }
    assert placements == {1: ["auto"] * 2, 2: ["together"] * 2, 4: ["auto"] * 2}


def test_a_draft_that_is_to_be_apart_is_refused_on_one_gpu() -> None:
    with pytest.raises(
        ConfigError, match=r"needs 2 GPUs \(target-0 1 \+ draft 1\), the cluster has 1;"
    ):
        check({"draft.placement": "apart"}, node(8, gpus=1))
