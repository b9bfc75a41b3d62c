"""When requests are sent, what they ask, and that every one of them leaves a record."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from itertools import islice

import pytest

from specserve.errors import BadValue, Overloaded
from specserve.tools.bench.address import Address
from specserve.tools.bench.load import Asking, ClosedLoop, OpenLoop, Question
from specserve.tools.bench.prompts import CODE, read_prompts
from tests.support.http_server import FakeService, serving
from tests.support.scripted_server import Script, scripted

QUESTION = Question(
    prompts=("a", "b"),
    max_tokens=8,
    temperature=0.0,
    seed=None,
    gamma=None,
    ignore_eos=True,
    numbered=False,
)


def _question(**changes: object) -> Question:
    return replace(QUESTION, **changes)  # type: ignore[arg-type]


def test_a_closed_loop_keeps_its_clients_busy_and_never_has_more():
    live, most, asked = 0, 0, []

    async def ask(number: int) -> None:
        nonlocal live, most
        live += 1
        most = max(most, live)
        asked.append(number)
        await asyncio.sleep(0.001 * (number % 3))
        live -= 1

    asyncio.run(ClosedLoop(3).drive(ask, range(20)))
    assert sorted(asked) == list(range(20))
    assert most == 3


def test_an_open_loop_does_not_wait_for_answers():
    begun: list[float] = []

    async def ask(_: int) -> None:
        begun.append(time.monotonic())
        await asyncio.sleep(0.3)

    asyncio.run(OpenLoop(rate=500, seed=1).drive(ask, range(30)))
    assert len(begun) == 30
    assert begun[-1] - begun[0] < 0.3  # the last one came before the first was answered


def test_arrivals_are_poisson_and_their_seed_repeats_them():
    gaps = list(islice(OpenLoop(rate=4.0, seed=2).gaps(), 20_000))
    assert gaps == list(islice(OpenLoop(rate=4.0, seed=2).gaps(), 20_000))
    assert gaps[:5] != list(islice(OpenLoop(rate=4.0, seed=3).gaps(), 5))
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 4, rel=0.03)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(
        1 / 16, rel=0.08
    )  # as large as the mean's square


def test_open_loop_keeps_its_rate():
    async def ask(_: int) -> None:
        pass

    load, begun = OpenLoop(rate=200, seed=5), time.monotonic()
    asyncio.run(load.drive(ask, range(40)))
    assert time.monotonic() - begun >= sum(islice(load.gaps(), 40)) - 1e-3


@pytest.mark.parametrize(
    ("changes", "holds", "lacks"),
    [
        (
            {},
            {"prompt": "b", "max_tokens": 8, "temperature": 0.0, "ignore_eos": True},
            ("seed", "speculation"),
        ),
        ({"seed": 5}, {}, ("seed",)),  # greedy text needs none
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
def test_a_body_holds_what_was_asked_for_and_nothing_else(changes, holds, lacks):
    body = _question(**changes).body(3)
    assert body.items() >= holds.items()
    assert not body.keys() & set(lacks)


def _asking(url: str, *, timeout_s: float = 20.0) -> Asking:
    return Asking(Address.of(url), QUESTION, model="demo", timeout_s=timeout_s)


def test_known_times_are_measured_as_they_are():
    events = ((0.05, ("plain",)), (0.03, ("accepted", "bonus")), (0.03, ("accepted", "correction")))
    with scripted(Script(events, speculation={"rounds": 3, "drafted": 4, "accepted": 2})) as url:
        asking = _asking(url)
        asyncio.run(asking.ask(0))
    (record,) = asking.records
    assert record.is_ok
    assert record.ttft is not None
    assert record.tpot is not None
    assert 0.05 <= record.ttft < 0.15  # a sleep is never short, and on a busy machine longer
    assert 0.06 / 4 <= record.tpot < 0.12 / 4
    assert all(gap >= 0.025 for gap in record.gaps)
    assert record.acceptance.alpha == 2 / 3


@pytest.mark.parametrize(
    ("script", "outcome"),
    [
        (Script(((0.0, ("plain",)), (0.0, ("plain",))), breaks_after=1), "broken off"),
        (Script(((0.0, ("plain",)), (0.0, ("plain",))), hangs_after=1), "no answer in time"),
    ],
)
def test_what_breaks_off_or_hangs_is_a_failure_with_the_tokens_that_came(script, outcome):
    with scripted(script) as url:
        asking = _asking(url, timeout_s=0.3)
        asyncio.run(asking.ask(0))
    assert [(record.outcome, record.tokens) for record in asking.records] == [(outcome, 1)]


def test_a_server_that_is_not_there_is_a_failure_of_each_request():
    asking = _asking("http://127.0.0.1:1")
    asyncio.run(ClosedLoop(2).drive(asking.ask, range(3)))
    assert [record.outcome for record in asking.records] == ["no connection"] * 3


@pytest.mark.parametrize(
    ("service", "outcome", "message"),
    [
        (FakeService(refusal=Overloaded("the queue is full")), "429", "the queue is full"),
        (FakeService(fails_after=2), "error in mid-stream", "the target fell over"),
    ],
)
def test_refusals_and_failures_in_mid_stream_are_told_in_the_servers_words(
    service, outcome, message
):
    with serving(service) as running:
        asking = _asking(running.url)
        asyncio.run(asking.ask(0))
    (record,) = asking.records
    assert record.outcome == outcome
    assert message in record.message


def test_tokens_of_requests_under_way_are_counted():
    async def look(asking: Asking) -> int:
        task = asyncio.create_task(asking.ask(0))
        while not asking.num_tokens:
            await asyncio.sleep(0.01)
        seen = asking.num_tokens
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return seen

    with scripted(Script(((0.0, ("accepted", "bonus")), (0.0, ("plain",))), hangs_after=1)) as url:
        asking = _asking(url)
        assert asyncio.run(look(asking)) == 2
    assert [(record.outcome, record.tokens) for record in asking.records] == [("interrupted", 2)]


def test_prompts_are_lines_of_text_or_of_json(tmp_path):
    file = tmp_path / "prompts"
    file.write_text(
        'def f():\n\n{"prompt": "two\\nlines", "id": 4}\n{not json\n42\n', encoding="utf-8"
    )
    assert read_prompts(file) == ("def f():", "two\nlines", "{not json", "42")
    assert len(set(CODE)) == len(CODE)


@pytest.mark.parametrize(
    "content", ["", "\n \n", '{"text": "x"}\n', '{"prompt": ""}\n', '{"prompt": [1, 2]}\n']
)
def test_a_file_without_prompts_is_refused_and_named(tmp_path, content):
    file = tmp_path / "prompts"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(BadValue, match="--prompts"):
        read_prompts(file)
