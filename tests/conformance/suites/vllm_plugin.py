"""A plugin of pytest for vLLM's tests: its test server is ours, its request classes ask ours.

vLLM itself is not installed. A test that calls one of its other classes is skipped by that class's
name, unless the test has a server, too. It runs in the suite's own environment.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn
from unittest.mock import MagicMock

import anthropic
import openai
import pytest
import requests
from pydantic import TypeAdapter

import tests
from tests.conformance.suites.selection import SuitePlugin
from tests.conformance.suites.served import CHATS, LONG_CHATS, PAIR, VOCABULARY, Servers
from tests.conformance.suites.vllm_exceptions import EXCEPTIONS

SERVERS = Servers()
RUNNING: list[pytest.Item] = []
"""The test that runs now; none while tests are collected."""


class RemoteOpenAIServer:
    """A server of ours where a test starts one of vLLM's. Of its options two are read."""

    def __init__(self, model: str, vllm_serve_args: Sequence[str], **options: object) -> None:
        if "--served-model-name" in vllm_serve_args:
            model = vllm_serve_args[vllm_serve_args.index("--served-model-name") + 1]
        server_options = LONG_CHATS if "--enable-chunked-prefill" in vllm_serve_args else CHATS
        in_completions = any("/completion/" in item.nodeid for item in RUNNING)
        self.url_root = SERVERS.open(model, PAIR if in_completions else server_options)

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *raised: object) -> None:
        """Leave the server to the tests that follow."""

    def url_for(self, *parts: str) -> str:
        return "/".join((self.url_root, *parts))

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**self._options("v1") | options)

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._options("v1") | options)

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(**self._options() | options)

    def _options(self, *parts: str) -> dict[str, Any]:
        return {"base_url": self.url_for(*parts), "api_key": "none", "max_retries": 0}


class RefusedError(ValueError):
    """The server's answer to a request that vLLM's own class would not take."""


class PostedRequest:
    """A request class of vLLM: it sends its fields to the server, and raises what it refuses."""

    path = "completions"

    def __init__(self, **fields: Any) -> None:
        SERVERS.open()  # so that there is a model to name
        reply = self._post({"max_tokens": 1} | fields | {"model": SERVERS.model})
        if reply.status_code != 200:
            raise RefusedError(f"{reply.status_code}: {reply.json()['error']['message']}")
        self.fields = fields

    @classmethod
    def model_validate(cls, body: Any) -> PostedRequest:
        if not isinstance(body, dict):
            assert cls._post(body).status_code == 400
            TypeAdapter(dict[str, Any]).validate_python(body)  # raises the error of vLLM's class
        return cls(**body)

    @classmethod
    def _post(cls, body: Any) -> requests.Response:
        return requests.post(f"{SERVERS.open()}/v1/{cls.path}", json=body, timeout=60)

    def __getattr__(self, name: str) -> Any:
        if name not in self.fields:
            _skip(f"{type(self).__name__}.{name}")
        return self.fields[name]


class CompletionRequest(PostedRequest):
    """vLLM's class of this name."""


class ChatCompletionRequest(PostedRequest):
    """vLLM's class of this name."""

    path = "chat/completions"


class ServedTokenizer:
    """The tokenizer behind the server."""

    def encode(self, text: str) -> list[int]:
        body: dict[str, Any] = {"prompt": text, "add_special_tokens": False}
        tokens: list[int] = requests.post(f"{SERVERS.open()}/tokenize", json=body).json()["tokens"]
        return tokens

    def decode(self, ids: Sequence[int]) -> str:
        body = {"tokens": list(ids)}
        text: str = requests.post(f"{SERVERS.open()}/detokenize", json=body).json()["prompt"]
        return text


class ModelConfig:
    """The size of the vocabulary, all that tests of a server ask of vLLM's class."""

    def __init__(self, **options: object) -> None:
        """Ignore every option."""

    def get_vocab_size(self) -> int:
        return VOCABULARY


STAND_INS = {
    "VLLMValidationError": RefusedError,
    "CompletionRequest": CompletionRequest,
    "ChatCompletionRequest": ChatCompletionRequest,
    "ModelConfig": ModelConfig,
    "RemoteOpenAIServer": RemoteOpenAIServer,
    "get_tokenizer": lambda **options: ServedTokenizer(),
    "hf_api": MagicMock(),  # adapters, which no test that runs asks for
    "ROCM_EXTRA_ARGS": [],
}


class Absent(type):
    """The type of what vLLM has and this environment has not. To use one skips the test."""

    def __call__(cls, *arguments: object, **options: object) -> Any:
        return _skip(cls.__name__) if RUNNING else MagicMock()

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _skip(f"{cls.__name__}.{name}") if RUNNING else MagicMock()

    def __add__(cls, other: object) -> Any:
        return _skip(cls.__name__)


def _skip(name: str) -> NoReturn:
    """Skip a test that calls this class of vLLM; one that has a server of ours fails."""
    if {"server", "client"} & set(getattr(RUNNING[0], "fixturenames", ())):
        raise AssertionError(f"a test of a server needs vLLM's {name}")
    pytest.skip("calls vLLM's own classes")


class StandInModule(ModuleType):
    """A module of vLLM: the stand-ins, and names that skip the test that uses them."""

    def __getattr__(self, name: str) -> Any:
        if name in STAND_INS:
            return STAND_INS[name]
        if name.startswith("__"):
            raise AttributeError(name)
        value = Absent(name, (), {})
        setattr(self, name, value)
        return value


class StandInFinder(MetaPathFinder, Loader):
    """Finds every module of vLLM, and the one with its test server."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name.partition(".")[0] == "vllm" or name == "tests.utils":
            return ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module as it was made."""


def pytest_configure(config: pytest.Config) -> None:
    sys.meta_path.insert(0, StandInFinder())
    tests.__path__.append(str(config.rootpath / "tests"))  # theirs lies beside ours
    config.pluginmanager.import_plugin("tests.entrypoints.conftest")
    config.pluginmanager.register(SuitePlugin(EXCEPTIONS, "tests/entrypoints/"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Any:
    RUNNING.append(item)
    try:
        return (yield)
    finally:
        RUNNING.clear()


def pytest_unconfigure() -> None:
    SERVERS.close()
