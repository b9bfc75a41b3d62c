"""Validity of texts generated under JSON schemas, and speed with and without speculation.

`python -m lab.bench.structured` samples 300 schemas of rising difficulty at T = 1, with and
without speculation in turns; tests/lab/bench/test_structured.py takes 30. With `--schemas DIR` they
are drawn from the JSON files below that directory, and refused ones are counted by their reasons.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for

from lab.bench.schemas import Schema, make_schema
from specserve import LLM
from specserve.errors import BadValue
from specserve.grammar.request import schema_grammar
from specserve.grammar.validate import validate_grammar
from specserve.llm.llm import Output
from specserve.sampling_params import Sampling
from specserve.types import FinishReason

PROMPT = "# A record as JSON, for schema {number}\nrecord = "
QUESTION = "Write one record as JSON. {about}"
MAX_ABOUT = 200
"""Characters of a schema's description in the question for a record."""
BATCH = 32
MAX_TOKENS = 256


def schema_sampling(schema: Schema, **sampling: Any) -> Sampling:
    return Sampling(guided={"json": schema}, **sampling)


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
    texts: dict[int, str] = field(default_factory=dict)

    @property
    def finished(self) -> int:
        return self.validated + len(self.wrong)

    def add(self, number: int, schema: Schema, output: Output) -> None:
        if output.error is not None:
            self.failed.append(f"{number}: {output.error}")
            return
        assert output.stats is not None
        self.texts[number] = output.text
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
    dialect = validator_for(schema, default=Draft202012Validator)
    validator = dialect(schema, format_checker=dialect.FORMAT_CHECKER)
    return next((error.message for error in validator.iter_errors(value)), None)


def read_schemas(directory: Path, count: int) -> list[Schema]:
    """Return schemas drawn from the JSON files below a directory."""
    files = sorted(directory.rglob("*.json"))
    random.Random(0).shuffle(files)
    return [json.loads(file.read_text(encoding="utf-8")) for file in files[:count]]


def accepted_schemas(schemas: Iterable[Schema]) -> list[tuple[int, Schema]]:
    """Return the schemas that are accepted, with their numbers.

    Refused ones are printed by their reasons.
    """
    accepted, refused = [], Counter[str]()
    for number, schema in enumerate(schemas):
        try:
            validate_grammar(schema_grammar("guided", schema))
        except BadValue as error:
            refused[re.sub(r"\d[\d.]*", "N", str(error))] += 1
            continue
        accepted.append((number, schema))
    for reason, times in refused.most_common():
        print(f"{times} refused: {reason}")
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
        outputs = (
            llm.chat([_chat(schema) for _, schema in batch], samplings)
            if llm.engine.tokenizer.has_chat_template
            else llm.generate([PROMPT.format(number=number) for number, _ in batch], samplings)
        )
        for (number, schema), output in zip(batch, outputs, strict=True):
            counts.add(number, schema, output)
    counts.seconds = time.perf_counter() - begin
    return counts


def _chat(schema: Schema) -> list[dict[str, object]]:
    about = f"{schema.get('title', '')} {schema.get('description', '')}"[:MAX_ABOUT]
    return [{"role": "user", "content": QUESTION.format(about=about)}]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", help="the demo's by default")
    parser.add_argument("--eagle", help="an EAGLE-3 head for it")
    parser.add_argument("--schemas", type=Path, metavar="DIR", help="a directory of schemas")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument(
        "--turns", type=int, default=2, help="of each, with speculation and without"
    )
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS)
    parser.add_argument("--quick", action="store_true", help="a tiny form, to see that it works")
    options = parser.parse_args()
    if options.quick:
        options.count, options.turns, options.max_tokens = 3, 1, 60
    numbered = accepted_schemas(
        map(make_schema, range(options.count))
        if options.schemas is None
        else read_schemas(options.schemas, options.count)
    )
    print(f"{len(numbered)} schemas, T = 1, at most {options.max_tokens} tokens each")
    print(
        "| speculation | validated | wrong | cut | failed | tokens | tokens/s "
        "| drafts accepted | tokens a round |"
    )
    print(f"|{'---|' * 9}")
    num_faults, first = 0, None
    keys = {"draft.kind": "eagle", "draft.path": options.eagle} if options.eagle else {}
    with LLM(options.target, **keys) as llm:
        generate_texts(llm, numbered[:BATCH], gamma=None, max_tokens=options.max_tokens)  # warm-up
        for gamma in [None, 0] * options.turns:
            counts = generate_texts(llm, numbered, gamma=gamma, max_tokens=options.max_tokens)
            print(_row("off" if gamma == 0 else "auto", counts), flush=True)
            for line in counts.wrong + counts.failed:
                print(line)
            first = counts if first is None else first
            differing = [one for one, text in first.texts.items() if counts.texts.get(one) != text]
            if differing:
                print(f"not the texts of the first turn: {differing}")
            num_faults += len(counts.wrong) + len(counts.failed) + len(differing)
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
