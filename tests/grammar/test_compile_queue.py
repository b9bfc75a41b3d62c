"""Grammars are compiled beside the passes: a dear or broken one concerns its own texts alone."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from specserve.errors import SpecserveError
from specserve.grammar import compile_queue, sequences
from specserve.grammar.compile_queue import MAX_FINISHED, CompileQueue
from specserve.grammar.matcher import GrammarCompiler
from specserve.grammar.sequences import GrammarStates, SequenceGrammar, TextUpdate
from specserve.types import Grammar
from tests.support.constrained_texts import GRAMMAR, tiny_grammars

A, B, C = (Grammar("regex", letter) for letter in "abc")
SECONDS = 20.0


class Compiler:
    """A compiler that stands still until it is let go on."""

    def __init__(self) -> None:
        self.begun: list[Grammar] = []
        self.has_begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self, grammar: Grammar) -> Any:
        self.begun.append(grammar)
        self.has_begun.set()
        assert self.go_on.wait(SECONDS)
        if grammar == B:
            raise ValueError("no such rule")
        return grammar.text


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    made = Compiler()
    yield made
    made.go_on.set()


@pytest.fixture(autouse=True)
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_queue, "GRACE_S", 0.0)


def test_a_grammar_is_ready_once_it_is_compiled(compiler: Compiler) -> None:
    queue = CompileQueue(compiler)
    assert not queue.is_ready(A, until=-math.inf)
    compiler.go_on.set()
    assert queue.is_ready(A, until=math.inf)
    assert cast(object, queue.take(A)) == "a"
    assert queue._jobs == {}


def test_an_error_belongs_to_its_grammar_alone(compiler: Compiler) -> None:
    queue = CompileQueue(compiler)
    queue.request(B)
    queue.request(C)
    compiler.go_on.set()
    assert cast(object, queue.take(C)) == "c"
    with pytest.raises(ValueError, match="no such rule"):
        queue.take(B)


def test_a_grammar_that_takes_too_long_is_given_up_and_not_started_again(
    compiler: Compiler,
) -> None:
    clock = SimpleNamespace(now=0.0)
    queue = CompileQueue(compiler, clock=lambda: clock.now)
    queue.request(A)
    queue.request(C)
    assert compiler.has_begun.wait(SECONDS)
    clock.now = 2 * compile_queue.MAX_COMPILE_S
    assert queue.is_ready(A, until=-math.inf)
    assert not queue.is_ready(C, until=-math.inf), "its own time has not begun"
    with pytest.raises(SpecserveError, match="too long to compile"):
        queue.take(A)
    queue.request(A)
    compiler.go_on.set()
    assert cast(object, queue.take(C)) == "c"
    assert compiler.begun == [A, C]


def test_a_grammar_without_a_text_that_waits_is_not_compiled(compiler: Compiler) -> None:
    queue = CompileQueue(compiler)
    for grammar in (A, B, C):
        queue.request(grammar)
    assert compiler.has_begun.wait(SECONDS)
    queue.drop(B)
    compiler.go_on.set()
    queue.take(C)
    assert compiler.begun == [A, C]


def test_grammars_that_no_text_takes_are_dropped(compiler: Compiler) -> None:
    queue = CompileQueue(compiler)
    compiler.go_on.set()
    for i in range(3 * MAX_FINISHED):
        assert queue.is_ready(Grammar("regex", "a" * i), until=math.inf)
    assert len(queue._jobs) <= MAX_FINISHED + 1


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[GrammarCompiler, threading.Event]]:
    """Yield a compiler that stands still over grammars other than GRAMMAR, until the event."""
    grammars, go_on = tiny_grammars(), threading.Event()
    compile_grammar: Callable[[Grammar], Any] = grammars._compile

    def slowly(grammar: Grammar) -> Any:
        assert grammar == GRAMMAR or go_on.wait(SECONDS)
        return compile_grammar(grammar)

    grammars._queue = CompileQueue(slowly)
    monkeypatch.setattr(sequences, "PATIENCE_S", 0.0)
    yield grammars, go_on
    go_on.set()


def test_masks_of_a_pass_do_not_wait_for_a_grammar(
    held_up: tuple[GrammarCompiler, threading.Event],
) -> None:
    grammars, go_on = held_up
    grammars.start(GRAMMAR)
    states = GrammarStates(grammars)
    states.set_grammar(0, SequenceGrammar(A, 0))
    states.set_grammar(1, SequenceGrammar(GRAMMAR, 0))
    updates = [(row, TextUpdate(row, 0, ())) for row in range(2)]
    masks = states._masks(updates)
    assert (masks.undecided, masks.token_mask.rows.tolist()) == (frozenset({0}), [1])
    assert states._masks(updates[:1]).undecided == {0}
    go_on.set()
    assert grammars.is_ready(A, until=math.inf)
    masks = states._masks(updates)
    assert (masks.undecided, masks.token_mask.rows.tolist()) == (frozenset(), [0, 1])


def test_the_grammar_of_a_dropped_sequence_is_not_compiled(
    held_up: tuple[GrammarCompiler, threading.Event],
) -> None:
    grammars, _ = held_up
    states = GrammarStates(grammars)
    for seq_id, grammar in enumerate((A, B, B)):
        states.set_grammar(seq_id, SequenceGrammar(grammar, 0))
    states.release([1])
    assert B in grammars._queue._jobs, "another sequence waits for it"
    states.release([2])
    assert B not in grammars._queue._jobs
