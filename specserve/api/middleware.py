"""Middleware of every HTTP request: access log, last-resort errors, hosts, size and load limits.

It is plain ASGI. The framework's own class would cost CPU with each streamed chunk, and would hide
that a client has left.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specserve.api.access import ClientAccess, may_ask_full_engines
from specserve.api.client_address import client_address
from specserve.api.metering import RequestMetrics
from specserve.api.model_directory import ModelDirectory
from specserve.api.refusal import (
    CLIENT_CLOSED_REQUEST,
    Refusal,
    log_redacted,
)
from specserve.api.strict_model import shown_names
from specserve.errors import Overloaded

log = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
IGNORED = "x-specserve-ignored"
"""Header with the names of parameters that nothing reads and that were ignored."""
MAX_HEAD = 32 * 1024
"""Bytes of a request's path, query and headers. Serve's HAProxy takes no more than 16 kB."""
_PORT = re.compile(r":[0-9]+$")
_VALID_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class AccessLog:
    """Log line and id of each request.

    The id is the client's if it is valid, else a new one; it goes into the response and the log.
    Failures of the API are counted.
    """

    def __init__(self, app: ASGIApp, *, metrics: RequestMetrics, trusted_proxies: int = 0) -> None:
        self._app, self._metrics, self._trusted_proxies = app, metrics, trusted_proxies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        status, ended = CLIENT_CLOSED_REQUEST, False
        start = self._metrics.clock()

        async def send_with_id(message: Message) -> None:
            nonlocal status, ended
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {
                    **message,
                    "headers": [
                        *message.get("headers", ()),
                        (REQUEST_ID.encode(), request_id.encode()),
                        *_ignored_header(scope),
                    ],
                }
            await send(message)
            ended = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            status = status if ended else CLIENT_CLOSED_REQUEST
            if status >= 400 and served_path(scope).startswith("/v1/"):
                scope["state"].get("model_metrics", self._metrics).count_failure(status)
            address = client_address(scope, trusted_proxies=self._trusted_proxies)
            _log_request(scope, status, self._metrics.clock() - start, address)


class HeadAsGet:
    """Answers to HEAD: the status and headers that GET would have, without the body."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        await self._app({**scope, "method": "GET"}, receive, send_head)


class InternalErrorHandler:
    """Last resort for unexpected errors: a plain 500 for the client, the traceback for the log."""

    def __init__(self, app: ASGIApp, *, log_prompts: bool) -> None:
        self._app, self._log_prompts = app, log_prompts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watched_send(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        except Exception as error:
            log_redacted(
                log,
                scope.get("state", {}).get("request_id", "a request"),
                error,
                log_prompts=self._log_prompts,
            )
            if not started and scope["type"] == "http":
                await Refusal.from_error(error).response()(scope, receive, send)


class LoadLimit:
    """Refusal of generations while every queue is full, before their bodies are read.

    A flood of requests must not take the processor's time from those that are served. Clients that
    have fewer requests under way than another one may ask the engine all the same. Of several
    models it is the body that says which is meant: a request passes here if one of them has room.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        models: ModelDirectory,
        access: ClientAccess | None,
        paths: Collection[str],
    ) -> None:
        self._app, self._models, self._access, self._paths = app, models, access, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and served_path(scope) in self._paths:
            try:
                self._models.require_room()
            except Overloaded as error:
                if not may_ask_full_engines(self._access, scope.get("state", {}).get("key_use")):
                    await Refusal.from_error(error).response()(scope, receive, send)
                    return
        await self._app(scope, receive, send)


class HostCheck:
    """Refusal of requests that are addressed to another host.

    A page from elsewhere could reach a server of this machine through a name of its own that it
    lets point here (DNS rebinding); its browser sends that name. Ports are not compared.
    """

    def __init__(self, app: ASGIApp, *, hosts: Collection[str]) -> None:
        self._app, self._hosts = app, frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host", "") if scope["type"] == "http" else ""
        if host and _PORT.sub("", host.strip().lower()) not in self._hosts:
            known = ", ".join(sorted(self._hosts))
            refusal = Refusal.from_error(
                HTTPException(421, f"requests must be addressed to {known} (see http.hosts)")
            )
            await refusal.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)


class HeadLimit:
    """Refusal of requests whose path and headers are too long."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _head_size(scope) > MAX_HEAD:
            refusal = Refusal.from_error(
                HTTPException(
                    431, f"path and headers are longer than the {MAX_HEAD} bytes that are allowed"
                )
            )
            await refusal.response({"Connection": "close"})(scope, receive, send)
            return
        await self._app(scope, receive, send)


def served_path(scope: Scope) -> str:
    """Return the path below the application's own."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path


def _head_size(scope: Scope) -> int:
    return (
        len(scope["path"])
        + len(scope.get("query_string", b""))
        + sum(len(name) + len(value) for name, value in scope["headers"])
    )


def _log_request(scope: Scope, status: int, seconds: float, address: str) -> None:
    """Write the access log's line; its fields are for logs in JSON.

    The client-supplied path is escaped to prevent log injection.
    """
    state, path = scope["state"], ascii(scope["path"][:200])[1:-1]
    client = state.get("client", "-")
    fields = {
        "request_id": state["request_id"],
        "method": scope["method"],
        "path": path,
        "status": status,
        "seconds": round(seconds, 6),
        "address": address,
        "client": client,
    }
    log.info(
        "%s %s %s %d %.3f s %s %s",
        state["request_id"],
        scope["method"],
        path,
        status,
        seconds,
        address,
        client,
        extra=fields,
    )


def _ignored_header(scope: Scope) -> list[tuple[bytes, bytes]]:
    names = scope["state"].get("ignored")
    return [] if names is None else [(IGNORED.encode(), shown_names(names).encode())]


def _request_id(scope: Scope) -> str:
    given: str = Headers(scope=scope).get(REQUEST_ID, "")
    return given if _VALID_ID.fullmatch(given) else uuid.uuid4().hex
