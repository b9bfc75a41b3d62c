"""Do texts that finish under a JSON schema validate, and what does speculation bring? Schemas of rising difficulty, sampled at T = 1.

`make structured` runs 300 of them, with speculation and without in turns; tests/benchmarks/test_structured.py takes 30.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jsonschema import Draft202012Validator

from benchmarks.schemas import LEVELS, Schema, made
from specserve import LLM
from specserve.errors import BadValue
from specserve.grammar.validate import check
from specserve.llm import Output
from specserve.sampling_params import Sampling
from specserve.types import Finish, Grammar

PROMPT = "# A record as JSON, for schema {number}\nrecord = "
AT_ONCE, MAX_TOKENS = 32, 256


def under(schema: Schema, **sampling: Any) -> Sampling:
    return Sampling(guided={"json": schema}, **sampling)


def of(schema: Schema) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


@dataclass(slots=True)
class Tally:
    """What became of the texts of some schemas."""

    validated: int = 0
    cut: int = 0  # at max_tokens, before the text had ended
    wrong: list[str] = field(default_factory=list)  # finished, and no such thing as the schema says
    failed: list[str] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0

    @property
    def finished(self) -> int:
        return self.validated + len(self.wrong)

    def take(self, number: int, schema: Schema, output: Output) -> None:
        if output.error is not None:
            self.failed.append(f"{number}: {output.error}")
            return
        assert output.stats is not None
        self.tokens += len(output.token_ids)
        self.drafted, self.accepted = (
            self.drafted + output.stats.drafted,
            self.accepted + output.stats.accepted,
        )
        self.rounds += output.stats.rounds
        if output.finish_reason == Finish.LENGTH:
            self.cut += 1
        elif problem := _problem(schema, output.text):
            self.wrong.append(f"{number}: {problem}: {output.text[:200]}")
        else:
            self.validated += 1


def _problem(schema: Schema, text: str) -> str | None:
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"no JSON: {error}"
    validator = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    return next((error.message for error in validator.iter_errors(value)), None)


def schemas(count: int) -> list[tuple[int, Schema]]:
    """Those that can be followed; what is refused is refused by name, and left out."""
    found = []
    for number in range(count):
        schema = made(number)
        try:
            check(of(schema))
        except BadValue as error:
            print(f"schema {number} is refused: {error}")
            continue
        found.append((number, schema))
    return found


def run(
    llm: LLM,
    numbered: Sequence[tuple[int, Schema]],
    *,
    gamma: int | None,
    max_tokens: int = MAX_TOKENS,
) -> Tally:
    """One text for each schema, at T = 1."""
    tally, began = Tally(), time.perf_counter()
    speculation = None if gamma is None else {"gamma": gamma}
    for start in range(0, len(numbered), AT_ONCE):
        part = numbered[start : start + AT_ONCE]
        samplings = [
            under(schema, max_tokens=max_tokens, seed=number, speculation=speculation)
            for number, schema in part
        ]
        outputs = llm.generate([PROMPT.format(number=number) for number, _ in part], samplings)
        for (number, schema), output in zip(part, outputs, strict=True):
            tally.take(number, schema, output)
    tally.seconds = time.perf_counter() - began
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument(
        "--turns", type=int, default=2, help="of each, with speculation and without"
    )
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS)
    options = parser.parse_args()
    numbered = schemas(options.count)
    print(f"{len(numbered)} schemas of {LEVELS} levels, T = 1, at most {options.max_tokens} tokens")
    print(
        "| speculation | validated | wrong | cut | failed | tokens | tokens/s | drafts accepted | tokens a round |"
    )
    print(f"|{'---|' * 9}")
    faults = 0
    with LLM() as llm:
        run(llm, numbered[:AT_ONCE], gamma=None, max_tokens=options.max_tokens)  # warm
        for gamma in [None, 0] * options.turns:
            tally = run(llm, numbered, gamma=gamma, max_tokens=options.max_tokens)
            print(_row("off" if gamma == 0 else "auto", tally), flush=True)
            for line in tally.wrong + tally.failed:
                print(line)
            faults += len(tally.wrong) + len(tally.failed)
    return 1 if faults else 0


def _row(name: str, tally: Tally) -> str:
    accepted = f"{tally.accepted / tally.drafted:.2f}" if tally.drafted else ""
    cells = [name, tally.validated, len(tally.wrong), tally.cut, len(tally.failed), tally.tokens]
    cells += [
        f"{tally.tokens / tally.seconds:.0f}",
        accepted,
        f"{tally.tokens / max(tally.rounds, 1):.2f}",
    ]
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    sys.exit(main())
