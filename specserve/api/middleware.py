"""What happens to every HTTP request, whatever it asks for: an id and a log line, a last resort, keys, and a limit on bodies.

Plain ASGI: a class of the framework's own would cost CPU with each streamed chunk, and hide that a client has left.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Collection, MutableMapping
from typing import Any

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specserve.api.keys import Keys
from specserve.api.meter import Meter
from specserve.api.refusal import BAD_KEY, STATUS_OF_GONE, Refusal

log = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class Journal:
    """Gives each request an id, or takes the client's; tells it in the response and in the log. Counts failures of the API."""

    def __init__(self, app: ASGIApp, *, meter: Meter) -> None:
        self._app, self._meter = app, meter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        status, ended = STATUS_OF_GONE, False
        begun = self._meter.clock()

        async def telling(message: Message) -> None:
            nonlocal status, ended
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), (REQUEST_ID.encode(), request_id.encode())]}
            await send(message)
            ended = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await self._app(scope, receive, telling)
        finally:
            status = status if ended else STATUS_OF_GONE
            if status >= 400 and scope["path"].startswith("/v1/"):
                self._meter.failed(status)
            log.info("%s %s %s %d %.3f s", request_id, scope["method"], scope["path"], status, self._meter.clock() - begun)


class LastResort:
    """Answers what nobody expected with a plain 500. The log has the trace, the client has not."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watching(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watching)
        except Exception as error:
            log.exception("%s failed", scope.get("state", {}).get("request_id", "a request"))
            if not started and scope["type"] == "http":
                await Refusal.of(error).response()(scope, receive, send)


class KeyCheck:
    """Asks for `Authorization: Bearer KEY`, but on the open paths."""

    def __init__(self, app: ASGIApp, *, keys: Keys, open_paths: Collection[str]) -> None:
        self._app, self._keys, self._open_paths = app, keys, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].removeprefix(scope.get("root_path", "")) not in self._open_paths and not self._admits(scope):
            refusal = Refusal(BAD_KEY, "an API key is needed: Authorization: Bearer KEY")
            await refusal.response({"WWW-Authenticate": "Bearer"})(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _admits(self, scope: MutableMapping[str, Any]) -> bool:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and self._keys.admits(key.strip())


class BodyLimit:
    """Refuses a body that says that it is too long, or turns out to be; no more than the limit is ever held."""

    def __init__(self, app: ASGIApp, *, limit: int) -> None:
        self._app, self._limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        told = Headers(scope=scope).get("content-length", "")
        if told.isdecimal() and int(told[:20]) > self._limit:
            await Refusal.of(self._too_large()).response({"Connection": "close"})(scope, receive, send)
            return
        held = 0

        async def counting() -> Message:
            nonlocal held
            message = await receive()
            held += len(message.get("body", b""))
            if held > self._limit:
                raise self._too_large()
            return message

        await self._app(scope, counting, send)

    def _too_large(self) -> HTTPException:
        return HTTPException(413, f"the body is longer than the {self._limit} bytes that are allowed", {"Connection": "close"})


def _request_id(scope: Scope) -> str:
    given: str = Headers(scope=scope).get(REQUEST_ID, "")
    return given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex
