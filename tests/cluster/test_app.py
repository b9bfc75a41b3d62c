"""The application gets the config that a server wants, not that of a library call."""

from __future__ import annotations

from typing import Any

import pytest

from specserve.cluster.app import BURST, application
from specserve.cluster.board.autoscaling import gateway_policy
from specserve.config.tree import config_from_keys


@pytest.mark.parametrize(("given", "shared"), [("auto", True), (True, True), (False, False)])
def test_a_server_shares_weights_unless_the_config_says_no(given: object, shared: bool) -> None:
    app: Any = application(config_from_keys({"weights.shared": given}))
    config = app._bound_deployment.init_args[0]
    assert config.weights.shared is shared


def test_several_models_have_engines_of_their_own_and_one_gateway() -> None:
    from ray.serve._private.build_app import build_app

    models = [
        {"name": "org/small", "limits": {"max_running": 3, "request_timeout_s": 700}},
        {"name": "large", "replicas": {"min": 1, "max": 5}},
    ]
    config = config_from_keys({"models": models, "limits.max_queued": 7})
    built: dict[str, Any] = {
        deployment.name: deployment
        for deployment in build_app(application(config), name=config.name).deployments
    }
    assert set(built) == {"Board", "Engine-org-small", "Engine-large", "Gateway"}
    small, large = (built[f"Engine-{name}"]._deployment_config for name in ("org-small", "large"))
    assert (small.max_queued_requests, large.max_queued_requests) == (7 + BURST, 7 + BURST)
    assert (small.num_replicas, large.autoscaling_config.max_replicas) == (1, 5)
    assert built["Engine-large"].init_args[0].model == "large"
    assert built["Engine-large"].init_args[3] == "large"
    assert [handle.deployment_name for handle in built["Gateway"].init_args[2:]] == [
        "Engine-org-small",
        "Engine-large",
    ]
    assert built["Gateway"]._deployment_config.graceful_shutdown_timeout_s == 700


def test_gateways_scale_by_the_policy_for_what_they_report() -> None:
    app: Any = application(config_from_keys({"replicas.gateways": 3}))
    gateway = app._bound_deployment
    scaling = gateway._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (1, 3)
    assert scaling.policy.get_policy().__name__ == gateway_policy.__name__, "found by its path"
    assert callable(gateway.func_or_class.record_autoscaling_stats), "Serve polls it by this name"
