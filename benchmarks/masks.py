"""Libraries that turn grammars into masks, side by side on a CPU: `python -m benchmarks.masks`. xgrammar takes part where it is installed.

Each compiles the schemas of schemas.py and walks through one text of each, drawn evenly from what is allowed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray

from benchmarks.schemas import made
from specserve.config.tree import DEMO
from specserve.grammar.validate import limits, source
from specserve.models.checkpoints.load import load_tokenizer, read_config
from specserve.types import Grammar

Bits = NDArray[np.int32]


class LLGuidance:
    name = "llguidance"

    def __init__(self, tokenizer: str, vocab: int, end: int) -> None:
        self._tokenizer = LLTokenizer(tokenizer, n_vocab=vocab, eos_token=[end])

    def begun(self, schema: str) -> Any:
        matcher = LLMatcher(
            self._tokenizer, source(Grammar("json_schema", schema)), log_level=0, limits=limits()
        )
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def mask(self, text: Any, bits: Bits) -> None:
        fill_next_token_bitmask(text, bits)

    def accept(self, text: Any, token: int) -> bool:
        return bool(text.consume_token(token))

    def fork(self, text: Any) -> Any:
        return text.deep_copy()


class XGrammar:
    name = "xgrammar"

    def __init__(self, tokenizer: str, vocab: int, end: int) -> None:
        import xgrammar

        self._xgrammar = xgrammar
        names = json.loads(tokenizer)["model"]["vocab"]
        ordered = [name for name, _ in sorted(names.items(), key=lambda pair: pair[1])]
        info = xgrammar.TokenizerInfo(
            ordered,
            vocab_type=xgrammar.VocabType.BYTE_LEVEL,
            vocab_size=vocab,
            stop_token_ids=[end],
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def begun(self, schema: str) -> Any:
        return self._xgrammar.GrammarMatcher(
            self._compiler.compile_json_schema(schema, strict_mode=False)
        )

    def mask(self, text: Any, bits: Bits) -> None:
        import torch

        text.fill_next_token_bitmask(torch.from_numpy(bits))

    def accept(self, text: Any, token: int) -> bool:
        return bool(text.accept_token(token))

    def fork(self, text: Any) -> Any:
        return text.fork()


@dataclass(slots=True)
class Found:
    """Seconds, each of one call."""

    compiled: list[float] = field(default_factory=list)
    masked: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)
    gone_back: list[float] = field(default_factory=list)
    forked: list[float] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


def measured(library: Any, schemas: Sequence[str], *, vocab: int, end: int, tokens: int) -> Found:
    found = Found()
    for number, schema in enumerate(schemas):
        began = time.perf_counter()
        try:
            text = library.begun(schema)
        except (ValueError, RuntimeError) as error:
            found.refused.append(f"{number}: {str(error).splitlines()[0][:100]}")
            continue
        found.compiled.append(time.perf_counter() - began)
        _walk(library, text, found, random.Random(number), vocab=vocab, end=end, tokens=tokens)
    return found


def _walk(
    library: Any, text: Any, found: Found, rng: random.Random, *, vocab: int, end: int, tokens: int
) -> None:
    bits = np.zeros((1, (vocab + 31) // 32), np.int32)
    for _ in range(tokens):
        found.masked.append(_seconds(lambda: library.mask(text, bits)))
        lawful = np.flatnonzero(
            np.unpackbits(bits.view(np.uint8), count=vocab, bitorder="little")
        ).tolist()
        token = rng.choice([token for token in lawful if token != end] or [end])
        if token == end:
            return
        found.accepted.append(_seconds(lambda token=token: library.accept(text, token)))  # type: ignore[misc]
        found.forked.append(_seconds(lambda: library.fork(text)))
        found.gone_back.append(_seconds(lambda: text.rollback(1)))
        library.accept(text, token)


def shares_the_interpreter(work: Callable[[], object]) -> float:
    """How much of its usual pace another thread keeps meanwhile."""
    steps, done = [0], threading.Event()

    def count() -> None:
        while not done.is_set():
            steps[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    paces = []
    for each in (lambda: time.sleep(0.2), work):
        before, began = steps[0], time.perf_counter()
        each()
        paces.append((steps[0] - before) / (time.perf_counter() - began))
    done.set()
    thread.join()
    return paces[1] / paces[0]


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _times(seconds: Sequence[float]) -> str:
    micro = sorted(1e6 * one for one in seconds)
    return f"{median(micro):.0f} / {mean(micro):.0f} / {micro[int(0.99 * len(micro))]:.0f}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schemas", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=100, help="of each text at most")
    options = parser.parse_args(arguments)
    config = read_config(DEMO / "target")
    tokenizer, vocab, end = load_tokenizer(DEMO / "target"), config.vocab_size, config.eos_token_id
    schemas = [json.dumps(made(number)) for number in range(options.schemas)]
    hard = json.dumps(
        {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {f"k{i}": {"pattern": f"^[a-f]{{1,50}}x{i}$"}},
                    "required": [f"k{i}"],
                }
                for i in range(900)
            ]
        }
    )
    libraries: list[type[LLGuidance] | type[XGrammar]] = [
        LLGuidance,
        *([XGrammar] if importlib.util.find_spec("xgrammar") else []),
    ]
    print(f"{len(schemas)} schemas, {vocab} ids; microseconds: median / mean / 99th percentile")
    print(
        "| library | compile | mask | accept | roll back | fork | refused | other threads keep |\n|---|---|---|---|---|---|---|---|"
    )
    for kind in libraries:
        library = kind(tokenizer, vocab, end)
        found = measured(library, schemas, vocab=vocab, end=end, tokens=options.tokens)
        kept = shares_the_interpreter(lambda library=library: library.begun(hard))  # type: ignore[misc]
        columns = [
            _times(each)
            for each in (
                found.compiled,
                found.masked,
                found.accepted,
                found.gone_back,
                found.forked,
            )
        ]
        print(f"| {' | '.join([kind.name, *columns, str(len(found.refused)), f'{kept:.2f}'])} |")
        for line in found.refused:
            print(f"  {kind.name} refuses {line}")


if __name__ == "__main__":
    main()
