"""Every error as clients see it: OpenAI's format, one table of status codes, and never a word about the inside."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from specserve import errors

RETRY_AFTER_S = 1  # unless the error knows better
STATUS_OF_GONE = 499  # a client that left; it sees no answer, but logs and metrics do


@dataclass(frozen=True, slots=True)
class Kind:
    """What all errors of a kind have in common."""

    status: int
    type: str
    code: str | None = None
    retry: bool = False  # the same request may succeed later


BAD = Kind(400, "invalid_request_error")
INTERNAL = Kind(500, "server_error", "internal_error")
BAD_KEY = Kind(401, "invalid_request_error", "invalid_api_key")

KINDS: Mapping[
    type[errors.SpecserveError], Kind
] = {  # an error is of the first kind that it is an instance of
    errors.TooLong: Kind(400, "invalid_request_error", "context_length_exceeded"),
    errors.NotServed: Kind(404, "invalid_request_error", "model_not_found"),
    errors.BadRequest: BAD,
    errors.TimedOut: Kind(408, "timeout_error", "request_timeout"),
    errors.Overloaded: Kind(429, "rate_limit_error", "overloaded", retry=True),
    errors.RateLimited: Kind(429, "rate_limit_error", "rate_limit_exceeded", retry=True),
    errors.Unavailable: Kind(503, "server_error", "unavailable", retry=True),
    errors.WorkerLost: Kind(500, "server_error", "worker_lost"),
}
PLAIN = {  # what the framework refuses by a status alone
    401: BAD_KEY,
    404: Kind(404, "invalid_request_error", "not_found"),
    405: Kind(405, "invalid_request_error", "method_not_allowed"),
    413: Kind(413, "invalid_request_error", "request_too_large"),
    431: Kind(431, "invalid_request_error", "headers_too_large"),
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """One error, ready to be sent as a response or inside a stream."""

    kind: Kind
    message: str
    param: str | None = None
    retry_after_s: float = RETRY_AFTER_S

    @classmethod
    def of(cls, error: Exception) -> Refusal:
        """Of an error that is not in the tables, a client learns no more than that there was one."""
        if isinstance(error, HTTPException):
            return cls(
                PLAIN.get(error.status_code, Kind(error.status_code, "invalid_request_error")),
                str(error.detail),
            )
        if isinstance(error, RequestValidationError):
            return _misshapen(error)
        for known, kind in KINDS.items():
            if isinstance(error, known):
                return cls(
                    kind,
                    str(error),
                    getattr(error, "param", None),
                    getattr(error, "retry_after_s", RETRY_AFTER_S),
                )
        return cls(INTERNAL, "the server failed to answer; its log says why")

    @property
    def status(self) -> int:
        return self.kind.status

    @property
    def json(self) -> str:
        """In ASCII, since it may quote what is not Unicode."""
        return json.dumps(
            {
                "error": {
                    "message": self.message,
                    "type": self.kind.type,
                    "param": self.param,
                    "code": self.kind.code,
                }
            }
        )

    def response(self, headers: Mapping[str, str] | None = None) -> Response:
        retry = {"Retry-After": str(math.ceil(self.retry_after_s))} if self.kind.retry else {}
        return Response(self.json, self.status, {**(headers or {}), **retry}, "application/json")


def _misshapen(error: RequestValidationError) -> Refusal:
    """The first of pydantic's complaints, in a sentence that names the parameter."""
    complaint = error.errors()[0]
    if complaint["type"] == "json_invalid":
        return Refusal(
            BAD,
            f"the body is not valid JSON: {complaint['ctx']['error']} at character {complaint['loc'][-1]}",
        )
    param = _path(complaint["loc"][1:])
    if not param:
        return Refusal(BAD, "the body must be a JSON object, sent as application/json")
    return Refusal(BAD, f"{param}: {complaint['msg'][0].lower()}{complaint['msg'][1:]}", param)


def _path(location: tuple[str | int, ...]) -> str:
    """`messages[0].role`. The branches of a union, which pydantic adds, are no names that a client knows; what follows them is left out."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "bool", "float"):
            path += f".{part}" if path else part
        else:
            break
    return path[:200]
