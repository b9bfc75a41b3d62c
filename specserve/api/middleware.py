"""What happens to every HTTP request, whatever it asks for: an id and a log line, a last resort, keys and rates, and limits on heads and bodies.

Plain ASGI: a class of the framework's own would cost CPU with each streamed chunk, and hide that a client has left.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specserve.api.discretion import log_failure
from specserve.api.keys import KeyFile
from specserve.api.metering import Meter
from specserve.api.rates import Account, Accounts
from specserve.api.refusal import BAD_KEY, STATUS_OF_GONE, Refusal
from specserve.errors import RateLimited

log = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
MAX_HEAD = (
    32 * 1024
)  # bytes of a request's path, query and headers; Serve's HAProxy takes no more than 16 kB
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
                message = {
                    **message,
                    "headers": [
                        *message.get("headers", ()),
                        (REQUEST_ID.encode(), request_id.encode()),
                    ],
                }
            await send(message)
            ended = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await self._app(scope, receive, telling)
        finally:
            status = status if ended else STATUS_OF_GONE
            if status >= 400 and scope["path"].startswith("/v1/"):
                self._meter.failed(status)
            _tell(scope, status, self._meter.clock() - begun)


class LastResort:
    """Answers what nobody expected with a plain 500. The log has the trace, the client has not."""

    def __init__(self, app: ASGIApp, *, quote: bool) -> None:
        self._app, self._quote = app, quote

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watching(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watching)
        except Exception as error:
            log_failure(
                log, scope.get("state", {}).get("request_id", "a request"), error, quote=self._quote
            )
            if not started and scope["type"] == "http":
                await Refusal.of(error).response()(scope, receive, send)


class KeyCheck:
    """Asks for `Authorization: Bearer KEY`, but on the open paths, and counts what each key asks for."""

    def __init__(
        self, app: ASGIApp, *, keys: KeyFile, accounts: Accounts, open_paths: Collection[str]
    ) -> None:
        self._app, self._keys, self._accounts, self._open_paths = app, keys, accounts, open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] != "http"
            or scope["path"].removeprefix(scope.get("root_path", "")) in self._open_paths
        ):
            await self._app(scope, receive, send)
            return
        account = self._account(scope)
        if account is None:
            refusal = Refusal(BAD_KEY, "an API key is needed: Authorization: Bearer KEY")
            await refusal.response({"WWW-Authenticate": "Bearer"})(scope, receive, send)
            return
        scope.setdefault("state", {})["account"] = account
        try:
            account.take_request()
        except RateLimited as error:
            await Refusal.of(error).response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _account(self, scope: Scope) -> Account | None:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        client = self._keys.find(key.strip()) if scheme.lower() == "bearer" else None
        return None if client is None else self._accounts.of(client)


class HeadLimit:
    """Refuses what has too much in front of its body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _head_size(scope) > MAX_HEAD:
            refusal = Refusal.of(
                HTTPException(
                    431, f"path and headers are longer than the {MAX_HEAD} bytes that are allowed"
                )
            )
            await refusal.response({"Connection": "close"})(scope, receive, send)
            return
        await self._app(scope, receive, send)


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
            await Refusal.of(self._too_large()).response({"Connection": "close"})(
                scope, receive, send
            )
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
        return HTTPException(
            413,
            f"the body is longer than the {self._limit} bytes that are allowed",
            {"Connection": "close"},
        )


def _head_size(scope: Scope) -> int:
    return (
        len(scope["path"])
        + len(scope.get("query_string", b""))
        + sum(len(name) + len(value) for name, value in scope["headers"])
    )


def _tell(scope: Scope, status: int, seconds: float) -> None:
    """One line. The path is a stranger's and is escaped, lest it look like lines of ours; the fields are for logs in JSON."""
    state, path = scope["state"], ascii(scope["path"][:200])[1:-1]
    account: Account | None = state.get("account")
    client = "-" if account is None else account.name
    fields = {
        "request_id": state["request_id"],
        "method": scope["method"],
        "path": path,
        "status": status,
        "seconds": round(seconds, 6),
        "client": client,
    }
    log.info(
        "%s %s %s %d %.3f s %s",
        state["request_id"],
        scope["method"],
        path,
        status,
        seconds,
        client,
        extra=fields,
    )


def _request_id(scope: Scope) -> str:
    given: str = Headers(scope=scope).get(REQUEST_ID, "")
    return given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex
