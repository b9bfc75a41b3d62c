"""Where the lines of gateways and engines go: the log files that Serve keeps for each replica, as text or as JSON, with Serve's own fields.

In JSON each line has the deployment, the replica and, while a request is served, its id: the gateway's and the engine's lines share it.
"""

from __future__ import annotations

import logging
from typing import Any

from specserve.config.tree import Config

SERVE = "ray.serve"  # the one logger that Serve gives handlers
OWN = "specserve"


class ToServe(logging.Handler):
    """Hands a record to whatever handlers Serve's logger has by then. Its level is not asked: Serve's own chatter is one thing, our lines another."""

    def emit(self, record: logging.LogRecord) -> None:
        for handler in logging.getLogger(SERVE).handlers:
            if record.levelno >= handler.level:
                handler.handle(record)


def join_serve(config: Config) -> None:
    """To be called first in a replica; a second call changes nothing but the level."""
    log = logging.getLogger(OWN)
    log.setLevel(config.logs.level)
    log.propagate = (
        False  # Serve sends what reaches the root to the same file a second time, by way of stderr
    )
    if not any(isinstance(handler, ToServe) for handler in log.handlers):
        log.addHandler(ToServe())


def logging_config(config: Config) -> dict[str, Any]:
    """Of Serve itself and of the deployments. Serve's line for each call is left out, for the gateway has one that says more."""
    return {
        "encoding": config.logs.format.upper(),
        "log_level": "WARNING",
        "enable_access_log": False,
    }
