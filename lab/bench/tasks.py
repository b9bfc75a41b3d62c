"""Acceptance and speed by kind of task, for each kind of drafter.

`python -m lab.bench.tasks --target DIR` asks a chat model the 160 prompts of tasks.jsonl, twenty of
each of eight kinds. Acceptance is of all prompts of a kind at once, with 4 draft tokens a round;
speed is with as many as the pacer chooses, in turns with none, of one prompt at a time and of 8 at
once. A draft, an EAGLE head and counted tables join in where they are given.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from specserve import LLM, Sampling
from specserve.llm.llm import Output
from specserve.request_stats import Stats
from specserve.tools.bench.report import machine

TEMPERATURES = (0.0, 1.0)
GAMMA = 4
STREAMS = 8


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt, its kind, and what it tests."""

    kind: str
    prompt: str
    tests: str

    @property
    def chat(self) -> list[dict[str, object]]:
        return [{"role": "user", "content": self.prompt}]


def read_tasks(*, per_kind: int) -> dict[str, list[Task]]:
    """Return the first tasks of each kind."""
    found: dict[str, list[Task]] = defaultdict(list)
    for line in (Path(__file__).parent / "tasks.jsonl").read_text(encoding="utf-8").splitlines():
        task = Task(**json.loads(line))
        if len(found[task.kind]) < per_kind:
            found[task.kind].append(task)
    return found


def drafter_keys(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return config keys by the drafter's kind, for those that need nothing or have their files."""
    keys: dict[str, dict[str, Any]] = {
        kind: {"draft.kind": kind} for kind in ("random", "prompt_copy", "max_gram", "layer_skip")
    }
    for kind in ("unigram", "bigram") if options.tables else ():
        keys[kind] = {"draft.kind": kind, "draft.path": str(options.tables)}
    for kind in {"unigram", "bigram", "max_gram"} & {*keys}:
        keys[kind]["draft.learn"] = False  # prompts are answered more than once
    if options.draft:
        keys["neural"] = {"draft.kind": "neural", "draft.path": options.draft}
    if options.eagle:
        keys["eagle"] = {"draft.kind": "eagle", "draft.path": options.eagle}
    return {kind: keys[kind] for kind in options.only or keys}


def sampling(number: int, temperature: float, tokens: int, gamma: int | None) -> Sampling:
    """Return the settings of a request; the pacer chooses gamma where it is None."""
    own = {} if gamma is None else {"gamma": gamma}
    return Sampling(max_tokens=tokens, temperature=temperature, seed=number, speculation=own)


@dataclass(frozen=True, slots=True)
class TaskFigures:
    """Acceptance and speed of one drafter on the tasks of one kind, at one temperature."""

    rates: Sequence[float]  # acceptance rate of each prompt for which something was drafted
    tokens_per_pass: float
    factors: Sequence[float]  # tokens a second with draft tokens to without, of a prompt alone
    factor_of_streams: float | None
    num_texts: int
    num_same: int  # texts that are those without draft tokens

    @property
    def acceptance(self) -> str:
        if not self.rates:
            return ""
        error = stdev(self.rates) / math.sqrt(len(self.rates)) if len(self.rates) > 1 else 0.0
        return f"{fmean(self.rates):.2f} ± {error:.2f}"

    @property
    def tokens(self) -> str:
        return f"{self.tokens_per_pass:.2f}"

    @property
    def speed(self) -> str:
        return f"{median(self.factors):.2f}" if self.factors else ""

    @property
    def speed_of_streams(self) -> str:
        return f"{self.factor_of_streams:.2f}" if self.factor_of_streams else ""


def answer(
    llm: LLM, tasks: Sequence[Task], temperature: float, tokens: int, gamma: int | None
) -> list[Output]:
    """Answer tasks at once."""
    own = [sampling(number, temperature, tokens, gamma) for number in range(len(tasks))]
    return llm.chat([task.chat for task in tasks], own)


def measure(
    llm: LLM,
    tasks: Sequence[Task],
    plain: Sequence[Output],
    temperature: float,
    *,
    tokens: int,
    timed: int,
) -> TaskFigures:
    """Answer all tasks at once, to compare with `plain`, and time the first ones alone."""
    drafted = answer(llm, tasks, temperature, tokens, GAMMA)
    stats = [one.stats for one in drafted if one.stats is not None]
    return TaskFigures(
        [acceptance_rate(one) for one in stats if one.drafts],
        sum(len(one.token_ids) for one in drafted) / sum(one.target_passes for one in stats),
        [factor(llm, [task], temperature, tokens) for task in tasks[:timed]],
        factor(llm, tasks[:STREAMS], temperature, tokens) if timed else None,
        len(tasks),
        sum(a.token_ids == b.token_ids for a, b in zip(drafted, plain, strict=True)),
    )


def acceptance_rate(stats: Stats) -> float:
    """Return accepted draft tokens to those that were reached.

    A proposal that is shorter than GAMMA counts as one whose next token was rejected.
    """
    whole = sum(stats.accepted_by_position[GAMMA - 1 :])
    return stats.accepted / (stats.drafts + stats.accepted - whole)


def factor(llm: LLM, tasks: Sequence[Task], temperature: float, tokens: int) -> float:
    """Return the ratio of tokens a second of tasks at once, with draft tokens to without."""

    def rate(gamma: int | None) -> float:
        start = time.perf_counter()
        outputs = answer(llm, tasks, temperature, tokens, gamma)
        return sum(len(one.token_ids) for one in outputs) / (time.perf_counter() - start)

    return rate(None) / rate(0)


Results = Mapping[tuple[str, float], Mapping[str, TaskFigures]]  # by drafter, temperature and kind


def measure_all(options: argparse.Namespace, tasks: Mapping[str, Sequence[Task]]) -> Results:
    own: dict[str, Any] = {"target.dtype": options.dtype}
    if options.target is not None:
        own["target"] = options.target
    found: dict[tuple[str, float], dict[str, TaskFigures]] = {}
    plain: dict[tuple[float, str], Sequence[Output]] = {}  # by the first engine
    for drafter, keys in drafter_keys(options).items():
        with LLM(**own, **keys) as llm:
            for temperature in TEMPERATURES:
                found[drafter, temperature] = row = {}
                for kind, some in tasks.items():
                    if (temperature, kind) not in plain:
                        plain[temperature, kind] = answer(llm, some, temperature, options.tokens, 0)
                    row[kind] = measure(
                        llm,
                        some,
                        plain[temperature, kind],
                        temperature,
                        tokens=options.tokens,
                        timed=options.timed,
                    )
                print(f"{drafter}, T = {temperature:g}", file=sys.stderr, flush=True)
    return found


TABLES: Mapping[str, Callable[[TaskFigures], str]] = {
    "Acceptance rate, with its standard error over prompts": lambda one: one.acceptance,
    "Tokens for each pass of the target": lambda one: one.tokens,
    "Tokens a second with draft tokens to without, one prompt at a time": lambda one: one.speed,
    f"The same, {STREAMS} prompts at once": lambda one: one.speed_of_streams,
}


def page(options: argparse.Namespace) -> Iterator[str]:
    """Yield the lines of the page."""
    load, tasks = os.getloadavg()[0], read_tasks(per_kind=options.per_kind)
    results = measure_all(options, tasks)
    same = sum(one.num_same for row in results.values() for one in row.values())
    total = sum(one.num_texts for row in results.values() for one in row.values())
    yield "# Tasks of eight kinds\n"
    yield f"{date.today()}, {machine()}, load before {load:.1f}. The target is {options.name};"
    yield f"{options.per_kind} prompts of each kind, at most {options.tokens} tokens each. Rates"
    yield f"are at gamma {GAMMA}, speeds at what the pacer chooses: {options.timed} prompts of a"
    yield f"kind alone (medians), and {STREAMS} at once. {same} of {total} texts are the same"
    yield "without draft tokens."
    yield "Command: `python -m lab.bench.tasks --target MODEL`."
    for title, cell in TABLES.items():
        if not any(cell(one) for row in results.values() for one in row.values()):
            continue  # nothing was timed
        yield f"\n## {title}\n"
        yield f"| drafter | T | {' | '.join(tasks)} |"
        yield "|---|---|" + "---|" * len(tasks)
        for (drafter, temperature), row in results.items():
            cells = " | ".join(map(cell, row.values()))
            yield f"| {drafter} | {temperature:g} | {cells} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", help="a chat model; the demo's target by default")
    parser.add_argument("--name", default="the demo's", help="how the page calls the target")
    parser.add_argument("--dtype", default="auto", help="of the target; auto by default")
    parser.add_argument("--draft", help="a draft model for it")
    parser.add_argument("--eagle", help="an EAGLE-3 head for it")
    parser.add_argument("--tables", type=Path, help="n-gram tables of its tokenizer")
    parser.add_argument("--only", nargs="+", metavar="KIND", help="these kinds of drafters alone")
    parser.add_argument("--per-kind", type=int, default=20, metavar="N", help="prompts of a kind")
    parser.add_argument("--timed", type=int, default=5, metavar="N", help="of them are timed")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, help="write the page there")
    parser.add_argument("--quick", action="store_true", help="one prompt of each kind, few tokens")
    options = parser.parse_args()
    if options.quick:
        options.per_kind, options.timed, options.tokens, options.only = 1, 1, 4, ["prompt_copy"]
    text = "\n".join(page(options)) + "\n"
    print(text)
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
