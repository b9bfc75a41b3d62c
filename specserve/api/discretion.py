"""What may quote a request stays out of the logs unless `logs.prompts` lets it in."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator


def log_failure(log: logging.Logger, request_id: str, error: BaseException, *, quote: bool) -> None:
    """Where it failed. The error's own words only if they may be quoted: one that nobody expected may repeat what was asked."""
    if quote:
        log.error("%s failed", request_id, exc_info=error, extra={"request_id": request_id})
    else:
        log.error(
            "%s failed: %s\n%s",
            request_id,
            type(error).__name__,
            "".join(_places(error)),
            extra={"request_id": request_id},
        )


def _places(error: BaseException | None) -> Iterator[str]:
    while error is not None:
        yield f"{type(error).__name__} at\n"
        yield from traceback.format_tb(error.__traceback__)
        error = error.__cause__ or error.__context__
