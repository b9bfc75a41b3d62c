"""A plugin of pytest for the LLM probes of Ray, which ask a server that runs.

They ask vLLM for its version alone. It runs in the suite's own environment.
"""

from __future__ import annotations

import os
import sys
from types import ModuleType

import pytest

from tests.conformance.suites.ray_llm_exceptions import EXCEPTIONS
from tests.conformance.suites.selection import SuitePlugin
from tests.conformance.suites.served import LONG_CHATS, Servers

SERVERS = Servers()


def pytest_configure(config: pytest.Config) -> None:
    os.environ["OPENAI_API_BASE"] = f"{SERVERS.open('smollm2', LONG_CHATS)}/v1"
    vllm = ModuleType("vllm")
    vllm.__dict__["__version__"] = "0.33.0"
    sys.modules["vllm"] = vllm
    sys.path.insert(0, str(config.rootpath))
    config.pluginmanager.import_plugin("probes.conftest")
    config.pluginmanager.register(SuitePlugin(EXCEPTIONS, "probes/"))


def pytest_unconfigure() -> None:
    SERVERS.close()
