"""Addresses in the access log: the connection's, or one that a trusted proxy has written."""

from __future__ import annotations

import logging

import pytest

from specserve.api.client_address import UNKNOWN, client_address
from tests.support.http_server import serving

SPOOFED, SEEN, INNER = "203.0.113.9", "198.51.100.7", "10.0.0.2"


def address(*headers: str, proxies: int, peer: tuple[str, int] | None = ("10.0.0.3", 1)) -> str:
    raw = [(b"x-forwarded-for", header.encode("latin-1")) for header in headers]
    return client_address({"type": "http", "client": peer, "headers": raw}, trusted_proxies=proxies)


def test_without_proxies_it_is_the_connection_s() -> None:
    assert address(proxies=0) == "10.0.0.3"
    assert address(proxies=0, peer=None) == UNKNOWN
    assert address(proxies=0, peer=("unix:", 0)) == UNKNOWN


def test_a_header_of_the_client_is_never_believed() -> None:
    """A peer of the loopback makes uvicorn put the header's address into the scope."""
    assert address(SPOOFED, proxies=0, peer=(SPOOFED, 0)) == UNKNOWN
    assert address(f"{SPOOFED}, {SEEN}", proxies=1) == SEEN
    assert address(SPOOFED, SEEN, proxies=1) == SEEN
    assert address(f"{SPOOFED}, {SEEN}, {INNER}", proxies=2) == SEEN


@pytest.mark.parametrize(
    ("entry", "read"),
    [
        ("198.51.100.7:4711", SEEN),
        ("[2001:DB8::1]:4711", "2001:db8::1"),
        ("[2001:db8::1]", "2001:db8::1"),
        (" 2001:db8::1 ", "2001:db8::1"),
        ("unknown", UNKNOWN),
        ("", UNKNOWN),
        ("\x1b[2J", UNKNOWN),
        ("1.2.3.4 forged line", UNKNOWN),
    ],
)
def test_nothing_but_an_address_reaches_the_log(entry: str, read: str) -> None:
    assert address(entry, proxies=1) == read


def test_fewer_entries_than_proxies_are_no_address() -> None:
    assert address(proxies=1) == UNKNOWN
    assert address(SEEN, proxies=2) == UNKNOWN


@pytest.mark.parametrize(
    ("proxies", "sent", "logged"),
    [(0, None, "127.0.0.1"), (0, SPOOFED, "-"), (1, f"{SPOOFED}, {SEEN}", SEEN)],
)
def test_the_access_log_has_the_address_before_the_client(
    proxies: int, sent: str | None, logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The server is uvicorn as Serve starts it, which believes peers of the loopback."""
    headers = {"X-Request-Id": "r1"} | ({} if sent is None else {"X-Forwarded-For": sent})
    with (
        caplog.at_level(logging.INFO, "specserve"),
        serving(config={"http.trusted_proxies": proxies}) as server,
    ):
        assert server.ask("/v1/models", headers=headers).status == 200
        assert server.until(lambda: any("r1 GET" in line for line in caplog.messages))
    (record,) = [record for record in caplog.records if "r1 GET" in record.getMessage()]
    assert record.getMessage().endswith(f" s {logged} -")
    assert vars(record)["address"] == logged
