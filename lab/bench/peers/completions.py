"""A server of OpenAI's completions API as a system of the comparison.

Its client receives whole streams, as a chat would.
"""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from lab.bench.peers.turn import TurnRequest
from specserve.tools.bench.streams import Stream, stream

MODEL, PATH = "demo", "/v1/completions"


@dataclass(frozen=True, slots=True)
class CompletionsClient:
    """Client of one server; `extra` joins the body of every request."""

    url: str
    extra: Mapping[str, object] = field(default_factory=dict)

    def run(self, request: TurnRequest) -> int:
        """Stream all prompts and return the number of new tokens, as the server counts them."""
        return sum(
            one.usage["completion_tokens"]
            for one in asyncio.run(self._streams(request))
            if one.usage is not None
        )

    def texts(self, request: TurnRequest) -> Sequence[str]:
        return [self._complete(self._body(request, prompt)) for prompt in request.prompts]

    async def _streams(self, request: TurnRequest) -> list[Stream]:
        done: list[Stream] = []
        for batch in request.batches:
            done += await asyncio.gather(
                *(self._stream(self._body(request, prompt)) for prompt in batch)
            )
        return done

    async def _stream(self, body: Mapping[str, object]) -> Stream:
        url = urlsplit(self.url)
        assert url.hostname is not None
        assert url.port is not None
        answer = await stream(url.hostname, url.port, PATH, body)
        if answer.status != 200:
            raise ValueError(f"HTTP {answer.status}: {answer.body.decode(errors='replace')}")
        if answer.error is not None:
            raise ValueError(f"the stream ended with {json.dumps(answer.error)}")
        return answer

    def _complete(self, body: Mapping[str, object]) -> str:
        post = urllib.request.Request(
            self.url + PATH, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(post) as answer:
            text: str = json.load(answer)["choices"][0]["text"]
        return text

    def _body(self, request: TurnRequest, prompt: Sequence[int]) -> Mapping[str, object]:
        return {
            "model": MODEL,
            "temperature": 0,
            "ignore_eos": True,
            "max_tokens": request.max_tokens,
            "prompt": list(prompt),
            **self.extra,
        }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
