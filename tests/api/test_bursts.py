"""Chunks that come in a burst, as after a break of the network, are no slow client's fault."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from specserve.api.generation import MAX_BEHIND
from specserve.types import Chunk, Request
from tests.support import asgi
from tests.support.http_server import TEXT, FakeService, app_over


class BurstingService(FakeService):
    """An engine whose chunks are all there at once."""

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        for chunk in self._chunks(request):
            self.num_chunks += 1
            yield chunk


@pytest.mark.parametrize("stream", [True, False])
def test_a_burst_of_chunks_reaches_a_client_that_reads(stream: bool) -> None:
    service = BurstingService(output=TEXT * 100)
    body = {"prompt": "x", "max_tokens": 1500, "stream": stream}
    reply = asgi.send(app_over(service), "/v1/completions", body)
    assert service.num_chunks > 2 * MAX_BEHIND
    assert b"does not take its answer" not in reply.body
    assert b'"finish_reason":"length"' in reply.body
