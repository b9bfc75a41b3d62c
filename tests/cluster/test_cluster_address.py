"""The choice of the Ray cluster, and one line when none answers there."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest
from ray.core.generated import gcs_service_pb2

from specserve.cluster import cluster_address
from specserve.cluster.cluster_address import address_to_join, require_answer, resolve
from specserve.errors import ConfigError, Unavailable

TOKEN = "5a" * 32


@pytest.mark.parametrize(
    ("join", "own_ray", "environment", "joined"),
    [
        (None, False, None, None),
        (None, False, "", None),
        (None, False, "local", None),
        (None, False, "10.0.0.1:6379", "10.0.0.1:6379"),
        (None, True, "10.0.0.1:6379", None),
        ("10.0.0.2:6379", False, "10.0.0.1:6379", "10.0.0.2:6379"),
        ("auto", False, None, "auto"),
    ],
)
def test_a_cluster_is_joined_only_when_asked(
    join: str | None, own_ray: bool, environment: str | None, joined: str | None
) -> None:
    variables = {} if environment is None else {"RAY_ADDRESS": environment}
    assert address_to_join(join, own_ray=own_ray, environment=variables) == joined


@pytest.mark.parametrize(
    ("running", "message"),
    [
        ((), r"no Ray cluster runs on this machine; --join HOST:PORT"),
        (("10.0.0.1:1", "10.0.0.1:2"), r"several .*: 10.0.0.1:1, 10.0.0.1:2; .*--join 10.0.0.1:1"),
    ],
)
def test_auto_is_the_one_cluster_of_this_machine(
    running: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(cluster_address, "running_clusters", lambda: running)
    with pytest.raises(ConfigError, match=message):
        resolve("auto")


@pytest.mark.parametrize("address", ["nonsense", "ray://head:10001"])
def test_what_is_no_address_of_a_cluster_is_refused_with_one(address: str) -> None:
    with pytest.raises(ConfigError, match=rf"cannot join {address}.*--join HOST:PORT"):
        resolve(address)


def test_an_address_without_a_cluster_is_said_at_once() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(Unavailable, match=rf"no Ray cluster answers at {address}; .*--own-ray"):
        require_answer(address)


def test_what_listens_and_is_no_cluster_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_address, "ANSWER_TIMEOUT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(Unavailable, match=rf"no Ray cluster answers at {address}"):
            require_answer(address)


@pytest.fixture
def cluster_with_token() -> Iterator[str]:
    """Yield the address of a server that answers as Ray does to those with the token alone."""

    def cluster_id(request: object, context: Any) -> Any:
        if f"Bearer {TOKEN}" not in dict(context.invocation_metadata()).values():
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "a token is missing")
        return messages.GetClusterIdReply()

    messages: Any = gcs_service_pb2
    handler = grpc.unary_unary_rpc_method_handler(
        cluster_id,
        request_deserializer=messages.GetClusterIdRequest.FromString,
        response_serializer=messages.GetClusterIdReply.SerializeToString,
    )
    service = "ray.rpc.NodeInfoGcsService"
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {"GetClusterId": handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.mark.parametrize(
    ("variables", "refused"),
    [
        ({"RAY_AUTH_TOKEN": TOKEN}, None),
        ({"RAY_AUTH_TOKEN": TOKEN, "RAY_AUTH_MODE": "disabled"}, "a token is missing; set RAY_A"),
        ({"RAY_AUTH_TOKEN": "0" * 64}, "a token is missing; set RAY_AUTH_MODE"),
        ({}, "a token is missing; set RAY_AUTH_MODE"),
    ],
)
def test_a_token_that_lies_here_is_taken_where_the_cluster_wants_one(
    cluster_with_token: str, variables: Mapping[str, str], refused: str | None, tmp_path: Path
) -> None:
    """Ask in a process of its own, since Ray keeps the mode."""
    code = (
        "import sys; from specserve.cluster.cluster_address import require_answer; "
        "require_answer(sys.argv[1])"
    )
    others = {key: value for key, value in os.environ.items() if not key.startswith("RAY_AUTH")}
    done = subprocess.run(
        [sys.executable, "-c", code, cluster_with_token],
        env={**others, "HOME": str(tmp_path), **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    said = done.stderr.strip().splitlines()
    assert (done.returncode == 0) is (refused is None), done.stderr
    assert refused is None or refused in said[-1]
