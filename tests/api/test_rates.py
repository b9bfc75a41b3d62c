"""Limits on the requests and tokens a minute of each client, and the refusals beyond them."""

from __future__ import annotations

import http.client
import json
from collections import Counter
from pathlib import Path

import openai
import pytest

from specserve.api.keys import ApiClient
from specserve.api.rates import MAX_GRAMMARS, Account, Accounts, RateBucket
from specserve.errors import Overloaded, RateLimited
from specserve.types import Grammar
from tests.support.clock import Clock
from tests.support.http_server import FakeService, RunningServer, serving


def bucket(per_minute: float | None) -> tuple[RateBucket, Clock]:
    made = RateBucket("tokens", clock := Clock(100.0))
    made.set_rate(per_minute)
    return made, clock


def wait_s(asked: RateBucket, amount: float) -> float:
    with pytest.raises(RateLimited) as refusal:
        asked.take(amount, "alice")
    return refusal.value.retry_after_s


def test_a_minutes_worth_can_be_taken_at_once_and_then_comes_back_evenly() -> None:
    tokens, clock = bucket(60)
    for _ in range(6):
        tokens.take(10, "alice")
    assert wait_s(tokens, 10) == pytest.approx(10)
    clock.now += 9.5
    assert wait_s(tokens, 10) == pytest.approx(0.5)
    clock.now += 0.5
    assert tokens.take(10, "alice") == 10
    clock.now += 3600
    assert tokens.take(60, "alice") == 60  # no more than a minute's worth is saved up
    assert wait_s(tokens, 1) == pytest.approx(1)


def test_over_a_long_time_no_client_exceeds_its_rate() -> None:
    tokens, clock = bucket(120)
    taken = 0.0
    for _ in range(6000):  # ten minutes, asking ten times a second
        clock.now += 0.1
        try:
            taken += tokens.take(7, "alice")
        except RateLimited:
            continue
    assert 10 * 120 - 7 <= taken <= 11 * 120


def test_more_than_a_minutes_worth_waits_for_a_full_bucket_and_is_settled_later() -> None:
    tokens, clock = bucket(60)
    assert tokens.take(1000, "alice") == 60
    tokens.settle(taken=60, used=180)
    assert wait_s(tokens, 1) == pytest.approx(121)
    clock.now += 121
    assert tokens.take(1, "alice") == 1


def test_unused_tokens_come_back_at_once() -> None:
    tokens, _ = bucket(60)
    tokens.settle(taken=tokens.take(60, "alice"), used=5)
    assert tokens.take(55, "alice") == 55
    tokens.settle(taken=500, used=0)
    assert tokens.take(60, "alice") == 60
    assert wait_s(tokens, 1) > 0  # and never more than a minute's worth


def test_a_rate_may_change_and_a_new_key_keeps_the_level() -> None:
    accounts = Accounts(clock := Clock(), Counter[str]().update)
    account = accounts.get(ApiClient("alice", b"1", tokens_per_minute=60))
    account.reserve(60)
    again = accounts.get(ApiClient("alice", b"2", tokens_per_minute=120))
    assert again is account
    with pytest.raises(RateLimited):
        again.reserve(1)
    clock.now += 30
    assert again.reserve(60) == 60
    free = accounts.get(ApiClient("alice", b"2"))
    assert free.reserve(10**9) == 0
    assert accounts.get(ApiClient("bob", b"3", tokens_per_minute=60)).reserve(60) == 60


def test_refusals_are_counted_by_limit() -> None:
    counted: list[str] = []
    account = Account("alice", Clock(), counted.append)
    account.set_rates((1, 10))
    with account.request():
        pass
    account.reserve(10)
    for refused in (account.request().__enter__, lambda: account.reserve(1)):
        with pytest.raises(RateLimited, match="alice has used up its"):
            refused()
    assert counted == ["requests", "tokens"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (file := tmp_path / "keys").write_text(
        "few few-key requests_per_minute=2\nsmall small-key tokens_per_minute=40\nfree free-key\n"
    )
    return file


def ask(server: RunningServer, key: str, **body: object) -> tuple[int, str | None]:
    reply = server.ask(
        "/v1/completions",
        {"prompt": [1, 2, 3, 4], "max_tokens": 16, **body},
        headers={"Authorization": f"Bearer {key}"},
    )
    return reply.status, reply.headers.get("retry-after")


def test_beyond_its_requests_a_client_gets_429_and_others_go_on(file: Path) -> None:
    with serving(config={"http.api_keys_file": str(file)}) as server:
        assert [ask(server, "few-key")[0] for _ in range(2)] == [200, 200]
        status, retry = ask(server, "few-key")
        assert status == 429
        assert 1 <= int(retry or 0) <= 30
        assert {ask(server, "free-key")[0] for _ in range(5)} == {200}
        with openai.OpenAI(base_url=server.url + "/v1", api_key="few-key", max_retries=0) as client:
            with pytest.raises(openai.RateLimitError) as refusal:
                client.completions.create(model="demo", prompt="x")
            assert refusal.value.code == "rate_limit_exceeded"
        assert server.registry.counter("rate_limited_total").samples() == {("requests",): (2.0,)}
        assert server.ask("/health", headers={"Authorization": "Bearer few-key"}).status == 200


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_are_reserved_and_settled_by_what_was_written(file: Path, stream: bool) -> None:
    with serving(FakeService(output="a b"), config={"http.api_keys_file": str(file)}) as server:
        written = len(server.service.requests), ask(server, "small-key", stream=stream)
        assert written == (0, (200, None))
        # 20 of 40 were reserved and fewer than 10 used. So another 20, and a third time 16, can be
        # reserved.
        assert ask(server, "small-key", stream=stream)[0] == 200
        assert ask(server, "small-key", stream=stream)[0] == 200
        status, retry = ask(server, "small-key", stream=stream, max_tokens=10_000)
        assert status == 429
        assert int(retry or 0) >= 10
        assert len(server.service.requests) == 3, "what is refused does not reach the engine"


def test_a_request_refused_by_a_full_engine_costs_no_tokens(file: Path) -> None:
    with serving(
        FakeService(refusal=Overloaded("the queue is full")),
        config={"http.api_keys_file": str(file)},
    ) as server:
        for _ in range(5):
            assert ask(server, "small-key", max_tokens=36) == (429, "1")
        assert not server.registry.counter("rate_limited_total").samples()
        server.service.refusal = None
        assert ask(server, "small-key", max_tokens=36)[0] == 200


def test_a_request_that_got_nothing_in_its_time_costs_nothing(file: Path) -> None:
    with serving(
        FakeService(hangs_after=0),
        config={"http.api_keys_file": str(file), "limits.request_timeout_s": 0.2},
    ) as server:
        assert ask(server, "small-key", max_tokens=36)[0] == 504
        server.service.hangs_after = None
        assert ask(server, "small-key", max_tokens=36)[0] == 200


def test_a_client_has_so_many_requests_under_way(tmp_path: Path) -> None:
    (keys := tmp_path / "keys").write_text("alice k1 concurrent_requests=2\nbob k2\n")
    service = FakeService(hangs_after=1)
    with serving(service, config={"http.api_keys_file": str(keys)}) as server:

        def ask(key: str) -> int:
            headers = {"Authorization": f"Bearer {key}"}
            return server.ask("/v1/models", headers=headers).status

        streams = []
        for _ in range(2):
            streams.append(http.client.HTTPConnection("127.0.0.1", server.port, timeout=20))
            body = json.dumps({"prompt": "x", "stream": True})
            headers = {"Content-Type": "application/json", "Authorization": "Bearer k1"}
            streams[-1].request("POST", "/v1/completions", body, headers)
        assert server.until(lambda: service.num_live == 2)
        assert (ask("k1"), ask("k2")) == (429, 200)
        for stream in streams:
            stream.close()
        assert server.until(lambda: ask("k1") == 200)
        limited = server.registry.counter("rate_limited_total")
        assert limited.samples()[("concurrent",)][0] >= 1


def test_a_client_has_texts_under_so_many_grammars() -> None:
    refusals: list[str] = []
    account = Account("alice", lambda: 0.0, refusals.append)
    grammars = [Grammar("lark", f'start: "{i}"') for i in range(MAX_GRAMMARS + 1)]
    for grammar in [*grammars[:-1], grammars[0]]:
        account.reserve(1, grammar)
    with pytest.raises(RateLimited, match="16 different grammars"):
        account.reserve(1, grammars[-1])
    account.settle(1, used=1, grammar=grammars[0])
    with pytest.raises(RateLimited):
        account.reserve(1, grammars[-1])
    account.settle(1, used=1, grammar=grammars[0])
    account.reserve(1, grammars[-1])
    assert refusals == ["grammars", "grammars"]
