"""Errors as clients of `/v1/messages` read them: the shape, the types and the status codes."""

from __future__ import annotations

import json
from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specserve.api.middleware import served_path

OVERLOADED = 529
TYPES: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    OVERLOADED: "overloaded_error",
}


def messages_error(
    status: int, kind: str, code: str | None, message: str, request_id: str
) -> tuple[int, dict[str, object]]:
    """Return status and body of an error, given its status, type and code in OpenAI's terms."""
    if code == "overloaded":
        status = OVERLOADED
    default = "api_error" if status >= 500 else "invalid_request_error"
    kind = kind if kind == "timeout_error" else TYPES.get(status, default)
    error = {"type": kind, "message": message}
    return status, {"type": "error", "error": error, "request_id": request_id}


class MessagesErrors:
    """Conversion of the errors of one path and of those below it, and the header `request-id`.

    Whatever refuses a request writes OpenAI's form, in one piece. Plain ASGI.
    """

    def __init__(self, app: ASGIApp, *, path: str) -> None:
        self._app, self._path = app, path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not f"{served_path(scope)}/".startswith(f"{self._path}/"):
            await self._app(scope, receive, send)
            return
        request_id: str = scope["state"]["request_id"]
        refused: Message | None = None  # the start of an error that is held

        async def send_converted(message: Message) -> None:
            nonlocal refused
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (b"request-id", request_id.encode())]
                message = {**message, "headers": headers}
                if message["status"] >= 400:
                    refused = message
                    return
            elif refused is not None:
                start, message = _converted(refused, message, request_id)
                refused = None
                await send(start)
            await send(message)

        await self._app(scope, receive, send_converted)


def _converted(start: Message, body: Message, request_id: str) -> tuple[Message, Message]:
    given = json.loads(body["body"])["error"]
    status, error = messages_error(
        start["status"], given["type"], given["code"], given["message"], request_id
    )
    content = json.dumps(error).encode()
    headers = [pair for pair in start["headers"] if pair[0].lower() != b"content-length"]
    headers.append((b"content-length", b"%d" % len(content)))
    return {**start, "status": status, "headers": headers}, {**body, "body": content}
