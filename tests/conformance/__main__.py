"""`python -m tests.conformance`: clients of other projects against real servers, as a table.

`python -m tests.conformance` installs each client into an environment of its own, runs its checks
and prints the page; --quick runs the clients of this environment against a scripted engine.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from lab.bench.start import server
from specserve.cli.default_model import chat_model_file
from tests.conformance.agent import TURNS
from tests.conformance.agent import table as agent_table
from tests.conformance.checks import CHAT, DEMO, SCRIPTED
from tests.conformance.clients import CLIENTS, Client, ClientRun, install, run_client
from tests.conformance.page import page, suites_section, unknown_failures
from tests.conformance.scripted_engine import scripted_gateway
from tests.support.ray_server import free_port

INSTALLED_FOR_TESTS = ("openai", "anthropic")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [client.name for client in CLIENTS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="CLIENT")
    parser.add_argument("--engine", choices=(SCRIPTED, DEMO, CHAT), help="instead of all")
    parser.add_argument("--out", type=Path, help="write the page there")
    parser.add_argument("--quick", action="store_true", help="nothing is installed")
    options = parser.parse_args()
    engines = (options.engine,) if options.engine else _engines()
    runs = _run_quickly() if options.quick else _run_all(options.only, engines)
    text = page(runs, [] if options.quick else list(agent_table(TURNS)))
    print(text)
    if options.out is not None:
        kept = options.out.read_text(encoding="utf-8") if options.out.exists() else ""
        options.out.write_text(text + suites_section(kept), encoding="utf-8")
    failures = unknown_failures(runs)
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


def _engines() -> tuple[str, ...]:
    if chat_model_file() is not None:
        return SCRIPTED, DEMO, CHAT
    print("smollm2 is not tested: make .venv/chat-model", file=sys.stderr)
    return SCRIPTED, DEMO


def _run_quickly() -> list[ClientRun]:
    clients = [client for client in CLIENTS if client.name in INSTALLED_FOR_TESTS]
    python = Path(sys.executable)
    with scripted_gateway() as gateway:
        return [run_client(client, gateway.url, SCRIPTED, python=python) for client in clients]


def _run_all(names: Sequence[str], engines: Sequence[str]) -> list[ClientRun]:
    clients = [client for client in CLIENTS if client.name in names]
    for client in clients:
        print(f"{client.name}: {', '.join(client.pins)}", file=sys.stderr, flush=True)
        install(client)
    runs: list[ClientRun] = []
    for engine in engines:
        if tested := [client for client in clients if engine in client.engines]:
            with _served(engine) as root:
                runs += [_run_one(client, root, engine) for client in tested]
    return sorted(runs, key=lambda run: names.index(run.client))


def _run_one(client: Client, root: str, engine: str) -> ClientRun:
    run = run_client(client, root, engine)
    print(f"{client.name}, {engine}: {run.seconds:.0f} s", file=sys.stderr, flush=True)
    return run


@contextlib.contextmanager
def _served(engine: str) -> Iterator[str]:
    """Serve an engine and yield the URL of its gateway."""
    if engine == SCRIPTED:
        with scripted_gateway() as gateway:
            yield gateway.url
        return
    port = free_port()
    pair = ("--set", "demo.size=none") if engine == DEMO else ()
    with server(*pair, port=port):
        yield f"http://127.0.0.1:{port}"


if __name__ == "__main__":
    sys.exit(main())
