"""A request's model chooses among several, and each has its own engines, limits and metrics."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from specserve.api.service import ModelStatus, Status
from tests.support.http_server import FakeService, RunningServer, serving_several

SMALL, LARGE = FakeService(output="from the small one"), FakeService(output="from the large one")
COMPLETIONS = "/v1/completions"
STATE = Status(
    ready=True,
    healthy=True,
    replicas=3,
    models=(
        ModelStatus("small", healthy=True, replicas=3),
        ModelStatus("org/large", healthy=False, why="no engine replica reports"),
        ModelStatus("late", healthy=False, why="no engine replica reports"),
    ),
)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    SMALL.state = STATE
    models = [
        {"name": "small"},
        {"name": "org/large", "replicas": {"min": 2, "max": 4}},
        {"name": "late"},
    ]
    with serving_several({"small": SMALL, "org/large": LARGE}, {"models": models}) as server:
        yield server


def _text(server: RunningServer, model: str) -> tuple[str, str]:
    answer = server.ask(COMPLETIONS, {"model": model, "prompt": "a", "max_tokens": 99}).json
    return answer["model"], answer["choices"][0]["text"]


def test_the_model_of_a_request_chooses_whose_engines_answer(server: RunningServer) -> None:
    assert _text(server, "small") == ("small", SMALL.output)
    assert _text(server, "org/large") == ("org/large", LARGE.output)


def test_the_model_of_a_message_chooses_as_well(server: RunningServer) -> None:
    body = {"model": "org/large", "messages": [{"role": "user", "content": "a"}]}
    answer = server.ask("/v1/messages", body | {"max_tokens": 99}).json
    assert (answer["model"], answer["content"][0]["text"]) == ("org/large", LARGE.output)
    assert server.ask("/v1/messages/count_tokens", body).json["input_tokens"] > 1
    other = body | {"model": "other"}
    assert server.ask("/v1/messages/count_tokens", other).status == 404
    assert server.ask("/v1/messages", other | {"max_tokens": 9}).status == 404


def test_a_name_with_an_adapter_is_refused_by_its_model(server: RunningServer) -> None:
    refused = server.ask(COMPLETIONS, {"model": "org/large:sql", "prompt": "a"})
    assert (refused.status, refused.error["param"]) == (404, "model")
    assert "it has none" in refused.error["message"]


@pytest.mark.parametrize(
    "path", [COMPLETIONS, "/v1/chat/completions", "/v1/responses", "/tokenize"]
)
def test_an_unknown_model_is_not_found_and_the_error_lists_those_that_are(
    server: RunningServer, path: str
) -> None:
    body = {
        "model": "other",
        "prompt": "a",
        "input": "a",
        "messages": [{"role": "user", "content": "a"}],
    }
    needed = {"/v1/responses": "input", "/v1/chat/completions": "messages"}.get(path, "prompt")
    reply = server.ask(path, {key: body[key] for key in ("model", needed)})
    assert reply.status == 404
    assert reply.error["message"] == (
        "the model 'other' is not served here; there are small, org/large, late"
    )
    assert server.ask("/v1/models/other").status == 404


def test_a_request_that_leaves_its_model_open_is_refused_with_the_list(
    server: RunningServer,
) -> None:
    reply = server.ask(COMPLETIONS, {"prompt": "a"})
    assert (reply.status, reply.error["param"]) == (400, "model")
    assert "small, org/large" in reply.error["message"]


def test_a_model_whose_engines_have_not_started_is_unavailable(server: RunningServer) -> None:
    reply = server.ask(COMPLETIONS, {"model": "late", "prompt": "a"})
    assert (reply.status, "is starting" in reply.error["message"]) == (503, True)


def test_the_list_has_all_models(server: RunningServer) -> None:
    listed = server.ask("/v1/models").json["data"]
    assert [one["id"] for one in listed] == ["small", "org/large"]
    assert server.ask("/v1/models/org/large").json["id"] == "org/large"


def test_full_engines_of_one_model_refuse_nothing_of_another(server: RunningServer) -> None:
    LARGE.full = True
    try:
        assert server.ask(COMPLETIONS, {"model": "org/large", "prompt": "a"}).status == 429
        assert _text(server, "small") == ("small", SMALL.output)
    finally:
        LARGE.full = False
    assert _text(server, "org/large") == ("org/large", LARGE.output)


def test_health_names_each_model_and_a_probe_may_ask_for_one(server: RunningServer) -> None:
    health = server.ask("/health")
    assert (health.status, health.json["models"]["small"]) == (200, "healthy")
    assert health.json["models"]["org/large"] == "no engine replica reports"
    for path in ("/health", "/ready"):
        assert server.ask(f"{path}?model=small").status == 200
        assert server.ask(f"{path}?model=org/large").status == 503
        assert server.ask(f"{path}?model=other").status == 404


def test_a_trace_is_that_of_the_model_that_is_named_or_of_the_first(server: RunningServer) -> None:
    assert server.ask("/trace").status == 200
    assert server.ask("/trace?model=org/large&rounds=3").json["rounds"] == 3
    assert server.ask("/trace?model=other").status == 404


def test_a_label_says_which_model_a_metric_is_of(server: RunningServer) -> None:
    _text(server, "small")
    server.ask(COMPLETIONS, {"model": "org/large", "prompt": ""})
    lines = server.ask("/metrics").body.decode().splitlines()
    assert 'specserve_replicas{model_name="small"} 3' in lines
    assert 'specserve_min_replicas{model_name="org/large"} 2' in lines
    assert any(
        line.startswith(
            'specserve_request_success_total{finished_reason="stop",model_name="small"} '
        )
        for line in lines
    )
    failed = 'specserve_request_failure_total{code="400",model_name="org/large"} '
    assert any(line.startswith(failed) for line in lines)
    assert not any(line.startswith("specserve_generation_tokens_total ") for line in lines)


def test_a_request_is_refused_unread_only_while_the_engines_of_all_models_are_full() -> None:
    full, other = FakeService(full=True), FakeService(full=True)
    models = [{"name": "a"}, {"name": "b"}]
    with serving_several({"a": full, "b": other}, {"models": models}) as server:
        assert server.ask(COMPLETIONS, b"not read").status == 429, "before the body is read"
        other.full = False
        assert server.ask(COMPLETIONS, b"not read").status == 400


def test_a_key_may_have_limits_for_one_model(tmp_path: Path) -> None:
    (keys := tmp_path / "keys").write_text("alice k requests_per_minute:large=1\n")
    models = [{"name": "small"}, {"name": "large"}]
    services = {"small": FakeService(), "large": FakeService()}
    config = {"models": models, "http.api_keys_file": str(keys)}
    with serving_several(services, config) as server:

        def status(model: str) -> int:
            body = {"model": model, "prompt": "a", "max_tokens": 2}
            return server.ask(COMPLETIONS, body, headers={"Authorization": "Bearer k"}).status

        assert [status("large"), status("large")] == [200, 429]
        assert [status("small"), status("small")] == [200, 200]


def test_tokens_that_a_model_s_limit_refuses_are_not_taken_from_the_client_s(
    tmp_path: Path,
) -> None:
    (keys := tmp_path / "keys").write_text("a k tokens_per_minute=90 tokens_per_minute:large=40\n")
    models = [{"name": "small"}, {"name": "large"}]
    services = {"small": FakeService(), "large": FakeService()}
    config = {"models": models, "http.api_keys_file": str(keys)}
    with serving_several(services, config) as server:

        def status(model: str, max_tokens: int) -> int:
            body = {"model": model, "prompt": [1], "max_tokens": max_tokens, "ignore_eos": True}
            return server.ask(COMPLETIONS, body, headers={"Authorization": "Bearer k"}).status

        assert status("large", 20) == 200
        assert status("large", 30) == 429, "of its 40 some 20 are left"
        assert status("small", 60) == 200, "and of all 90 some 70"
