"""Turn every error into OpenAI's format and a status code, and log failures without prompts.

An unexpected error's message never reaches the client.
"""

from __future__ import annotations

import json
import logging
import math
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from specserve import errors
from specserve.api.strict_model import NOT_UNICODE

RETRY_AFTER_S = 1  # for errors that have no time of their own
CLIENT_CLOSED_REQUEST = 499
"""Status in logs and metrics of a client that left; it receives no answer."""


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """Status and names that all errors of a kind share."""

    status: int
    type: str
    code: str | None = None
    retry: bool = False  # the same request may succeed later


BAD_REQUEST = ErrorKind(400, "invalid_request_error")
INTERNAL = ErrorKind(500, "server_error", "internal_error")
BAD_KEY = ErrorKind(401, "invalid_request_error", "invalid_api_key")
MISSING_SCOPE = ErrorKind(403, "permission_error", "insufficient_scope")

# An error is of the first kind that it is an instance of.
ERROR_KINDS: Mapping[type[errors.SpecserveError], ErrorKind] = {
    errors.TooLong: ErrorKind(400, "invalid_request_error", "context_length_exceeded"),
    errors.NotServed: ErrorKind(404, "invalid_request_error", "model_not_found"),
    errors.BadRequest: BAD_REQUEST,
    errors.NotBegun: ErrorKind(504, "timeout_error", "request_timeout"),
    errors.TimedOut: ErrorKind(408, "timeout_error", "request_timeout"),
    errors.Overloaded: ErrorKind(429, "rate_limit_error", "overloaded", retry=True),
    errors.RateLimited: ErrorKind(429, "rate_limit_error", "rate_limit_exceeded", retry=True),
    errors.KeyRevoked: BAD_KEY,
    errors.Unavailable: ErrorKind(503, "server_error", "unavailable", retry=True),
    errors.WorkerLost: ErrorKind(500, "server_error", "worker_lost"),
}
# Errors of the framework, which have nothing but a status.
STATUS_KINDS = {
    401: BAD_KEY,
    403: MISSING_SCOPE,
    404: ErrorKind(404, "invalid_request_error", "not_found"),
    405: ErrorKind(405, "invalid_request_error", "method_not_allowed"),
    408: ErrorKind(408, "invalid_request_error", "body_too_slow"),
    413: ErrorKind(413, "invalid_request_error", "request_too_large"),
    415: ErrorKind(415, "invalid_request_error", "unsupported_encoding"),
    421: ErrorKind(421, "invalid_request_error", "wrong_host"),
    431: ErrorKind(431, "invalid_request_error", "headers_too_large"),
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """One error, ready to be sent as a response or as an event of a stream."""

    kind: ErrorKind
    message: str
    param: str | None = None
    retry_after_s: float = RETRY_AFTER_S

    @classmethod
    def from_error(cls, error: Exception) -> Refusal:
        """Return what a client may know of an error; one of no known kind is a plain 500."""
        if isinstance(error, HTTPException):
            return cls(
                STATUS_KINDS.get(
                    error.status_code, ErrorKind(error.status_code, "invalid_request_error")
                ),
                str(error.detail),
            )
        if isinstance(error, RequestValidationError):
            return _from_validation_error(error)
        for known, kind in ERROR_KINDS.items():
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
        """The body, in ASCII because it may quote what is not Unicode."""
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


def _from_validation_error(error: RequestValidationError) -> Refusal:
    """Put the first of pydantic's complaints into a sentence that names the parameter."""
    complaint = error.errors()[0]
    if complaint["type"] == "json_invalid":
        return Refusal(
            BAD_REQUEST,
            f"the body is not valid JSON: {complaint['ctx']['error']} "
            f"at character {complaint['loc'][-1]}",
        )
    param = _path(complaint["loc"][1:])
    if not param:
        return Refusal(BAD_REQUEST, "the body must be a JSON object, sent as application/json")
    if complaint["type"] == "string_unicode":
        return Refusal(BAD_REQUEST, f"{param} {NOT_UNICODE}", param)
    return Refusal(
        BAD_REQUEST, f"{param}: {complaint['msg'][0].lower()}{complaint['msg'][1:]}", param
    )


def _path(location: tuple[str | int, ...]) -> str:
    """Return a path such as `messages[0].role`.

    Pydantic adds the branches of a union, which are no names that a client knows. The path ends
    at the first of them.
    """
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "bool", "float"):
            path += f".{part}" if path else part
        else:
            break
    return path[:200]


def log_redacted(
    log: logging.Logger, request_id: str, error: BaseException, *, log_prompts: bool
) -> None:
    """Log where a request failed, with the error's message only if `logs.prompts` allows it.

    The message of an unexpected error may repeat the prompt.
    """
    if log_prompts:
        log.error("%s failed", request_id, exc_info=error, extra={"request_id": request_id})
    else:
        log.error(
            "%s failed: %s\n%s",
            request_id,
            type(error).__name__,
            "".join(_traceback_lines(error)),
            extra={"request_id": request_id},
        )


def _traceback_lines(error: BaseException | None) -> Iterator[str]:
    while error is not None:
        yield f"{type(error).__name__} at\n"
        yield from traceback.format_tb(error.__traceback__)
        error = error.__cause__ or error.__context__
