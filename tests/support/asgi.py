"""Send one request to an app in this process, without a server or a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Message

from tests.support.http_server import Reply


def send(app: ASGIApp, path: str, body: object, headers: Mapping[str, str] | None = None) -> Reply:
    """POST a body, as JSON unless it is bytes, and return the whole answer."""
    return asyncio.run(answer(app, path, body, headers))


async def answer(
    app: ASGIApp, path: str, body: object, headers: Mapping[str, str] | None = None
) -> Reply:
    """Do the same in the running event loop."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {"content-type": "application/json", "content-length": str(len(data))}
    given |= {name.lower(): value for name, value in (headers or {}).items()}
    scope: dict[str, Any] = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
    }
    return await _run(app, scope, data)


async def _run(app: ASGIApp, scope: dict[str, Any], data: bytes) -> Reply:
    messages: list[Message] = []
    has_body = True

    async def receive() -> Message:
        nonlocal has_body
        if has_body:
            has_body = False
            return {"type": "http.request", "body": data, "more_body": False}
        await asyncio.Event().wait()  # a client that stays
        raise AssertionError

    async def keep(message: Message) -> None:
        messages.append(message)

    await app(scope, receive, keep)
    start, *rest = messages
    headers = {name.decode().lower(): value.decode() for name, value in start["headers"]}
    return Reply(start["status"], headers, b"".join(part.get("body", b"") for part in rest))
