"""The clients: what each installs into an environment of its own, and how its program runs.

Requirements are pinned. An environment is made once, and again when its requirements change.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.conformance.checks import CHAT, DEMO, FAILED, SCRIPTED, CheckResult

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / ".venv-conformance"
PROGRAM_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class Client:
    """A client of another project and the engines that its program is run against.

    Its program is the module of its name in tests/conformance/programs/.
    """

    name: str
    requirements: tuple[str, ...]
    engines: tuple[str, ...] = (SCRIPTED,)
    constrained: tuple[str, ...] = ()
    """Further packages, at the versions of constraints.txt."""
    alone: tuple[str, ...] = ()
    """Packages of whose own requirements the program needs none but those above."""

    @property
    def module(self) -> str:
        return f"tests.conformance.programs.{self.name.replace('-', '_')}_client"

    @property
    def python(self) -> Path:
        return ENVIRONMENTS / self.name / "bin" / "python"

    @property
    def pins(self) -> tuple[str, ...]:
        lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        return (
            *self.requirements,
            *self.alone,
            *(line for line in lines if line.partition("==")[0] in self.constrained),
        )


CLIENTS: Sequence[Client] = (
    Client("openai", ("openai==3.54.0",), (SCRIPTED, DEMO)),
    Client("anthropic", ("anthropic==2.14.0",), (SCRIPTED, DEMO)),
    Client("langchain", ("langchain-tests==1.1.9", "langchain-openai==1.7.4")),
    Client("instructor", ("instructor==1.17.0",)),
    Client("litellm", ("litellm==1.109.1",)),
    Client("openai-agents", ("openai-agents==0.24.0",)),
    Client("pydantic-ai", ("pydantic-ai-slim[openai]==2.66.0",)),
    Client("guidellm", ("guidellm==0.8.1",), (DEMO,), constrained=("torch",)),
    Client("aiperf", ("aiperf==0.13.0",), (DEMO,)),
    Client(
        "bfcl-eval",
        (
            *("openai==3.54.0", "jsonschema==4.26.0", "filelock==3.20.0", "overrides==7.7.0"),
            *("tenacity==9.2.1", "tqdm==4.70.1", "python-dotenv==1.2.4", "tree_sitter==0.21.3"),
            *("tree-sitter-java==0.21.0", "tree-sitter-javascript==0.21.4"),
        ),
        (CHAT,),
        alone=("bfcl-eval==2026.3.23",),
    ),
    Client("lm-eval", ("lm_eval[api]==0.4.13",), (DEMO,), constrained=("transformers",)),
)


@dataclass(frozen=True, slots=True)
class ClientRun:
    """Results of one client against one engine; the versions are those that ran."""

    client: str
    engine: str
    versions: tuple[str, ...]
    results: tuple[CheckResult, ...]
    seconds: float = 0.0

    def num(self, outcome: str) -> int:
        return sum(result.outcome == outcome for result in self.results)


def install(client: Client) -> None:
    """Make a client's environment unless it is there with these requirements."""
    folder = ENVIRONMENTS / client.name
    stamp, pins = folder / "installed", "\n".join(client.pins) + "\n"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == pins:
        return
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    pip = (str(client.python), "-m", "pip", "install", "--quiet")
    subprocess.run([*pip, *(pin for pin in client.pins if pin not in client.alone)], check=True)
    if client.alone:
        subprocess.run([*pip, "--no-deps", *client.alone], check=True)
    stamp.write_text(pins, encoding="utf-8")


def run_client(client: Client, root: str, engine: str, *, python: Path | None = None) -> ClientRun:
    """Run a client's program against a server; `python` has the client installed."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.jsonl"
        command = [str(python or client.python), "-m", client.module]
        command += ["--root", root, "--engine", engine, "--report", str(report)]
        with (Path(folder) / "output").open("w+", encoding="utf-8") as output:
            failure = _run(command, folder, output.fileno())
            output.seek(0)
            lines = output.read().splitlines()
        versions, results = read_report(report)
    if failure:
        last = next((line for line in reversed(lines) if line.strip()), "")
        results = (*results, CheckResult("the program ends", FAILED, f"{failure}: {last.strip()}"))
    elif not results:
        results = (CheckResult("the program ends", FAILED, "it ran no check"),)
    return ClientRun(client.name, engine, versions, results, time.monotonic() - begun)


def _run(command: Sequence[str], home: str, output: int) -> str:
    """Return why a program did not end well, or an empty text."""
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=_environment(home),
            stdout=output,
            stderr=output,
            timeout=PROGRAM_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"still ran after {PROGRAM_TIMEOUT_S:g} s"
    return f"exit status {done.returncode}" if done.returncode else ""


def _environment(home: str) -> Mapping[str, str]:
    """Return variables under which a client finds neither this environment nor a network."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV") and not name.lower().endswith("_proxy")
    }
    return kept | {"HF_HUB_OFFLINE": "1", "HF_HOME": home, "OPENAI_API_KEY": "none"}


def read_report(path: Path) -> tuple[tuple[str, ...], tuple[CheckResult, ...]]:
    """Return versions and results of a program's report; a missing file has none."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    parsed = [json.loads(line) for line in lines]
    return (
        tuple(line["version"] for line in parsed if "version" in line),
        tuple(CheckResult(**line) for line in parsed if "name" in line),
    )
