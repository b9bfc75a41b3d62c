"""Encoding of request headers for Serve, which decodes them as UTF-8, and one id in its answers.

Serve imports `middlewares` where SETTING names it. Knows headers, no paths and no bodies.
"""

from __future__ import annotations

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

REQUEST_ID = b"x-request-id"
SETTING = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
"""Variable with the import path of a function that returns middleware of Serve's HTTP servers."""


class Utf8Headers:
    """Headers in UTF-8: where one is not, it is taken as Latin-1 and encoded again.

    RFC 9110, section 5.5, lets a value have any bytes. Serve 2.60 decodes the request's id and the
    headers for its own use as UTF-8, and answers 500 when that fails (`_direct_ingress_asgi` in
    ray/serve/_private/replica.py). It also sends the id back, so one beyond ASCII is dropped, and
    Serve makes another.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if "headers" in scope:
            scope["headers"] = [
                (_as_utf8(name), _as_utf8(value))
                for name, value in scope["headers"]
                if value.isascii() or name.lower() != REQUEST_ID
            ]
        await self._app(scope, receive, send)


class SingleRequestId:
    """Answers with one request id: the first, which is the gateway's where it has answered.

    Serve adds its own after it (`RequestIdMiddleware` in ray/serve/_private/http_util.py).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_single(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                ids = [number for number, (name, _) in enumerate(headers) if _is_id(name)]
                kept = [pair for number, pair in enumerate(headers) if number not in ids[1:]]
                message = {**message, "headers": kept}
            await send(message)

        await self._app(scope, receive, send_single)


def middlewares() -> list[Middleware]:
    """Return what Serve puts in front of its own middleware, in gateways and in proxies."""
    return [Middleware(Utf8Headers), Middleware(SingleRequestId)]


IMPORT_PATH = f"{__name__}:{middlewares.__name__}"
"""Value of SETTING."""


def _is_id(name: bytes) -> bool:
    return name.lower() == REQUEST_ID


def _as_utf8(text: bytes) -> bytes:
    if text.isascii():
        return text
    try:
        text.decode()
    except UnicodeDecodeError:
        return text.decode("latin-1").encode()
    return text
