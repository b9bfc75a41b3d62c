"""Our lines in Serve's log files: with their fields in JSON, at our level and not at Serve's."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specserve.cluster.logs import OWN_LOGGER, SERVE_LOGGER, join_serve, logging_config
from specserve.config.tree import config_from_keys

pytestmark = pytest.mark.filterwarnings(
    "ignore:Using extra keyword arguments on `Field`:DeprecationWarning"
)


@pytest.fixture
def serve_logger() -> Iterator[logging.Logger]:
    """Yield Serve's logger, and restore both loggers afterwards."""
    serve, own = logging.getLogger(SERVE_LOGGER), logging.getLogger(OWN_LOGGER)
    before = [(log, list(log.handlers), log.level, log.propagate) for log in (serve, own)]
    yield serve
    for handler in serve.handlers:
        getattr(handler, "target", handler).close()
        handler.close()
    for log, handlers, level, propagate in before:
        log.handlers[:], log.propagate = handlers, propagate
        log.setLevel(level)


def lines(serve: logging.Logger, directory: Path, **keys: Any) -> list[str]:
    """Return the log lines of a replica whose loggers are set up in the order of a real one."""
    from ray.serve._private.logging_utils import configure_component_logger
    from ray.serve.schema import LoggingConfig

    config = config_from_keys({}, keys)
    options = LoggingConfig(**logging_config(config), logs_dir=str(directory))
    configure_component_logger(
        component_name="Gateway",
        component_id="r1",
        logging_config=options,
        max_bytes=10**6,
        backup_count=1,
    )
    join_serve(config)
    join_serve(config)
    log = logging.getLogger("specserve.api.middleware")
    log.debug("not at this level")
    log.info("%s %s", "trace-42", "GET", extra={"request_id": "trace-42", "status": 200})
    serve.info("Serve's chatter")
    serve.warning("Serve's worry")
    for handler in serve.handlers:
        handler.flush()
    (file,) = directory.iterdir()
    return file.read_text().splitlines()


def test_in_json_a_line_has_its_fields_and_stands_there_once(
    serve_logger: logging.Logger, tmp_path: Path
) -> None:
    ours, theirs = map(json.loads, lines(serve_logger, tmp_path, **{"logs.format": "json"}))
    assert (ours["request_id"], ours["status"], ours["levelname"], ours["message"]) == (
        "trace-42",
        200,
        "INFO",
        "trace-42 GET",
    )
    assert theirs["message"] == "Serve's worry"


def test_as_text_it_reads_like_serves_own(serve_logger: logging.Logger, tmp_path: Path) -> None:
    ours, _ = lines(serve_logger, tmp_path)
    assert ours.startswith("INFO ")
    assert ours.endswith("trace-42 GET")


@pytest.mark.parametrize(("level", "ours"), [("WARNING", 0), ("INFO", 1), ("DEBUG", 2)])
def test_the_level_is_ours(
    serve_logger: logging.Logger, tmp_path: Path, level: str, ours: int
) -> None:
    assert len(lines(serve_logger, tmp_path, **{"logs.level": level})) == ours + 1
