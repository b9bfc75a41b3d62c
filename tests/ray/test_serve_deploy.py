"""`serve deploy deploy/demo.yaml` on a real Ray: deployed, updated under load, and deleted."""

from __future__ import annotations

import re
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml

from tests.support.ray_server import free_port, ray_with_dashboard, serve_command

pytestmark = pytest.mark.long

DEMO_FILE = Path(__file__).parents[2] / "deploy" / "demo.yaml"
LIMIT_S = 240.0
NAME = "specserve"


@pytest.fixture(scope="module")
def dashboard() -> Iterator[str]:
    with ray_with_dashboard(num_cpus=12) as url:
        yield url


def any_status(dashboard: str) -> dict[str, Any]:
    """Return the status of our application, which may have failed; empty if there is none."""
    applications = yaml.safe_load(serve_command(dashboard, "status"))["applications"]
    found: dict[str, Any] = applications.get(NAME, {})
    return found


def says(dashboard: str, line: str) -> bool:
    """Return whether the status of our application has that line."""
    return line in any_status(dashboard).get("message", "")


def status(dashboard: str) -> dict[str, Any]:
    """Return the status of our application, empty if there is none."""
    found = any_status(dashboard)
    assert found.get("status") != "DEPLOY_FAILED", found
    return found


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.3)


def engines(url: str) -> set[str]:
    """Return the ids of the engines that the metrics name."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as reply:
        return set(re.findall(r'_engine_.*replica="([^"]+)"', reply.read().decode()))


def answer(url: str) -> str:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        done = client.completions.create(
            model="demo", prompt="def f(x):", max_tokens=8, temperature=0
        )
        return done.choices[0].text


def test_the_demo_file_is_deployed_updated_under_load_and_deleted(
    dashboard: str, tmp_path: Path
) -> None:
    tree = yaml.safe_load(DEMO_FILE.read_text(encoding="utf-8"))
    tree["http_options"]["port"] = free_port()
    url, file = f"http://127.0.0.1:{tree['http_options']['port']}", tmp_path / "demo.yaml"

    def deploy() -> None:
        file.write_text(yaml.safe_dump(tree), encoding="utf-8")
        serve_command(dashboard, "deploy", str(file))

    deploy()
    wait_until(lambda: status(dashboard).get("status") == "RUNNING")
    text, deployed = answer(url), status(dashboard)["last_deployed_time_s"]
    assert text

    # An update in place: the engine is replaced, and no request is refused meanwhile.
    texts: list[str] = []
    updated = threading.Event()

    def ask() -> None:
        while not updated.is_set():
            try:
                texts.append(answer(url))
            except openai.OpenAIError as error:
                texts.append(f"{type(error).__name__}: {error}")

    client = threading.Thread(target=ask)
    client.start()
    try:
        tree["applications"][0]["args"]["limits"]["max_running"] = 8
        deploy()
        wait_until(
            lambda: (
                (now := status(dashboard)).get("status") == "RUNNING"
                and now["last_deployed_time_s"] != deployed
            )
        )
        num_before = len(texts)
        wait_until(lambda: len(texts) > num_before)
    finally:
        updated.set()
        client.join()
    assert set(texts) == {text}

    # A bad path, or a misspelt key, is one line of the status, and the replicas serve on.
    wait_until(lambda: len(engines(url)) == 1)  # the replaced one is counted for a moment
    serving, arguments = engines(url), tree["applications"][0]["args"]
    for mistake, expected in (
        ({"target": {"path": "/nowhere/target"}}, "/nowhere/target is on no node that could hold"),
        ({"draft": {"path": "/nowhere/draft"}}, "/nowhere/draft is on no node that could hold"),
        ({"limits": {"max_runing": 4}}, "did you mean limits.max_running?"),
    ):
        tree["applications"][0]["args"] = arguments | mistake
        deploy()
        wait_until(partial(says, dashboard, expected))
        failed = any_status(dashboard)
        assert failed["status"] == "DEPLOY_FAILED"
        assert len(failed["message"].strip().splitlines()) == 2, "Serve's own line, and ours"
        assert (answer(url), engines(url)) == (text, serving)

    # A file without it deletes the application; Serve itself stays.
    tree["applications"] = []
    deploy()
    wait_until(lambda: not status(dashboard))
    with pytest.raises(openai.NotFoundError):
        answer(url)
    serve_command(dashboard, "shutdown", "-y")
