"""Several drafters that make one proposal: larger ones review what smaller ones draft.

The larger ones also write the first positions. Knows no target. docs/design/drafters.md has the
algorithm (2312.11462), and why its proposals are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from specserve.drafters.base import OutcomeForecast, never
from specserve.drafters.neural.drafter import NeuralDrafter
from specserve.drafters.ngram.tables import TrainableTable
from specserve.drafters.ranking import PositionLogits, rank_next_tokens
from specserve.features.cascade.sequence import CascadeSequence
from specserve.features.cascade.stages import (
    DraftRequest,
    PassCounter,
    StageDrafter,
    StageNode,
)
from specserve.sampling.distribution import WarpBatch
from specserve.types import DraftStep, Proposal, Step


class CascadeDrafter:
    """A drafter made of `stages`, from the largest to the smallest, all but the last neural.

    `node` is the tree that was built of them. The cascade keeps each sequence's tokens; a stage
    that was skipped is prefilled with the missing tokens before it is used. Implements
    `base.ForkableDrafter`.
    """

    def __init__(
        self,
        stages: Sequence[StageDrafter],
        node: StageNode,
        counter: PassCounter,
        *,
        learner: TrainableTable | None = None,
    ) -> None:
        assert isinstance(stages[0], NeuralDrafter)
        self._stages, self._node, self._counter, self._learner = stages, node, counter, learner
        self._first: NeuralDrafter = stages[0]
        self._sequences: dict[int, CascadeSequence] = {}

    @property
    def passes(self) -> tuple[int, ...]:
        """Number of passes of each stage.

        A stage that drafts alone counts one for each token of the longest draft in a batch.
        """
        return tuple(self._counter.passes)

    def draft(
        self, steps: Sequence[DraftStep], should_stop: Callable[[], bool]
    ) -> Sequence[Proposal]:
        """Return one proposal for each step, as `base.ResumableDrafter` says.

        A step that leaves a gap gets an empty proposal with the number of cached positions.
        """
        sequences = {
            step.seq_id: self._commit(step)
            for step in steps
            if self._length(step.seq_id) >= step.start
        }
        wanted = [
            (sequences[step.seq_id], step.gamma)
            for step in steps
            if step.gamma and step.seq_id in sequences
        ]
        self._prefill(
            [
                sequences[step.seq_id]
                for step in steps
                if not step.gamma and step.seq_id in sequences
            ]
        )
        requests = [
            DraftRequest(sequence, sequence.start, sequence.start + gamma)
            for sequence, gamma in wanted
            if self._is_worth_drafting(sequence)
        ]
        if any(request.num_missing for request in requests):
            self._node.extend(requests, should_stop)
        return [
            sequences[step.seq_id].proposal(step.gamma)
            if step.seq_id in sequences
            else Proposal(step.seq_id, step.stop, (), None, self._length(step.seq_id))
            for step in steps
        ]

    def release(self, seq_ids: Sequence[int]) -> None:
        for stage in self._stages:
            stage.release(seq_ids)
        for seq_id in seq_ids:
            self._sequences.pop(seq_id, None)

    @torch.inference_mode()
    def forecast_outcomes(
        self,
        seq_ids: Sequence[int],
        width: int,
        undrafted: Sequence[DraftStep] = (),
        extra_steps: Sequence[DraftStep] = (),
    ) -> Sequence[OutcomeForecast]:
        """Return the forecasts of the largest drafter, which takes one pass for all of them."""
        fitting = self._forecast_steps(seq_ids, undrafted)
        if not fitting:
            return []
        counts = [len(sequence.draft_probs) + 1 for sequence, _ in fitting]
        logits = self._first.compute_logits([step for _, step in fitting], counts)
        logits = self._first.grammar_states.mask_for(
            [sequence.drafted_sequence(sequence.start) for sequence, _ in fitting]
        ).apply(logits)
        histories = [
            self._first.history(sequence.seq_id, sequence.start, sequence.policy)
            for sequence, _ in fitting
        ]
        adjusted = WarpBatch(
            [sequence.policy.warp for sequence, _ in fitting], counts, histories
        ).adjust(logits)
        rows = iter(adjusted)
        rankings = rank_next_tokens(
            [_position_logits(sequence, rows) for sequence, _ in fitting], width
        )
        for sequence, _ in fitting:
            sequence.num_cached[0] = len(sequence)
        return [
            one.forecast(
                sequence.seq_id, sequence.start, sequence.tokens[sequence.start :], sequence.policy
            )
            for (sequence, _), one in zip(fitting, rankings, strict=True)
        ]

    def _forecast_steps(
        self, seq_ids: Sequence[int], undrafted: Sequence[DraftStep]
    ) -> list[tuple[CascadeSequence, Step]]:
        """Return the sequences to forecast, with the largest drafter's steps that fit."""
        drafted = [
            sequence
            for seq_id in seq_ids
            if (sequence := self._sequences.get(seq_id)) is not None and sequence.draft_probs
        ]
        drafted += [
            self._commit(step) for step in undrafted if self._length(step.seq_id) >= step.start
        ]
        steps = [sequence.missing_step(0, before=sequence.start) for sequence in drafted]
        fit = self._first.which_fit(steps)
        return [
            (sequence, step)
            for sequence, step, fits in zip(drafted, steps, fit, strict=True)
            if fits
        ]

    def fork(self, seq_id: int, branch_id: int, length: int) -> bool:
        """Fork the sequence in every stage, as far as the stage has cached it, or in none."""
        sequence = self._sequences[seq_id]
        branch = sequence.fork(branch_id, length)
        for number, stage in enumerate(self._stages):
            num_cached = min(sequence.num_cached[number], length)
            if num_cached and not stage.fork(seq_id, branch_id, num_cached):
                for other in self._stages[:number]:
                    other.release([branch_id])
                return False
            branch.num_cached[number] = num_cached
        self._sequences[branch_id] = branch
        return True

    def promote_branch(self, seq_id: int, branch_id: int) -> None:
        """Replace the sequence by the branch. A stage that has nothing of it starts afresh."""
        branch = self._sequences.pop(branch_id)
        for number, stage in enumerate(self._stages):
            if stage.num_cached(branch_id):
                stage.promote_branch(seq_id, branch_id)
            else:
                stage.release([seq_id])
                branch.num_cached[number] = 0
        branch.seq_id, branch.is_branch = seq_id, False
        self._sequences[seq_id] = branch

    def _length(self, seq_id: int) -> int:
        sequence = self._sequences.get(seq_id)
        return 0 if sequence is None else len(sequence)

    def _commit(self, step: DraftStep) -> CascadeSequence:
        """Return the sequence with the step's tokens, and with its draft tokens if it resumes."""
        sequence = self._sequences.get(step.seq_id)
        if sequence is None:
            sequence = self._sequences[step.seq_id] = CascadeSequence(
                step.seq_id, step.policy, num_stages=len(self._stages)
            )
        if sequence.can_resume(step):
            return sequence
        sequence.commit(step)
        if (
            self._learner is not None
            and not sequence.is_branch
            and sequence.start > sequence.num_learned
        ):
            self._learner.learn(sequence.tokens[max(sequence.num_learned - 1, 0) :])
            sequence.num_learned = sequence.start
        return sequence

    def _is_worth_drafting(self, sequence: CascadeSequence) -> bool:
        """Return False for a branch that a stage had no room to fork after all.

        The stage would have to prefill the whole text, for a branch that may be of no use.
        """
        return not sequence.is_branch or all(
            stage.num_cached(sequence.seq_id) >= num_cached
            for stage, num_cached in zip(self._stages, sequence.num_cached, strict=True)
        )

    def _prefill(self, sequences: Sequence[CascadeSequence]) -> None:
        """Prefill every stage with committed tokens, as a long prompt comes in chunks."""
        for number, stage in enumerate(self._stages):
            steps = [sequence.draft_step(number, 0) for sequence in sequences]
            for sequence, proposal in zip(
                sequences, stage.draft(steps, never) if steps else (), strict=True
            ):
                sequence.num_cached[number] = min(proposal.num_cached, len(sequence))


def _position_logits(sequence: CascadeSequence, rows: Iterator[Tensor]) -> list[PositionLogits]:
    """Return the logits at every draft token, and at the position after the last."""
    drafts: list[int | None] = [*sequence.tokens[sequence.start :], None]
    return [
        PositionLogits(next(rows), sequence.policy, position, draft)
        for position, draft in enumerate(drafts, sequence.start)
    ]
