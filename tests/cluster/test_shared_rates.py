"""Rates over several gateways: their accounts exchange what was used by way of the status board."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from specserve.api.access import ClientAccess
from specserve.api.key_file import KeyFile
from specserve.api.keys import ApiClient
from specserve.api.rates import Account, Accounts, ClientUse
from specserve.cluster.board import reporting, status_board
from specserve.cluster.board.reporting import report_forever
from specserve.cluster.board.status_board import (
    ENGINE,
    GATEWAY,
    Board,
    EngineKeys,
    GatewayAnswer,
    ReplicaReport,
)
from specserve.config.sections import HttpConfig
from specserve.errors import RateLimited
from specserve.metrics import Registry, Snapshot
from tests.support.clock import Clock

RATE = 60
ALICE = ApiClient("alice", b"1", requests_per_minute=RATE, tokens_per_minute=6000)


class Gateways:
    """Accounts of gateways that report to one board, at other times within the second."""

    def __init__(self, count: int) -> None:
        self.clock = Clock()
        self.board = Board(self.clock)
        self.accounts = [Accounts(self.clock, Counter[str]().update) for _ in range(count)]
        for gateway in range(count):
            self.exchange(gateway)

    def exchange(self, gateway: int) -> None:
        report = ReplicaReport(
            str(gateway), GATEWAY, None, Snapshot({}), uses=self.accounts[gateway].uses()
        )
        answer = self.board.report(report)
        assert isinstance(answer, GatewayAnswer)
        self.accounts[gateway].charge_others(answer.uses)

    def exchange_all(self) -> None:
        for _ in range(2):  # the first one knows of the others' reports at its next
            for gateway in range(len(self.accounts)):
                self.exchange(gateway)

    def account(self, gateway: int, client: ApiClient = ALICE) -> Account:
        return self.accounts[gateway].get(client)


def ask(account: Account) -> bool:
    """Begin and end a request, and return whether the account admits it."""
    try:
        with account.request():
            return True
    except RateLimited:
        return False


def burst(account: Account) -> int:
    return sum(iter(lambda: ask(account), False))


def can_reserve(account: Account, num_tokens: int) -> bool:
    try:
        account.reserve(num_tokens)
    except RateLimited:
        return False
    return True


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_client_that_asks_all_gateways_gets_its_rate_once(count: int) -> None:
    minutes, steps = 20, 10
    gateways = Gateways(count)
    admitted = 0
    for step in range(minutes * 60 * steps):
        gateways.clock.now = step / steps
        for gateway in range(count):
            if (step + gateway * 3) % steps == 0:
                gateways.exchange(gateway)
            admitted += ask(gateways.account(gateway))
    assert RATE * minutes <= admitted <= RATE * (minutes + count)


def test_a_burst_at_all_gateways_at_once_is_paid_off_before_more_is_granted() -> None:
    gateways = Gateways(3)
    accounts = [gateways.account(gateway) for gateway in range(3)]
    assert [burst(account) for account in accounts] == [RATE] * 3, "the stated excess"
    gateways.exchange_all()
    gateways.clock.now = 120.5
    assert [ask(account) for account in accounts] == [False] * 3
    gateways.clock.now = 121.5
    assert ask(accounts[0])


def test_tokens_that_are_returned_at_one_gateway_are_returned_at_all() -> None:
    gateways = Gateways(2)
    here, elsewhere = gateways.account(0), gateways.account(1)
    reserved = here.reserve(6000)
    gateways.exchange_all()
    assert not can_reserve(elsewhere, 1000)
    here.settle(reserved, used=500)
    gateways.exchange_all()
    assert not can_reserve(elsewhere, 5600)
    assert can_reserve(elsewhere, 5500)


def test_a_gateway_that_starts_is_not_charged_for_the_past() -> None:
    gateways = Gateways(1)
    for gateways.clock.now in range(600):
        ask(gateways.account(0))
    gateways.exchange(0)
    gateways.accounts.append(Accounts(gateways.clock, Counter[str]().update))
    gateways.exchange_all()
    assert burst(gateways.account(1)) == RATE
    gateways.exchange_all()
    assert not ask(gateways.account(0)), "what the new one grants is known from then on"


def test_a_board_that_was_away_takes_nothing_twice_and_loses_nothing() -> None:
    gateways = Gateways(2)
    here, elsewhere = gateways.account(0), gateways.account(1)
    for _ in range(20):
        assert ask(here)
    gateways.exchange_all()
    gateways.board = Board(gateways.clock)  # a new one, which knows no reports
    for accounts in gateways.accounts:
        accounts.charge_others({})
    for _ in range(10):
        assert ask(here)
    gateways.exchange_all()
    gateways.exchange_all()
    assert burst(elsewhere) == RATE - 30


def test_requests_under_way_are_those_of_all_gateways() -> None:
    bob = ApiClient("bob", b"2", concurrent_requests=2)
    gateways = Gateways(2)
    here, elsewhere = gateways.account(0, bob), gateways.account(1, bob)
    with here.request(), here.request():
        gateways.exchange_all()
        assert not ask(elsewhere)
        gateways.accounts[1].charge_others({})
        assert ask(elsewhere), "while the board is away, each counts for itself"
        gateways.exchange_all()
        gateways.clock.now += status_board.SILENT_AFTER_S + 1
        gateways.exchange(1)
        assert ask(elsewhere), "what is gone runs nothing"
    gateways.exchange_all()
    assert ask(elsewhere)


def test_engines_are_no_gateways() -> None:
    board = Board()
    use = ClientUse("alice", 1, 1, 0)
    board.report(ReplicaReport("g", GATEWAY, None, Snapshot({}), uses=(use,)))
    assert board.report(ReplicaReport("e", ENGINE, None, Snapshot({}))) is None
    answer = board.report(ReplicaReport("h", GATEWAY, None, Snapshot({})))
    assert isinstance(answer, GatewayAnswer)
    assert answer.uses == {"g": (use,)}


def test_a_client_that_has_not_come_here_yet_is_charged_all_the_same(tmp_path: Path) -> None:
    (file := tmp_path / "keys").write_text("alice k1 requests_per_minute=2\n")
    access = ClientAccess.from_config(HttpConfig(api_keys_file=str(file)), Registry())
    assert access is not None
    access.charge_others({"g": ()})
    access.charge_others({"g": (ClientUse("alice", 2, 0, 0), ClientUse("removed", 9, 0, 0))})
    client = access.find("k1")
    assert client is not None
    with pytest.raises(RateLimited), access.request(client):
        pass


def test_each_report_brings_the_others_and_a_board_that_is_away_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reporting, "REPORT_EVERY_S", 0.0)
    engines = EngineKeys(frozenset(), is_complete=True)
    first, second = (GatewayAnswer(engines, {name: ()}) for name in "gh")
    answers: list[GatewayAnswer | None] = [first, None, second]
    taken: list[GatewayAnswer | None] = []

    async def remote(report: ReplicaReport) -> GatewayAnswer:
        answer = answers.pop(0) if answers else first
        if answer is None:
            raise ConnectionError
        return answer

    async def main() -> None:
        board = SimpleNamespace(report=SimpleNamespace(remote=remote))
        report = ReplicaReport("r", GATEWAY, None, Snapshot({}))
        reports = asyncio.create_task(report_forever(board, lambda: report, taken.append))
        while len(taken) < 3:
            await asyncio.sleep(0)
        reports.cancel()

    asyncio.run(main())
    assert taken[:3] == [first, None, second]


def test_a_model_s_limit_is_one_for_all_gateways(tmp_path: Path) -> None:
    (file := tmp_path / "keys").write_text("alice k requests_per_minute:large=2\n")
    clock = Clock()
    access = ClientAccess(KeyFile(file), Accounts(clock, Counter[str]().update))
    alice = access.find("k")
    assert alice is not None
    used = ClientUse("alice:large", 0, 0, 0)
    access.charge_others({"other": [used]})
    access.charge_others({"other": [replace(used, requests=2)]})

    async def charge(model: str) -> None:
        with access.request(alice) as use:
            access.charge_model(use, model)

    asyncio.run(charge("small"))
    with pytest.raises(RateLimited, match="alice:large has used up its 2 requests a minute"):
        asyncio.run(charge("large"))
