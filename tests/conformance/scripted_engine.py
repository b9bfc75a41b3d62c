"""An engine whose texts follow a script, so that a failure behind it is the gateway's.

It takes the first of its answers that the request's grammar admits, as a model under the grammar
would. Everything else is the gateway's: the template, parsing, streaming and validation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from specserve.api.tokenizer import Tokenizer
from specserve.grammar.matcher import GrammarCompiler
from specserve.types import Chunk, FinishReason, Grammar, Request
from tests.conformance.answers import answers
from tests.support.http_server import FakeService, RunningServer, serving
from tests.support.templates import family

END_ID = 0
CONTEXT = 32768


@dataclass
class ScriptedEngine(FakeService):
    """An engine that answers what tests/conformance/answers.py says."""

    tokenizer: Tokenizer = field(default_factory=lambda: family("hermes"))

    def __post_init__(self) -> None:
        self._compiler = GrammarCompiler.from_tokenizer(
            self.tokenizer._backend.to_str,
            vocab_size=self.tokenizer.vocab_size,
            end_ids=frozenset([END_ID]),
        )

    def _text_chunks(self, request: Request) -> Iterator[Chunk]:
        prompt = self.tokenizer._tokenizer.decode(request.prompt, skip_special_tokens=False)
        for text in answers(prompt, request.grammar):
            if request.grammar is None or self.admits(request.grammar, text):
                yield from FakeService(text, self.tokenizer)._text_chunks(request)
                return
        yield Chunk(0, 0, (), (), finish=FinishReason.ERROR, error="the script has no such text")

    def admits(self, grammar: Grammar, text: str) -> bool:
        """Return True if a text follows a grammar to its end."""
        tokens = self.tokenizer.encode(text, special=False)
        matcher = self._compiler.start(grammar)
        if matcher.num_valid(tokens) < len(tokens):
            return False
        matcher.write(0, tokens)
        return bool(matcher.bits()[END_ID // 32] >> END_ID % 32 & 1)


@contextmanager
def scripted_gateway() -> Iterator[RunningServer]:
    """Serve a scripted engine behind the real gateway."""
    engine = ScriptedEngine()
    with serving(
        engine,
        tokenizer=engine.tokenizer,
        max_context=CONTEXT,
        vocab_size=engine.tokenizer.vocab_size,
    ) as server:
        yield server
