"""Draft with some of the target's own layers, on its own KV cache. Exact as every drafter is.

A round's draft tokens are written where the target will write the same positions a moment later:
its step begins at the newest token, drops what lies there, and writes all of its layers. So nothing
that was drafted is ever attended to by a whole pass, no prefix cache can find it, and no prompt is
prefilled twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specserve.drafters.neural.drafter import NeuralDrafter
from specserve.drafters.together import cached_by_target, shareable_network
from specserve.models.runner import Runner
from specserve.models.target import TargetModel
from specserve.types import DraftStep, Proposal


class LayerSkipDrafter:
    """A drafter on the target's pages.

    A sequence's prefix is cached by the whole model, which is better than by fewer layers.
    """

    def __init__(self, target: TargetModel, skip: Sequence[int], *, support: int) -> None:
        shared, self.context = target.runner, target.info.max_context
        runner = Runner(
            shareable_network(target).without_layers(skip),
            shared.cache,
            device=shared.device,
            pad_to_bucket=shared.pad_to_bucket,
        )
        size = target.info.vocab_size
        self._drafter = NeuralDrafter(
            runner,
            vocab_size=size,
            target_vocab_size=size,
            context=self.context,
            support=support,
            grammar_states=target.grammar_states,
        )

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]:
        """Return proposals for sequences whose last pass was the target's.

        The target has cached them up to the newest token. The draft tokens are dropped at once: the
        target drops them from its pages, and resuming them later would declare them committed.
        """
        wanted = [
            replace(step, start=step.stop - 1, tokens=step.tokens[-1:])
            for step in steps
            if step.gamma and self._is_cached(step)
        ]
        drafted = {
            proposal.seq_id: proposal for proposal in self._drafter.propose(wanted, deadline)
        }
        self._drafter.drop_drafts([step.seq_id for step in wanted])
        return [cached_by_target(step, drafted.get(step.seq_id)) for step in steps]

    def release(self, seq_ids: Sequence[int]) -> None:
        """Do nothing: the target releases the pages."""

    def _is_cached(self, step: DraftStep) -> bool:
        """Return whether the target has cached all but the newest token."""
        cache = self._drafter.runner.cache
        return cache.length(step.seq_id) >= step.stop - 1 and cache.holds(
            step.seq_id, step.start, step.tokens[:-1]
        )
