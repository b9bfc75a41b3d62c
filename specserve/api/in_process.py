"""Requests to an ASGI application of the same process, whose answers arrive as they are written.

Knows nothing of what the application serves.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message


@dataclass(frozen=True, slots=True)
class Answer:
    """Status of an answer, and the pieces of its body."""

    status: int
    pieces: AsyncIterator[bytes]

    async def read(self) -> bytes:
        """Return the whole body."""
        return b"".join([piece async for piece in self.pieces])


@asynccontextmanager
async def post(
    app: ASGIApp, path: str, body: bytes, headers: Mapping[str, str]
) -> AsyncIterator[Answer]:
    """Send a request, and yield its answer. Leaving the block cancels what still answers."""
    sent: asyncio.Queue[Message | None] = asyncio.Queue()
    request: Message | None = {"type": "http.request", "body": body, "more_body": False}

    async def receive() -> Message:
        nonlocal request
        if request is not None:
            message, request = request, None
            return message
        await asyncio.Event().wait()  # until it is cancelled
        raise AssertionError

    async def serve() -> None:
        try:
            await app(_scope(path, len(body), headers), receive, sent.put)
        finally:
            sent.put_nowait(None)

    serving = asyncio.create_task(serve())
    try:
        start = await sent.get()
        if start is None:
            await serving  # raises what the app raised
            raise RuntimeError("the application ended without an answer")
        yield Answer(start["status"], _pieces(sent, serving))
    finally:
        serving.cancel()
        await asyncio.wait([serving])


async def _pieces(
    sent: asyncio.Queue[Message | None], serving: asyncio.Task[None]
) -> AsyncGenerator[bytes, None]:
    while (message := await sent.get()) is not None:
        if piece := message.get("body"):
            yield piece
        if not message.get("more_body", False):
            return
    await serving  # raises what the app raised, whose answer has no end


def _scope(path: str, length: int, headers: Mapping[str, str]) -> dict[str, Any]:
    named = {name.lower(): value for name, value in headers.items()}
    named |= {"content-type": "application/json", "content-length": str(length)}
    named.pop("content-encoding", None)  # of the body that a client sent to somebody else
    named.pop("transfer-encoding", None)
    named["host"] = "localhost"
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [
            (name.encode("latin-1", "replace"), value.encode("latin-1", "replace"))
            for name, value in named.items()
        ],
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 0),
        "state": {},
    }
