"""Manifests for operators: valid for Ray and for us, consistent with each other and the pins."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray._private.label_utils import parse_node_labels_string, validate_label_selector
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.util.placement_group import validate_placement_group

from specserve import __version__
from specserve.cluster import haproxy
from specserve.cluster.gateway import header_encoding
from specserve.cluster.placement import bundles, engine_deployments
from specserve.config.features import has
from specserve.config.tree import DEMO, Config, config_from_keys

# A warning of ray.serve's own, when it is imported.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Using extra keyword arguments on `Field`:DeprecationWarning"
)

ROOT = Path(__file__).parents[2]
HA_PROXY = "RAY_SERVE_ENABLE_HA_PROXY"
SELECTOR = re.compile(r"# (label_selector: .*)")
APP_NAME = "specserve"  # which every file gives to its application


def _text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def _load(name: str) -> dict[str, Any]:
    tree: dict[str, Any] = yaml.safe_load(_text(name))
    return tree


def _ray_service(name: str = "deploy/kuberay.yaml") -> dict[str, Any]:
    services = [tree for tree in yaml.safe_load_all(_text(name)) if tree["kind"] == "RayService"]
    assert len(services) == 1
    service: dict[str, Any] = services[0]
    return service


def _serve_configs() -> dict[str, dict[str, Any]]:
    embedded = yaml.safe_load(_ray_service()["spec"]["serveConfigV2"])
    pooled = yaml.safe_load(_ray_service("deploy/kuberay-pool.yaml")["spec"]["serveConfigV2"])
    apart = yaml.safe_load(SELECTOR.sub(r"\1", _text("deploy/llama-70b.yaml")))
    return {
        "demo": _load("deploy/demo.yaml"),
        "llama-70b": _load("deploy/llama-70b.yaml"),
        "llama-70b, apart": apart,
        "kuberay": embedded,
        "kuberay-pool": pooled,
    }


def _config(serve_config: Mapping[str, Any]) -> Config:
    return config_from_keys(serve_config["applications"][0]["args"])


def _pinned(package: str) -> str:
    found = re.search(rf"^{package}==(\S+)$", _text("constraints.txt"), re.MULTILINE)
    assert found is not None
    return found[1]


def _schema(serve_config: Mapping[str, Any]) -> Any:
    from ray.serve.schema import ServeDeploySchema  # late: the import itself warns

    return ServeDeploySchema.model_validate(serve_config)


def _deployments(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the deployments that `build` makes of the args, by name.

    `serve build` would not do, since it leaves label selectors out.
    """
    from ray.serve._private.build_app import build_app

    from specserve.cluster.app import build

    return {
        deployment.name: deployment
        for deployment in build_app(build(args), name=APP_NAME).deployments
    }


serve_configs = pytest.mark.parametrize(
    "serve_config",
    [
        pytest.param(tree, id=name)
        for name, tree in _serve_configs().items()
        if name != "kuberay-pool" or has("draft_pools")
    ],
)


# Serve's files


@serve_configs
def test_serve_takes_the_file(serve_config: dict[str, Any]) -> None:
    from specserve.cluster.app import build

    schema = _schema(serve_config)
    (application,) = schema.applications
    assert (application.name, application.route_prefix, schema.http_options.port) == (
        APP_NAME,
        "/",
        8000,
    )
    assert application.import_path == f"{build.__module__}:{build.__name__}"


@serve_configs
def test_serve_reads_every_key_of_the_file(serve_config: dict[str, Any]) -> None:
    """Check that all keys are known, since Serve's schema silently ignores a misspelt one."""
    schema = _schema(serve_config)
    assert set(serve_config) <= set(type(schema).model_fields)
    assert set(serve_config["http_options"]) <= set(type(schema.http_options).model_fields)
    assert set(serve_config["applications"][0]) <= set(type(schema.applications[0]).model_fields)


@serve_configs
def test_our_config_takes_the_args(serve_config: dict[str, Any]) -> None:
    config = _config(serve_config)
    assert config.draft.kind == "neural"
    assert config.replicas.target_ongoing_requests <= config.limits.max_running, (
        "scaling up should begin before requests have to queue"
    )


@serve_configs
def test_the_file_builds_the_deployments_that_it_describes(serve_config: dict[str, Any]) -> None:
    config = _config(serve_config)
    deployments = _deployments(serve_config["applications"][0]["args"])
    pools = {f"DraftPool-{config.draft.pool.name}"} if config.draft.is_pooled else set()
    assert set(deployments) == {
        "Board",
        "Engine",
        "Gateway",
        *pools,
    }
    wanted, placed = bundles(config, has_gpus=False), deployments["Engine"]._replica_config
    assert placed.placement_group_bundles == [dict(bundle.resources) for bundle in wanted]
    for name in ("Gateway", "Board"):
        options = deployments[name]._replica_config.ray_actor_options
        assert options.get("label_selector") == (dict(config.http.label_selector) or None)
    labels = [dict(bundle.labels) for bundle in wanted]
    assert placed.placement_group_bundle_label_selector == (labels if any(labels) else None)
    validate_placement_group(
        placed.placement_group_bundles,
        placed.placement_group_strategy,
        bundle_label_selector=labels,
    )
    scaled = deployments["Engine"]._deployment_config
    if config.replicas.min == config.replicas.max:
        assert scaled.num_replicas == config.replicas.min
    else:
        assert (scaled.autoscaling_config.min_replicas, scaled.autoscaling_config.max_replicas) == (
            config.replicas.min,
            config.replicas.max,
        )


def test_the_file_of_two_models_builds_engines_for_each() -> None:
    serve_config = _load("deploy/two-models.yaml")
    _schema(serve_config)
    config = _config(serve_config)
    assert [part.model for part in config.each_model] == ["demo", "demo-plain"]
    deployments = _deployments(serve_config["applications"][0]["args"])
    assert set(deployments) == {"Board", "Engine-demo", "Engine-demo-plain", "Gateway"}
    for name, part in engine_deployments(config).items():
        placed = deployments[name]._replica_config
        wanted = bundles(part, has_gpus=False)
        assert placed.placement_group_bundles == [dict(one.resources) for one in wanted]


def test_the_demo_file_serves_the_demo_pair_on_the_loopback_without_gpus() -> None:
    serve_config = _load("deploy/demo.yaml")
    config = _config(serve_config)
    assert (config.model, config.target.path, config.draft.path) == (
        "demo",
        str(DEMO / "target"),
        str(DEMO / "draft"),
    )
    assert (serve_config["http_options"]["host"], serve_config["proxy_location"]) == (
        "127.0.0.1",
        "HeadOnly",
    )
    assert all("GPU" not in bundle.resources for bundle in bundles(config, has_gpus=True))


@pytest.mark.parametrize("name", ["llama-70b", "kuberay", "kuberay-pool"])
def test_gateways_on_other_nodes_can_be_reached(name: str) -> None:
    serve_config = _serve_configs()[name]
    assert (serve_config["http_options"]["host"], serve_config["proxy_location"]) == (
        "0.0.0.0",
        "EveryNode",
    )


@pytest.mark.parametrize("name", ["llama-70b", "kuberay", "kuberay-pool"])
def test_what_other_nodes_can_reach_requires_keys(name: str) -> None:
    assert _config(_serve_configs()[name]).http.api_keys_file is not None


def test_the_70b_files_keys_are_brought_to_every_node_by_the_cluster_file() -> None:
    file = _config(_load("deploy/llama-70b.yaml")).http.api_keys_file
    assert file is not None
    folder = str(Path(file).parent)
    assert folder in _load("cluster.yaml")["file_mounts"]
    local = _load("cluster.yaml")["file_mounts"][folder]
    assert f"--file {local}/{Path(file).name}" in _text("docs/guides/deploying.md")


@pytest.mark.parametrize("has_gpus", [False, True])
def test_the_70b_target_has_four_gpus_and_its_draft_a_fifth(has_gpus: bool) -> None:
    """Check the bundles with and without a GPU node when the application is built."""
    wanted = bundles(_config(_load("deploy/llama-70b.yaml")), has_gpus=has_gpus)
    assert [dict(bundle.resources) for bundle in wanted] == [
        {"CPU": 1},
        *[{"CPU": 1, "GPU": 1}] * 4,
        {"CPU": 1, "GPU": 1},
    ]
    assert not any(bundle.labels for bundle in wanted)


def test_the_commented_lines_put_target_and_draft_on_nodes_of_different_kinds() -> None:
    assert len(SELECTOR.findall(_text("deploy/llama-70b.yaml"))) == 2
    wanted = bundles(_config(_serve_configs()["llama-70b, apart"]), has_gpus=False)
    assert [dict(bundle.labels) for bundle in wanted] == [
        {},
        *[{"role": "target"}] * 4,
        {"role": "draft"},
    ]
    for bundle in wanted:
        assert validate_label_selector(dict(bundle.labels)) is None


# cluster.yaml


def test_ray_up_takes_the_cluster_file() -> None:
    validate_config(prepare_config(_load("cluster.yaml")))


@pytest.mark.parametrize(
    "where",
    [("available_node_types", "draft", "label"), ("worker_start_commands",), ("docker", "images")],
)
def test_ray_up_would_not_take_it_with_a_misspelt_key(where: tuple[str, ...]) -> None:
    tree = prepare_config(_load("cluster.yaml"))
    *sections, key = where
    branch = tree
    for name in sections:
        branch = branch[name]
    branch[key] = {"role": "draft"}
    with pytest.raises(jsonschema.ValidationError):
        validate_config(tree)


def test_no_node_installs_another_ray() -> None:
    """Check the keys whose defaults in Ray install a nightly build where they find no Ray."""
    tree = prepare_config(_load("cluster.yaml"))
    assert tree["head_setup_commands"] == ["pip install boto3"]
    assert tree["worker_setup_commands"] == tree["initialization_commands"] == []


def test_every_node_starts_ray_with_haproxy_and_the_hub_token() -> None:
    tree = _load("cluster.yaml")
    for commands in (tree["head_start_ray_commands"], tree["worker_start_ray_commands"]):
        (starting,) = [command for command in commands if "ray start" in command]
        exports, _, _ = starting.partition("ray start")
        assert f"export {HA_PROXY}=1 HF_TOKEN_PATH=" in exports
        token = re.search(r"HF_TOKEN_PATH=([^;\s]+)", exports)
        assert token is not None
        assert str(Path(token[1]).parent) in tree["file_mounts"]


def test_each_bundle_of_the_70b_has_a_kind_of_node_and_all_replicas_have_room() -> None:
    types = copy.deepcopy(_load("cluster.yaml")["available_node_types"])
    config = _config(_serve_configs()["llama-70b, apart"])
    for bundle in bundles(config, has_gpus=False):
        fitting = [
            kind
            for kind in types.values()
            if bundle.labels.items() <= kind.get("labels", {}).items()
            and all(
                kind["resources"].get(name, 0) >= amount
                for name, amount in bundle.resources.items()
            )
        ]
        assert fitting, bundle
    for role, gpus in (("target", config.target.tensor_parallel), ("draft", 1)):
        (kind,) = [kind for kind in types.values() if kind.get("labels") == {"role": role}]
        replicas_a_node = kind["resources"]["GPU"] // gpus
        assert replicas_a_node * kind["max_workers"] == config.replicas.max
    assert (
        sum(kind.get("max_workers", 0) for kind in types.values())
        == _load("cluster.yaml")["max_workers"]
    )


def test_the_head_has_no_room_for_workers() -> None:
    tree = _load("cluster.yaml")
    assert tree["available_node_types"][tree["head_node_type"]]["resources"] == {"CPU": 0}
    assert any(
        "ray start --head" in command and "--num-cpus=0" in command
        for command in tree["head_start_ray_commands"]
    )


# The image, and versions everywhere


def test_manifests_and_image_name_the_ray_that_the_tests_run_with() -> None:
    ray_version = _pinned("ray")
    assert _ray_service()["spec"]["rayClusterConfig"]["rayVersion"] == ray_version
    assert f"ARG BASE=rayproject/ray:{ray_version}-py311-cpu\n" in _text("deploy/Dockerfile")


def test_manifests_name_the_image_of_this_version() -> None:
    image = f"registry.example.com/specserve:{__version__}"
    assert _load("cluster.yaml")["docker"]["image"] == image
    assert f" IMAGE={image}\n" in _text("deploy/Dockerfile")


def test_the_image_is_built_of_files_that_are_there_and_all_that_the_package_needs() -> None:
    copied = [
        name
        for line in re.findall(r"^COPY --chown=\S+ (.*)$", _text("deploy/Dockerfile"), re.MULTILINE)
        for name in line.split()[:-1]
    ]
    assert all((ROOT / name).exists() for name in copied)
    alone = "specserve/flashinfer_kernels.py"  # of a stage that compiles
    assert {"pyproject.toml", "deploy/locks", "README.md", "LICENSE", "specserve", alone} == set(
        copied
    )


def test_no_pin_asks_for_a_build_of_one_index() -> None:
    """A local version such as 2.13.0+cpu is published nowhere but where it was built."""
    assert re.findall(r"^\S+==\S+\+\S+$", _text("constraints.txt"), re.MULTILINE) == []


def test_the_image_starts_ray_with_our_haproxy_and_headers_in_any_encoding() -> None:
    assert f"ENV {HA_PROXY}=1" in _text("deploy/Dockerfile")
    assert f"{haproxy.BINARY_PATH}=/home/ray/anaconda3/bin/{haproxy.COMMAND}" in _text(
        "deploy/Dockerfile"
    )
    starts = f"{haproxy.BINARY_PATH}=$(command -v {haproxy.COMMAND})"
    assert starts in _text("docs/guides/deploying.md")
    setting = f"{header_encoding.SETTING}={header_encoding.IMPORT_PATH}"
    assert setting in _text("deploy/Dockerfile")
    assert setting in _text("docs/guides/deploying.md")


def test_the_first_process_of_the_image_reaps_what_others_leave() -> None:
    assert re.search(r"apt-get install[^&]*\btini\b", _text("deploy/Dockerfile"))
    assert '\nENTRYPOINT ["tini", "--"]\n' in _text("deploy/Dockerfile")


def test_the_image_has_a_compiler_for_kernels_that_are_built_on_the_spot() -> None:
    """Triton compiles its launchers; without a compiler slower kernels are taken."""
    assert re.search(r"apt-get install[^&]*\bgcc\b[^&]*\blibc6-dev\b", _text("deploy/Dockerfile"))


def test_the_clusters_draft_drafts_a_token_in_well_less_than_a_verification() -> None:
    read_gb_s = {
        "g6e.2xlarge": 864,
        "g6.2xlarge": 300,
        "p5.48xlarge": 3350,
    }  # by the makers' sheets
    draft = yaml.safe_load(_text("cluster.yaml"))["available_node_types"]["draft"]
    bandwidth = read_gb_s[draft["node_config"]["InstanceType"]] * 1e9
    token_ms = 2.5e9 / bandwidth * 1e3  # 1.24B parameters in bf16
    assert token_ms < 18 / 4, "a verification of 70B on four H100 takes 18 ms"


# The page


def test_the_page_names_labels_that_ray_start_takes() -> None:
    labels = re.findall(r"--labels=(\S+?)[`\s]", _text("docs/guides/deploying.md"))
    assert labels
    assert all(parse_node_labels_string(label) for label in labels)


@pytest.mark.parametrize(
    "name",
    [
        "deploy/demo.yaml",
        "deploy/llama-70b.yaml",
        "deploy/kuberay.yaml",
        "deploy/kuberay-pool.yaml",
        "deploy/Dockerfile",
        "cluster.yaml",
    ],
)
def test_the_page_describes_every_file(name: str) -> None:
    assert name in _text("docs/guides/deploying.md")
