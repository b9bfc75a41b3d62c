"""specserve as a system of the comparison, over HTTP.

It runs Ray, Serve, proxy, gateway and engine as `specserve serve` starts them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from urllib.parse import urlsplit

from benchmarks.peers.turn import System, TurnRequest, serve_turns
from specserve import __version__
from specserve.cluster.launch import deploy
from specserve.cluster.ray_session import ray_session
from specserve.config.tree import Config, config_from_keys, parse_override
from specserve.tools.bench.streams import Stream, stream

MODEL, PATH = "demo", "/v1/completions"
GAMMAS: Mapping[str, int | str | None] = {
    "plain": 0,
    "auto": "auto",
    "draft": None,
}
"""Gamma of each mode; None is the one of the request."""


class SpecserveSystem:
    """Running server and its client, which receives whole streams as a chat would."""

    def __init__(self, url: str, config: Config) -> None:
        self._url, self._config = url, config

    def about(self) -> Mapping[str, str]:
        threads = (
            f"{name} {section.threads or 'its share of the cores'}"
            for name, section in (("target", self._config.target), ("draft", self._config.draft))
        )
        return {
            "version": f"{__version__}, torch {version('torch')}, ray {version('ray')}",
            "threads": ", ".join(threads),
            "precision": self._config.target.dtype,
        }

    def run(self, request: TurnRequest) -> int:
        return sum(
            one.usage["completion_tokens"]
            for one in asyncio.run(self._streams(request))
            if one.usage is not None
        )

    def texts(self, request: TurnRequest) -> Sequence[str]:
        return [self._complete(_body(request, prompt)) for prompt in request.prompts]

    async def _streams(self, request: TurnRequest) -> list[Stream]:
        done: list[Stream] = []
        for batch in request.batches:
            done += await asyncio.gather(
                *(self._stream(_body(request, prompt)) for prompt in batch)
            )
        return done

    async def _stream(self, body: Mapping[str, object]) -> Stream:
        url = urlsplit(self._url)
        assert url.hostname is not None
        assert url.port is not None
        answer = await stream(url.hostname, url.port, PATH, body)
        if answer.status != 200:
            raise ValueError(f"HTTP {answer.status}: {answer.body.decode(errors='replace')}")
        return answer

    def _complete(self, body: Mapping[str, object]) -> str:
        post = urllib.request.Request(
            self._url + PATH, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(post) as answer:
            text: str = json.load(answer)["choices"][0]["text"]
        return text


def _body(request: TurnRequest, prompt: Sequence[int]) -> Mapping[str, object]:
    fixed = GAMMAS[request.mode]
    gamma = request.gamma if fixed is None else fixed
    common = {
        "model": MODEL,
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": request.max_tokens,
    }
    return {**common, "prompt": list(prompt), "speculation": {"gamma": gamma}}


@contextmanager
def open_system(keys: Mapping[str, object]) -> Iterator[System]:
    """Serve on a Ray of its own and on a free port.

    Prefix caching is off, because the prompts repeat in every turn.
    """
    config = config_from_keys(
        {
            "model": MODEL,
            "http.port": _free_port(),
            "cache.prefix_caching": False,
            "target.dtype": "bfloat16",
            "draft.dtype": "bfloat16",
        },
        keys,
    )
    with ray_session(config, _ignore), deploy(config, _ignore) as url:
        yield SpecserveSystem(url, config)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _ignore(line: str) -> None:
    pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--set", type=parse_override, action="append", default=[])
    args = parser.parse_args()
    serve_turns(
        lambda: open_system(
            {"target.path": args.target, "draft.path": args.draft, **dict(args.set)}
        )
    )


if __name__ == "__main__":
    main()
