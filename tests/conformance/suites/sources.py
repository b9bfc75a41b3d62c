"""The suites: which release they are taken from, what they need, and which of their files run.

A release's source archive holds the project's tests. Nothing of it is built or installed. Ray's
archive is on GitHub alone.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lab.bench.peers.install import PEERS
from tests.conformance.checks import FAILED, CheckResult
from tests.conformance.clients import ENVIRONMENTS, ROOT, Client, install, read_report
from tests.conformance.suites.selection import REPORT
from tests.conformance.suites.served import COMMAND

TIMEOUT_S = 3600.0
TEST_TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Suite:
    """Tests of another project: a release, the folder of its archive to unpack, and its files."""

    name: str
    title: str
    client: Client
    """Its environment, and the plugin's module."""
    release: str
    """What pip downloads, or a URL."""
    folder: str
    root: str
    """Where, in the parent of that folder, pytest's root is."""
    paths: tuple[str, ...]
    variables: Mapping[str, str] = field(default_factory=dict)
    """What the release wants set to say its version."""
    server: tuple[str, ...] = (sys.executable, "-m", "specserve", "serve", "--own-ray")

    @property
    def unpacked(self) -> Path:
        return ENVIRONMENTS / self.client.name / "suite" / self.release.rpartition("/")[2]

    @property
    def plugin(self) -> str:
        return f"tests.conformance.suites.{self.client.name.replace('-', '_')}_plugin"


PYTEST = ("pytest==9.2.0", "pytest-timeout==2.4.0", "openai==3.54.0", "requests==2.34.2")
_PROBES = Suite(
    "ray-llm",
    "LLM probes of Ray 2.60.0",
    Client("ray-llm", (*PYTEST, "pytest-asyncio==1.5.0", "backoff==2.2.1", "pyyaml")),
    "https://github.com/ray-project/ray/archive/refs/tags/ray-2.60.0.tar.gz",
    "release/llm_tests/serve/probes",
    ".",
    ("probes",),
)
SUITES: Sequence[Suite] = (
    Suite(
        "vllm",
        "vLLM 0.33.0",
        Client(
            "vllm",
            (
                *(*PYTEST, "pytest-asyncio==1.5.0", "anthropic==2.14.0", "fastapi", "pybase64"),
                *("pillow", "setuptools-scm", "setuptools-rust", "cmake", "ninja", "wheel"),
            ),
            constrained=("jsonschema", "numpy", "regex", "setuptools", "torch"),
        ),
        "vllm==0.33.0",
        "tests",
        ".",
        (
            *("tests/entrypoints/openai/completion", "tests/entrypoints/openai/chat_completion"),
            "tests/entrypoints/openai/models",
            "tests/entrypoints/openai/test_chunked_prompt.py",
            "tests/entrypoints/openai/test_return_token_ids.py",
            "tests/entrypoints/openai/test_return_tokens_as_ids.py",
            "tests/entrypoints/serve/instrumentator/test_basic.py",
        ),
        {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": "0.33.0"},
    ),
    Suite(
        "llama-cpp",
        "llama.cpp 0c1e57098, in llama-cpp-python 0.3.36",
        Client(
            "llama-cpp",
            (*PYTEST, "filelock", "wget", "prometheus-client", "scikit-build-core", "numpy"),
        ),
        "llama-cpp-python==0.3.36",
        "vendor/llama.cpp/tools/server/tests",
        "tests",
        ("unit",),
    ),
    _PROBES,
    replace(
        _PROBES,
        name="ray-llm-app",
        title=f"{_PROBES.title}, behind `build_openai_app`",
        server=(str(PEERS["ray-llm"].folder / "bin" / "python"), "-m", "tests.ray_llm.served"),
    ),
)


@dataclass(frozen=True, slots=True)
class SuiteRun:
    """Results of one suite."""

    suite: Suite
    results: tuple[CheckResult, ...]
    seconds: float

    def num(self, outcome: str) -> int:
        return sum(result.outcome == outcome for result in self.results)


def fetch(suite: Suite, archive: Path | None = None) -> None:
    """Make a suite's environment, and unpack its tests: a given archive's, or those it lacks."""
    install(suite.client)
    if suite.unpacked.exists() and archive is None:
        return
    suite.unpacked.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=suite.unpacked.parent) as folder:
        tests = Path(folder) / "tests"
        with tarfile.open(archive or _download(suite, Path(folder))) as opened:
            for member in opened.getmembers():
                inside = member.name.partition("/")[2]
                if inside.startswith(f"{suite.folder}/"):
                    member.name = str(Path(inside).relative_to(Path(suite.folder).parent))
                    opened.extract(member, tests, filter="data")
        if not tests.exists():
            raise FileNotFoundError(f"{archive or suite.release} has no {suite.folder}")
        if suite.unpacked.exists():
            shutil.rmtree(suite.unpacked)
        tests.rename(suite.unpacked)


def _download(suite: Suite, folder: Path) -> Path:
    """Return a release's source archive."""
    if suite.release.startswith("https:"):
        return Path(urllib.request.urlretrieve(suite.release, folder / "archive.tar.gz")[0])
    pip = (str(suite.client.python), "-m", "pip", "download", "--quiet", "--dest", str(folder))
    only_source = ("--no-deps", "--no-build-isolation", "--no-binary=:all:")
    subprocess.run(
        [*pip, *only_source, suite.release], env=os.environ | suite.variables, check=True
    )
    (archive,) = folder.iterdir()
    return archive


def run_suite(
    suite: Suite,
    tests: Sequence[str] = (),
    *,
    python: Path | None = None,
    root: Path | None = None,
) -> SuiteRun:
    """Run a suite, or these tests of it, against servers that its plugin starts.

    `python` has what the suite needs; `root` is the folder of the suite's paths.
    """
    begun = time.monotonic()
    root = root or suite.unpacked / suite.root
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.jsonl"
        command = [str(python or suite.client.python), "-m", "pytest", "-c", os.devnull]
        command += ["--rootdir", str(root), "-p", suite.plugin, "-p", "no:cacheprovider", "-q"]
        command += ["--tb=short", f"--timeout={TEST_TIMEOUT_S}", "--noconftest"]
        command += [str(root / path) for path in tests or suite.paths]
        variables = {REPORT: str(report), COMMAND: shlex.join(suite.server), "HF_HUB_OFFLINE": "1"}
        path = os.pathsep.join((str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])))
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | variables | {"PYTHONPATH": path},
            stdout=sys.stderr,
            timeout=TIMEOUT_S,
            check=False,
        )
        results = read_report(report)[1]
    if done.returncode not in (0, 1) or not results:
        ended = CheckResult("the suite ends", FAILED, f"exit status {done.returncode}")
        results = (*results, ended)
    return SuiteRun(suite, results, time.monotonic() - begun)
