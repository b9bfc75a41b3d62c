"""Our lines in Serve's log files: with their fields in JSON, at our level and not at Serve's."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specserve.cluster.logs import (
    DEAD_WORKER,
    OWN_LOGGER,
    SERVE_LOGGER,
    join_serve,
    logging_config,
    without_dead_workers,
)
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


def test_of_a_dead_worker_ray_prints_nothing_and_of_what_else_happens_all(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Send messages as the raylet does, to the thread of Ray that prints them."""
    from ray._private import worker

    def errors(*messages: str | None) -> Iterator[Any]:
        for message in messages:
            yield None, message and {"job_id": None, "error_message": message}

    def listen() -> str:
        stopped, found = threading.Event(), errors(f"{DEAD_WORKER} by X. Its ids: 1 2", "Spilled")

        def poll() -> Any:
            message = next(found, None)
            if message is None:
                stopped.set()
            return message or (None, None)

        subscriber = SimpleNamespace(subscribe=lambda: None, poll=poll)
        job = SimpleNamespace(binary=lambda: b"")
        listener: Any = SimpleNamespace(gcs_error_subscriber=subscriber, current_job_id=job)
        worker.listen_error_messages(listener, stopped)
        return capsys.readouterr().out

    with without_dead_workers():
        printed = listen()
    assert "Spilled" in printed
    assert "Its ids" not in printed
    assert "Its ids" in listen(), "only while a server runs"


def test_ray_begins_what_it_prints_of_a_dead_worker_as_it_did() -> None:
    import ray

    raylet = Path(ray.__file__).parent / "core/src/ray/raylet/raylet"
    assert DEAD_WORKER.encode() in raylet.read_bytes()
