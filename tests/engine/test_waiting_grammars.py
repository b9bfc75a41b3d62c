"""A grammar that is being compiled holds up the texts under it, and no other.

The target says that it is, and is queried again with each round.
"""

from __future__ import annotations

import pytest

from specserve.types import FinishReason, Grammar
from tests.support.fakes import (
    VOCAB,
    model_info,
    text,
)
from tests.support.served import Served

DEAR, OTHER = Grammar("lark", "start: DEAR"), Grammar("lark", "start: OTHER")
PLAIN, CONSTRAINED = (5, 6, 7), (8, 9, 10, 11)


def serve(alpha: float | None = 0.7) -> Served:
    """Open an engine whose target has yet to compile a grammar."""
    served = Served(alpha=alpha, info=model_info(end_ids=frozenset({VOCAB})))
    served.target.uncompiled = {DEAR}
    return served


def asked(served: Served) -> list[int]:
    """Return the sequences of the last pass."""
    return [step.seq_id for step in served.target.rounds[-1]]


@pytest.mark.parametrize("alpha", [None, 0.7])
def test_other_texts_are_written_meanwhile_and_the_constrained_one_is_whole(
    alpha: float | None,
) -> None:
    served = serve(alpha)
    dear, plain = served.submit(*CONSTRAINED, grammar=DEAR), served.submit(*PLAIN)
    other = served.submit(*CONSTRAINED, grammar=OTHER)
    served.rounds(40)
    assert served.tokens(plain) == text(PLAIN, 20)
    assert served.tokens(other) == text(CONSTRAINED, 20)
    assert served.tokens(dear) == ()
    assert asked(served) == [dear]
    served.target.uncompiled.clear()
    served.rounds(40)
    assert served.tokens(dear) == text(CONSTRAINED, 20)
    assert not served.coordinator._live


def test_one_text_of_a_grammar_asks_for_all_of_them() -> None:
    served = serve()
    first, *others = [served.submit(*CONSTRAINED, i, grammar=DEAR) for i in range(8)]
    served.rounds(3)
    assert asked(served) == [first]
    served.coordinator.cancel(first)
    served.rounds(1)
    assert asked(served) == [others[0]], "another one asks in its place"
    served.target.uncompiled.clear()
    served.rounds(40)
    assert [served.tokens(seq_id) for seq_id in others] == [
        text((*CONSTRAINED, i), 20) for i in range(1, 8)
    ]


def test_a_text_that_waits_can_be_cancelled() -> None:
    served = serve()
    dear = served.submit(*CONSTRAINED, grammar=DEAR)
    served.rounds(2)
    served.coordinator.cancel(dear)
    served.rounds(2)
    assert [chunk.finish for chunk in served.chunks(dear)] == [FinishReason.CANCELLED]
    assert served.target.caches == {}


def test_passes_that_may_wait_for_a_grammar_teach_the_pacer_nothing() -> None:
    served = serve(alpha=None)
    served.submit(*PLAIN)
    served.submit(*CONSTRAINED, grammar=DEAR)
    served.rounds(2)
    assert not served.coordinator._schedule().is_steady
    served.target.uncompiled.clear()
    served.rounds(1)
    assert served.coordinator._schedule().is_steady
