"""A draft pool's config, its devices and its load: what is refused, and what is deployed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.build_app import build_app

from specserve.cluster.app import application
from specserve.config.tree import Config, config_from_keys
from specserve.errors import ConfigError, TokenizerMismatch
from specserve.features.draft_pools.autoscaling import pool_policy
from specserve.features.draft_pools.deployment import LoadMeter, pool_draft_config
from specserve.features.draft_pools.load import DraftLoad
from specserve.features.draft_pools.sharers import (
    engines_per_draft,
    pool_bundles,
    shared_draft_config,
)
from specserve.features.draft_pools.tokenizers import require_shared_tokenizers
from specserve.tools.plan.devices import device_demands
from tests.support import checkpoints

POOL = {"draft.pool.name": "shared", "replicas.min": 2, "replicas.max": 2}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"draft.pool.devices": 2}, "give it a draft.pool.name"),
        ({"draft.pool": {"name": None, "devices": 2}}, "give it a draft.pool.name"),
        # As many as there are by default.
        ({"draft.pool": {"devices": 1}}, "draft.pool.devices is given without draft.pool.name"),
        ({**POOL, "draft.pool.name": "a b"}, "draft.pool.name 'a b' must begin"),
        ({**POOL, "draft.kind": "max_gram", "draft.path": None}, "draft.kind is max_gram"),
        ({**POOL, "draft.placement": "together"}, "draft.placement is together"),
        ({**POOL, "draft.learn": True}, "draft.learn belongs to"),
        ({**POOL, "draft.pool.targets": 1}, "below replicas.max 2"),
        ({**POOL, "draft.pool.devices": 3}, "above the number of engines, 2"),
        ({**POOL, "draft.pool.max_devices": 3}, "max_devices 3 is above the number of engines, 2"),
        (
            {**POOL, "draft.pool.devices": 2, "draft.pool.max_devices": 1},
            "draft.pool.max_devices 1 is below draft.pool.devices 2",
        ),
        (
            {**POOL, "draft.pool.devices_per_engine": 2},
            "draft.pool.devices_per_engine 2 is above draft.pool.devices 1; lower it",
        ),
        (
            {**POOL, "draft.pool": {"name": "a", "devices": 5, "devices_per_engine": 2}},
            "devices 5 is above the number of engines, 2, and each drafts on 2; lower it",
        ),
        ({**POOL, "draft.pool.target_busy": 0}, "draft.pool.target_busy"),
    ],
)
def test_a_pool_that_cannot_work_is_refused_with_the_key_and_the_remedy(
    keys: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from_keys(keys)


def pooled(**keys: object) -> Config:
    return config_from_keys({**POOL, "target.device": "cpu", "draft.device": "cpu", **keys})


def test_a_device_has_room_for_all_engines_that_it_drafts_for() -> None:
    config = pooled(**{"replicas.max": 5, "draft.pool.devices": 2, "cache.pages": 100})
    assert engines_per_draft(config) == 3
    on_both = pooled(
        **{"replicas.max": 5, "draft.pool.devices": 2, "draft.pool.devices_per_engine": 2}
    )
    assert engines_per_draft(on_both) == 5
    own = pool_draft_config(config, has_gpu=False)
    assert (own.cache.pages, own.limits.max_running) == (300, 3 * config.limits.max_running)
    assert own.draft.device == "cpu"
    auto = pool_draft_config(pooled(**{"draft.device": "cuda"}), has_gpu=True)
    assert auto.draft.device == "cuda:0", "Ray numbers the replica's own GPUs from 0"


def built_deployments(config: Config) -> dict[str, Any]:
    """Return the deployments of the config's application by name."""
    return {each.name: each for each in build_app(application(config), name="it").deployments}


def test_a_pool_that_may_grow_is_scaled_by_its_own_policy_between_its_bounds() -> None:
    config = pooled(**{"replicas.max": 4, "draft.pool.max_devices": 3})
    pool = built_deployments(config)["DraftPool-shared"]._deployment_config
    scaling = pool.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (1, 3)
    assert scaling.policy.policy_function == f"{pool_policy.__module__}:{pool_policy.__name__}"
    assert pool.max_ongoing_requests == 4, "the fewest devices have room for all engines"
    assert len(pool_bundles(config, has_gpus=False)) == 1
    assert len(pool_bundles(config, has_gpus=False, at_most=True)) == 3
    fixed = built_deployments(pooled())["DraftPool-shared"]._deployment_config
    assert (fixed.num_replicas, fixed.autoscaling_config) == (1, None)


def test_the_load_is_measured_between_two_readings() -> None:
    times = iter([0.0, 4.0, 6.0])
    worker: Any = SimpleNamespace(load=DraftLoad())
    meter = LoadMeter(worker, lambda: next(times))
    worker.load.seconds = 3.0
    assert [meter.read(), meter.read()] == [0.75, 0.0]


def two_models(first: dict[str, Any], second: dict[str, Any], **keys: object) -> Config:
    """Return the config of two models that share a pool, apart from these keys of each."""
    own = {"draft": {"path": "org/draft", "device": "cpu", "pool": {"name": "shared"}}}
    models = [
        {"name": name, "target": {"path": f"org/{name}", "device": "cpu"}, **own, **given}
        for name, given in (("a", first), ("b", second))
    ]
    return config_from_keys({"models": models, **keys})


def test_two_models_that_name_one_pool_share_its_devices() -> None:
    limits = {"max_running": 4, "max_batch_tokens": 100}
    config = two_models({"replicas": {"max": 2}, "limits": limits}, {"replicas": {"max": 3}})
    assert [engines_per_draft(part) for part in config.models] == [5, 5]
    (bundle,) = pool_bundles(config, has_gpus=False)
    assert bundle.name == "draft pool shared"
    shared = shared_draft_config(config.models)
    assert shared.limits.max_running == 64, "the larger of both"
    assert shared.limits.max_batch_tokens is None, "one leaves it to the draft"

    built = built_deployments(config)
    assert set(built) == {"Board", "Engine-a", "Engine-b", "DraftPool-shared", "Gateway"}
    pool = built["DraftPool-shared"]
    assert pool._deployment_config.max_ongoing_requests == 5
    assert [target.path for target in pool.init_args[2]] == ["org/b"]
    handles = [built[name].init_kwargs["pool"] for name in ("Engine-a", "Engine-b")]
    assert [each.deployment_name for each in handles] == ["DraftPool-shared"] * 2


def test_two_models_may_have_a_pool_each() -> None:
    own = {"draft": {"path": "org/other", "device": "cpu", "pool": {"name": "own"}}}
    config = two_models({}, own)
    assert [engines_per_draft(part) for part in config.models] == [1, 1]
    built = built_deployments(config)
    assert built["Engine-b"].init_kwargs["pool"].deployment_name == "DraftPool-own"


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (
            {"draft": {"path": "org/x", "device": "cpu", "pool": {"name": "shared"}}},
            "models a and b share the draft.pool shared, and differ in draft.path: "
            "org/draft and org/x; give them the same, or each a draft.pool.name of its own",
        ),
        (
            {
                "draft": {
                    "path": "org/draft",
                    "device": "cpu",
                    "pool": {"name": "shared", "devices": 2},
                }
            },
            "differ in draft.pool.devices: 1 and 2",
        ),
        ({"cache": {"page_size": 8}}, "differ in cache.page_size: 16 and 8"),
        (
            {"speculation": {"anticipation": {"fanout": 3}}},
            "differ in speculation.anticipation.fanout: none and 3",
        ),
    ],
)
def test_models_that_share_a_pool_and_differ_in_its_draft_are_refused(
    second: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        two_models({}, second)


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        ({"targets": 2}, "draft.pool.targets 2 is below replicas.max of a, b together 3"),
        ({"devices": 4}, "draft.pool.devices 4 is above the number of engines, 3"),
    ],
)
def test_a_shared_pool_has_as_many_engines_as_its_models_together(
    pool: dict[str, int], message: str
) -> None:
    own = {"draft": {"path": "org/draft", "pool": {"name": "shared", **pool}}}
    with pytest.raises(ConfigError, match=message):
        two_models({**own, "replicas": {"max": 2}}, own)


def test_targets_of_a_pool_with_different_tokenizers_are_refused(tmp_path: Path) -> None:
    """Check it for tokens in another order, which an equal number of them would not show."""
    names = ("a", "b", "c")
    targets = [checkpoints.make("llama", tmp_path / name) for name in names]
    for target in targets:
        checkpoints.add_tokenizer(target)
    file = targets[2] / "tokenizer.json"
    described = json.loads(file.read_text())
    vocab = described["model"]["vocab"]
    vocab["A"], vocab["B"] = vocab["B"], vocab["A"]
    file.write_text(json.dumps(described))
    same, other = (
        two_models({"target": {"path": str(targets[0])}}, {"target": {"path": str(target)}})
        for target in targets[1:]
    )
    require_shared_tokenizers(same)
    with (
        pytest.raises(TokenizerMismatch, match=r"give each model a draft\.pool\.name of its own"),
    ):
        require_shared_tokenizers(other)


def test_the_devices_of_a_plan_include_those_of_a_pool_once() -> None:
    keys = {"replicas.min": 2, "replicas.max": 4, "draft.threads": 3, "draft.device": "cpu"}
    pool_keys = {"name": "shared", "devices": 2, "max_devices": 3}
    config = config_from_keys({**keys, "draft": {"pool": pool_keys}})
    engines, pool, _ = device_demands(config, has_gpus=False)
    assert (engines.cpus, engines.max_replicas) == (2.0, 4), "coordinator and rank"
    assert (pool.name, pool.cpus) == ("draft pool shared", 3.0)
    assert (pool.min_replicas, pool.max_replicas) == (2, 3)
