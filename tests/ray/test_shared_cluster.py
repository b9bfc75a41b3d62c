"""Several applications on one Ray cluster: beside each other, refused, replaced, and too large."""

from __future__ import annotations

import contextlib
import json
import re
import urllib.request
from collections.abc import Iterator

import pytest
from ray.cluster_utils import Cluster

from specserve.cluster.launch import deploy
from specserve.cluster.proxy_settings import SERVE_SETTINGS
from specserve.cluster.ray_session import ray_session
from specserve.cluster.serve_instance import is_serve_running
from specserve.config.tree import Config, config_from_keys
from specserve.errors import ConfigError
from tests.support.ray_server import free_port

HEAD_CPUS, NODE_CPUS = 6, 2
# An engine would be started by the first request.
NO_ENGINE: dict[str, object] = {"replicas__min": 0, "replicas__upscale_delay_s": 20}


class SharedCluster:
    """A cluster that we joined, and what was said about it."""

    def __init__(self) -> None:
        self.port, self.said = free_port(), list[str]()

    def config(self, **keys: object) -> Config:
        """Return a config of two CPUs for the engine, and one for a gateway on the head."""
        defaults: dict[str, object] = {
            "http.port": self.port,
            "draft.kind": "none",
            "target.threads": 1,
            "http.label_selector": {"pool": "head"},
        }
        return config_from_keys(
            defaults | {key.replace("__", "."): value for key, value in keys.items()}
        )

    def deploy(
        self, config: Config, *, replace: bool = False
    ) -> contextlib.AbstractContextManager[str]:
        return deploy(config, self.said.append, owns_ray=False, replace=replace)


@pytest.fixture(scope="module")
def cluster() -> Iterator[SharedCluster]:
    """Join a cluster of two nodes, which runs no Serve."""
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in SERVE_SETTINGS.items():
            patch.setenv(variable, value)
        nodes = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": HEAD_CPUS,
                "labels": {"pool": "head"},
                "include_dashboard": False,
            },
        )
        nodes.add_node(num_cpus=NODE_CPUS)
        shared = SharedCluster()
        with ray_session(shared.config(), shared.said.append, join=nodes.address):
            yield shared
        nodes.shutdown()


def models(url: str) -> list[str]:
    with urllib.request.urlopen(f"{url}/v1/models", timeout=60) as response:
        return [model["id"] for model in json.load(response)["data"]]


def complete(url: str, model: str) -> int:
    asked = {"model": model, "prompt": "import", "max_tokens": 3, "ignore_eos": True}
    body = json.dumps(asked).encode()
    request = urllib.request.Request(
        f"{url}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        tokens: int = json.load(response)["usage"]["completion_tokens"]
        return tokens


def refusal(cluster: SharedCluster, config: Config) -> str:
    with pytest.raises(ConfigError) as caught, cluster.deploy(config):
        pass
    return str(caught.value)


def test_applications_live_beside_each_other_and_end_alone(cluster: SharedCluster) -> None:
    first = cluster.config(model="first")
    with cluster.deploy(first) as first_url:
        second = cluster.config(
            model="second", name="second", http__root_path="/second", **NO_ENGINE
        )
        with cluster.deploy(second) as second_url:
            assert second_url == f"{first_url}/second"
            assert complete(first_url, "first") == 3
            assert models(first_url) == ["first"]
            assert models(second_url) == ["second"]
            assert "--replace" in refusal(cluster, first)
            assert "http.root_path" in refusal(cluster, cluster.config(name="third"))
        assert complete(first_url, "first") == 3, "the second has deleted nothing but itself"
        successor = cluster.config(model="successor", name=first.name, **NO_ENGINE)
        with cluster.deploy(successor, replace=True) as url:
            assert models(url) == ["successor"]
        assert is_serve_running(), "the one that replaced it has not started Serve"
    assert not is_serve_running()
    assert any("replaced by another" in line for line in cluster.said)


def test_bundles_that_fit_on_no_node_beside_each_other_end_the_deployment(
    cluster: SharedCluster,
) -> None:
    """Check a rank that needs the whole of the only node on which the gateway may be."""
    why = refusal(cluster, cluster.config(name="large", target__threads=HEAD_CPUS))
    assert re.match(
        rf"no node has room for (gateway|target-0) .* has \d of {HEAD_CPUS} CPUs free.*; lower", why
    )
    assert not is_serve_running(), "nothing of it is left"
