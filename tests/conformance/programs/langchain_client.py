"""LangChain's own suite of integration tests for chat models, with its client of OpenAI's API."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

from tests.conformance.checks import (
    FAILED,
    MODEL,
    PASSED,
    SKIPPED,
    CheckResult,
    Endpoint,
    Reporter,
    arguments,
)


class TestChatModel(ChatModelIntegrationTests):
    """The suite, with what a model of text can do switched on."""

    endpoint = Endpoint("", "")

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "model": MODEL,
            "base_url": self.endpoint.url,
            "api_key": "none",
            "max_retries": 0,
            "stream_usage": True,
        }

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return False  # one model is served


class Recorder:
    """A plugin of pytest that reports each test."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        name = report.nodeid.rpartition("::")[2].removeprefix("test_").replace("_", " ")
        if report.skipped:
            reason = getattr(report, "wasxfail", "") or _skip_reason(report)
            self._reporter.add(CheckResult(name, SKIPPED, reason))
        elif report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self._reporter.add(CheckResult(name, FAILED, getattr(crash, "message", "")))
        else:
            self._reporter.add(CheckResult(name, PASSED))


def _skip_reason(report: pytest.TestReport) -> str:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
    return reason.removeprefix("Skipped: ")


def main() -> None:
    TestChatModel.endpoint, reporter = arguments(("langchain-tests", "langchain-openai"))
    options = ["-q", "-c", "/dev/null", "--noconftest", "-p", "no:cacheprovider"]
    # The client keeps its connections for all tests, so these need one event loop.
    for scope in ("asyncio_default_test_loop_scope", "asyncio_default_fixture_loop_scope"):
        options += ["-o", f"{scope}=session"]
    pytest.main([*options, "--asyncio-mode=auto", __file__], plugins=[Recorder(reporter)])


if __name__ == "__main__":
    # pytest imports this file by its path; both must have the same class.
    sys.modules["tests.conformance.programs.langchain_client"] = sys.modules["__main__"]
    main()
