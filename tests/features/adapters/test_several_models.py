"""Adapters of one of several models: requests name them in a suffix of their model's name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from specserve.config.tree import DEMO
from tests.support.adapters import write_adapter
from tests.support.http_server import FakeService, RunningServer, serving_several

SMALL, LARGE = FakeService(output="from the small one"), FakeService(output="from the large one")
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    adapter = tmp_path_factory.mktemp("adapters") / "sql"
    write_adapter(DEMO / "target", adapter, only="layers.0.self_attn")
    models = [
        {"name": "small", "adapters": {"paths": {"sql": str(adapter)}}},
        {"name": "org/large"},
        {"name": "late"},
    ]
    with serving_several({"small": SMALL, "org/large": LARGE}, {"models": models}) as server:
        yield server


def test_a_name_with_an_adapter_chooses_its_model(server: RunningServer) -> None:
    answer = server.ask(COMPLETIONS, {"model": "small:sql", "prompt": "a", "max_tokens": 99}).json
    assert (answer["model"], answer["choices"][0]["text"]) == ("small:sql", SMALL.output)
    refused = server.ask(COMPLETIONS, {"model": "org/large:sql", "prompt": "a"})
    assert (refused.status, refused.error["param"]) == (404, "model")
    assert "it has none" in refused.error["message"]


def test_the_list_has_the_adapters_of_each_model(server: RunningServer) -> None:
    listed = server.ask("/v1/models").json["data"]
    assert [one["id"] for one in listed] == ["small", "small:sql", "org/large"]


def test_an_error_that_lists_the_models_lists_their_adapters(server: RunningServer) -> None:
    reply = server.ask(COMPLETIONS, {"prompt": "a"})
    assert (reply.status, reply.error["param"]) == (400, "model")
    assert "small, small:sql, org/large" in reply.error["message"]
    refused = server.ask(COMPLETIONS, {"model": "other", "prompt": "a"})
    assert refused.error["message"] == (
        "the model 'other' is not served here; there are small, small:sql, org/large, late"
    )
