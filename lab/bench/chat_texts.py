"""Answers of a chat model to prompts of eight kinds, from which a draft for it learns.

`python -m lab.bench.chat_texts --target FILE.gguf --out DIR` writes files for `specserve eagle
--text`: whole conversations with the template's own tokens, half of the answers drawn at T = 1 and
half greedy. It goes on where it ended.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from lab.bench.chat_prompts import prompts
from specserve import LLM, Sampling
from specserve.llm.llm import Output

BATCH = 64
"""Prompts at once, and conversations in a file."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=1408)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    start, drawn = time.monotonic(), 0
    with LLM(target=options.target, **{"target.threads": options.threads}) as llm:
        found = list(prompts(options.prompts, seed=options.seed))
        for number, begin in enumerate(range(0, len(found), BATCH)):
            part = found[begin : begin + BATCH]
            file = options.out / f"{number:04}.txt"
            if file.exists():
                continue
            texts, tokens = _conversations(llm, part, number, options.tokens)
            file.write_text("".join(texts), encoding="utf-8")
            drawn += tokens
            pace = drawn / (time.monotonic() - start)
            print(f"{file}: {drawn} tokens, {pace:.0f} a second", file=sys.stderr)


def _conversations(
    llm: LLM, part: Sequence[str], number: int, tokens: int
) -> tuple[list[str], int]:
    """Return the conversations as texts, and the tokens that were drawn."""
    outputs: list[Output] = llm.chat(
        [[{"role": "user", "content": prompt}] for prompt in part],
        [
            Sampling(max_tokens=tokens, temperature=float(i % 16 < 8), seed=number * BATCH + i)
            for i in range(len(part))
        ],
    )
    tail = llm.engine.tokenizer.prompt_tail
    texts = [tail(output.prompt_token_ids + output.token_ids) for output in outputs]
    return texts, sum(len(output.token_ids) for output in outputs)


if __name__ == "__main__":
    main()
