"""`python -m tests.chaos.releases`: updates of a server under load to another release's wheel.

Two wheels of this tree are made, the second with another version of the package, and once with
another version of the protocol, too: its processes and the first's refuse one another.
With --earlier REF the first wheel is that of an earlier commit. `serve deploy` goes from one to the
other and back, with two engines and two gateways, and a number of updates of each kind.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import shutil
import subprocess
import tempfile
import time
import urllib.request
import zipfile
from collections.abc import Mapping
from contextlib import chdir
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from lab.chaos.faults import Fault
from lab.chaos.report import TABLE_HEAD, lines, table_row
from lab.chaos.run import ChaosRun
from specserve.tools.bench.address import ServerAddress
from tests.support.ray_server import free_port, ray_with_dashboard, serve_command
from tests.support.wheel import LEFT_OUT, ROOT, build_tree, clean

CLIENTS, TOKENS = 4, 24
WITHIN_S, PROBES = 400.0, 12
NAME = "specserve"
KEYS: Mapping[str, Any] = {
    "model": "demo",
    # Bits of bfloat16 are the same in any batch, on any processor.
    "target": {"device": "cpu", "threads": 1, "dtype": "bfloat16"},
    "draft": {"device": "cpu", "threads": 1, "placement": "together"},
    "replicas": {"min": 2, "max": 2, "gateways": 2, "min_gateways": 2},
    "cache": {"pages": 2048},
}
PACKAGE_VERSION = re.compile(r'^__version__ = "(.*)"$', re.MULTILINE)
PROTOCOL_VERSION = re.compile(r"^VERSION = (\d+)$", re.MULTILINE)


say = partial(print, flush=True)


@dataclass(frozen=True, slots=True)
class Release:
    """A wheel that was unpacked where Ray's processes import it from."""

    folder: Path
    version: str
    protocol: int


def release_of(tree: Path, into: Path) -> Release:
    """Build the wheel of a tree and unpack it."""
    into.mkdir()
    with zipfile.ZipFile(build_tree(tree, into).wheel) as archive:
        archive.extractall(into / "site")
    return Release(
        into / "site",
        _only(PACKAGE_VERSION, tree / "specserve" / "version.py"),
        int(_only(PROTOCOL_VERSION, tree / "specserve" / "wire" / "version.py")),
    )


def this_tree(into: Path) -> Path:
    shutil.copytree(ROOT, into, ignore=LEFT_OUT)
    return into


def earlier_tree(commit: str, into: Path) -> Path:
    into.mkdir()
    archive = subprocess.run(
        ["git", "archive", "--format=tar", commit], cwd=ROOT, check=True, capture_output=True
    )
    subprocess.run(["tar", "-x", "-C", str(into)], input=archive.stdout, check=True)
    return into


def next_tree(into: Path, *, changes_protocol: bool) -> Path:
    """Copy this tree as the one of a later release."""
    tree = this_tree(into)
    package = tree / "specserve" / "version.py"
    later = _only(PACKAGE_VERSION, package) + (".post2" if changes_protocol else ".post1")
    _replace(PACKAGE_VERSION, f'__version__ = "{later}"', package)
    if changes_protocol:
        file = tree / "specserve" / "wire" / "version.py"
        _replace(PROTOCOL_VERSION, f"VERSION = {int(_only(PROTOCOL_VERSION, file)) + 1}", file)
    return tree


def _only(pattern: re.Pattern[str], file: Path) -> str:
    (found,) = pattern.findall(file.read_text(encoding="utf-8"))
    return str(found)


def _replace(pattern: re.Pattern[str], line: str, file: Path) -> None:
    file.write_text(pattern.sub(line, file.read_text(encoding="utf-8")), encoding="utf-8")


@dataclass(slots=True)
class Deployment:
    """The application as `serve deploy` leaves it, of one release after the other."""

    dashboard: str
    file: Path
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def update_to(self, release: Release) -> None:
        """Deploy a release and wait until its gateways answer alone. Raises AssertionError."""
        self.file.write_text(yaml.safe_dump(self._config(release)), encoding="utf-8")
        self._serve("deploy", str(self.file))
        until = time.monotonic() + WITHIN_S
        while not (self._is_running() and self.versions() == {release.version}):
            assert time.monotonic() < until, f"not only {release.version} runs"
            time.sleep(0.3)

    def versions(self) -> set[str]:
        """Ask for the version so often that each gateway answers."""
        return {self._version() for _ in range(PROBES)}

    def _version(self) -> str:
        with urllib.request.urlopen(f"{self.url}/version", timeout=60) as reply:
            return str(yaml.safe_load(reply.read())["version"])

    def _config(self, release: Release) -> dict[str, Any]:
        application = {
            "name": NAME,
            "route_prefix": "/",
            "import_path": "specserve.cluster.app:build",
            "runtime_env": {"env_vars": {"PYTHONPATH": str(release.folder)}},
            "args": dict(KEYS),
        }
        return {
            "proxy_location": "HeadOnly",
            "http_options": {"host": "127.0.0.1", "port": self.port},
            "applications": [application],
        }

    def _is_running(self) -> bool:
        application = yaml.safe_load(self._serve("status"))["applications"].get(NAME, {})
        assert application.get("status") != "DEPLOY_FAILED", application
        return bool(application.get("status") == "RUNNING")

    def _serve(self, command: str, *arguments: str) -> str:
        return serve_command(self.dashboard, command, *arguments, env=clean())


def updated(deployment: Deployment, first: Release, second: Release, number: int) -> str:
    """Update back and forth under load and return the row of the table."""
    releases = [second, first] * number
    seconds: list[float] = []

    async def update(rng: random.Random) -> Fault | None:
        release = releases[len(seconds)]
        at = time.monotonic()
        await asyncio.to_thread(deployment.update_to, release)
        seconds.append(time.monotonic() - at)
        return Fault(at, "update", f"to {release.version}", 0, until=time.monotonic())

    run = ChaosRun(
        ServerAddress.from_url(deployment.url), "demo", CLIENTS, TOKENS, waits_for_streams=False
    )
    outcome = asyncio.run(run.run(update, num_faults=number, seed=1, say=say))
    protocols = f"{first.protocol} and {second.protocol}"
    name = f"{first.version} and {second.version}, protocol {protocols}"
    for line in lines(name, outcome):
        say(line)
    say(f"  updates took {', '.join(f'{one:.0f}' for one in seconds)} s")
    return table_row(name, outcome)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=4, metavar="N", help="of each kind")
    parser.add_argument("--earlier", metavar="REF", help="commit of an earlier release")
    options = parser.parse_args()
    rows: list[str] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        # Ray puts the folder where it was started before PYTHONPATH, and this one has a specserve.
        chdir(folder),
        ray_with_dashboard(num_cpus=24, without=["PYTHONPATH"]) as dashboard,
    ):
        work = Path(folder)
        ours = release_of(this_tree(work / "tree"), work / "this")
        others = [
            release_of(next_tree(work / f"tree-{kind}", changes_protocol=changes), work / kind)
            for kind, changes in (("same", False), ("another", True))
        ]
        if options.earlier is not None:
            tree = earlier_tree(options.earlier, work / "earlier-tree")
            others.append(release_of(tree, work / "earlier"))
        deployment = Deployment(dashboard, work / "serve.yaml", free_port())
        deployment.update_to(ours)
        for other in others:
            if deployment.versions() != {ours.version}:
                deployment.update_to(ours)
            rows.append(updated(deployment, ours, other, options.updates))
    say("\n".join((TABLE_HEAD, *rows)))


if __name__ == "__main__":
    main()
