"""Draft with an EAGLE-3 head: a layer over the target's hidden states, with a cache of its own.

It drafts as a model does, token by token. What it adds is where its rows get their states from, and
that rows of draft tokens are computed again once the target's own states are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specserve.config.tree import Config
from specserve.drafters.neural.drafter import NeuralDrafter
from specserve.grammar.sequences import GrammarStates
from specserve.models.attention import GroupedAttention, invariant_kernel, sdpa_kernel
from specserve.models.cache import PagedCache
from specserve.models.checkpoints.find import find_checkpoint
from specserve.models.eagle.checkpoint import EagleInfo, EagleWeights
from specserve.models.eagle.network import KEY_PADDING, EagleNetwork, EagleProjection
from specserve.models.eagle.states import TargetStates
from specserve.models.layers import PrivateWeights, linear_weights
from specserve.models.model import resolve_dtype
from specserve.models.runner import Runner
from specserve.models.target import TargetModel
from specserve.types import DraftStep, Proposal


class EagleDrafter(NeuralDrafter):
    """A drafter that runs a head on the states of a target in the same process."""

    def __init__(self, runner: Runner, states: TargetStates, **options: Any) -> None:
        """Create a drafter; `options` are those of `NeuralDrafter`."""
        super().__init__(runner, **options)
        self._target_states = states
        runner.on_written = states.store

    @classmethod
    def from_config(cls, config: Config, target: TargetModel) -> EagleDrafter:
        """Open the head of a config, and let the target hand its hidden states over."""
        draft = config.draft
        assert draft.path is not None, "the config has been checked"
        return cls.from_files(
            find_checkpoint(draft.path, revision=draft.revision),
            target,
            dtype=draft.dtype,
            support=draft.support,
            kernel=config.weights.kernel,
        )

    @classmethod
    def from_files(
        cls,
        directory: Path,
        target: TargetModel,
        *,
        dtype: str = "auto",
        support: int = 64,
        pages: int | None = None,  # None: as many as the target's
        kernel: str = "auto",
    ) -> EagleDrafter:
        """Open a head that has been checked to be of this target."""
        cache, info = target.runner.cache, EagleInfo.from_directory(directory)
        assert target.network is not None, "the config has been checked"
        weights = EagleWeights(directory, info)
        number_format = resolve_dtype(dtype, cache.device)
        own_cache = PagedCache(
            num_layers=1,
            kv_heads=info.layer.num_key_value_heads,
            head_dim=info.layer.head_dim + KEY_PADDING,
            v_head_dim=info.layer.head_dim,
            state_width=info.layer.hidden_size,
            num_pages=pages or cache.num_pages,
            page_size=cache.page_size,
            dtype=number_format,
            device=cache.device,
            prefix_caching=cache.prefix_caching,
        )
        embedding = (
            weights.read("embed_tokens.weight").to(cache.device, number_format)
            if "embed_tokens.weight" in weights
            else target.network.embedding
        )
        with linear_weights(PrivateWeights(kernel)):
            network = EagleNetwork(
                weights,
                own_cache,
                embedding=embedding,
                attention=GroupedAttention(
                    sdpa_kernel if cache.device.type == "cuda" else invariant_kernel
                ),
                context=target.info.max_context,
            )
            projection = EagleProjection(weights, dtype=number_format, device=cache.device)
        states = TargetStates(own_cache, projection)
        target.on_hidden = states.receive
        return cls(
            Runner(network, own_cache, device=cache.device),
            states,
            vocab_size=target.info.vocab_size,
            target_vocab_size=target.info.vocab_size,
            context=target.info.max_context,
            support=support,
            grammar_states=GrammarStates(target.grammar_states.grammar_compiler),
        )

    def release(self, seq_ids: Sequence[int]) -> None:
        super().release(seq_ids)
        self._target_states.release(seq_ids)

    def _proposal(self, step: DraftStep) -> Proposal:
        """Return the proposal, with the rows of its draft tokens not counted as cached.

        They were computed from the head's own states, so the next step repeats those accepted.
        """
        proposal = super()._proposal(step)
        return replace(proposal, num_cached=min(proposal.num_cached, step.stop))
