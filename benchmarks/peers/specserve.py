"""specserve as a system of the contest: Ray, Serve, proxy, gateway and engine as `specserve serve` starts them, asked over HTTP."""

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

from benchmarks.peers.turn import Ask, System, answer_turns
from specserve import __version__
from specserve.cluster.launch import deployed
from specserve.cluster.ray_session import ray_here
from specserve.config.tree import Config, override, parse
from specserve.tools.bench.streams import Stream, stream

MODEL, PATH = "demo", "/v1/completions"
GAMMAS: Mapping[str, int | str | None] = {
    "plain": 0,
    "auto": "auto",
    "draft": None,
}  # None: the one that is asked for


class Server:
    """A running server and its client: whole streams are read, as a chat would."""

    def __init__(self, url: str, config: Config) -> None:
        self._url, self._config = url, config

    def about(self) -> Mapping[str, str]:
        threads = (
            f"{name} {own.threads or 'its share of the cores'}"
            for name, own in (("target", self._config.target), ("draft", self._config.draft))
        )
        return {
            "version": f"{__version__}, torch {version('torch')}, ray {version('ray')}",
            "threads": ", ".join(threads),
            "precision": self._config.target.dtype,
        }

    def run(self, ask: Ask) -> int:
        return sum(
            one.usage["completion_tokens"]
            for one in asyncio.run(self._streams(ask))
            if one.usage is not None
        )

    def texts(self, ask: Ask) -> Sequence[str]:
        return [self._whole(_body(ask, prompt)) for prompt in ask.prompts]

    async def _streams(self, ask: Ask) -> list[Stream]:
        done: list[Stream] = []
        for batch in ask.batches:
            done += await asyncio.gather(*(self._stream(_body(ask, prompt)) for prompt in batch))
        return done

    async def _stream(self, body: Mapping[str, object]) -> Stream:
        where = urlsplit(self._url)
        assert where.hostname is not None
        assert where.port is not None
        answer = await stream(where.hostname, where.port, PATH, body)
        if answer.status != 200:
            raise ValueError(f"HTTP {answer.status}: {answer.body.decode(errors='replace')}")
        return answer

    def _whole(self, body: Mapping[str, object]) -> str:
        request = urllib.request.Request(
            self._url + PATH, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            text: str = json.load(answer)["choices"][0]["text"]
        return text


def _body(ask: Ask, prompt: Sequence[int]) -> Mapping[str, object]:
    own = GAMMAS[ask.mode]
    gamma = ask.gamma if own is None else own
    common = {"model": MODEL, "temperature": 0, "ignore_eos": True, "max_tokens": ask.max_tokens}
    return {**common, "prompt": list(prompt), "speculation": {"gamma": gamma}}


@contextmanager
def served(keys: Mapping[str, object]) -> Iterator[System]:
    """On a Ray of its own and a free port. Nothing is kept from one turn to the next: the prompts come again."""
    config = parse(
        {
            "model": MODEL,
            "http.port": _free_port(),
            "cache.prefix_caching": False,
            "target.dtype": "bfloat16",
            "draft.dtype": "bfloat16",
        },
        keys,
    )
    with ray_here(config, _ignore, join=False), deployed(config, _ignore) as url:
        yield Server(url, config)


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
    parser.add_argument("--set", type=override, action="append", default=[])
    args = parser.parse_args()
    answer_turns(
        lambda: served({"target.path": args.target, "draft.path": args.draft, **dict(args.set)})
    )


if __name__ == "__main__":
    main()
