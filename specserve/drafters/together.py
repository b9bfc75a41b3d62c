"""Functions for drafters that use the network and the cache of a target in their process."""

from __future__ import annotations

from dataclasses import replace

from specserve.errors import UnsupportedModel
from specserve.models.network import ShareableNetwork
from specserve.models.target import TargetModel
from specserve.types import DraftStep, Proposal


def shareable_network(target: TargetModel) -> ShareableNetwork:
    """Return the target's network for a drafter to use, or raise UnsupportedModel."""
    if target.network is None:
        raise UnsupportedModel("draft.kind layer_skip and heads need a decoder-only target")
    return target.network


def cached_by_target(step: DraftStep, proposal: Proposal | None) -> Proposal:
    """Return the proposal, empty if there is none, as one whose positions are all cached.

    The drafter has what the target has, so the next step need not repeat it.
    """
    if proposal is None or not proposal.tokens:
        return Proposal(step.seq_id, step.stop, (), None, step.stop)
    return replace(proposal, num_cached=step.stop + len(proposal.tokens))
