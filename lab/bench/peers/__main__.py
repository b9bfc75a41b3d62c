"""Compare the systems and write the report: `python -m lab.bench.peers`."""

from __future__ import annotations

import argparse
import logging
import platform
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from pathlib import Path

import psutil

from lab.bench.peers.comparison import OURS, ComparisonPlan, Load, PeerComparison
from lab.bench.peers.entries import (
    ENVIRONMENTS,
    FORCED_ALPHA,
    HTTP,
    IN_PROCESS,
    ComparedPair,
    chat_texts,
    code_texts,
    full_loads,
    python_of,
    quick_loads,
)
from lab.bench.peers.plot import plot
from lab.bench.peers.process import ROOT, PeerFailed, SystemProcess
from lab.bench.peers.report import RunDescription, as_json, page
from lab.bench.peers.section import ComparisonSection, SystemState
from lab.bench.shapes import PROPORTIONAL, PROPORTIONAL_DRAFT, LlamaShape, write_random
from specserve.config.tree import DEMO
from specserve.host import usable_cores
from specserve.models.checkpoints.widen import inflate

_log = logging.getLogger(__name__)

IDLE_S = 5.0
INTERFACES = {"process": IN_PROCESS, "http": HTTP}
WIDENED, RANDOM = "widened", "proportional"
SMOLLM2_HEAD = DEMO / "smollm2"
TINY = LlamaShape(2, 64, 192, 4, 2, vocab_size=5000)


def make_pair(kind: str, params: int, folder: Path, *, quick: bool) -> ComparedPair:
    """Return the checkpoints of a shape; what does not ship with the package is written first."""
    if kind == WIDENED:
        if quick:
            return ComparedPair("demo pair", DEMO / "target", DEMO / "draft", is_trained=True)
        reached = inflate(DEMO / "target", params, folder / "target")
        name = f"demo target widened to {reached / 1e6:.0f}M, demo draft"
        return ComparedPair(name, folder / "target", DEMO / "draft", is_trained=True)
    shape, draft = (TINY, TINY) if quick else (PROPORTIONAL, PROPORTIONAL_DRAFT)
    reached = write_random(shape, folder / "target")
    write_random(draft, folder / "draft")
    name = (
        f"{shape.num_layers} layers of {shape.hidden:,} x {shape.mlp:,}, {reached / 1e6:.0f}M, "
        "random weights"
    )
    return ComparedPair(name, folder / "target", folder / "draft", is_trained=False)


def installation_error(python: Path) -> str | None:
    """Return the last error of an installation that was not finished, or None."""
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


def absence(system: str, environments: Path) -> str | None:
    """Return the reason why a system cannot run before it is started, or None."""
    if system not in ENVIRONMENTS:
        return None
    python = python_of(system, environments)
    if error := installation_error(python):
        return error
    return None if python.exists() else f"{ENVIRONMENTS[system]} is not installed"


@dataclass(slots=True)
class StartedSystems:
    """Systems that have started and rest, and the reasons why others are absent."""

    processes: dict[str, SystemProcess] = field(default_factory=dict)
    states: dict[str, SystemState] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    def observe(self, name: str, *, seconds: float) -> None:
        """Measure the memory of a system, and how busy the machine is while it idles."""
        self.states[name].memory = self.processes[name].memory()
        self.states[name].busy_when_idle = psutil.cpu_percent(seconds) / 100


def compare(
    pair: ComparedPair, interface: str, plan: ComparisonPlan, args: argparse.Namespace, work: Path
) -> ComparisonSection:
    """Start the systems of one interface, compare them, and end them."""
    commands = pair.commands(interface, work, environments=args.environments, keys=args.set)
    with ExitStack() as stack:
        started = StartedSystems()
        for name, command in commands.items():
            if _is_chosen(name, args) and name != taken_by_auto(started.states):
                _log.info("starting %s, %s, %s", name, interface, pair.name)
                start(started, name, command, stack, args, rest_ends=interface == HTTP)
        known = {**started.states, **started.absent}
        entries = [
            replace(entry, gammas=entry.gammas[:1]) if args.quick else entry
            for entry in pair.entries(interface)
            if entry.system in known
        ]
        observe = partial(started.observe, seconds=0.1 if args.quick else IDLE_S)
        rows = PeerComparison(started.processes, started.absent, plan, observe).run(entries)
    return ComparisonSection(
        pair.name, interface, rows, started.states, started.absent, _weights(pair)
    )


def start(
    started: StartedSystems,
    name: str,
    command: Sequence[str],
    stack: ExitStack,
    args: argparse.Namespace,
    *,
    rest_ends: bool,
) -> None:
    """Start a system, or record why it is absent. Rest ends our servers only."""
    if reason := absence(name, args.environments):
        started.absent[name] = reason
        return
    try:
        process = SystemProcess(command, rest_ends=rest_ends and name.startswith(OURS))
        stack.enter_context(process)
        started.states[name] = SystemState(process.about())
        process.rest()
    except PeerFailed as error:
        started.absent[name] = str(error)
    else:
        started.processes[name] = process


def taken_by_auto(states: Mapping[str, SystemState]) -> str | None:
    """Return the name of the server whose placement the one with `auto` has taken, too."""
    if OURS not in states:
        return None
    return next(
        (
            f"{OURS} {placement}"
            for placement in ("together", "apart")
            if states[OURS].about.get("settings", "").startswith(f"draft {placement}")
        ),
        None,
    )


def _is_chosen(name: str, args: argparse.Namespace) -> bool:
    return not args.systems or any(name.startswith(wanted) for wanted in args.systems)


def _weights(pair: ComparedPair) -> int:
    files = [pair.target] if pair.is_gguf else pair.target.glob("*.safetensors")
    return sum(file.stat().st_size for file in files)


def sections(plan: ComparisonPlan, args: argparse.Namespace) -> Iterator[ComparisonSection]:
    """Yield the results of each shape and interface; only one interface is started at a time."""
    for kind in args.shapes:
        with tempfile.TemporaryDirectory() as directory:
            if args.gguf is None:
                pair = make_pair(kind, args.params, Path(directory), quick=args.quick)
            else:
                pair = ComparedPair(args.gguf.name, args.gguf, args.eagle, is_trained=True)
            for interface in args.interfaces:
                work = Path(directory) / interface
                yield compare(pair, INTERFACES[interface], plan, args, work)


def describe(plan: ComparisonPlan, args: argparse.Namespace) -> RunDescription:
    machine = f"{date.today()}, {platform.machine()}, {usable_cores()} cores"
    loads = "; ".join(
        f"{load.name}: {len(load.prompts)} prompts of {_lengths(load)} tokens "
        f"{'at once' if load.together else 'one after the other'}, {load.max_tokens} new each"
        for load in plan.loads
    )
    overrides = f" specserve runs with {', '.join(args.set)}." if args.set else ""
    numbers = "bfloat16" if args.gguf is None else "weights as in the file"
    work = (
        f"Greedy, {numbers}. {loads}. Turns: {plan.turns}, all systems once in each. In its turn a "
        "system runs alone: the others are stopped by a signal, and specserve's servers, whose Ray "
        "does not survive that, are restarted and warmed up. No prefix is cached. Each takes "
        "the best of its gammas in a short sweep before. *Accepted* means that our draft is right "
        f"in {FORCED_ALPHA:.0%} of its tokens, whatever the weights.{overrides}"
    )
    return RunDescription(machine, work)


def _lengths(load: Load) -> str:
    lengths = sorted({len(prompt) for prompt in load.prompts})
    return " to ".join(f"{length:,}" for length in dict.fromkeys((lengths[0], lengths[-1])))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument(
        "--params", type=int, default=200_000_000, help="parameters of the widened target"
    )
    parser.add_argument(
        "--environments",
        type=Path,
        default=ROOT,
        help="where the peers' environments lie: " + ", ".join(ENVIRONMENTS.values()),
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="a.b=c", help="any key of specserve's config"
    )
    parser.add_argument(
        "--alone", type=int, default=1, help="prompts that one stream runs in each turn"
    )
    parser.add_argument("--shapes", nargs="+", choices=(WIDENED, RANDOM), default=[WIDENED, RANDOM])
    parser.add_argument(
        "--interfaces", nargs="+", choices=tuple(INTERFACES), default=list(INTERFACES)
    )
    parser.add_argument("--systems", nargs="+", default=[], help="beginnings of names; all if none")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one turn of a few tokens: shows that all of it runs, and measures nothing",
    )
    parser.add_argument(
        "--out", type=Path, help="write the report here, its figures and plots beside it"
    )
    parser.add_argument("--gguf", type=Path, help="compare on this file instead, over HTTP")
    parser.add_argument(
        "--eagle", type=Path, default=SMOLLM2_HEAD, help="the EAGLE head of the GGUF file's model"
    )
    args = parser.parse_args(arguments)
    if args.gguf is not None:
        args.shapes, args.interfaces = [WIDENED], ["http"]
    args.environments = args.environments.absolute()  # systems start elsewhere
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    prompts, files = code_texts() if args.gguf is None else chat_texts(args.gguf)
    plan = (
        ComparisonPlan(quick_loads(prompts), turns=1, sweeps=1)
        if args.quick
        else ComparisonPlan(full_loads(prompts, files, serial=args.alone), args.turns, sweeps=1)
    )
    description = describe(plan, args)
    done: list[ComparisonSection] = []
    for section in sections(plan, args):
        done.append(section)
        if args.out is not None:  # after each section, so that a later failure loses no figures
            _write(args.out, done, description)
    print(page(done, description, stem=None if args.out is None else args.out.stem))


def _exit(number: int, frame: object) -> None:
    sys.exit(128 + number)


def _write(out: Path, done: Sequence[ComparisonSection], description: RunDescription) -> None:
    out.write_text(page(done, description, stem=out.stem), encoding="utf-8")
    out.with_suffix(".json").write_text(as_json(done, description), encoding="utf-8")
    for number, section in enumerate(done, 1):
        svg = out.with_name(f"{out.stem}-{number}.svg")
        svg.write_text(plot(section), encoding="utf-8")


if __name__ == "__main__":
    # systems at rest are stopped, and could not end by themselves
    signal.signal(signal.SIGTERM, _exit)
    main()
