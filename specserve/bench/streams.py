"""A lean client for many streams at once: plain sockets, so that what is measured is the server. Times are of this machine's monotonic clock."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Stream:
    """What came back of one request."""

    sent: float
    status: int = 0
    times: list[float] = field(default_factory=list)  # of each event with text
    final: Mapping[str, Any] | None = None  # the event with the finish reason
    usage: Mapping[str, int] | None = None
    body: bytes = b""  # of an answer that is no stream

    @property
    def longest_gap(self) -> float:
        return max((later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)), default=0.0)


async def stream(host: str, port: int, path: str, body: Mapping[str, object]) -> Stream:
    """Posts a streaming request and reads it to its end."""
    reader, writer = await asyncio.open_connection(host, port, limit=2**20)
    try:
        payload = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
        result = Stream(time.monotonic())
        writer.write(head.encode() + payload)
        result.status = int((await reader.readline()).split()[1])
        while (await reader.readline()).strip():
            pass
        if result.status == 200:
            await _read_events(reader, result)
        else:
            result.body = await reader.read()
        return result
    finally:
        writer.close()


async def _read_events(reader: asyncio.StreamReader, result: Stream) -> None:
    """Lines of chunk sizes stand between those of events and are passed over."""
    while line := await reader.readline():
        if not line.startswith(b"data: {"):
            if line.startswith(b"data: [DONE]"):
                return
            continue
        now = time.monotonic()
        if b'"finish_reason":null' in line:
            result.times.append(now)
            continue
        event = json.loads(line[6:])
        if event.get("usage"):
            result.usage = event["usage"]
        elif event.get("choices"):
            result.times.append(now)
            result.final = event
