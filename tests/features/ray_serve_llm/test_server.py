"""The server class of Ray Serve LLM without that package: its config and placement.

tests/ray_llm has it behind Ray's own router.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from specserve.errors import ConfigError
from specserve.features.ray_serve_llm.config import config_of
from specserve.features.ray_serve_llm.server import SpecserveServer
from tests.support.llm_configs import llm_config

ROOT = Path(__file__).parents[3]


def test_engine_kwargs_are_keys_of_a_config_file_nested_or_not() -> None:
    given = {"target": {"threads": 2}, "draft.threads": 3}
    config = config_of(llm_config(engine_kwargs=given, accelerator_type="H100"))
    assert (config.model, config.target.threads, config.draft.threads) == ("demo", 2, 3)
    assert dict(config.target.label_selector) == {"ray.io/accelerator-type": "H100"}
    elsewhere = config_of(llm_config(loading={"model_id": "m", "model_source": "org/model"}))
    assert (elsewhere.model, elsewhere.target.path) == ("m", "org/model")
    assert config_of(llm_config(loading={"model_id": "org/model"})).target.path == "org/model"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"engine_kwargs": {"tensor_parallel_size": 2}}, "tensor_parallel_size"),
        ({"engine_kwargs": {"replicas.max": 2}}, "deployment_config"),
        ({"engine_kwargs": {"replicas": {"max": 2}}}, "deployment_config"),
        ({"placement_group_config": {"bundles": [{"CPU": 1}]}}, "placement_group_config"),
        ({"lora_config": {"dynamic_lora_loading_path": "s3://x"}}, "adapters.paths"),
        ({"loading": {"model_source": {"bucket_uri": "s3://x"}}}, "not a mirror"),
    ],
)
def test_what_would_do_nothing_is_refused(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config_of(llm_config(**changed))


def test_a_replica_asks_for_a_bundle_for_each_of_its_processes() -> None:
    options = SpecserveServer.get_deployment_options(
        llm_config(
            engine_kwargs={"target.threads": 2, "draft.threads": 1, "draft.placement": "apart"},
            deployment_config={"num_replicas": 3, "ray_actor_options": {"resources": {"a": 1}}},
            runtime_env={"env_vars": {"A": "b"}},
        )
    )
    assert options["placement_group_bundles"] == [{"CPU": 1.0}, {"CPU": 2.0}, {"CPU": 1.0}]
    assert options["num_replicas"] == 3
    assert options["ray_actor_options"] == {
        "num_cpus": 1.0,
        "resources": {"a": 1},
        "runtime_env": {"env_vars": {"A": "b"}},
    }
    assert "request_router_config" not in options


def test_the_example_names_the_class_and_only_keys_that_exist() -> None:
    (application,) = yaml.safe_load((ROOT / "deploy/ray-llm.yaml").read_text())["applications"]
    (entry,) = application["args"]["llm_configs"]
    assert entry["server_cls"] == f"{SpecserveServer.__module__}:{SpecserveServer.__name__}"
    loading = entry.pop("model_loading_config")
    config = config_of(llm_config(**entry, loading=loading))
    assert config.target.threads == 1
