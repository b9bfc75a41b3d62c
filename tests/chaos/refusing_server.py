"""A process that refuses every HTTP request at once, as the least that any server could do."""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from specserve.tools.bench.address import ServerAddress

_BODY = b'{"error": {"message": "the queue is full", "type": "rate_limit_error"}}'
ANSWER = (
    b"HTTP/1.1 429 Too Many Requests\r\nContent-Type: application/json\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
)


@contextmanager
def refusing_server() -> Iterator[ServerAddress]:
    """Run the process, and yield its address."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        port: int = listener.getsockname()[1]
        process = multiprocessing.get_context("fork").Process(
            target=_serve, args=(listener,), daemon=True
        )
        process.start()
    try:
        yield ServerAddress("127.0.0.1", port)
    finally:
        process.terminate()
        process.join()


def _serve(listener: socket.socket) -> None:
    async def serve() -> None:
        server = await asyncio.start_server(_refuse, sock=listener)
        await server.serve_forever()

    asyncio.run(serve())


async def _refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer once the head has come. The body is short, and comes with it."""
    try:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(ANSWER)
        await writer.drain()
    except (OSError, EOFError):
        pass
    finally:
        writer.close()
