"""Several drafters that write one proposal: the larger review what the smaller guess, and write the first positions. Knows no target.

docs/cascades.md has the algorithm (2312.11462), and why what comes out is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from specserve.drafters.base import Outlook
from specserve.drafters.cascade.sequence import Manuscript, stop_of
from specserve.drafters.cascade.stages import Ask, Stage, Tally, Writer
from specserve.drafters.neural.drafter import NeuralDrafter
from specserve.drafters.ngram.drafter import Learns
from specserve.drafters.ranking import Ranked, Sight, mode, ranked
from specserve.sampling.distribution import WarpBatch
from specserve.types import DraftStep, Proposal

NOTHING: tuple[int, ...] = ()


class Cascade:
    """Implements `base.Forks`. `stages` from the largest to the smallest; all but the last are neural. `writer` is made of them.

    It keeps every text itself, and reads to a stage what that has missed when it is asked.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        writer: Writer,
        tally: Tally,
        *,
        learner: Learns | None = None,
    ) -> None:
        assert isinstance(stages[0], NeuralDrafter)
        self._stages, self._writer, self._tally, self._learner = stages, writer, tally, learner
        self._first: NeuralDrafter = stages[0]
        self._scripts: dict[int, Manuscript] = {}

    @property
    def passes(self) -> tuple[int, ...]:
        """Of each stage until now: one that drafts by itself has one for each token of the longest draft in a batch."""
        return tuple(self._tally.passes)

    def draft(self, steps: Sequence[DraftStep], enough: Callable[[], bool]) -> Sequence[Proposal]:
        """A step that leaves a gap gets an empty proposal that says what is held."""
        scripts = {
            step.seq_id: self._opened(step)
            for step in steps
            if self._held(step.seq_id) >= step.start
        }
        wanted = [
            (scripts[step.seq_id], step.gamma)
            for step in steps
            if step.gamma and step.seq_id in scripts
        ]
        self._read(
            [scripts[step.seq_id] for step in steps if not step.gamma and step.seq_id in scripts]
        )
        asks = [
            Ask(script, script.start, script.start + gamma)
            for script, gamma in wanted
            if self._is_whole(script)
        ]
        if any(ask.lacks for ask in asks):
            self._writer.write(asks, enough)
        return [self._proposal(step, scripts.get(step.seq_id)) for step in steps]

    def release(self, seq_ids: Sequence[int]) -> None:
        for stage in self._stages:
            stage.release(seq_ids)
        for seq_id in seq_ids:
            self._scripts.pop(seq_id, None)

    @torch.inference_mode()
    def outlooks(self, seq_ids: Sequence[int], width: int) -> Sequence[Outlook]:
        """What the largest drafter thinks of it all, in one pass."""
        drafted = [
            script
            for seq_id in seq_ids
            if (script := self._scripts.get(seq_id)) is not None and script.laws
        ]
        steps = [script.unread(0, before=script.start) for script in drafted]
        fit = self._first.fitting(steps)
        going = [
            (script, step) for script, step, fits in zip(drafted, steps, fit, strict=True) if fits
        ]
        if not going:
            return []
        counts = [len(script.laws) + 1 for script, _ in going]
        logits = self._first.read([step for _, step in going], counts)
        logits = self._first.parses.allowed(
            [script.guessed(script.start) for script, _ in going]
        ).applied(logits)
        histories = [
            self._first.history(script.seq_id, script.start, script.policy) for script, _ in going
        ]
        adjusted = WarpBatch(
            [script.policy.warp for script, _ in going], counts, histories
        ).adjusted(logits)
        rows = iter(adjusted)
        places = iter(
            ranked([sight for script, _ in going for sight in _sights(script, rows)], width)
        )
        for script, _ in going:
            script.read[0] = len(script)
        return [
            _outlook(script, [next(places) for _ in range(count)])
            for (script, _), count in zip(going, counts, strict=True)
        ]

    def fork(self, seq_id: int, as_id: int, length: int) -> bool:
        """By every stage, as far as it has read; or by none."""
        script = self._scripts[seq_id]
        branch = script.forked(as_id, length)
        for number, stage in enumerate(self._stages):
            read = min(script.read[number], length)
            if read and not stage.fork(seq_id, as_id, read):
                for other in self._stages[:number]:
                    other.release([as_id])
                return False
            branch.read[number] = read
        self._scripts[as_id] = branch
        return True

    def become(self, seq_id: int, branch_id: int) -> None:
        """A stage that holds nothing of the branch starts anew."""
        script = self._scripts.pop(branch_id)
        for number, stage in enumerate(self._stages):
            if stage.held(branch_id):
                stage.become(seq_id, branch_id)
            else:
                stage.release([seq_id])
                script.read[number] = 0
        script.seq_id, script.is_branch = seq_id, False
        self._scripts[seq_id] = script

    def _held(self, seq_id: int) -> int:
        script = self._scripts.get(seq_id)
        return 0 if script is None else len(script)

    def _opened(self, step: DraftStep) -> Manuscript:
        """Its text, with what was begun for this very step, or with nothing behind it."""
        script = self._scripts.get(step.seq_id)
        if script is None:
            script = self._scripts[step.seq_id] = Manuscript(
                step.seq_id, step.policy, num_stages=len(self._stages)
            )
        if script.continues(step):
            return script
        script.commit(step)
        if self._learner is not None and not script.is_branch and script.start > script.learnt:
            self._learner.learn(script.tokens[max(script.learnt - 1, 0) :])
            script.learnt = script.start
        return script

    def _is_whole(self, script: Manuscript) -> bool:
        """A fork for which there was no room in the end left a stage without text: too much to read for a branch that may be of no use."""
        return not script.is_branch or all(
            stage.held(script.seq_id) >= read
            for stage, read in zip(self._stages, script.read, strict=True)
        )

    def _read(self, scripts: Sequence[Manuscript]) -> None:
        """Every stage reads what is committed: a long prompt comes in pieces, and is best read so."""
        for number, stage in enumerate(self._stages):
            steps = [script.asked(number, 0) for script in scripts]
            for script, proposal in zip(
                scripts, stage.draft(steps, bool) if steps else (), strict=True
            ):
                script.read[number] = min(proposal.held, len(script))

    def _proposal(self, step: DraftStep, script: Manuscript | None) -> Proposal:
        if script is None:
            return Proposal(step.seq_id, stop_of(step), NOTHING, None, self._held(step.seq_id))
        return script.proposal(step.gamma)


def _sights(script: Manuscript, rows: Iterator[Tensor]) -> list[Sight]:
    """Every place of the drafts, and the one behind them."""
    drafts: list[int | None] = [*script.tokens[script.start :], None]
    return [
        Sight(next(rows), script.policy, at, draft) for at, draft in enumerate(drafts, script.start)
    ]


def _outlook(script: Manuscript, places: Sequence[Ranked]) -> Outlook:
    return Outlook(
        script.seq_id,
        script.start,
        tuple(script.tokens[script.start :]),
        nexts=tuple(place.tokens for place in places),
        trust=tuple(place.trust for place in places[:-1]),
        shares=tuple(place.shares for place in places),
        mode=mode(script.policy),
    )
