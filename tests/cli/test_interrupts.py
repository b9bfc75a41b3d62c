"""A signal at the first moment after a server says that it is ready ends it as later ones do."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from rich.console import Console

from specserve.cli import serve as serve_command
from specserve.config.tree import config_from_keys


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["ready", "curl"])
def test_a_signal_as_soon_as_it_is_ready_ends_it_in_order(
    monkeypatch: pytest.MonkeyPatch, moment: str, number: signal.Signals
) -> None:
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if line.startswith(moment):
            os.kill(os.getpid(), number)

    @contextmanager
    def nothing(*given: object, **named: object) -> Iterator[object]:
        yield "http://127.0.0.1:8000"
        said.append("removed")

    for name in ("checkpoint_check", "ray_session", "deploy"):
        monkeypatch.setattr(serve_command, name, nothing)
    monkeypatch.setattr(serve_command, "handle", lambda config, name: SimpleNamespace())
    try:
        serve_command.serve_until_ended(config_from_keys({}), say, Console(file=io.StringIO()))
    except KeyboardInterrupt:
        pytest.fail(f"it was interrupted after {said}")
    assert said[-4:] == ["stopping", "removed", "removed", "removed"]
