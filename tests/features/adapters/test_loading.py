"""Adapters in HTTP: as models that requests name, and loaded while the server runs."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from specserve.config.tree import DEMO
from tests.support.adapters import write_adapter
from tests.support.http_server import FakeService, RunningServer, serving

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("sql", "support", "later")):
        write_adapter(DEMO / "target", root / name, seed=seed, only="layers.0.self_attn")
    return root


@pytest.fixture
def server(adapters: Path) -> Iterator[RunningServer]:
    paths = {name: str(adapters / name) for name in ("sql", "support")}
    with serving(config={"adapters.paths": paths, "adapters.load_from": str(adapters)}) as running:
        yield running


def test_the_official_client_lists_adapters_with_their_parent(server: RunningServer) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as client:
        base, *others = client.models.list()
        assert base.id == "demo"
        assert "parent" not in base.model_dump()
        assert [(one.id, one.model_dump()["parent"]) for one in others] == [
            ("demo:sql", "demo"),
            ("demo:support", "demo"),
        ]
        assert client.models.retrieve("demo:sql") == others[0]


@pytest.mark.parametrize(
    ("path", "prompt"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9}),
    ],
)
def test_a_request_gets_the_adapter_that_its_model_names(
    server: RunningServer, path: str, prompt: dict[str, object]
) -> None:
    for model, name in (("demo:sql", "sql"), ("demo", None), ("demo:support", "support")):
        reply = server.ask(path, {"model": model, **prompt})
        assert reply.status == 200
        assert reply.json["model"] == model
        adapter = server.service.requests[-1].adapter
        assert (adapter and adapter.name) == name
    streamed = server.ask(path, {"model": "demo:sql", "stream": True, **prompt})
    assert b'"model": "demo:sql"' in streamed.body or b'"model":"demo:sql"' in streamed.body


def test_an_adapter_that_is_not_there_is_404_with_those_that_are(server: RunningServer) -> None:
    for path, body in (
        ("/v1/completions", {"model": "demo:sq", "prompt": "x"}),
        ("/tokenize", {"model": "demo:sq", "prompt": "x"}),
        ("/v1/models/demo:sq", None),
    ):
        reply = server.ask(path, body)
        assert (reply.status, reply.error["code"]) == (404, "model_not_found")
        assert reply.error["message"] == "'demo' has no adapter 'sq'; it has sql, support"
    assert server.ask("/v1/completions", {"model": "other:sql", "prompt": "x"}).status == 404
    assert server.service.requests == []


def test_an_adapter_is_loaded_used_and_unloaded(server: RunningServer) -> None:
    body = {"model": "demo:later", "prompt": "x"}
    assert server.ask("/v1/completions", body).status == 404
    loaded = server.ask(LOAD, {"lora_name": "later", "lora_path": "later"})
    assert (loaded.status, loaded.json["id"], loaded.json["parent"]) == (200, "demo:later", "demo")
    (tried,) = server.service.requests
    assert tried.adapter is not None
    assert (tried.adapter.name, tried.max_tokens) == ("later", 1)
    assert server.ask("/v1/completions", body).status == 200
    assert len(server.ask("/v1/models").json["data"]) == 4
    assert server.ask(UNLOAD, {"lora_name": "later"}).json == {"id": "demo:later", "deleted": True}
    assert server.ask("/v1/completions", body).status == 404
    assert server.ask(UNLOAD, {"lora_name": "later"}).status == 404


def test_what_cannot_be_loaded_is_400_and_is_not_listed(adapters: Path, tmp_path: Path) -> None:
    outside = shutil.copytree(adapters / "later", tmp_path / "outside")
    (tmp_path / "allowed" / "empty").mkdir(parents=True)
    shutil.copytree(adapters / "later", tmp_path / "allowed" / "good")
    shutil.copytree(adapters / "sql", tmp_path / "allowed" / "other")
    (tmp_path / "allowed" / "link").symlink_to(outside)
    service = FakeService()
    keys = {"adapters.load_from": str(tmp_path / "allowed")}
    with serving(service, config=keys) as server:

        def refusal(name: str, path: str) -> str:
            reply = server.ask(LOAD, {"lora_name": name, "lora_path": path})
            assert reply.status == 400
            return str(reply.error["message"])

        for path in (str(outside), "../outside", "link"):
            assert "not below the directory" in refusal("a", path)
        assert "adapter_config.json cannot be read" in refusal("a", "empty")
        assert "lora_name begins with" in refusal("a:b", "good")
        service.fails_after = 0  # as an engine does whose target cannot use it
        assert refusal("a", "good") == "the target fell over"
        service.fails_after = None
        assert len(server.ask("/v1/models").json["data"]) == 1
        assert server.ask(LOAD, {"lora_name": "a", "lora_path": "good"}).status == 200
        assert server.ask(LOAD, {"lora_name": "a", "lora_path": "good"}).status == 200
        assert "unload it first" in refusal("a", "other")


def test_loading_needs_the_operators_key_and_the_clients_scope(
    adapters: Path, tmp_path: Path
) -> None:
    body = {"lora_name": "later", "lora_path": "later"}
    with serving() as closed:
        assert closed.ask(LOAD, body).status == 404
    (file := tmp_path / "keys").write_text("a plain-key\nb load-key scopes=generate,adapters\n")
    config = {"http.api_keys_file": str(file), "adapters.load_from": str(adapters)}
    with serving(config=config) as server:
        for key, status in (("wrong", 401), ("plain-key", 403), ("load-key", 200)):
            reply = server.ask(LOAD, body, headers={"Authorization": f"Bearer {key}"})
            assert reply.status == status
