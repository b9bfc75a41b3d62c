"""The two kinds of answer, in one piece and as a stream. Both notice at any time that the client has left, and cancel."""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specserve.api import wording
from specserve.api.choices import Choice, Form
from specserve.api.continuation import Piece
from specserve.api.discretion import log_failure
from specserve.api.generation import Run
from specserve.api.metering import Meter
from specserve.api.parse import Asked
from specserve.api.refusal import INTERNAL, Refusal
from specserve.api.tokenizer import Text
from specserve.api.wording import dumps

log = logging.getLogger(__name__)

DONE = "data: [DONE]\n\n"
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # proxies would wait for more
]


@dataclass(frozen=True, slots=True)
class Head:
    """What an answer says of itself."""

    form: Form
    request_id: str
    created: int
    model: str

    def members(self, kind: str) -> dict[str, object]:
        return {
            "id": self.form.prefix + self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
        }


class Answer(Response):
    """Until the first byte is sent, whatever goes wrong is raised, and so gets a status of its own."""

    def __init__(self, run: Run, text: Text, asked: Asked, head: Head, meter: Meter) -> None:
        self.status_code, self.background = 200, None
        self._run, self._asked, self._head, self._meter = run, asked, head, meter
        n = asked.sampling.n
        self._choices: list[Choice] = [
            head.form.choice(text, prompt) for prompt in asked.prompts for _ in range(n)
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _while_connected(receive, self._answer(scope, receive, send))

    @abstractmethod
    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    def _usage(self) -> dict[str, int]:
        return wording.usage(
            prompt_tokens=self._run.num_prompt_tokens,
            completion_tokens=self._run.num_completion_tokens,
        )

    def _speculation(self) -> dict[str, object]:
        """Nothing of it when the engine said nothing."""
        stats = [
            continuation.stats
            for continuation in self._run.continuations
            if continuation.stats is not None
        ]
        return {"specserve": wording.speculation(stats)} if stats else {}


class Whole(Answer):
    """All of it as one JSON object."""

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        pieces: list[list[Piece]] = [[] for _ in self._choices]
        async with self._run as run:
            async for index, piece in run:
                pieces[index].append(piece)
        choices = [self._choice(index, Piece.joined(own)) for index, own in enumerate(pieces)]
        members = self._head.members(self._head.form.whole)
        await wording.respond(
            members | {"choices": choices, "usage": self._usage()} | self._speculation()
        )(scope, receive, send)

    def _choice(self, index: int, piece: Piece) -> dict[str, object]:
        assert piece.finish is not None
        return {
            "index": index,
            **self._choices[index].whole(piece),
            "finish_reason": piece.finish.value,
        }


class Streamed(Answer):
    """Server-sent events. A chunk is put together by hand: a head that never changes, and a few small values."""

    def __init__(
        self,
        run: Run,
        text: Text,
        asked: Asked,
        head: Head,
        meter: Meter,
        *,
        origins: bool,
        quote: bool,
    ) -> None:
        super().__init__(run, text, asked, head, meter)
        self._origins, self._quote = origins, quote
        self._begin = "data: " + dumps(head.members(head.form.chunk))[:-1] + ',"choices":['
        self._heads = [self._begin + f'{{"index":{index},' for index in range(len(self._choices))]
        self._begun = [False] * len(self._choices)
        self._tail = ',"usage":null' if asked.include_usage else ""

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._run as run:
            events = self._events(run)
            first = await anext(events)
            await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
            await _send(send, first)
            try:
                async for event in events:
                    await _send(send, event)
            except Exception as error:  # the status is gone; in mid-stream an event has to say it
                await _send(send, self._failure(error))
            await send({"type": "http.response.body", "body": DONE.encode(), "more_body": False})

    async def _events(self, run: Run) -> AsyncGenerator[str, None]:
        async for index, piece in run:
            if self._is_worth_sending(index, piece):
                yield self._chunk(index, piece, last=run.is_last)
        if self._asked.include_usage:
            yield (
                self._begin
                + "],"
                + dumps({"usage": self._usage(), **self._speculation()})[1:]
                + "\n\n"
            )

    def _is_worth_sending(self, index: int, piece: Piece) -> bool:
        """A round may end inside a character, and then shows nothing."""
        return bool(
            piece.text
            or piece.calls
            or piece.finish
            or piece.logprobs
            or not self._begun[index]
            or (self._origins and piece.origins)
        )

    def _chunk(self, index: int, piece: Piece, *, last: bool) -> str:
        self._begun[index] = True
        finish = "null" if piece.finish is None else f'"{piece.finish.value}"'
        extras = self._tail
        if self._origins:
            extras += f',"origins":{dumps(piece.origins)}'
        if last and (speculation := self._speculation()):
            extras += "," + dumps(speculation)[1:-1]
        return f'{self._heads[index]}{self._choices[index].members(piece)},"finish_reason":{finish}}}]{extras}}}\n\n'

    def _failure(self, error: Exception) -> str:
        refusal = Refusal.of(error)
        self._meter.failed(refusal.status)
        log.error(
            "%s failed in mid-stream with %d: %s",
            self._head.request_id,
            refusal.status,
            refusal.message,
        )
        if refusal.kind is INTERNAL:
            log_failure(log, self._head.request_id, error, quote=self._quote)
        return f"data: {refusal.json}\n\n"


async def _send(send: Send, event: str) -> None:
    await send({"type": "http.response.body", "body": event.encode(), "more_body": True})


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work`; it is cancelled, and has cleaned up behind itself, when the client leaves."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
    if not working.cancelled():
        working.result()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
