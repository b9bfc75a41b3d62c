"""Requests to an application of the same process: its answers arrive as they are written."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import pytest
from fastapi import FastAPI, Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from specserve.api.in_process import post


def run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 20))


def test_pieces_of_an_answer_arrive_before_it_ends() -> None:
    async def scenario() -> None:
        app, goes_on = FastAPI(), asyncio.Event()

        @app.post("/path")
        async def answer(request: Request) -> StreamingResponse:
            said = await request.json()

            async def pieces() -> Any:
                yield f"{said['a']} {request.headers['x-name']}"
                await goes_on.wait()
                yield "end"

            return StreamingResponse(pieces(), status_code=201)

        body, headers = json.dumps({"a": 1}).encode(), {"X-Name": "n", "Content-Length": "999"}
        async with post(app, "/path", body, headers) as got:
            assert got.status == 201
            assert await anext(got.pieces) == b"1 n"
            goes_on.set()
            assert await got.read() == b"end"

    run(scenario())


def test_an_answer_that_is_not_taken_is_cancelled() -> None:
    async def scenario() -> None:
        ended = asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await receive()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"first", "more_body": True})
            try:
                await receive()
            finally:
                ended.set()

        async with post(app, "/", b"", {}) as got:
            assert await anext(got.pieces) == b"first"
        await ended.wait()

    run(scenario())


def test_an_application_that_fails_before_it_answers_raises_here() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise ValueError("no answer")

    async def scenario() -> None:
        with pytest.raises(ValueError, match="no answer"):
            async with post(app, "/", b"", {}):
                pass

    run(scenario())


def test_an_application_that_fails_in_its_answer_raises_too() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        raise ValueError("half an answer")

    async def scenario() -> None:
        with pytest.raises(ValueError, match="half an answer"):
            async with post(app, "/", b"", {}) as got:
                await got.read()

    run(scenario())
