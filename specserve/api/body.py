"""Bodies of requests: how long, how slow and how compressed they may be. Plain ASGI."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specserve.api.refusal import Refusal

BODY_S = 60.0
"""Seconds within which a body must have arrived."""
MAX_DRAIN = 256 * 2**20
"""Bytes of a refused body that are read and dropped, so that its client comes to the answer."""
DRAIN_S = 30.0
"""Seconds for them. After either limit, the connection is closed and the client may see an error.

HAProxy then stops reading now and then without closing its own side: a client that goes on sending,
and sets no time limit, waits.
"""


class BodyLimit:
    """Refusal of bodies that are too long, by their content length or by what arrives, or too slow.

    No more than the limit is ever held, and for no longer than BODY_S. Most clients read the
    answer only when they have sent their body, and a connection that is closed with data on the
    way is reset. What follows a refusal is therefore read before the connection is closed.
    """

    def __init__(self, app: ASGIApp, *, limit: int, seconds: float) -> None:
        self._app, self._limit, self._seconds = app, limit, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > self._limit:
            refusal = Refusal.from_error(self._too_large())
            response = refusal.response({"Connection": "close"})
            await response(scope, receive, _draining(receive, send))
            return
        received, is_complete, is_too_large = 0, False, False
        until = asyncio.get_running_loop().time() + self._seconds
        drain = _draining(receive, send)

        async def limited_receive() -> Message:
            nonlocal received, is_complete, is_too_large
            try:
                async with asyncio.timeout_at(None if is_complete else until):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(
                    408,
                    f"the body did not arrive within {self._seconds:g} s",
                    {"Connection": "close"},
                ) from None
            is_complete = not message.get("more_body", False)
            received += len(message.get("body", b""))
            if received > self._limit:
                is_too_large = True
                raise self._too_large()
            return message

        async def limited_send(message: Message) -> None:
            await (drain if is_too_large and not is_complete else send)(message)

        await self._app(scope, limited_receive, limited_send)

    def _too_large(self) -> HTTPException:
        return too_large(self._limit)


def too_large(limit: int, what: str = "the body") -> HTTPException:
    """Return the error for a body of more than `limit` bytes."""
    return HTTPException(
        413, f"{what} is longer than the {limit} bytes that are allowed", {"Connection": "close"}
    )


def _draining(receive: Receive, send: Send) -> Send:
    """Return a `send` that reads the rest of the body between an answer and its end."""

    async def drain() -> None:
        dropped = 0
        while dropped <= MAX_DRAIN:
            message = await receive()
            dropped += len(message.get("body", b""))
            if not message.get("more_body", False):
                return

    async def send_and_drain(message: Message) -> None:
        if message["type"] != "http.response.body" or message.get("more_body", False):
            await send(message)
            return
        await send({**message, "more_body": True})
        try:
            async with asyncio.timeout(DRAIN_S):
                await drain()
        except TimeoutError:
            pass  # the answer has been sent
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return send_and_drain


class BodyDecoder:
    """Decompression of bodies in gzip or deflate, to no more than the limit.

    Others are refused with 415. It stands behind BodyLimit, which bounds what is compressed.
    """

    def __init__(self, app: ASGIApp, *, limit: int) -> None:
        self._app, self._limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        coding = _coding(scope)
        if not coding:
            await self._app(scope, receive, send)
            return
        try:
            if coding not in DECODERS:
                raise HTTPException(
                    415,
                    f"bodies in the content encoding {ascii(coding[:40])[1:-1]} are not taken; "
                    f"{' and '.join(DECODERS)} are, and bodies without any",
                )
            body = await self._decoded(coding, receive)
        except HTTPException as error:  # also from BodyLimit, while the body arrives
            await Refusal.from_error(error).response(error.headers)(scope, receive, send)
            return
        if body is None:
            return  # the client has left
        await self._app(_decoded_scope(scope, body), _replay(body, receive), send)

    async def _decoded(self, coding: str, receive: Receive) -> bytes | None:
        """Return the whole body decompressed; None if the client leaves before its end."""
        parts: list[bytes] = []
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        try:
            return await asyncio.to_thread(self._decompress, coding, b"".join(parts))
        except zlib.error as error:
            raise HTTPException(400, f"the body is not valid {coding}: {error}") from error

    def _decompress(self, coding: str, body: bytes) -> bytes:
        decoder = DECODERS[coding](body)
        decoded = decoder.decompress(body, self._limit + 1)
        if len(decoded) > self._limit:
            raise too_large(self._limit, "the decompressed body")
        if not decoder.eof or decoder.unused_data:
            raise zlib.error("it is cut, or goes on behind its end")
        return decoded


def _deflate(body: bytes) -> zlib._Decompress:
    """Return the decoder of deflate, which some clients send without zlib's two bytes."""
    has_header = len(body) > 1 and body[0] & 15 == 8 and int.from_bytes(body[:2]) % 31 == 0
    return zlib.decompressobj(zlib.MAX_WBITS if has_header else -zlib.MAX_WBITS)


DECODERS: dict[str, Callable[[bytes], zlib._Decompress]] = {
    "gzip": lambda body: zlib.decompressobj(zlib.MAX_WBITS | 16),
    "x-gzip": lambda body: zlib.decompressobj(zlib.MAX_WBITS | 16),
    "deflate": _deflate,
}


def _coding(scope: Scope) -> str:
    """Return the content encoding; "" if there is none."""
    if scope["type"] != "http":
        return ""
    coding = ",".join(Headers(scope=scope).getlist("content-encoding")).strip().lower()
    return "" if coding == "identity" else coding


def _decoded_scope(scope: Scope, body: bytes) -> Scope:
    headers = [
        pair
        for pair in scope["headers"]
        if pair[0].lower() not in (b"content-encoding", b"content-length", b"transfer-encoding")
    ]
    return {**scope, "headers": [*headers, (b"content-length", b"%d" % len(body))]}


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that has the body first, and then what follows it."""
    has_body = True

    async def receive_decoded() -> Message:
        nonlocal has_body
        if not has_body:
            return await receive()
        has_body = False
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_decoded
