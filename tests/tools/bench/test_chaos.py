"""Who judges a siege must be able to find fault: every way in which a text can go wrong is told from one that is right."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from specserve.tools.bench.address import Address
from specserve.tools.bench.chaos.check import Asked, Tally, pauses, verdict
from specserve.tools.bench.chaos.faults import KILLED, Blow
from specserve.tools.bench.chaos.report import lines, row
from specserve.tools.bench.chaos.run import Outcome, Siege
from specserve.tools.bench.streams import Stream
from tests.support.http_server import TEXT, FakeService, serving


def asked(
    *texts: str, at: tuple[float, ...] = (), trouble: str | None = None, **seen: object
) -> Asked:
    fields = {"status": 200, "num_finals": 1, "ended": 9.0, **seen}
    return Asked(0, Stream(texts=list(texts), times=list(at), **fields), trouble)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("one", "expected"),
    [
        (asked("ab", "c"), "complete"),
        (asked("ab"), "different"),
        (asked("ab", "ab", "c"), "different"),
        (asked("ab", "d"), "different"),
        (asked("ab", "c", num_finals=2), "truncated"),
        (asked("ab", "c", num_finals=0), "truncated"),
        (asked("ab", "c", ended=None), "truncated"),
        (asked("ab", trouble="EOFError"), "truncated"),
        (asked("ab", "c", error={"message": "the target fell over"}), "lost"),
        (asked(status=503), "lost"),
        (asked(status=0, trouble="ConnectionRefusedError"), "lost"),
    ],
)
def test_one_end_and_every_token_once_or_a_fault(one: Asked, expected: str) -> None:
    assert verdict(one, "abc") == expected


def test_faults_are_counted_by_kind_and_what_went_on_elsewhere_beside_them() -> None:
    moved = asked("abc", final={"specserve": {"resumed": 1}})
    tally = Tally.of([asked("abc"), moved, asked("ab"), asked(status=429)], {0: "abc"})
    assert (tally.complete, tally.different, tally.lost, tally.truncated, tally.resumed) == (
        2,
        1,
        1,
        0,
        1,
    )
    assert tally.num_failed == 2


def test_a_pause_is_the_longest_gap_of_a_stream_that_was_under_way_at_the_blow() -> None:
    blow = Blow(10.0, "draft", KILLED, 1)
    before, over, after = asked(at=(1.0, 9.0)), asked(at=(9.9, 12.5, 12.6)), asked(at=(11.5, 14.0))
    assert pauses(blow, [before, over, after]) == [pytest.approx(2.6)]
    assert pauses(Blow(10.0, "update", "deployed anew", 0, until=12.0), [after]) == [
        pytest.approx(2.5)
    ], "while a long blow lasts"


def besiege(
    service: FakeService, strike: Callable[[int], None], *, blows: int, seconds: float = 60.0
) -> Outcome:
    """Of a server that stays, whose service `strike` changes."""
    struck = 0

    async def hit(chance: random.Random) -> Blow:
        nonlocal struck
        struck += 1
        strike(struck)
        return Blow(asyncio.get_running_loop().time(), "draft", KILLED, 0)

    with serving(service) as server:
        siege = Siege(Address.of(server.url), "demo", 2, 64, seconds)
        return asyncio.run(siege.run(hit, num_blows=blows, seed=1, say=lambda line: None))


def test_a_siege_that_harms_nobody_has_no_fault() -> None:
    outcome = besiege(FakeService(), lambda number: None, blows=2)
    assert outcome.tally.complete > 2
    assert outcome.tally.num_failed == 0
    assert outcome.first_wrong is None
    assert row("draft", outcome).startswith(
        f"| draft | 2 | {outcome.tally.complete} | 0 | 0 | 0 | 0 | "
    )


def test_a_token_too_many_after_a_blow_is_found_and_told() -> None:
    service = FakeService()

    def harm(number: int) -> None:
        service.written = TEXT + "!"

    outcome = besiege(service, harm, blows=1)
    assert outcome.tally.different > 0
    assert any("first that went wrong: different" in line for line in lines("draft", outcome))


def test_a_siege_ends_with_its_time_however_many_blows_are_left() -> None:
    assert 1 <= len(besiege(FakeService(), lambda number: None, blows=1000, seconds=2.0).blows) < 12
