"""The page docs/measurements/conformance.md: a table of clients, and the reasons below it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import date

from specserve.tools.bench.report import machine
from tests.conformance.checks import CHAT, DEMO, FAILED, PASSED, SCRIPTED, SKIPPED
from tests.conformance.clients import ClientRun

KNOWN: Mapping[tuple[str, str], str] = {}
"""Failures of a client's check that are understood, and why the server does not answer so."""
ENGINES = {"demo": DEMO, "scripted": SCRIPTED, "chat": CHAT}
INTRODUCTION = """# Clients of other projects

{when}, {machine}. Command: `python -m tests.conformance`.

Each client is installed in an environment of its own, at the version in the table, and speaks HTTP
to a server on this machine. Behind the gateway is one of three engines. *{demo}* is the demo pair
by `specserve serve`, for what any model can do. *{scripted}* is an engine whose texts follow a
script (`tests/conformance/answers.py`), for what depends on what a model says: tool calls,
structured answers, agents. guidellm, aiperf and lm_eval need a model: each request must succeed
with all its tokens, a generated text must be the one that the server writes when asked without a
client, and the likelier of two choices must have the higher likelihood. *{chat}* is SmolLM2 with
the draft that ships. bfcl-eval puts 300 of its questions to it, half of them greedily and half at
T = 1, with at most 128 tokens: each whole call must obey the schema of its function, and all
answers must be the same without draft tokens.
"""


AGENT = """
## Sessions of agents

Command: `python -m tests.conformance.agent`, which the one above runs, too. An agent's session is
held in chats, responses and messages over one real engine: a request with tools, two calls in one
answer, their results, an answer. A tiny model is made to write a script, reasoning included; the
template keeps or drops the reasoning of earlier turns. In every turn all three protocols sent the
engine the same prompt and returned the same text, and more of the prompt was
[cached](../guides/http.md#cached-tokens) than in the turn before. Where reasoning is dropped, the
pages of the last answer are of no use.
"""
"""Section before the table of tests/conformance/agent.py."""


SUITES = "## Suites of other projects"
"""Heading of the last section, which `python -m tests.conformance.suites` writes."""


def suites_section(text: str) -> str:
    """Return the last section of a page with this text; empty if it has none."""
    _, heading, section = text.partition(SUITES)
    return f"\n{heading}{section}" if heading else ""


def page(runs: Sequence[ClientRun], agent_table: Sequence[str] = ()) -> str:
    """Return the page of these runs, and of an agent's sessions."""
    lines = [
        INTRODUCTION.format(when=date.today(), machine=machine(), **ENGINES),
        "| client | engine | checks | passed | failed | skipped |",
        "|---|---|---|---|---|---|",
        *map(_row, runs),
        "",
        *_reasons(runs),
        *([AGENT, *agent_table] if agent_table else ()),
    ]
    return "\n".join(lines).rstrip() + "\n"


def unknown_failures(runs: Sequence[ClientRun]) -> list[str]:
    """Return the failures that no reason is known for."""
    return [
        f"{run.client}: {result.name}: {result.reason}"
        for run in runs
        for result in run.results
        if result.outcome == FAILED and (run.client, result.name) not in KNOWN
    ]


def _row(run: ClientRun) -> str:
    name = ", ".join(run.versions) or run.client
    counts = [run.num(outcome) for outcome in (PASSED, FAILED, SKIPPED)]
    cells = [name, run.engine, len(run.results), *counts]
    return f"| {' | '.join(map(str, cells))} |"


def _reasons(runs: Sequence[ClientRun]) -> Iterator[str]:
    """Yield a table of the checks that did not pass."""
    rows = [
        f"| {run.client} | {_cell(result.name)} | {result.outcome} | {_cell(reason)} |"
        for run in runs
        for result in run.results
        if result.outcome != PASSED
        for reason in [KNOWN.get((run.client, result.name), result.reason)]
    ]
    if not rows:
        yield "No check failed or was skipped."
        return
    yield from ("| client | check | outcome | reason |", "|---|---|---|---|", *rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
