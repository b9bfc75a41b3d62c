"""Answers to clients of HTTP/1.0, which know no chunks. Plain ASGI."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class WholeAnswer:
    """Answers with a length to requests in HTTP/1.0: a stream is sent as a whole.

    Without a length uvicorn writes chunks, whatever the version, and such a client would take
    their sizes for text (RFC 9112, section 6.1).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope.get("http_version") != "1.0":
            await self._app(scope, receive, send)
            return
        start: Message | None = None  # while its body is gathered
        parts: list[bytes] = []

        async def send_whole(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start" and not _has_length(message):
                start = message
                return
            if start is None or message["type"] != "http.response.body":
                await send(message)
                return
            parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                length = (b"content-length", b"%d" % sum(map(len, parts)))
                await send({**start, "headers": [*start.get("headers", ()), length]})
                await send({**message, "body": b"".join(parts)})

        await self._app(scope, receive, send_whole)


def _has_length(start: Message) -> bool:
    return any(name.lower() == b"content-length" for name, _ in start.get("headers", ()))
