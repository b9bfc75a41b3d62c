"""The checks of a chaos run must find every way in which a text can go wrong."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from lab.chaos.__main__ import main
from lab.chaos.check import ChaosRequest, CheckCounts, check_text, pauses_at
from lab.chaos.faults import KILLED, Fault
from lab.chaos.report import ChaosOutcome, lines, table_row
from lab.chaos.requests import KIND_NAMES, KINDS, kind_of, path_and_body
from lab.chaos.run import ChaosRun
from specserve.tools.bench.address import ServerAddress
from specserve.tools.bench.streams import Stream
from tests.support.http_server import TEXT, FakeService, serving


def request(
    *texts: str, at: tuple[float, ...] = (), failure: str | None = None, **changes: object
) -> ChaosRequest:
    stream = Stream(texts=list(texts), times=list(at), status=200, num_finals=1, ended=9.0)
    for name, value in changes.items():
        setattr(stream, name, value)
    return ChaosRequest(0, stream, failure)


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (request("ab", "c"), "complete"),
        (request("ab"), "different"),
        (request("ab", "ab", "c"), "different"),
        (request("ab", "d"), "different"),
        (request("ab", "c", logprobs=["[0.5]"]), "different"),
        (request("ab", "c", calls=["edit"]), "different"),
        (request("ab", "c", num_finals=2), "truncated"),
        (request("ab", "c", num_finals=0), "truncated"),
        (request("ab", "c", ended=None), "truncated"),
        (request("ab", failure="EOFError"), "truncated"),
        (request("ab", "c", error={"message": "the target fell over"}), "lost"),
        (request(status=503), "lost"),
        (request(status=0, failure="ConnectionRefusedError"), "lost"),
    ],
)
def test_a_text_without_one_end_or_with_other_tokens_is_found(
    one: ChaosRequest, expected: str
) -> None:
    assert check_text(one, "abc") == expected


def test_every_kind_of_request_comes_up_and_has_a_single_right_answer() -> None:
    for number in range(len(KIND_NAMES)):
        path, body = path_and_body(number, max_tokens=9)
        assert path == KINDS[kind_of(number)].path
        assert body["temperature"] == 0 or "seed" in body
    assert {kind_of(number) for number in range(16)} == set(KIND_NAMES)


def test_failed_texts_are_counted_by_kind_and_resumed_ones_beside_them() -> None:
    moved = request("abc", final={"specserve": {"resumed": 1}})
    requests = [request("abc"), moved, request("ab"), request(status=429)]
    counts = CheckCounts.from_requests(requests, {0: "abc"})
    assert counts == CheckCounts(complete=2, lost=1, truncated=0, different=1, resumed=1)
    assert counts.num_failed == 2


def test_a_pause_is_the_longest_gap_of_a_stream_that_was_under_way_at_the_fault() -> None:
    fault = Fault(10.0, "draft", KILLED, 1)
    before, after = request(at=(1.0, 9.0)), request(at=(11.5, 14.0))
    during = request(at=(9.9, 12.5, 12.6))
    assert pauses_at(fault, [before, during, after]) == [pytest.approx(2.6)]
    update = Fault(10.0, "update", "redeployed", 0, until=12.0)
    assert pauses_at(update, [after]) == [pytest.approx(2.5)], "while a long fault lasts"


def run_chaos(
    service: FakeService,
    break_service: Callable[[int], None],
    *,
    num_faults: int,
    seconds: float = 60.0,
) -> ChaosOutcome:
    """Run chaos on one server, where a fault only calls `break_service` with its number."""
    count = 0

    async def inject(rng: random.Random) -> Fault:
        nonlocal count
        count += 1
        break_service(count)
        return Fault(asyncio.get_running_loop().time(), "draft", KILLED, 0)

    with serving(service) as server:
        chaos = ChaosRun(ServerAddress.from_url(server.url), "demo", 2, 64, seconds)
        return asyncio.run(chaos.run(inject, num_faults=num_faults, seed=1, say=lambda line: None))


def test_a_chaos_run_without_effect_reports_no_failure() -> None:
    outcome = run_chaos(FakeService(), lambda number: None, num_faults=2)
    assert outcome.counts.complete > 2
    assert outcome.counts.num_failed == 0
    assert outcome.first_failure is None
    assert table_row("draft", outcome).startswith(
        f"| draft | 2 | {outcome.counts.complete} | 0 | 0 | 0 | 0 | "
    )


def test_an_extra_token_after_a_fault_is_found_and_reported() -> None:
    service = FakeService()

    def add_a_character(number: int) -> None:
        service.output = TEXT + "!"

    outcome = run_chaos(service, add_a_character, num_faults=1)
    assert outcome.counts.different > 0
    assert any("first failure: different" in line for line in lines("draft", outcome))


def test_a_chaos_run_ends_with_its_time_however_many_faults_are_left() -> None:
    outcome = run_chaos(FakeService(), lambda number: None, num_faults=1000, seconds=2.0)
    assert 1 <= len(outcome.faults) < 12


def test_the_next_fault_waits_until_every_stream_under_way_has_gone_on() -> None:
    async def scenario() -> None:
        chaos = ChaosRun(ServerAddress("127.0.0.1", 1), "demo", 3, 9)
        going, ended, silent = Stream(times=[2.0]), Stream(), Stream(times=[0.5])
        chaos._open = [going, ended, silent]
        waiting = asyncio.create_task(chaos._wait_until_streams_go_on(1.0))
        await asyncio.sleep(0.2)
        chaos._open = [going, silent]
        assert not waiting.done()
        silent.times.append(1.5)
        await asyncio.wait_for(waiting, 10)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--roles", "drafts"], "--roles knows"),
        (["--roles", "draft", "--kills", "0"], "--kills must be 1 or more, not 0"),
        ([], "required: --roles"),
    ],
)
def test_a_mistake_is_one_clear_line_and_exit_code_2(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--url", "http://127.0.0.1:1", *arguments]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("python -m lab.chaos: ")
    assert shown.count("\n") == 1
    assert complaint in shown


def test_a_role_without_a_process_here_fails_without_a_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lab.chaos.command.find_pids", lambda role: [])
    assert main(["--url", "http://127.0.0.1:1", "--roles", "draft"]) == 1
    assert "no process of the role draft runs on this machine" in capsys.readouterr().err
