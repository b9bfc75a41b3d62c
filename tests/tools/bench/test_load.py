"""Send times of requests, their bodies, and the record that each of them leaves."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from specserve.errors import BadValue, Overloaded
from specserve.tools.bench.address import ServerAddress
from specserve.tools.bench.load import ClosedLoop, LoadClient, OpenLoop, RequestTemplate
from specserve.tools.bench.prompts import CODE_PROMPTS, read_prompts
from tests.support.http_server import FakeService, serving
from tests.support.scripted_server import Script, scripted_server

TEMPLATE = RequestTemplate(
    prompts=("a", "b"),
    max_tokens=8,
    temperature=0.0,
    seed=None,
    gamma=None,
    ignore_eos=True,
    numbered=False,
)


def _template(**changes: Any) -> RequestTemplate:
    return replace(TEMPLATE, **changes)


def test_a_closed_loop_keeps_its_clients_busy_and_never_has_more() -> None:
    live, most = 0, 0
    sent: list[int] = []

    async def send(number: int) -> None:
        nonlocal live, most
        live += 1
        most = max(most, live)
        sent.append(number)
        await asyncio.sleep(0.001 * (number % 3))
        live -= 1

    asyncio.run(ClosedLoop(3).drive(send, range(20)))
    assert sorted(sent) == list(range(20))
    assert most == 3


def test_an_open_loop_does_not_wait_for_answers() -> None:
    started: list[int] = []

    async def drive() -> None:
        all_started = asyncio.Event()

        async def send(number: int) -> None:
            """Answer no request before the last one was sent."""
            started.append(number)
            if len(started) == 30:
                all_started.set()
            await all_started.wait()

        await asyncio.wait_for(OpenLoop(rate=500, seed=1).drive(send, range(30)), timeout=60)

    asyncio.run(drive())
    assert len(started) == 30


def test_arrivals_are_poisson_and_their_seed_repeats_them() -> None:
    gaps = list(islice(OpenLoop(rate=4.0, seed=2).gaps(), 20_000))
    assert gaps == list(islice(OpenLoop(rate=4.0, seed=2).gaps(), 20_000))
    assert gaps[:5] != list(islice(OpenLoop(rate=4.0, seed=3).gaps(), 5))
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 4, rel=0.03)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert variance == pytest.approx(1 / 16, rel=0.08)  # the square of the mean


def test_open_loop_keeps_its_rate() -> None:
    async def send(_: int) -> None:
        pass

    load, started = OpenLoop(rate=200, seed=5), time.monotonic()
    asyncio.run(load.drive(send, range(40)))
    assert time.monotonic() - started >= sum(islice(load.gaps(), 40)) - 1e-3


@pytest.mark.parametrize(
    ("changes", "holds", "lacks"),
    [
        (
            {},
            {"prompt": "b", "max_tokens": 8, "temperature": 0.0, "ignore_eos": True},
            ("seed", "speculation"),
        ),
        ({"seed": 5}, {}, ("seed",)),  # greedy text needs no seed
        ({"seed": 5, "temperature": 0.5}, {"seed": 8, "temperature": 0.5}, ()),
        ({"temperature": 0.5}, {}, ("seed",)),
        (
            {"gamma": "auto", "ignore_eos": False},
            {"speculation": {"gamma": "auto"}},
            ("ignore_eos",),
        ),
        ({"gamma": 0, "numbered": True}, {"speculation": {"gamma": 0}, "prompt": "# 3\nb"}, ()),
    ],
)
def test_a_body_holds_the_given_parameters_and_no_others(
    changes: dict[str, object], holds: dict[str, object], lacks: tuple[str, ...]
) -> None:
    body = _template(**changes).body(3)
    assert body.items() >= holds.items()
    assert not body.keys() & set(lacks)


def _client(url: str, *, timeout_s: float = 20.0) -> LoadClient:
    return LoadClient(ServerAddress.from_url(url), TEMPLATE, model="demo", timeout_s=timeout_s)


def test_known_times_are_measured() -> None:
    events = ((0.05, ("plain",)), (0.03, ("accepted", "bonus")), (0.03, ("accepted", "correction")))
    with scripted_server(
        Script(events, speculation={"rounds": 3, "drafted": 4, "accepted": 2})
    ) as url:
        client = _client(url)
        asyncio.run(client.send(0))
    (record,) = client.records
    assert record.is_ok
    assert record.ttft is not None
    assert record.tpot is not None
    # A sleep is never short, and any event may arrive late on a busy machine: only lower bounds
    # that start at the request hold.
    assert record.ttft >= 0.05
    assert record.ttft + 4 * record.tpot >= 0.11
    assert 4 * record.tpot == pytest.approx(record.events[-1].at - record.events[0].at)
    assert sum(record.gaps) == pytest.approx(4 * record.tpot)
    assert record.acceptance.alpha == 2 / 3


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        (Script(((0.0, ("plain",)), (0.0, ("plain",))), breaks_after=1), "broken off"),
        (Script(((0.0, ("plain",)), (0.0, ("plain",))), hangs_after=1), "no answer in time"),
    ],
)
def test_a_stream_that_breaks_off_or_hangs_is_a_failure_and_keeps_its_tokens(
    script: Script, outcome: str
) -> None:
    with scripted_server(script) as url:
        client = _client(url, timeout_s=0.3)
        asyncio.run(client.send(0))
    assert [(record.outcome, record.tokens) for record in client.records] == [(outcome, 1)]


def test_without_a_server_each_request_is_a_failure() -> None:
    client = _client("http://127.0.0.1:1")
    asyncio.run(ClosedLoop(2).drive(client.send, range(3)))
    assert [record.outcome for record in client.records] == ["no connection"] * 3


@pytest.mark.parametrize(
    ("service", "outcome", "message"),
    [
        (FakeService(refusal=Overloaded("the queue is full")), "429", "the queue is full"),
        (FakeService(fails_after=2), "error in mid-stream", "the target fell over"),
    ],
)
def test_refusals_and_failures_in_mid_stream_keep_the_servers_message(
    service: FakeService, outcome: str, message: str
) -> None:
    with serving(service) as running:
        client = _client(running.url)
        asyncio.run(client.send(0))
    (record,) = client.records
    assert record.outcome == outcome
    assert message in record.message


def test_tokens_of_requests_under_way_are_counted() -> None:
    async def num_tokens(client: LoadClient) -> int:
        task = asyncio.create_task(client.send(0))
        while not client.num_tokens:
            await asyncio.sleep(0.01)
        seen = client.num_tokens
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return seen

    with scripted_server(
        Script(((0.0, ("accepted", "bonus")), (0.0, ("plain",))), hangs_after=1)
    ) as url:
        client = _client(url)
        assert asyncio.run(num_tokens(client)) == 2
    assert [(record.outcome, record.tokens) for record in client.records] == [("interrupted", 2)]


def test_prompts_are_lines_of_text_or_of_json(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text(
        'def f():\n\n{"prompt": "two\\nlines", "id": 4}\n{not json\n42\n', encoding="utf-8"
    )
    assert read_prompts(file) == ("def f():", "two\nlines", "{not json", "42")
    assert len(set(CODE_PROMPTS)) == len(CODE_PROMPTS)


@pytest.mark.parametrize(
    "content", ["", "\n \n", '{"text": "x"}\n', '{"prompt": ""}\n', '{"prompt": [1, 2]}\n']
)
def test_a_file_without_prompts_is_refused_and_named(tmp_path: Path, content: str) -> None:
    file = tmp_path / "prompts"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(BadValue, match="--prompts"):
        read_prompts(file)
