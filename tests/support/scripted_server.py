"""A server that streams scripted events at known times, over raw sockets.

What a load measures of it is known in advance.
"""

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
    """The stream that every completion gets, and where it fails.

    An event is the seconds to wait and the origins of its tokens. The last one has the finish
    reason.
    """

    events: Sequence[tuple[float, Sequence[str]]] = ((0.0, ("plain",)),)
    speculation: dict[str, object] | None = None
    metrics: Callable[[], bytes] = lambda: b""
    piece: int | None = None  # size in bytes of the pieces into which events are cut
    breaks_after: int | None = None  # events
    hangs_after: int | None = None  # events
    num_before_hang: int = 0  # streams that do not hang; those after them do
    # Path, headers and body of each request.
    requests: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)

    @property
    def num_streams(self) -> int:
        """Number of streams requested so far."""
        return sum(path.endswith("/v1/completions") for path, _, _ in self.requests)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
            headers = {
                name.lower(): value
                for name, _, value in (line.partition(": ") for line in head[1:] if line)
            }
            path = head[0].split()[1]
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            self.requests.append((path, headers, body))
            if path.endswith("/v1/completions"):
                await self._stream(writer)
            else:
                content = MODELS if path.endswith("/v1/models") else self.metrics()
                status = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(content)
                writer.write(status + content)
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client left
        finally:
            writer.close()

    async def _stream(self, writer: asyncio.StreamWriter) -> None:
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        for number, (wait, origins) in enumerate(self.events):
            if number == self.breaks_after:
                return
            if number == self.hangs_after and self.num_streams > self.num_before_hang:
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
def scripted_server(script: Script) -> Iterator[str]:
    """Serve the script from a thread of its own and yield the server's URL."""
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
