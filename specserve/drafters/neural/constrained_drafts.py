"""Drafting where some sequences have a grammar: its masks apply to q, and what it forces is taken without a pass. Knows no target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from specserve.drafters.neural.draft_state import Todo, certain
from specserve.drafters.neural.draws import Draws, Place, Source
from specserve.grammar.mask import Allowed
from specserve.grammar.matcher import Parse
from specserve.grammar.sequences import Parses
from specserve.models.runner import Runner
from specserve.sampling.distribution import History
from specserve.types import Policy, Step


@dataclass(frozen=True, slots=True, eq=False)
class Going:
    """A sequence on its way to `goal` draft tokens. Its parse, if it has a grammar, stands behind those that there are."""

    one: Todo
    parse: Parse | None
    goal: int

    @property
    def lacks(self) -> int:
        return self.goal - len(self.one.draft.tokens)

    def add(self, token: int, source: Source, row: int) -> None:
        self.one.draft.add(token, source, row)
        if self.parse is not None:
            self.parse.write(len(self.parse.tokens), (token,))

    def first_step(self, *, draws: bool) -> Step:
        """What there is to read, and, where a draw follows, what was forced behind it."""
        read, drafted = self.one.read, self.goal - self.one.wanted
        return (
            replace(read, tokens=read.tokens + tuple(self.one.draft.tokens[drafted:]))
            if draws
            else read
        )


class Constrained:
    """Token by token, as without grammars, but a pass may write several tokens of a sequence: those that were forced since the last."""

    def __init__(
        self,
        runner: Runner,
        parses: Parses,
        history: Callable[[int, int, Policy], History | None],
        *,
        support: int,
        shared_vocab: int,
    ) -> None:
        self._runner, self._parses, self._history = runner, parses, history
        self._support, self._vocab = support, shared_vocab

    def draw(self, todo: Sequence[Todo], enough: Callable[[], bool]) -> None:
        """Reads what is to be read, and draws what is wanted behind it. The last token, and forced ones before it, are not written."""
        going = [
            Going(one, self._parses.of(one.seq_id), len(one.draft.tokens) + one.wanted)
            for one in todo
        ]
        drawing = self._able(going)
        self._pass(
            [each.first_step(draws=each in drawing) for each in going],
            [int(each in drawing) for each in going],
            drawing,
        )
        while drawing and not enough():
            drawing = self._able(drawing)
            steps = [
                each.one.draft.unread(each.one.seq_id, self._runner.cache.length(each.one.seq_id))
                for each in drawing
            ]
            self._pass(steps, [1] * len(drawing), drawing)

    def masked(self, parses: Sequence[Parse | None], logits: Tensor) -> Tensor:  # [seqs, vocab]
        """Logits behind these texts without what may not come next."""
        found = [(row, parse.bits()) for row, parse in enumerate(parses) if parse is not None]
        return Allowed.of(found).applied(logits)

    def _able(self, going: Sequence[Going]) -> list[Going]:
        """Takes what is forced; those that want to draw what comes then."""
        for each in going:
            self._force(each)
        return [
            each
            for each in going
            if each.lacks > 0 and (each.parse is None or self._can_go_on(each.parse))
        ]

    def _force(self, each: Going) -> None:
        while each.parse is not None and (tokens := each.parse.forced(each.lacks)):
            for token in tokens:
                if token >= self._vocab:  # the target will see to it
                    return
                each.add(token, self._certain(token), 0)

    def _can_go_on(self, parse: Parse) -> bool:
        """Whether any token that the draft model knows may come next."""
        return not parse.is_over and bool(
            np.unpackbits(parse.bits().view(np.uint8), count=self._vocab, bitorder="little").any()
        )

    def _pass(self, steps: Sequence[Step], wanted: Sequence[int], drawing: Sequence[Going]) -> None:
        if not steps:
            return
        logits = self._runner.run(steps, wanted)[:, : self._vocab]
        if not drawing:
            return
        draws = Draws(
            [self._place(each.one) for each in drawing],
            support=self._support,
            device=self._runner.device,
        )
        draws.draw(self.masked([each.parse for each in drawing], logits))
        source = draws.drawn[0].fetched()
        for row, each in enumerate(drawing):
            each.add(source.tokens[row], source, row)

    def _place(self, one: Todo) -> Place:
        history = self._history(one.seq_id, self._runner.cache.length(one.seq_id), one.draft.policy)
        return Place(one.draft.start, len(one.draft.tokens), 1, one.draft.policy, history)

    def _certain(self, token: int) -> Source:
        return certain(
            token,
            width=min(self._support, self._vocab),
            vocab=self._vocab,
            device=self._runner.device,
        )
