"""The requests of a browser's page, as the guide writes them, are answered as it says."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from urllib.parse import urlsplit

from tests.support import pages as guide
from tests.support.http_server import Reply, RunningServer, serving

ORIGIN = "https://app.example.org"


def run(server: RunningServer, words: Sequence[str], origin: str = ORIGIN) -> Reply:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("-X", dest="method")
    parser.add_argument("-H", dest="headers", action="append")
    parser.add_argument("-d", dest="body")
    parser.add_argument("-i", action="store_true")
    given = parser.parse_args(words)
    headers = dict(header.split(": ", 1) for header in given.headers) | {"Origin": origin}
    body = None if given.body is None else given.body.encode()
    return server.ask(urlsplit(given.url).path, body, method=given.method, headers=headers)


def test_the_commands_of_the_guide_do_what_it_says() -> None:
    (block,) = [
        block
        for block in guide.blocks()
        if block.page.name == "http.md" and "Origin: " in block.text
    ]
    assert ORIGIN in block.text
    preflight, request = guide.commands(block.text)
    with serving(config={"http.cors_origins": [ORIGIN]}) as server:
        for command in (preflight, request):
            reply = run(server, command.words[1:])
            assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, ORIGIN)
        exposed = reply.headers["access-control-expose-headers"].lower()
        assert {"x-request-id", "x-specserve-ignored", "retry-after"} <= set(exposed.split(", "))
        assert run(server, preflight.words[1:], origin="https://other.org").status == 400
