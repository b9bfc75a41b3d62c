"""Validity of texts generated under JSON schemas, and speed with and without speculation.

`python -m lab.bench.structured` samples 300 schemas of rising difficulty at T = 1, with and
without speculation in turns; tests/lab/bench/test_structured.py takes 30.
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

from lab.bench.schemas import LEVELS, Schema, make_schema
from specserve import LLM
from specserve.errors import BadValue
from specserve.grammar.validate import validate_grammar
from specserve.llm.llm import Output
from specserve.sampling_params import Sampling
from specserve.types import FinishReason, Grammar

PROMPT = "# A record as JSON, for schema {number}\nrecord = "
BATCH = 32
MAX_TOKENS = 256


def schema_sampling(schema: Schema, **sampling: Any) -> Sampling:
    return Sampling(guided={"json": schema}, **sampling)


def schema_grammar(schema: Schema) -> Grammar:
    return Grammar("json_schema", json.dumps(schema))


@dataclass(slots=True)
class TextCounts:
    """Counts of the texts of some schemas, by outcome."""

    validated: int = 0
    cut: int = 0  # at max_tokens, before the text had ended
    wrong: list[str] = field(default_factory=list)  # finished and invalid
    failed: list[str] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0

    @property
    def finished(self) -> int:
        return self.validated + len(self.wrong)

    def add(self, number: int, schema: Schema, output: Output) -> None:
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
        if output.finish_reason == FinishReason.LENGTH:
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


def accepted_schemas(count: int) -> list[tuple[int, Schema]]:
    """Return the schemas that the library accepts, with their numbers.

    A refused one is printed with the reason.
    """
    accepted = []
    for number in range(count):
        schema = make_schema(number)
        try:
            validate_grammar(schema_grammar(schema))
        except BadValue as error:
            print(f"schema {number} is refused: {error}")
            continue
        accepted.append((number, schema))
    return accepted


def generate_texts(
    llm: LLM,
    numbered: Sequence[tuple[int, Schema]],
    *,
    gamma: int | None,
    max_tokens: int = MAX_TOKENS,
) -> TextCounts:
    """Generate one text for each schema, at T = 1."""
    counts, begin = TextCounts(), time.perf_counter()
    speculation = None if gamma is None else {"gamma": gamma}
    for start in range(0, len(numbered), BATCH):
        batch = numbered[start : start + BATCH]
        samplings = [
            schema_sampling(schema, max_tokens=max_tokens, seed=number, speculation=speculation)
            for number, schema in batch
        ]
        outputs = llm.generate([PROMPT.format(number=number) for number, _ in batch], samplings)
        for (number, schema), output in zip(batch, outputs, strict=True):
            counts.add(number, schema, output)
    counts.seconds = time.perf_counter() - begin
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument(
        "--turns", type=int, default=2, help="of each, with speculation and without"
    )
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS)
    parser.add_argument("--quick", action="store_true", help="a tiny form, to see that it works")
    options = parser.parse_args()
    if options.quick:
        options.count, options.turns, options.max_tokens = 3, 1, 60
    numbered = accepted_schemas(options.count)
    print(f"{len(numbered)} schemas of {LEVELS} levels, T = 1, at most {options.max_tokens} tokens")
    print(
        "| speculation | validated | wrong | cut | failed | tokens | tokens/s "
        "| drafts accepted | tokens a round |"
    )
    print(f"|{'---|' * 9}")
    num_faults = 0
    with LLM() as llm:
        generate_texts(llm, numbered[:BATCH], gamma=None, max_tokens=options.max_tokens)  # warm-up
        for gamma in [None, 0] * options.turns:
            counts = generate_texts(llm, numbered, gamma=gamma, max_tokens=options.max_tokens)
            print(_row("off" if gamma == 0 else "auto", counts), flush=True)
            for line in counts.wrong + counts.failed:
                print(line)
            num_faults += len(counts.wrong) + len(counts.failed)
    return 1 if num_faults else 0


def _row(name: str, counts: TextCounts) -> str:
    accepted = f"{counts.accepted / counts.drafted:.2f}" if counts.drafted else ""
    cells = [
        name,
        counts.validated,
        len(counts.wrong),
        counts.cut,
        len(counts.failed),
        counts.tokens,
    ]
    cells += [
        f"{counts.tokens / counts.seconds:.0f}",
        accepted,
        f"{counts.tokens / max(counts.rounds, 1):.2f}",
    ]
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    sys.exit(main())
