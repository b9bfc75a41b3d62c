"""Libraries that turn grammars into masks, side by side on a CPU: `python -m lab.bench.masks`.

Each compiles the schemas of schemas.py and walks through one text of each, drawn evenly from the
allowed tokens. xgrammar takes part where it is installed.
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
from functools import partial
from statistics import mean, median
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray

from lab.bench.schemas import make_schema
from specserve.config.tree import DEMO
from specserve.grammar.validate import library_grammar, parser_limits
from specserve.models.checkpoints.library import load_tokenizer, read_config
from specserve.types import Grammar

Bits = NDArray[np.int32]


class LLGuidance:
    """The library that the engine uses."""

    name = "llguidance"

    def __init__(self, tokenizer: str, vocab: int, end: int) -> None:
        self._tokenizer = LLTokenizer(tokenizer, n_vocab=vocab, eos_token=[end])

    def new_matcher(self, schema: str) -> Any:
        matcher = LLMatcher(
            self._tokenizer,
            library_grammar(Grammar("json_schema", schema)),
            log_level=0,
            limits=parser_limits(),
        )
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return matcher

    def mask(self, matcher: Any, bits: Bits) -> None:
        fill_next_token_bitmask(matcher, bits)

    def accept(self, matcher: Any, token: int) -> bool:
        return bool(matcher.consume_token(token))

    def fork(self, matcher: Any) -> Any:
        return matcher.deep_copy()


class XGrammar:
    """The other library, with the same methods."""

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

    def new_matcher(self, schema: str) -> Any:
        return self._xgrammar.GrammarMatcher(
            self._compiler.compile_json_schema(schema, strict_mode=False)
        )

    def mask(self, matcher: Any, bits: Bits) -> None:
        import torch

        matcher.fill_next_token_bitmask(torch.from_numpy(bits))

    def accept(self, matcher: Any, token: int) -> bool:
        return bool(matcher.accept_token(token))

    def fork(self, matcher: Any) -> Any:
        return matcher.fork()


@dataclass(slots=True)
class MaskTimes:
    """Seconds of each call, and the schemas that were refused."""

    compile_seconds: list[float] = field(default_factory=list)
    mask_seconds: list[float] = field(default_factory=list)
    accept_seconds: list[float] = field(default_factory=list)
    rollback_seconds: list[float] = field(default_factory=list)
    fork_seconds: list[float] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


def measure(
    library: Any, schemas: Sequence[str], *, vocab: int, end: int, tokens: int
) -> MaskTimes:
    times = MaskTimes()
    for number, schema in enumerate(schemas):
        start = time.perf_counter()
        try:
            matcher = library.new_matcher(schema)
        except (ValueError, RuntimeError) as error:
            times.refused.append(f"{number}: {str(error).splitlines()[0][:100]}")
            continue
        times.compile_seconds.append(time.perf_counter() - start)
        _walk(library, matcher, times, random.Random(number), vocab=vocab, end=end, tokens=tokens)
    return times


def _walk(
    library: Any,
    matcher: Any,
    times: MaskTimes,
    rng: random.Random,
    *,
    vocab: int,
    end: int,
    tokens: int,
) -> None:
    bits = np.zeros((1, (vocab + 31) // 32), np.int32)
    for _ in range(tokens):
        times.mask_seconds.append(_seconds(lambda: library.mask(matcher, bits)))
        allowed = np.flatnonzero(
            np.unpackbits(bits.view(np.uint8), count=vocab, bitorder="little")
        ).tolist()
        token = rng.choice([token for token in allowed if token != end] or [end])
        if token == end:
            return
        times.accept_seconds.append(_seconds(partial(library.accept, matcher, token)))
        times.fork_seconds.append(_seconds(lambda: library.fork(matcher)))
        times.rollback_seconds.append(_seconds(lambda: matcher.rollback(1)))
        library.accept(matcher, token)


def pace_of_other_threads(work: Callable[[], object]) -> float:
    """Return the share of its usual pace that another thread keeps during the work."""
    steps, done = [0], threading.Event()

    def count() -> None:
        while not done.is_set():
            steps[0] += 1

    thread = threading.Thread(target=count)
    thread.start()
    paces = []
    for function in (lambda: time.sleep(0.2), work):
        before, start = steps[0], time.perf_counter()
        function()
        paces.append((steps[0] - before) / (time.perf_counter() - start))
    done.set()
    thread.join()
    return paces[1] / paces[0]


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _cell(seconds: Sequence[float]) -> str:
    micros = sorted(1e6 * value for value in seconds)
    return f"{median(micros):.0f} / {mean(micros):.0f} / {micros[int(0.99 * len(micros))]:.0f}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schemas", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=100, help="of each text at most")
    parser.add_argument("--quick", action="store_true", help="a tiny form, to see that it works")
    options = parser.parse_args(arguments)
    if options.quick:
        options.schemas, options.tokens = 2, 10
    config = read_config(DEMO / "target")
    tokenizer, vocab, end = load_tokenizer(DEMO / "target"), config.vocab_size, config.eos_token_id
    schemas = [json.dumps(make_schema(number)) for number in range(options.schemas)]
    hard_schema = json.dumps(
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
        "| library | compile | mask | accept | roll back | fork | refused | other threads keep |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    for kind in libraries:
        library = kind(tokenizer, vocab, end)
        times = measure(library, schemas, vocab=vocab, end=end, tokens=options.tokens)
        pace = pace_of_other_threads(partial(library.new_matcher, hard_schema))
        columns = [
            _cell(seconds)
            for seconds in (
                times.compile_seconds,
                times.mask_seconds,
                times.accept_seconds,
                times.rollback_seconds,
                times.fork_seconds,
            )
        ]
        cells = [kind.name, *columns, str(len(times.refused)), f"{pace:.2f}"]
        print(f"| {' | '.join(cells)} |")
        for line in times.refused:
            print(f"  {kind.name} refuses {line}")


if __name__ == "__main__":
    main()
