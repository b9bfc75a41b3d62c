"""Spans of the HTTP server, for the requests that generate. Used only if there is a tracer."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specserve.tracing import HEADERS, TraceContext, context_of, set_failed, start_child

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

TRACE_CONTEXT = "trace_context"
"""Key of the request's state that has the context for the engine's spans."""


class RequestSpans:
    """Middleware that starts a span for each request to some paths.

    Its parent is that of the request's `traceparent`, if the header is valid.
    """

    def __init__(self, app: ASGIApp, *, tracer: Tracer, paths: Collection[str]) -> None:
        self._app, self._tracer, self._paths = app, tracer, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or path not in self._paths:
            await self._app(scope, receive, send)
            return
        method, state = scope["method"], scope.setdefault("state", {})
        attributes: dict[str, str | int] = {
            "http.request.method": method,
            "url.path": scope["path"],
            "specserve.request_id": state.get("request_id", ""),
        }
        span = start_child(self._tracer, f"{method} {path}", given_context(scope), attributes)
        state[TRACE_CONTEXT] = context_of(span)

        async def send_watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.set_attribute("http.response.status_code", message["status"])
                if message["status"] >= 500:
                    set_failed(span, str(message["status"]))
            await send(message)

        try:
            await self._app(scope, receive, send_watched)
        except BaseException as error:
            set_failed(span, type(error).__name__)
            raise
        finally:
            span.end()


def given_context(scope: Scope) -> TraceContext:
    """Return the trace context of a request's headers; () if it gives several parents."""
    headers = Headers(scope=scope)
    parent, state = (headers.getlist(name) for name in HEADERS)
    if len(parent) != 1:
        return ()
    return tuple(zip(HEADERS, (parent[0], ",".join(state)), strict=True))
