"""Write the logs of gateways and engines to Serve's log files, as text or as JSON.

In JSON each line has the deployment, the replica and, while a request is served, its id, which the
gateway's and the engine's lines share.
"""

from __future__ import annotations

import logging
from typing import Any

from specserve.config.tree import Config

SERVE_LOGGER = "ray.serve"  # the only logger that Serve gives handlers
OWN_LOGGER = "specserve"


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
