"""One thread for all tests, the small pair as demo, marks by folder, and one browser.

Tests run beside one another on small machines, and bits must not depend on the number of threads.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.support.suite import mark_of

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    from tests.support.http_server import RunningServer

WITHOUT_CHAT_MODEL = str(Path(__file__).parent / "support" / "without_chat_model")
sys.path.insert(0, WITHOUT_CHAT_MODEL)
os.environ["PYTHONPATH"] = os.pathsep.join(
    [WITHOUT_CHAT_MODEL, *filter(None, [os.environ.get("PYTHONPATH")])]
)
SECONDS: defaultdict[str, float] = defaultdict(float)
"""Seconds of each file's tests."""


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if mark := mark_of(item.path):
            item.add_marker(mark)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    SECONDS[report.nodeid.partition("::")[0]] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    cache = getattr(session.config, "cache", None)  # none with -p no:cacheprovider
    if cache is not None and session.config.getoption("--record-seconds"):
        for file, seconds in SECONDS.items():
            cache.set(f"seconds/{file}", seconds)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--screenshots",
        metavar="DIR",
        help="where the tests of the playground leave pictures of it",
    )
    parser.addoption(
        "--record-seconds",
        action="store_true",
        help="keep the seconds of each file for `python -m tests.support.suite --write-durations`",
    )


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    from tests.support.browser import chromium

    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """Serve a scripted engine; modules that need another server have their own."""
    from tests.support.browser import Slow
    from tests.support.http_server import serving

    with serving(Slow(pace_s=0.005)) as running:
        yield running


@pytest.fixture
def page(browser: Browser, server: RunningServer) -> Iterator[Page]:
    from tests.support.browser import tab

    with tab(browser, server.url) as opened:
        yield opened


@pytest.fixture
def keys(tmp_path: Path) -> str:
    from tests.support.browser import KEY

    (file := tmp_path / "keys").write_text(f"{KEY}\n")
    return str(file)
