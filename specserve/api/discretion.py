"""What may quote a request goes to a log of its own, which is off unless `logs.prompts` asks for it."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator

quoting = logging.getLogger("specserve.quoting")
quoting.disabled = True


def quote(allowed: bool) -> None:
    """For this process, from now on."""
    quoting.disabled = not allowed


def log_failure(log: logging.Logger, request_id: str, error: BaseException) -> None:
    """Where it failed, without the error's own words: an error that nobody expected may quote what was asked."""
    log.error("%s failed: %s\n%s", request_id, type(error).__name__, "".join(_places(error)), extra={"request_id": request_id})
    quoting.error("%s failed: %s", request_id, error, extra={"request_id": request_id})


def _places(error: BaseException | None) -> Iterator[str]:
    while error is not None:
        yield f"{type(error).__name__} at\n"
        yield from traceback.format_tb(error.__traceback__)
        error = error.__cause__ or error.__context__
