"""Write the logs of gateways and engines to Serve's log files, as text or as JSON.

In JSON each line has the deployment, the replica and, while a request is served, its id, which the
gateway's and the engine's lines share. What Ray prints of dead workers is left out.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from specserve.config.tree import Config

SERVE_LOGGER = "ray.serve"  # the only logger that Serve gives handlers
OWN_LOGGER = "specserve"
DEAD_WORKER = "A worker died or was killed"
"""How a paragraph of Ray begins that has a worker's ids, and not what it did."""


class ServeLogHandler(logging.Handler):
    """Handler that passes records to the handlers that Serve's logger has at that time.

    The level of Serve's logger is ignored, since it is for Serve's own messages.
    """

    def emit(self, record: logging.LogRecord) -> None:
        for handler in logging.getLogger(SERVE_LOGGER).handlers:
            if record.levelno >= handler.level:
                handler.handle(record)


def join_serve(config: Config) -> None:
    """Send our log lines to Serve's files. Call it first in a replica.

    A second call changes only the level.
    """
    log = logging.getLogger(OWN_LOGGER)
    log.setLevel(config.logs.level)
    # Serve writes what reaches the root logger to the same file a second time, by way of stderr.
    log.propagate = False
    if not any(isinstance(handler, ServeLogHandler) for handler in log.handlers):
        log.addHandler(ServeLogHandler())


def logging_config(config: Config) -> dict[str, Any]:
    """Return the logging options of Serve and of the deployments.

    Serve's access log is off, since the gateway logs more about each call.
    """
    return {
        "encoding": config.logs.format.upper(),
        "log_level": "WARNING",
        "enable_access_log": False,
    }


@contextmanager
def without_dead_workers() -> Iterator[None]:
    """Have Ray print nothing about each dead worker here; its other messages stay.

    The engine's own status says which of them was restarted.
    """
    from ray._private import worker

    module: Any = worker
    printed = module.print_to_stdstream

    def print_others(data: dict[str, Any], *, ignore_prefix: bool) -> None:
        if not data["lines"][0].startswith(DEAD_WORKER):
            printed(data, ignore_prefix=ignore_prefix)

    module.print_to_stdstream = print_others
    try:
        yield
    finally:
        module.print_to_stdstream = printed
