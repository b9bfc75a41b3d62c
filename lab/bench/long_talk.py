"""Acceptance and text over one long dialogue: `python -m lab.bench.long_talk --target MODEL`.

A chat model answers the prompts of tasks.jsonl one after the other, one of each kind in turn, in a
single dialogue that holds all former answers, until its context is full: without draft tokens, and
with a drafter, at temperatures 0 and 1.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import chain
from pathlib import Path
from typing import Any

from lab.bench.tasks import GAMMA, TEMPERATURES, read_tasks, sampling
from specserve import LLM
from specserve.request_stats import Stats
from specserve.tools.bench.report import machine


@dataclass(frozen=True, slots=True)
class DialogueTurn:
    """An answer of the dialogue."""

    context: int  # tokens before it
    tokens: tuple[int, ...]
    stats: Stats


Talks = Mapping[tuple[str, float], Sequence[DialogueTurn]]  # by drafter and temperature


def prompts() -> Iterator[str]:
    """Yield a task of each kind, then the next of each."""
    kinds = read_tasks(per_kind=sys.maxsize).values()
    return (task.prompt for task in chain.from_iterable(zip(*kinds, strict=False)))


def talk(
    llm: LLM, temperature: float, gamma: int, options: argparse.Namespace
) -> list[DialogueTurn]:
    """Hold a dialogue until `options.context` tokens; each turn has a seed of its own."""
    messages: list[dict[str, object]] = []
    turns: list[DialogueTurn] = []
    for number, prompt in enumerate(prompts()):
        messages.append({"role": "user", "content": prompt})
        answer = llm.chat([messages], sampling(number, temperature, options.tokens, gamma))[0]
        assert answer.stats is not None
        context = len(answer.prompt_token_ids)
        turns.append(DialogueTurn(context, tuple(answer.token_ids), answer.stats))
        messages.append({"role": "assistant", "content": answer.text})
        if context + len(answer.token_ids) > options.context:
            break
    return turns


def acceptance_rate(turns: Sequence[DialogueTurn]) -> str:
    """Return accepted draft tokens to those that were reached, or nothing without any."""
    stats = [turn.stats for turn in turns if turn.stats.drafts]
    whole = sum(sum(one.accepted_by_position[GAMMA - 1 :]) for one in stats)
    accepted = sum(one.accepted for one in stats)
    reached = sum(one.drafts for one in stats) + accepted - whole
    return f"{accepted / reached:.2f}" if reached else ""


def hold_all(options: argparse.Namespace) -> Talks:
    own: dict[str, Any] = {"target.dtype": options.dtype}
    if options.target is not None:
        own["target"] = options.target
    keys: dict[str, Any] = {"draft.kind": "prompt_copy"}
    if options.eagle:
        keys = {"draft.kind": "eagle", "draft.path": options.eagle}
    found: dict[tuple[str, float], Sequence[DialogueTurn]] = {}
    with LLM(**own, **keys) as llm:
        for temperature in TEMPERATURES:
            for kind, gamma in (("none", 0), (keys["draft.kind"], GAMMA)):
                found[kind, temperature] = talk(llm, temperature, gamma, options)
                print(f"{kind}, T = {temperature:g}", file=sys.stderr, flush=True)
    return found


def page(options: argparse.Namespace) -> Iterator[str]:
    """Yield the lines of the page."""
    load, talks = os.getloadavg()[0], hold_all(options)
    bounds = range(0, options.context, options.step)
    yield "# A long dialogue\n"
    yield f"{date.today()}, {machine()}, load before {load:.1f}. The target is {options.name};"
    yield f"answers of at most {options.tokens} tokens, in one dialogue of {options.context:,};"
    yield f"acceptance rates at gamma {GAMMA}, by the tokens before an answer.\n"
    first = [f"{start:,} to {start + options.step:,}" for start in bounds]
    yield f"| drafter | T | answers | tokens | the same as without | {' | '.join(first)} |"
    yield "|---|---|---|---|---|" + "---|" * len(first)
    for (kind, temperature), turns in talks.items():
        if kind == "none":
            continue
        plain = talks["none", temperature]
        same = sum(one.tokens == other.tokens for one, other in zip(turns, plain, strict=False))
        rates = [
            acceptance_rate([one for one in turns if start <= one.context < start + options.step])
            for start in bounds
        ]
        tokens = sum(len(one.tokens) for one in turns)
        cells = [kind, f"{temperature:g}", str(len(turns)), f"{tokens:,}", f"{same}", *rates]
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", help="a chat model; the demo's target by default")
    parser.add_argument("--name", default="the demo's", help="how the page calls the target")
    parser.add_argument("--dtype", default="auto", help="of the target; auto by default")
    parser.add_argument("--eagle", help="an EAGLE-3 head that drafts; else the prompt is copied")
    parser.add_argument("--context", type=int, default=7680, help="tokens of the dialogue")
    parser.add_argument("--step", type=int, default=1024, help="tokens of a column of the table")
    parser.add_argument("--tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--out", type=Path, help="write the page there")
    parser.add_argument("--quick", action="store_true", help="two short answers")
    options = parser.parse_args()
    if options.quick:
        options.context, options.step, options.tokens = 30, 30, 4
    text = "\n".join(page(options)) + "\n"
    print(text)
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
