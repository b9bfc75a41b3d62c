"""Headers reach Serve, which decodes them as UTF-8, in UTF-8."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message, Receive, Scope, Send

from specserve.cluster.gateway.header_encoding import IMPORT_PATH, SETTING, Utf8Headers
from specserve.cluster.proxy_settings import SERVE_SETTINGS

Header = tuple[bytes, bytes]


def passed_on(*headers: Header) -> list[Header]:
    """Return the headers that an app behind the middleware gets."""
    found: list[Header] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        found.extend(scope["headers"])

    async def receive() -> Message:
        raise AssertionError

    async def send(message: Message) -> None:
        raise AssertionError

    asyncio.run(Utf8Headers(app)({"type": "http", "headers": list(headers)}, receive, send))
    return found


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b"plain", b"plain"),
        ("café".encode(), "café".encode()),
        (b"caf\xe9", "café".encode()),
        (b"\xff\xfe", "ÿþ".encode()),
    ],
)
def test_a_value_that_is_not_utf_8_is_encoded_again(value: bytes, expected: bytes) -> None:
    assert passed_on((b"x-session-id", value)) == [(b"x-session-id", expected)]


@pytest.mark.parametrize("value", [b"caf\xe9", "café".encode()])
def test_a_request_id_beyond_ascii_is_dropped_so_that_serve_makes_one(value: bytes) -> None:
    assert passed_on((b"host", b"x"), (b"X-Request-Id", value)) == [(b"host", b"x")]
    assert passed_on((b"x-request-id", b"abc")) == [(b"x-request-id", b"abc")]


def test_serve_is_given_the_middleware_and_takes_it() -> None:
    from ray.serve._private.http_util import validate_http_proxy_callback_return
    from ray.serve._private.utils import call_function_from_import_path

    assert SERVE_SETTINGS[SETTING] == IMPORT_PATH
    made = call_function_from_import_path(IMPORT_PATH)
    assert validate_http_proxy_callback_return(made) == made
