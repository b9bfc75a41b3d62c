"""A server that answers by a script, with known times, over raw sockets: what a load measures of it is known beforehand."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

MODELS = json.dumps({"data": [{"id": "scripted"}]}).encode()
DONE = b"data: [DONE]\n\n"


@dataclass
class Script:
    """Each event: seconds to wait, and the origins of its tokens. The last one has the finish reason."""

    events: Sequence[tuple[float, Sequence[str]]] = ((0.0, ("plain",)),)
    speculation: dict[str, object] | None = None
    metrics: Callable[[], bytes] = lambda: b""
    piece: int | None = None  # bytes; events are cut into pieces of that size
    breaks_after: int | None = None  # events
    hangs_after: int | None = None  # events
    num_unhung: int = 0  # streams, the first ones, that do not hang
    asked: list[tuple[str, dict[str, str], bytes]] = field(
        default_factory=list
    )  # target, headers, body

    @property
    def num_streams(self) -> int:
        """Asked for until now."""
        return sum(path.endswith("/v1/completions") for path, _, _ in self.asked)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {
                name.lower(): value
                for name, _, value in (line.partition(": ") for line in head[1:] if line)
            }
            path = head[0].split()[1]
            self.asked.append(
                (path, headers, await reader.readexactly(int(headers.get("content-length", 0))))
            )
            if path.endswith("/v1/completions"):
                await self._stream(writer)
            else:
                body = MODELS if path.endswith("/v1/models") else self.metrics()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client left
        finally:
            writer.close()

    async def _stream(self, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        for number, (wait, origins) in enumerate(self.events):
            if number == self.breaks_after:
                return
            if number == self.hangs_after and self.num_streams > self.num_unhung:
                await asyncio.sleep(60)
            await asyncio.sleep(wait)
            finish = "length" if number == len(self.events) - 1 else None
            self._send(
                writer,
                _event(
                    {
                        "choices": [{"finish_reason": finish}],
                        "origins": origins,
                        "specserve": self.speculation,
                    }
                ),
            )
        tokens = sum(len(origins) for _, origins in self.events)
        self._send(writer, _event({"choices": [], "usage": {"completion_tokens": tokens}}) + DONE)
        writer.write(b"0\r\n\r\n")

    def _send(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        size = self.piece or len(data)
        for piece in (data[i : i + size] for i in range(0, len(data), size)):
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))


def _event(content: object) -> bytes:
    return f"data: {json.dumps(content)}\n\n".encode()


@contextmanager
def scripted(script: Script) -> Iterator[str]:
    """Its URL, while it is served from a thread of its own."""
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(script.answer, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        asyncio.run_coroutine_threadsafe(_end(server), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _end(server: asyncio.Server) -> None:
    server.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
