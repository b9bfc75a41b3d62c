"""specserve as a system of the comparison, over HTTP.

It runs Ray, Serve, proxy, gateway and engine as `specserve serve` starts them.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version

from lab.bench.peers.completions import MODEL, CompletionsClient, free_port
from lab.bench.peers.turn import System, TurnRequest, serve_turns
from specserve import __version__
from specserve.cluster.launch import deploy
from specserve.cluster.ray_session import ray_session
from specserve.config.sections import PLACEMENTS
from specserve.config.tree import Config, config_from_keys, parse_override

GAMMAS: Mapping[str, int | str | None] = {
    "plain": 0,
    "auto": "auto",
    "draft": None,
}
"""Gamma of each mode; None is the one of the request."""


class SpecserveSystem:
    """Running server and its client."""

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
            "settings": f"draft {self._placement()}",
        }

    def run(self, request: TurnRequest) -> int:
        return self._client(request).run(request)

    def texts(self, request: TurnRequest) -> Sequence[str]:
        return self._client(request).texts(request)

    def _client(self, request: TurnRequest) -> CompletionsClient:
        fixed = GAMMAS[request.mode]
        gamma = request.gamma if fixed is None else fixed
        return CompletionsClient(self._url, {"speculation": {"gamma": gamma}})

    def _placement(self) -> str:
        with urllib.request.urlopen(f"{self._url}/health") as answer:
            placement: str = json.load(answer).get("draft_placement", "none")
        return f"{placement} (draft.placement {self._config.draft.placement})"


@contextmanager
def open_system(keys: Mapping[str, object]) -> Iterator[System]:
    """Serve on a Ray of its own and on a free port.

    Prefix caching is off, because the prompts repeat in every turn.
    """
    config = config_from_keys(
        {
            "model": MODEL,
            "http.port": free_port(),
            "cache.prefix_caching": False,
            "target.dtype": "bfloat16",
            "draft.dtype": "bfloat16",
        },
        keys,
    )
    with ray_session(config, _ignore), deploy(config, _ignore) as url:
        yield SpecserveSystem(url, config)


def _ignore(line: str) -> None:
    pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft")
    parser.add_argument("--placement", choices=PLACEMENTS, default="auto")
    parser.add_argument("--set", type=parse_override, action="append", default=[])
    args = parser.parse_args()
    draft = {"draft.path": args.draft, "draft.placement": args.placement} if args.draft else {}
    serve_turns(lambda: open_system({"target.path": args.target, **draft, **dict(args.set)}))


if __name__ == "__main__":
    main()
