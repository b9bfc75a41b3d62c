"""A suite runs against a server of ours, and every outcome and reason is counted."""

from __future__ import annotations

import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.conformance.checks import FAILED, PASSED, SKIPPED, CheckResult, Reporter
from tests.conformance.clients import read_report
from tests.conformance.scripted_engine import scripted_gateway
from tests.conformance.suites import sources
from tests.conformance.suites.selection import DIFFERENT, Exceptions, SuitePlugin
from tests.conformance.suites.served import URL
from tests.conformance.suites.sources import SUITES, SuiteRun, fetch, run_suite
from tests.conformance.suites.tables import tables

VLLM, LLAMA_CPP, PROBES, PROBES_BEHIND_RAY = SUITES
FOR_VLLM = """
import pytest
from tests.utils import RemoteOpenAIServer
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.sampling_params import SamplingParams

def test_answer():
    with RemoteOpenAIServer("demo", ["--enforce-eager"]) as server:
        client = server.get_client()
        assert client.completions.create(model="demo", prompt="x", max_tokens=1).choices

def test_refusal():
    with pytest.raises(ValueError, match="400"):
        CompletionRequest(prompt="x", n=0)

def test_sampling_params():
    assert SamplingParams(n=2).n == 2
"""
FOR_LLAMA_CPP = """
import os
import openai
import requests

URL = f"http://127.0.0.1:{os.environ['PORT']}"
MESSAGES = [{"role": "user", "content": "hello"}]

def test_path_without_version():
    assert requests.post(f"{URL}/chat/completions", json={"messages": MESSAGES}).ok

def test_any_model():
    client = openai.OpenAI(base_url=URL, api_key="none")
    assert client.chat.completions.create(model="davinci-002", messages=MESSAGES).choices

def test_own_path():
    assert requests.post(f"{URL}/completion", json={"prompt": "hello"}).ok
"""
FOR_RAY = """
import os
import pytest
import vllm
from openai import OpenAI
from .names import NAME

@pytest.mark.skipif("0.8.2" <= vllm.__version__ < "0.8.5", reason="hangs")
def test_models(path):
    client = OpenAI(base_url=os.environ["OPENAI_API_BASE"], api_key="none")
    assert [model["id"] for model in client.get(path, cast_to=dict)["data"]] == [NAME]
"""
FIXTURES = """
import pytest

@pytest.fixture
def path():
    return "/models"
"""


def test_tests_of_vllm_run_against_a_server_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tests" / "entrypoints"
    folder.mkdir(parents=True)
    for package in (folder.parent, folder):
        (package / "__init__.py").touch()
    (folder / "conftest.py").touch()
    (folder / "test_tiny.py").write_text(FOR_VLLM, encoding="utf-8")
    with scripted_gateway() as gateway:
        monkeypatch.setenv(URL, gateway.url)
        run = run_suite(VLLM, ["tests"], python=Path(sys.executable), root=tmp_path)
    assert run.results == (
        CheckResult("test_tiny.py::test_answer", PASSED),
        CheckResult("test_tiny.py::test_refusal", PASSED),
        CheckResult("test_tiny.py::test_sampling_params", SKIPPED, "calls vLLM's own classes"),
    )


def test_tests_of_llama_cpp_run_against_a_server_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "unit").mkdir()
    (tmp_path / "unit" / "test_tiny.py").write_text(FOR_LLAMA_CPP, encoding="utf-8")
    with scripted_gateway() as gateway:
        monkeypatch.setenv(URL, gateway.url)
        run = run_suite(LLAMA_CPP, python=Path(sys.executable), root=tmp_path)
    assert run.results == (
        CheckResult("test_tiny.py::test_path_without_version", PASSED),
        CheckResult("test_tiny.py::test_any_model", PASSED),
        CheckResult("test_tiny.py::test_own_path", SKIPPED, "asks for a path of llama.cpp alone"),
    )


def test_probes_of_ray_run_against_a_server_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "probes"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "conftest.py").write_text(FIXTURES, encoding="utf-8")
    (folder / "names.py").write_text("NAME = 'demo'", encoding="utf-8")
    (folder / "test_tiny.py").write_text(FOR_RAY, encoding="utf-8")
    with scripted_gateway() as gateway:
        monkeypatch.setenv(URL, gateway.url)
        run = run_suite(PROBES, python=Path(sys.executable), root=tmp_path)
    assert run.results == (CheckResult("test_tiny.py::test_models", PASSED),)
    assert PROBES_BEHIND_RAY.unpacked == PROBES.unpacked
    assert "tests.ray_llm.served" in PROBES_BEHIND_RAY.server


def test_a_suite_is_unpacked_from_an_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "ENVIRONMENTS", tmp_path / "environments")
    monkeypatch.setattr(sources, "install", lambda client: None)
    release = tmp_path / "ray-2"
    for path in ("release/llm_tests/serve/probes/test_a.py", "python/ray/other.py"):
        (release / path).parent.mkdir(parents=True)
        (release / path).touch()
    with tarfile.open(tmp_path / "ray.tar.gz", "w:gz") as archive:
        archive.add(release, "ray-2")
    with tarfile.open(tmp_path / "other.tar.gz", "w:gz") as archive:
        archive.add(release / "python", "ray-2")
    (PROBES.unpacked / "of an older archive").mkdir(parents=True)
    fetch(PROBES, tmp_path / "ray.tar.gz")
    with pytest.raises(FileNotFoundError, match=r"other.tar.gz has no release/llm_tests"):
        fetch(PROBES, tmp_path / "other.tar.gz")
    fetch(PROBES)  # which finds what is there
    files = [path for path in PROBES.unpacked.parent.rglob("*") if path.is_file()]
    assert files == [PROBES.unpacked / "probes" / "test_a.py"]
    assert list(PROBES.unpacked.iterdir()) == [PROBES.unpacked / "probes"]


def test_a_failure_needs_a_reason_and_a_reason_a_failure(tmp_path: Path) -> None:
    exceptions = Exceptions(
        left_out={"no pictures": ("test_a.py", "test_b.py::test_x[1]")},
        different={"other words": ("test_c.py::test_known", "test_c.py::test_mended")},
        left_out_parameters={"lora": "no adapters"},
    )
    assert exceptions.why_left_out("test_a.py::TestA::test_y[2]") == "no pictures"
    assert exceptions.why_left_out("test_b.py::test_x[1]") == "no pictures"
    assert exceptions.why_left_out("test_b.py::test_x[2]") is None
    assert exceptions.why_left_out("test_b.py::test_x[some-lora]") == "no adapters"
    plugin = SuitePlugin(exceptions, "unit/", Reporter(tmp_path / "report"))
    for name, is_failed in (("known", True), ("mended", False), ("new", True), ("good", False)):
        plugin.pytest_runtest_logreport(_report(f"unit/test_c.py::test_{name}", is_failed))
    results = read_report(tmp_path / "report")[1]
    assert results == (
        CheckResult("test_c.py::test_known", DIFFERENT, "other words"),
        CheckResult("test_c.py::test_mended", FAILED, "it passes, but is listed: other words"),
        CheckResult("test_c.py::test_new", FAILED, "assert 1 == 2"),
        CheckResult("test_c.py::test_good", PASSED),
    )
    text = "\n".join(tables([SuiteRun(VLLM, results, 1.0)]))
    assert f"| {VLLM.title} | 4 | 1 | 1 | 0 | 2 |" in text
    assert "| vllm | different | 1 | other words |" in text


def _report(nodeid: str, is_failed: bool) -> pytest.TestReport:
    report = SimpleNamespace(
        nodeid=nodeid,
        skipped=False,
        failed=is_failed,
        when="call",
        longreprtext="a trace\nE assert 1 == 2",
    )
    return cast(pytest.TestReport, cast(Any, report))
