"""Run the real app under a real uvicorn on a free port, over an engine that follows a script."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import cycle
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI
from opentelemetry.trace import Tracer

from specserve.api.access import ClientAccess
from specserve.api.app import build
from specserve.api.model_directory import ModelBackend, ModelDirectory
from specserve.api.service import ServedModel, Status
from specserve.api.tokenizer import Tokenizer
from specserve.config.tree import DEMO, config_from_keys
from specserve.errors import Overloaded
from specserve.metrics import Registry
from specserve.types import (
    Chunk,
    FinishReason,
    Logprobs,
    Origin,
    PromptLogprobs,
    Request,
    Stats,
)

CONTEXT = 256
TEXT = "Grüße aus 日本! 👩‍👩‍👧‍👦 the END of it. And more."
_ROUNDS = (1, 3, 2, 4)  # tokens that the rounds commit, in turn


@cache
def demo_tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO / "target")


@dataclass
class FakeService:
    """An engine that writes `output` and ends. Each failure that a test may want is a field."""

    output: str = TEXT
    tokenizer: Tokenizer = field(default_factory=lambda: demo_tokenizer())
    refusal: Exception | None = None  # before the first chunk
    full: bool = False  # and known to be so before a request is read
    fails_after: int | None = None  # chunks
    error: Exception | None = None  # raised then; None: a last chunk with FinishReason.ERROR
    silent_after: int | None = None  # chunks; then the request ends without a last one
    hangs_after: int | None = None  # chunks; then nothing more comes
    state: Status = field(default_factory=lambda: Status(ready=True, healthy=True, replicas=1))
    requests: list[Request] = field(default_factory=list)
    cached_tokens: list[int] = field(default_factory=list)  # of the next requests
    num_live: int = 0
    num_chunks: int = 0
    tokens: tuple[int, ...] | None = None  # of `output`, if they are known

    def require_room(self) -> None:
        if self.full:
            raise Overloaded("the queue is full")

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        self.requests.append(request)
        if self.refusal is not None:
            raise self.refusal
        self.num_live += 1
        try:
            for number, chunk in enumerate(self._chunks(request)):
                if number == self.hangs_after:
                    await asyncio.Event().wait()
                if number == self.silent_after:
                    return
                if number == self.fails_after:
                    if self.error is not None:
                        raise self.error
                    chunk = Chunk(
                        0, 0, (), (), finish=FinishReason.ERROR, error="the target fell over"
                    )
                await asyncio.sleep(0)
                self.num_chunks += 1
                yield chunk
        finally:
            self.num_live -= 1

    def _chunks(self, request: Request) -> Iterator[Chunk]:
        """Yield the text, with the logprobs of the prompt in parts up to its first chunk."""
        if request.prompt_logprobs is None:
            yield from self._text_chunks(request)
            return
        logprobs, size = prompt_logprobs(request), len(request.prompt) // 2
        parts = [
            logprobs.part(first, stop, start=first + 1, num_top=request.prompt_logprobs)
            for first, stop in ((0, size), (size, len(request.prompt) - 1))
        ]
        # The prompt is computed again after a preemption.
        yield Chunk(0, 0, (), (), prompt_logprobs=parts[0])
        yield Chunk(0, 0, (), (), prompt_logprobs=parts[0])
        first, *others = self._text_chunks(request)
        yield replace(first, prompt_logprobs=parts[1])
        yield from others

    def _text_chunks(self, request: Request) -> Iterator[Chunk]:
        if not request.max_tokens:
            stats = Stats("block", True, 0, 0, 0, 1)
            finish = FinishReason.LENGTH
            yield Chunk(0, 0, (), (), None if request.logprobs is None else (), finish, stats)
            return
        ids = self.tokens or (*self.tokenizer.encode(self.output), 0)
        ids = ids[: request.max_tokens]
        finish = FinishReason.STOP if ids[-1] == 0 else FinishReason.LENGTH
        start, rounds = 0, 0
        cached_tokens = self.cached_tokens.pop(0) if self.cached_tokens else 0
        for size in cycle(_ROUNDS):
            tokens = ids[start : start + size]
            stop, rounds = start + len(tokens), rounds + 1
            origins = (*[Origin.ACCEPTED] * (len(tokens) - 1), Origin.BONUS)
            logprobs = (
                None
                if request.logprobs is None
                else tuple(_logprobs(token, request.logprobs) for token in tokens)
            )
            stats = Stats(
                "block",
                True,
                rounds=rounds,
                drafted=4 * rounds,
                accepted=stop - rounds,
                target_passes=rounds + 1,
                drafts=rounds,
                accepted_by_position=_by_position(stop, rounds),
                cached_tokens=cached_tokens,
                queue_time_ms=1.5,
                prefill_time_ms=20.25,
            )
            is_last = stop == len(ids)
            yield Chunk(0, start, tokens, origins, logprobs, finish if is_last else None, stats)
            if is_last:
                return
            start = stop

    async def status(self) -> Status:
        return self.state

    async def trace(self, last: int | None = None) -> Mapping[str, object]:
        return {"traceEvents": []} | ({} if last is None else {"rounds": last})


def _by_position(num_tokens: int, rounds: int) -> tuple[int, ...]:
    """Return how many of the rounds accepted their first, second, ... draft token."""
    sizes = [size for _, size in zip(range(rounds), cycle(_ROUNDS), strict=False)]
    sizes[-1] -= sum(sizes) - num_tokens
    return tuple(sum(size > n for size in sizes) for n in range(1, max(sizes)))


def prompt_logprobs(request: Request) -> PromptLogprobs:
    """Return logprobs in which token i of the prompt is the third likeliest of a few, at -i."""
    assert request.prompt_logprobs is not None
    rows = np.arange(1, len(request.prompt), dtype=np.float32)
    top = np.arange(request.prompt_logprobs)
    return PromptLogprobs(
        1,
        -rows,
        np.full(len(rows), 3, np.uint32),
        np.tile((300 + top).astype(np.uint32), (len(rows), 1)),
        (-rows[:, None] / 10 - top).astype(np.float32),
    )


def _logprobs(token: int, count: int) -> Logprobs:
    return Logprobs(
        -0.5, (token, *range(1, count))[:count], (-0.5, *([float("-inf")] * count))[:count]
    )


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error of the body, which must have these four members and no others."""
        assert set(self.json) == {"error"}
        assert set(self.json["error"]) == {"message", "type", "param", "code"}
        assert "Traceback" not in self.json["error"]["message"]
        error: dict[str, Any] = self.json["error"]
        return error

    @property
    def events(self) -> list[Any]:
        """Chunks of a stream, which must end with `[DONE]`."""
        *events, done, rest = self.body.decode().split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        assert all(event.startswith("data: {") for event in events)
        return [json.loads(event.removeprefix("data: ")) for event in events]


@dataclass
class RunningServer:
    """A server that answers at `url`."""

    port: int
    service: FakeService
    registry: Registry

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(
        self,
        path: str,
        body: object = None,
        *,
        method: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """Send a request; a body of bytes is sent as it is, any other as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        kind = {} if body is None else {"Content-Type": "application/json"}
        try:
            connection.request(
                method or ("GET" if body is None else "POST"),
                path,
                data,
                {**kind, **(headers or {})},
            )
            response = connection.getresponse()
            return Reply(
                response.status,
                {name.lower(): value for name, value in response.getheaders()},
                response.read(),
            )
        finally:
            connection.close()

    def until(self, condition: Callable[[], bool]) -> bool:
        """Wait for a condition and return True if it came true within a minute."""
        end = time.monotonic() + 60
        while not condition() and time.monotonic() < end:
            time.sleep(0.005)
        return condition()


def app_over(
    service: FakeService,
    *,
    tokenizer: Tokenizer | None = None,
    max_context: int = CONTEXT,
    vocab_size: int = 4096,
    is_encoder_decoder: bool = False,
    sampling_defaults: Mapping[str, float] | None = None,
    config: Mapping[str, object] | None = None,
    registry: Registry | None = None,
    tracer: Tracer | None = None,
) -> FastAPI:
    """Return the app over a service; `config` has keys of the config tree, such as `http.port`."""
    served = ServedModel(
        "demo",
        vocab_size=vocab_size,
        max_context=max_context,
        max_gamma=16,
        created=1,
        is_encoder_decoder=is_encoder_decoder,
        sampling_defaults=sampling_defaults or {},
    )
    settings, registry = config_from_keys({}, config or {}), registry or Registry()
    access = ClientAccess.from_config(settings.http, registry)
    backend = ModelBackend.from_config(
        settings, service, tokenizer or demo_tokenizer(), served, registry
    )
    return build(ModelDirectory([served.name], [backend]), settings, registry, access, tracer)


@contextmanager
def serving(
    service: FakeService | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    max_context: int = CONTEXT,
    vocab_size: int = 4096,
    is_encoder_decoder: bool = False,
    sampling_defaults: Mapping[str, float] | None = None,
    config: Mapping[str, object] | None = None,
) -> Iterator[RunningServer]:
    """Serve the app in a thread of its own; the options are as for `app_over`."""
    service, registry = service or FakeService(), Registry()
    app = app_over(
        service,
        tokenizer=tokenizer,
        max_context=max_context,
        vocab_size=vocab_size,
        is_encoder_decoder=is_encoder_decoder,
        sampling_defaults=sampling_defaults,
        config=config,
        registry=registry,
    )
    with _running(app) as port:
        yield RunningServer(port, service, registry)


@contextmanager
def serving_several(
    services: Mapping[str, FakeService], config: Mapping[str, object]
) -> Iterator[RunningServer]:
    """Serve several models, one for each service; the config's models without one are not open."""
    settings, registry = config_from_keys(config), Registry()
    models = ModelDirectory([part.model for part in settings.models])
    for part in settings.models:
        if part.model in services:
            served = ServedModel(part.model, 4096, CONTEXT, max_gamma=16, created=1)
            models.add(
                ModelBackend.from_config(
                    part, services[part.model], demo_tokenizer(), served, Registry()
                )
            )
    access = ClientAccess.from_config(settings.http, registry)
    with _running(build(models, settings, registry, access)) as port:
        yield RunningServer(port, next(iter(services.values())), registry)


@contextmanager
def _running(app: FastAPI) -> Iterator[int]:
    """Run the app in a thread of its own, and yield its port."""
    server = uvicorn.Server(
        uvicorn.Config(
            app, log_level="warning", ws="none", lifespan="off", timeout_graceful_shutdown=2
        )
    )
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()
