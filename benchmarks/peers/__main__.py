"""Compare the systems and write the report: `python -m benchmarks.peers`."""

from __future__ import annotations

import argparse
import logging
import os
import platform
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import date
from pathlib import Path

import psutil

from benchmarks.peers.comparison import OURS, ComparisonPlan, PeerComparison
from benchmarks.peers.process import ROOT, PeerFailed, SystemProcess
from benchmarks.peers.report import RunDescription, as_json, page
from specserve.config.tree import DEMO
from specserve.demo.corpus import held_out_prompts
from specserve.tools.inflate import inflate

_log = logging.getLogger(__name__)

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 8, 128, 128
IDLE_S = 5.0


def commands(
    target: Path, work: Path, *, python: Path, keys: Sequence[str]
) -> Mapping[str, Sequence[str]]:
    """Return the command of each system; `python` is the interpreter of the peers' environment."""
    models = ["--target", str(target), "--draft", str(DEMO / "draft")]
    module = f"{__package__}."
    return {
        OURS: [
            sys.executable,
            "-m",
            f"{module}specserve",
            *models,
            *(part for key in keys for part in ("--set", key)),
        ],
        "transformers": [sys.executable, "-m", f"{module}transformers", *models],
        "openvino-genai": [str(python), "-m", f"{module}openvino", *models, "--work", str(work)],
    }


def installation_error(python: Path) -> str | None:
    """Return the last error of an installation that the Makefile did not finish, or None."""
    home = python.parent.parent
    log = home / "install.log"
    if (home / "installed").exists() or not log.exists():
        return None
    errors = [
        line.partition("ERROR: ")[2]
        for line in log.read_text(errors="replace").splitlines()
        if "ERROR: " in line
    ]
    return errors[-1] if errors else None


def run(
    plan: ComparisonPlan, target: Path, work: Path, args: argparse.Namespace
) -> tuple[str, str]:
    """Run the comparison and return the page and the JSON."""
    processes: dict[str, SystemProcess] = {}
    systems: dict[str, Mapping[str, str]] = {}
    absent: dict[str, str] = {}
    with ExitStack() as stack:
        for name, command in commands(target, work, python=args.python, keys=args.set).items():
            _log.info("starting %s", name)
            try:
                processes[name] = stack.enter_context(SystemProcess(command))
                systems[name] = processes[name].about()
            except PeerFailed as error:
                absent[name] = installation_error(ROOT / command[0]) or str(error)
        rows = PeerComparison(processes, absent, plan).run()
        busy_when_idle = psutil.cpu_percent(IDLE_S) / 100
    machine = f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores"
    description = RunDescription(
        machine, _describe_work(plan, args), busy_when_idle, systems, absent
    )
    return page(rows, description), as_json(rows, description)


def _describe_work(plan: ComparisonPlan, args: argparse.Namespace) -> str:
    overrides = f" specserve runs with {', '.join(args.set)}." if args.set else ""
    return (
        f"demo target widened to {args.params / 1e6:.0f}M with the demo draft, greedy, "
        f"{len(plan.prompts)} prompts of {PROMPT_TOKENS} tokens, {plan.max_tokens} new ones each; "
        f"{plan.num_serial} of them one after the other, or all at once. Turns: {plan.turns}, all "
        "systems once in each, alone on the machine; no prefix is cached. specserve is asked over "
        "HTTP, the others in their own process. Each takes the best of its gammas in a short sweep "
        f"before.{overrides}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument(
        "--params", type=int, default=200_000_000, help="parameters of the widened target"
    )
    parser.add_argument(
        "--python",
        type=Path,
        default=Path(".venv-peers/bin/python"),
        help="of the peers' environment, seen from the repository",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="a.b=c", help="any key of specserve's config"
    )
    parser.add_argument(
        "--alone",
        type=int,
        default=PROMPTS,
        help="prompts that are asked one after the other, in each turn",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one turn of 32 tokens: shows that all of it runs, and measures nothing",
    )
    parser.add_argument(
        "--out", type=Path, help="write the report here, and its figures beside it as JSON"
    )
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    prompts = held_out_prompts(count=PROMPTS, length=PROMPT_TOKENS)
    full, quick = (
        ComparisonPlan(prompts, args.alone, NEW_TOKENS, turns=args.turns, sweeps=2),
        ComparisonPlan(prompts, 2, 32, turns=1, sweeps=1),
    )
    plan = quick if args.quick else full
    with tempfile.TemporaryDirectory() as directory:
        target, work = Path(directory) / "target", Path(directory) / "openvino"
        inflate(DEMO / "target", args.params, target)
        text, figures = run(plan, target, work, args)
    print(text)
    if args.out is not None:
        args.out.write_text(text, encoding="utf-8")
        args.out.with_suffix(".json").write_text(figures, encoding="utf-8")


if __name__ == "__main__":
    main()
