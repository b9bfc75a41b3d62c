"""A lean HTTP client for many streams at once, on plain sockets so that the server is measured.

Times are of this machine's monotonic clock.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_READ_BYTES = 2**16  # at most at once, of an answer that is not chunked


@dataclass(slots=True)
class Stream:
    """The answer to one request, filled as it arrives, so that a timeout keeps what has come."""

    sent: float = 0.0
    status: int = 0  # 0 without an answer
    times: list[float] = field(default_factory=list)  # of each event with text
    texts: list[str] = field(default_factory=list)  # beside `times`
    calls: list[str] = field(default_factory=list)  # pieces of tool calls: names and arguments
    logprobs: list[str] = field(default_factory=list)  # of each token, as JSON
    num_finals: int = 0  # events with a finish reason; one, if all is well
    # Beside `times`: origins of each event's tokens, if the server sends them.
    origins: list[Sequence[str]] = field(default_factory=list)
    final: Mapping[str, Any] | None = None  # the event with the finish reason
    usage: Mapping[str, int] | None = None
    error: Mapping[str, Any] | None = None  # a failure in mid-stream
    body: bytes = b""  # an answer that is no stream
    ended: float | None = None  # None: it broke off

    @property
    def answer(self) -> str:
        """Everything that was generated: the text, tool calls and logprobs."""
        return "".join((*self.texts, *self.calls, *self.logprobs))

    @property
    def longest_gap(self) -> float:
        return max(
            (later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)),
            default=0.0,
        )


async def stream(
    host: str,
    port: int,
    path: str,
    body: Mapping[str, object],
    *,
    headers: Mapping[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
    into: Stream | None = None,
) -> Stream:
    """Send a streaming request and read the stream to its end.

    Raises OSError or EOFError when the connection fails.
    """
    payload = json.dumps(
        {**body, "stream": True, "stream_options": {"include_usage": True}}
    ).encode()
    all_headers = {
        "Content-Type": "application/json",
        "Content-Length": str(len(payload)),
        **(headers or {}),
    }
    result = Stream() if into is None else into
    await _exchange(host, port, _head("POST", host, port, path, all_headers) + payload, tls, result)
    return result


async def fetch(
    host: str,
    port: int,
    path: str,
    *,
    headers: Mapping[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
) -> Stream:
    """Send a GET request and return the whole answer."""
    result = Stream()
    await _exchange(host, port, _head("GET", host, port, path, headers or {}), tls, result)
    return result


def _head(method: str, host: str, port: int, path: str, headers: Mapping[str, str]) -> bytes:
    name = f"[{host}]" if ":" in host else host
    lines = [
        f"{method} {path} HTTP/1.1",
        f"Host: {name}:{port}",
        "Connection: close",
        *(f"{key}: {value}" for key, value in headers.items()),
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


async def _exchange(
    host: str, port: int, request: bytes, tls: ssl.SSLContext | None, result: Stream
) -> None:
    reader, writer = await asyncio.open_connection(host, port, limit=2**20, ssl=tls)
    try:
        result.sent = time.monotonic()
        writer.write(request)
        status = await reader.readline()
        if not status.startswith(b"HTTP/1."):
            raise EOFError("the server hung up" if not status else "the server does not speak HTTP")
        result.status = int(status.split()[1])
        headers = await _headers(reader)
        pieces = _pieces(reader, chunked=headers.get(b"transfer-encoding") == b"chunked")
        if headers.get(b"content-type", b"").startswith(b"text/event-stream"):
            await _read_events(pieces, result)
        else:
            result.body = b"".join([piece async for piece in pieces])
            result.ended = time.monotonic()
    finally:
        writer.close()


async def _headers(reader: asyncio.StreamReader) -> dict[bytes, bytes]:
    headers = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.partition(b":")
        headers[name.lower()] = value.strip().lower()
    return headers


async def _pieces(reader: asyncio.StreamReader, *, chunked: bool) -> AsyncIterator[bytes]:
    """Yield the body as it arrives, until its end or the end of the connection."""
    if not chunked:
        while piece := await reader.read(_READ_BYTES):
            yield piece
        return
    while size := int((await reader.readline()).partition(b";")[0] or b"0", 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def _read_events(pieces: AsyncIterator[bytes], result: Stream) -> None:
    """Parse server-sent events from pieces that a proxy may have cut anywhere."""
    rest = b""
    async for piece in pieces:
        now = time.monotonic()
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                _add_event(json.loads(line[6:]), now, result)
            elif line.startswith(b"data: [DONE]"):
                result.ended = now
                return


def _add_event(event: Mapping[str, Any], now: float, result: Stream) -> None:
    if "error" in event:
        result.error = event["error"]
    elif event.get("usage"):
        result.usage = event["usage"]
    elif event.get("choices"):
        choice = event["choices"][0]
        delta = choice.get("delta", {})
        if not event.get("origins") and _has_role_alone(choice, delta):
            return
        result.times.append(now)
        result.texts.append(choice.get("text") or delta.get("content") or "")
        result.calls += [
            call["function"].get("name", "") + call["function"]["arguments"]
            for call in delta.get("tool_calls", ())
        ]
        if choice.get("logprobs"):
            result.logprobs += _logprobs(choice["logprobs"])
        result.origins.append(event.get("origins", ()))
        if choice.get("finish_reason") is not None:
            result.final = event
            result.num_finals += 1


def _has_role_alone(choice: Mapping[str, Any], delta: Mapping[str, Any]) -> bool:
    """Return True for the event by which some servers begin a chat, before its first token."""
    rest = [key for key, value in delta.items() if value and key != "role"]
    return "role" in delta and not rest and choice.get("finish_reason") is None


def _logprobs(logprobs: Mapping[str, Any]) -> list[str]:
    """Return one text for each token, of the formats of completions and of chats."""
    tokens = logprobs.get("content") or zip(
        *(logprobs[name] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")),
        strict=True,
    )
    return [json.dumps(token) for token in tokens]
