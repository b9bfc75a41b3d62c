"""A plugin of pytest for llama.cpp's server tests, which take a running server (DEBUG_EXTERNAL).

Two habits of llama.cpp are translated: its paths work without /v1, and it ignores the model's name.
A test that asks for a path of llama.cpp alone is skipped. It runs in the suite's own environment.
"""

from __future__ import annotations

import os
import sys
from functools import cache
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
import requests

from tests.conformance.suites.llama_cpp_exceptions import EXCEPTIONS
from tests.conformance.suites.selection import SuitePlugin
from tests.conformance.suites.served import Servers

MODEL = "tinyllama-2"
PATHS = ("/chat/completions", "/messages", "/models", "/responses")
"""Paths of OpenAI's and Anthropic's APIs that llama.cpp serves without /v1, too."""
OWN_PATHS = (
    *("/apply-template", "/completion", "/cors-proxy", "/embedding", "/infill", "/lora-adapters"),
    *("/models/", "/predict", "/props", "/rerank", "/slots", "/tools", "/v1/rerank", "/v1/stream"),
)
SERVERS = Servers()
SEND = requests.Session.request


@cache
def served_model() -> str:
    models = requests.get(f"{SERVERS.open()}/v1/models").json()
    return str(models["data"][0]["id"])


def send(session: requests.Session, method: str, url: str, **options: Any) -> requests.Response:
    """Send a request of a test, with /v1 and the model's name."""
    path = urlsplit(url).path
    if path.startswith(OWN_PATHS) or path.endswith("/input_tokens"):
        pytest.skip("asks for a path of llama.cpp alone")
    if path.startswith(PATHS):
        url = url.replace(path, f"/v1{path}", 1)
    if isinstance(body := options.get("json"), dict):
        options["json"] = body | {"model": served_model()}
    return SEND(session, method, url, **options)


class Client(openai.OpenAI):
    """OpenAI's client, with the name of the model that is served."""

    def _prepare_options(self, options: Any) -> Any:
        if "/v1" not in str(self.base_url):
            options.url = f"/v1{options.url}"
        if isinstance(options.json_data, dict):
            options.json_data = {**options.json_data, "model": served_model()}
        return options


def pytest_configure(config: pytest.Config) -> None:
    os.environ |= {"DEBUG_EXTERNAL": "1", "PORT": str(urlsplit(SERVERS.open(MODEL)).port)}
    requests.Session.request = send  # type: ignore[method-assign, assignment]
    openai.OpenAI = Client  # type: ignore[misc]
    sys.path.insert(0, str(config.rootpath))
    config.pluginmanager.register(SuitePlugin(EXCEPTIONS, "unit/"))


def pytest_unconfigure() -> None:
    SERVERS.close()
