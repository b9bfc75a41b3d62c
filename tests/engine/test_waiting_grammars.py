"""A grammar that is being compiled holds up the texts under it, and no other.

The target says that it is, and is queried again with each round.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from specserve.engine import Coordinator
from specserve.types import Chunk, FinishReason, Grammar, Request, Warp
from tests.support.fakes import (
    VOCAB,
    FakeDrafter,
    FakeTarget,
    model_info,
    open_coordinator,
    text,
)

DEAR, OTHER = Grammar("lark", "start: DEAR"), Grammar("lark", "start: OTHER")
PLAIN, CONSTRAINED = (5, 6, 7), (8, 9, 10, 11)


class Served:
    """An engine whose target has yet to compile a grammar."""

    def __init__(self, alpha: float | None = 0.7) -> None:
        info = model_info(end_ids=frozenset({VOCAB}))
        self.target, self.chunks = FakeTarget(info), list[Chunk]()
        self.target.uncompiled = {DEAR}
        self.coordinator: Coordinator = open_coordinator(
            self.target,
            None if alpha is None else FakeDrafter(alpha),
            info=info,
            emit=self.chunks.extend,
        )

    def submit(self, prompt: Sequence[int], grammar: Grammar | None = None) -> int:
        return self.coordinator.submit(Request((*prompt,), 20, Warp(), seed=3, grammar=grammar))

    def rounds(self, count: int) -> None:
        async def play() -> None:
            for _ in range(count):
                await self.coordinator.round()

        asyncio.run(play())

    def tokens(self, seq_id: int) -> tuple[int, ...]:
        return tuple(
            token for chunk in self.chunks if chunk.seq_id == seq_id for token in chunk.tokens
        )

    def asked(self) -> list[int]:
        """Return the sequences of the last pass."""
        return [step.seq_id for step in self.target.rounds[-1]]


@pytest.mark.parametrize("alpha", [None, 0.7])
def test_other_texts_are_written_meanwhile_and_the_constrained_one_is_whole(
    alpha: float | None,
) -> None:
    served = Served(alpha)
    dear, plain = served.submit(CONSTRAINED, DEAR), served.submit(PLAIN)
    other = served.submit(CONSTRAINED, OTHER)
    served.rounds(40)
    assert served.tokens(plain) == text(PLAIN, 20)
    assert served.tokens(other) == text(CONSTRAINED, 20)
    assert served.tokens(dear) == ()
    assert served.asked() == [dear]
    served.target.uncompiled.clear()
    served.rounds(40)
    assert served.tokens(dear) == text(CONSTRAINED, 20)
    assert not served.coordinator._live


def test_one_text_of_a_grammar_asks_for_all_of_them() -> None:
    served = Served()
    first, *others = [served.submit((*CONSTRAINED, i), DEAR) for i in range(8)]
    served.rounds(3)
    assert served.asked() == [first]
    served.coordinator.cancel(first)
    served.rounds(1)
    assert served.asked() == [others[0]], "another one asks in its place"
    served.target.uncompiled.clear()
    served.rounds(40)
    assert [served.tokens(seq_id) for seq_id in others] == [
        text((*CONSTRAINED, i), 20) for i in range(1, 8)
    ]


def test_a_text_that_waits_can_be_cancelled() -> None:
    served = Served()
    dear = served.submit(CONSTRAINED, DEAR)
    served.rounds(2)
    served.coordinator.cancel(dear)
    served.rounds(2)
    assert [chunk.finish for chunk in served.chunks] == [FinishReason.CANCELLED]
    assert served.target.caches == {}


def test_passes_that_may_wait_for_a_grammar_teach_the_pacer_nothing() -> None:
    served = Served(alpha=None)
    served.submit(PLAIN)
    served.submit(CONSTRAINED, DEAR)
    served.rounds(2)
    assert not served.coordinator._schedule().is_steady
    served.target.uncompiled.clear()
    served.rounds(1)
    assert served.coordinator._schedule().is_steady
