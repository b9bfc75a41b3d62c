"""Manifests for Kubernetes: fields that exist, one port, times that fit, and locked doors."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from specserve import __version__
from specserve.cluster.placement import bundles
from specserve.config.tree import config_from_keys
from tests.support.kubernetes_check import errors, kuberay_definitions, kubernetes_definitions
from tests.support.kubernetes_fields import schema_of

Tree = dict[str, Any]
ROOT = Path(__file__).parents[2]
FILES = (
    "deploy/kuberay.yaml",
    "deploy/kubernetes/network-policy.yaml",
    "deploy/kubernetes/redis.yaml",
)
WITH_POOL = "deploy/kuberay-pool.yaml"
SECRETS = "/etc/specserve/secrets"
SIGTERM_REMAINDER_S = 10
"""Time that Ray needs to end once its drain is over."""


def _load(name: str) -> tuple[Tree, ...]:
    return tuple(yaml.safe_load_all((ROOT / name).read_text(encoding="utf-8")))


@cache
def _objects() -> tuple[Tree, ...]:
    return tuple(tree for name in FILES for tree in _load(name))


def _name(tree: Tree) -> str:
    return f"{tree['kind']} {tree['metadata']['name']}"


def _object(kind: str, name: str) -> Tree:
    (found,) = [
        tree for tree in _objects() if (tree["kind"], tree["metadata"]["name"]) == (kind, name)
    ]
    return found


SERVICE: Tree = _object("RayService", "specserve")["spec"]
CLUSTER: Tree = SERVICE["rayClusterConfig"]
SERVE: Tree = yaml.safe_load(SERVICE["serveConfigV2"])
(APPLICATION,) = SERVE["applications"]
CONFIG = config_from_keys(APPLICATION["args"])
GROUPS = {group["groupName"]: group for group in CLUSTER["workerGroupSpecs"]}
PODS: Mapping[str, Tree] = {
    "head": CLUSTER["headGroupSpec"]["template"]["spec"],
    **{name: group["template"]["spec"] for name, group in GROUPS.items()},
    "redis": _object("StatefulSet", "specserve-redis")["spec"]["template"]["spec"],
}
RAY_PODS = ("head", *GROUPS)
WORKER_PODS = tuple(GROUPS)

every_pod = pytest.mark.parametrize("name", PODS)
every_ray_pod = pytest.mark.parametrize("name", RAY_PODS)
every_worker_pod = pytest.mark.parametrize("name", WORKER_PODS)


def _container(name: str) -> Tree:
    (container,) = PODS[name]["containers"]
    found: Tree = container
    return found


def _env(name: str) -> dict[str, Any]:
    return {entry["name"]: entry.get("value") for entry in _container(name)["env"]}


def _volumes(name: str) -> dict[str, Tree]:
    return {volume["name"]: volume for volume in PODS[name]["volumes"]}


def _files(name: str) -> dict[str, tuple[str, str]]:
    """Return secret and key of each file under SECRETS."""
    (mount,) = [mount for mount in _container(name)["volumeMounts"] if mount["name"] == "secrets"]
    assert (mount["mountPath"], mount["readOnly"]) == (SECRETS, True)
    return {
        f"{SECRETS}/{item['path']}": (source["secret"]["name"], item["key"])
        for source in _volumes(name)["secrets"]["projected"]["sources"]
        for item in source["secret"]["items"]
    }


# Fields


def _validator(tree: Tree) -> jsonschema.Draft7Validator:
    return jsonschema.Draft7Validator(schema_of(tree["apiVersion"], tree["kind"]))


@pytest.mark.parametrize("tree", [*_objects(), *_load(WITH_POOL)], ids=_name)
def test_every_field_exists(tree: Tree) -> None:
    _validator(tree).validate(tree)


def _paths(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths of all keys that are not names of the author's own."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield (*path, key)
            free = ("labels", "matchLabels", "rayStartParams", "limits", "requests", "selector")
            if key not in free or not all(isinstance(one, str) for one in value.values()):
                yield from _paths(value, (*path, key))
    elif isinstance(tree, list):
        for number, value in enumerate(tree):
            yield from _paths(value, (*path, number))


@pytest.mark.parametrize("tree", [*_objects(), *_load(WITH_POOL)], ids=_name)
def test_a_misspelt_field_is_refused_wherever_it_stands(tree: Tree) -> None:
    validator, broken = _validator(tree), copy.deepcopy(tree)
    for *above, key in _paths(tree):
        branch: Any = broken
        for part in above:
            branch = branch[part]
        branch[f"{key}s"] = branch.pop(key)
        assert not validator.is_valid(broken), (*above, key)
        branch[key] = branch.pop(f"{key}s")


def test_the_check_against_full_definitions_finds_a_misspelt_field(tmp_path: Path) -> None:
    spec = {"properties": {"port": {"x-kubernetes-int-or-string": True}}}
    schema = {"properties": {"apiVersion": {}, "kind": {}, "spec": spec}}
    versions = [{"name": "v1", "schema": {"openAPIV3Schema": schema}}]
    definition = {"group": "ray.io", "names": {"kind": "Ray"}, "versions": versions}
    (tmp_path / "ray.yaml").write_text(yaml.safe_dump({"spec": definition}), encoding="utf-8")
    definitions = dict(kuberay_definitions(tmp_path))
    good: Tree = {
        "apiVersion": "ray.io/v1",
        "kind": "Ray",
        "metadata": {},
        "spec": {"port": "http"},
    }
    assert errors(good, definitions) == []
    (found,) = errors(good | {"spec": {"ports": "http"}}, definitions)
    assert "'ports' was unexpected" in found
    assert errors(good | {"kind": "Rays"}, definitions) == ["ray.io/v1 Rays is not defined"]


def test_definitions_of_kubernetes_are_read_with_their_references(tmp_path: Path) -> None:
    served = [{"group": "", "version": "v1", "kind": "Pod"}]
    parts = {
        "Pod": {
            "properties": {"kind": {}, "apiVersion": {}, "spec": {"$ref": "#/definitions/Spec"}},
            "x-kubernetes-group-version-kind": served,
        },
        "Spec": {"properties": {"size": {"$ref": "#/definitions/resource.Quantity"}}},
    }
    file = tmp_path / "swagger.json"
    file.write_text(json.dumps({"definitions": parts}), encoding="utf-8")
    definitions = dict(kubernetes_definitions(file))
    good: Tree = {"apiVersion": "v1", "kind": "Pod", "spec": {"size": "1Gi"}}
    assert errors(good, definitions) == []
    assert errors(good | {"spec": {"sizes": 1}}, definitions)


# What is served, and where


def test_kubernetes_serves_what_the_70b_file_says_behind_gateways_on_nodes_of_their_own() -> None:
    expected = yaml.safe_load((ROOT / "deploy/llama-70b.yaml").read_text(encoding="utf-8"))
    serve = copy.deepcopy(SERVE)
    (application,) = serve["applications"]
    http, (gateway,) = application["args"].pop("http"), application.pop("deployments")
    assert list(expected["applications"][0]["args"].pop("http")) == ["api_keys_file"]
    assert serve == expected
    assert http["label_selector"] == GROUPS["gateways"]["labels"]
    assert not any("labels" in group for name, group in GROUPS.items() if name != "gateways")
    assert gateway == {"name": "Gateway", "num_replicas": GROUPS["gateways"]["minReplicas"]}


def test_a_gateway_pod_has_room_for_its_successor_and_an_engine_pod_for_one_engine() -> None:
    wanted = bundles(CONFIG, has_gpus=True)
    gateways, engines = GROUPS["gateways"], GROUPS["engines"]
    assert int(gateways["rayStartParams"]["num-cpus"]) == 2
    limits = _container("engines")["resources"]["limits"]
    assert int(limits["nvidia.com/gpu"]) == sum(one.resources.get("GPU", 0) for one in wanted)
    assert int(limits["cpu"]) >= sum(one.resources["CPU"] for one in wanted)
    assert (engines["minReplicas"], engines["maxReplicas"]) == (
        CONFIG.replicas.min,
        CONFIG.replicas.max,
    )
    assert "nvidia.com/gpu" not in _container("gateways")["resources"]["limits"]


def test_clients_enter_through_gateway_pods_alone_and_every_port_is_the_same() -> None:
    (port,) = SERVICE["serveService"]["spec"]["ports"]
    served_at = SERVE["http_options"]["port"]
    assert port["port"] == served_at
    named = {
        name: {one["name"]: one["containerPort"] for one in _container(name)["ports"]}
        for name in RAY_PODS
    }
    assert named["head"][port["name"]] == served_at, "KubeRay takes the service's ports from there"
    assert [name for name in RAY_PODS if port["targetPort"] in named[name]] == ["gateways"]
    for name in WORKER_PODS:
        probe = _container(name)["readinessProbe"]["httpGet"]
        assert probe["path"] == "/ready"
        assert named[name][probe["port"]] == served_at
    assert SERVICE["excludeHeadPodFromServeSvc"] is True


@every_worker_pod
def test_no_pod_is_killed_for_what_an_engine_elsewhere_does(name: str) -> None:
    probe = _container(name)["livenessProbe"]["httpGet"]
    assert probe == {"path": "/api/healthz", "port": 52365}, "Ray's own agent, which needs no token"


@every_ray_pod
def test_every_pod_starts_ray_with_haproxy_from_the_image_of_this_version(name: str) -> None:
    assert _env(name)["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    assert _container(name)["image"] == f"registry.example.com/specserve:{__version__}"


def test_numbers_are_text_where_kubernetes_takes_nothing_else() -> None:
    params = [group["rayStartParams"] for group in (CLUSTER["headGroupSpec"], *GROUPS.values())]
    values = [value for param in params for value in param.values()]
    assert all(isinstance(value, str) for value in values)
    assert CLUSTER["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    env = [entry["value"] for name in RAY_PODS for entry in _container(name)["env"]]
    assert all(isinstance(value, str) for value in env)


# With draft pools


def _with_pool() -> tuple[Tree, Tree, dict[str, Tree]]:
    """Return the RayService, its application and its worker groups."""
    (service,) = [tree for tree in _load(WITH_POOL) if tree["kind"] == "RayService"]
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    groups = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    return service, application, {group["groupName"]: group for group in groups}


def test_the_file_with_a_pool_differs_in_the_pool_and_its_pods_alone() -> None:
    others = [tree for tree in _load(WITH_POOL) if tree["kind"] != "RayService"]
    assert others == [tree for tree in _load(FILES[0]) if tree["kind"] != "RayService"]
    service, application, groups = _with_pool()
    cluster = service["spec"].pop("rayClusterConfig")
    assert service["spec"] | {"rayClusterConfig": 0, "serveConfigV2": 0} == (
        SERVICE | {"rayClusterConfig": 0, "serveConfigV2": 0}
    )
    assert cluster | {"workerGroupSpecs": 0} == CLUSTER | {"workerGroupSpecs": 0}
    assert groups["gateways"] == GROUPS["gateways"]
    engines = GROUPS["engines"]["template"]["spec"]
    for name in set(groups) - {"gateways"}:
        assert groups[name]["rayStartParams"] == {}
        assert groups[name]["template"]["metadata"] == GROUPS["engines"]["template"]["metadata"]
        spec = copy.deepcopy(groups[name]["template"]["spec"])
        spec["containers"][0]["resources"] = engines["containers"][0]["resources"]
        if name == "drafts":  # which has fewer weights to share
            spec["volumes"][1] = engines["volumes"][1]
        assert spec == engines
    for section, keys in {
        "target": ("label_selector",),
        "draft": ("label_selector", "pool"),
        "replicas": ("min",),
    }.items():
        for key in keys:
            application["args"][section].pop(key)
        expected = APPLICATION["args"][section]
        application["args"][section] |= {key: expected[key] for key in keys if key in expected}
    assert application == APPLICATION


# Secrets


@every_ray_pod
def test_ray_asks_for_a_token_that_is_in_a_file(name: str) -> None:
    secret = CLUSTER["authOptions"]["secretName"]
    env = _env(name)
    assert (CLUSTER["authOptions"]["mode"], env["RAY_AUTH_MODE"]) == ("token", "token")
    assert env["RAY_AUTH_TOKEN"] == "", "else KubeRay puts the token into the environment"
    assert _files(name)[env["RAY_AUTH_TOKEN_PATH"]] == (secret, "auth_token")


def test_an_empty_token_leaves_ray_to_the_file(tmp_path: Path) -> None:
    """Check what the manifest relies on: Ray prefers the variable only if it has a token."""
    file = tmp_path / "ray-token"
    file.write_text("the-token-of-the-file\n", encoding="utf-8")
    read = "from ray._raylet import AuthenticationTokenLoader as Loader\nprint(Loader.instance()"
    named = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "", "RAY_AUTH_TOKEN_PATH": str(file)}
    printed = subprocess.run(
        [sys.executable, "-c", f"{read}.get_token_for_http_header())"],
        env=os.environ | named,
        capture_output=True,
        check=True,
        text=True,
    )
    assert "Bearer the-token-of-the-file" in printed.stdout


def test_tokens_and_keys_are_files_of_the_pods_that_need_them() -> None:
    for name in WORKER_PODS:
        assert _files(name)[_env(name)["HF_TOKEN_PATH"]] == ("huggingface", "token")
    assert CONFIG.http.api_keys_file in _files("gateways")
    assert CONFIG.http.api_keys_file not in _files("engines")
    for name in RAY_PODS:
        assert not any("valueFrom" in entry for entry in _container(name)["env"])


def test_the_password_of_redis_stands_on_no_command_line(tmp_path: Path) -> None:
    """Run the container's command with a server that prints how it was called."""
    redis = _container("redis")
    (mount,) = [one for one in redis["volumeMounts"] if one["name"] == "password"]
    (tmp_path / "password").write_text("kept-secret", encoding="utf-8")
    server = tmp_path / "redis-server"
    server.write_text('#!/bin/sh\necho "$@"\ncat\n', encoding="utf-8")
    server.chmod(0o755)
    (script,) = redis["args"]
    printed = subprocess.run(
        [*redis["command"], script.replace(mount["mountPath"], str(tmp_path))],
        env=os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        check=True,
        text=True,
    ).stdout.splitlines()
    assert printed == ["- --dir /data --appendonly yes", 'requirepass "kept-secret"']


def test_models_are_on_the_volume_that_all_worker_pods_share() -> None:
    claim = _object("PersistentVolumeClaim", "specserve-models")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    for name in WORKER_PODS:
        (mount,) = [one for one in _container(name)["volumeMounts"] if one["name"] == "models"]
        assert _env(name)["HF_HOME"].startswith(mount["mountPath"])
        volume = _volumes(name)["models"]["persistentVolumeClaim"]
        assert volume["claimName"] == claim["metadata"]["name"]


# What a pod may do


def _is_locked(security: Tree) -> bool:
    return security == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


@every_pod
def test_no_pod_is_root_or_may_become_so(name: str) -> None:
    security = PODS[name]["securityContext"]
    assert security["runAsNonRoot"] is True
    assert security["runAsUser"] > 0
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert _is_locked(_container(name)["securityContext"])
    assert _is_locked(CLUSTER["autoscalerOptions"]["securityContext"])
    if name != "head":  # whose autoscaler asks Kubernetes for pods
        assert PODS[name]["automountServiceAccountToken"] is False


@every_ray_pod
def test_what_ray_writes_to_is_mounted(name: str) -> None:
    mounts = {mount["mountPath"]: mount["name"] for mount in _container(name)["volumeMounts"]}
    volumes = _volumes(name)
    for path in ("/tmp", "/dev/shm"):
        assert "emptyDir" in volumes[mounts[path]]
    assert volumes[mounts["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert _env(name)["HOME"] in mounts
    assert set(mounts.values()) <= set(volumes)


def test_the_autoscaler_shares_rays_log_directory_with_the_head() -> None:
    mounts = CLUSTER["autoscalerOptions"]["volumeMounts"]
    assert [mount for mount in mounts if mount not in _container("head")["volumeMounts"]] == []
    assert {mount["mountPath"] for mount in mounts} == {"/tmp", "/tmp/ray"}


def test_the_image_runs_as_the_manifests_user_and_keeps_caches_in_tmp() -> None:
    image = (ROOT / "deploy/Dockerfile").read_text(encoding="utf-8")
    security = PODS["engines"]["securityContext"]
    assert image.rstrip().endswith(f"USER {security['runAsUser']}:{security['runAsGroup']}")
    for variable in (
        "TRITON_CACHE_DIR",
        "TORCHINDUCTOR_CACHE_DIR",
        "CUDA_CACHE_PATH",
        "FLASHINFER_WORKSPACE_BASE",
    ):
        assert f"{variable}=/tmp/" in image


# Who may connect


def _selects(selector: Tree, labels: Mapping[str, str]) -> bool:
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(one["key"]) in one["values"] for one in selector.get("matchExpressions", ())
    )


def _labels(name: str) -> dict[str, str]:
    """Return the labels of a pod, with those that KubeRay gives to it."""
    if name == "redis":
        metadata = _object("StatefulSet", "specserve-redis")["spec"]["template"]["metadata"]
        return dict(metadata["labels"])
    group = CLUSTER["headGroupSpec"] if name == "head" else GROUPS[name]
    kind = {"ray.io/node-type": "head" if name == "head" else "worker", "ray.io/group": name}
    return {**kind, **group["template"]["metadata"]["labels"], **group.get("labels", {})}


def _rules(name: str) -> list[Tree]:
    policies = [tree["spec"] for tree in _objects() if tree["kind"] == "NetworkPolicy"]
    applied = [spec for spec in policies if _selects(spec["podSelector"], _labels(name))]
    assert applied, f"every connection to {name} is allowed"
    assert all("Ingress" in spec["policyTypes"] for spec in applied)
    return [rule for spec in applied for rule in spec["ingress"]]


def _pods_admitted(name: str) -> set[str]:
    """Return the pods of this namespace that may connect to a pod, to any port."""
    return {
        other
        for rule in _rules(name)
        for peer in rule["from"]
        for other in PODS
        if "namespaceSelector" not in peer and _selects(peer["podSelector"], _labels(other))
    }


def _ports_open_to_other_namespaces(name: str) -> list[str]:
    return [
        port["port"]
        for rule in _rules(name)
        if any("namespaceSelector" in peer for peer in rule["from"])
        for port in rule["ports"]
    ]


def test_pods_of_the_cluster_reach_each_other_and_nothing_else_does() -> None:
    for name in RAY_PODS:
        assert _pods_admitted(name) == set(RAY_PODS)
    assert _pods_admitted("redis") == {"head"}


def test_other_namespaces_reach_one_port_of_the_gateways_and_one_of_the_head() -> None:
    (port,) = SERVICE["serveService"]["spec"]["ports"]
    assert {name: _ports_open_to_other_namespaces(name) for name in PODS} == {
        "head": ["dashboard"],
        "gateways": [port["targetPort"]],
        "engines": [],
        "redis": [],
    }
    assert {one["name"] for one in _container("head")["ports"]} >= {"dashboard"}


# Time to leave


def _seconds(name: str) -> tuple[int, int, int]:
    """Return how long a pod sleeps, drains, and is given until it is killed."""
    before = _container(name).get("lifecycle", {"preStop": {"exec": {"command": ["sleep", "0"]}}})
    drain = int(_env(name)["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
    grace: int = PODS[name]["terminationGracePeriodSeconds"]
    return int(before["preStop"]["exec"]["command"][1]), drain, grace


@every_worker_pod
def test_a_pod_is_given_the_time_that_its_ray_takes_to_leave(name: str) -> None:
    sleep, drain, grace = _seconds(name)
    assert grace >= sleep + drain + SIGTERM_REMAINDER_S


def test_streams_of_a_gateway_that_leaves_end_and_another_starts_before() -> None:
    """Check the drain: Serve stops a replica as long before its end as the replica may take."""
    _, drain, grace = _seconds("gateways")
    assert drain >= CONFIG.limits.request_timeout_s + 30
    assert grace >= 600
    assert SERVICE["rayClusterDeletionDelaySeconds"] > CONFIG.limits.request_timeout_s


def test_an_engine_leaves_within_the_two_minutes_of_a_spot_notice() -> None:
    _, drain, grace = _seconds("engines")
    assert 20 < drain < grace < 120


def test_kubernetes_keeps_a_gateway_when_it_empties_nodes() -> None:
    budget = _object("PodDisruptionBudget", "specserve-gateways")["spec"]
    assert budget["minAvailable"] == GROUPS["gateways"]["minReplicas"] - 1 == 1
    assert [name for name in PODS if _selects(budget["selector"], _labels(name))] == ["gateways"]
    (spread,) = PODS["gateways"]["topologySpreadConstraints"]
    assert spread["topologyKey"] == "kubernetes.io/hostname"
    assert _selects(spread["labelSelector"], _labels("gateways"))


def test_the_heads_state_outlives_it_in_redis() -> None:
    options = CLUSTER["gcsFaultToleranceOptions"]
    host, port = options["redisAddress"].split(":")
    service = _object("Service", host)
    assert _selects({"matchLabels": service["spec"]["selector"]}, _labels("redis"))
    (served,) = service["spec"]["ports"]
    assert served["port"] == int(port)
    assert {one["name"]: one["containerPort"] for one in _container("redis")["ports"]} == {
        served["targetPort"]: int(port)
    }
    password = options["redisPassword"]["valueFrom"]["secretKeyRef"]
    assert _volumes("redis")["password"]["secret"]["secretName"] == password["name"]
    assert f"/{password['key']})" in _container("redis")["args"][0]
    (claim,) = _object("StatefulSet", host)["spec"]["volumeClaimTemplates"]
    assert claim["metadata"]["name"] in {m["name"] for m in _container("redis")["volumeMounts"]}


# The page


def test_the_page_names_every_secret_and_file() -> None:
    page = (ROOT / "docs/guides/kubernetes.md").read_text(encoding="utf-8")
    secrets = {secret for name in RAY_PODS for secret, _ in _files(name).values()}
    password = CLUSTER["gcsFaultToleranceOptions"]["redisPassword"]["valueFrom"]["secretKeyRef"]
    secrets.add(password["name"])
    assert len(secrets) == 4
    for name in (*secrets, *FILES, WITH_POOL):
        assert name in page, name
