"""Options of heads that read a target's hidden states, beside it and apart."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from specserve.config.tree import Config
from specserve.drafters.branch_budget import MAX_BRANCHES
from specserve.models.attention import GroupedAttention
from specserve.models.attention_kernels import invariant_kernel, sdpa_kernel
from specserve.models.cache import PagedCache
from specserve.models.checkpoints.find import find_checkpoint
from specserve.models.device_formats import resolve_device
from specserve.models.target import TargetModel
from specserve.types import ModelInfo

PAGES_FOR_BRANCHES = 2 * MAX_BRANCHES
"""Pages of a head apart beside its sequences' pages: each branch takes one or two."""


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """The device and format of a head, and what it has to know of its target."""

    device: torch.device
    dtype: str
    num_pages: int
    page_size: int
    prefix_caching: bool
    vocab_size: int  # the target's
    context: int
    support: int = 64
    kernel: str = "auto"  # of linear layers on CPUs

    @classmethod
    def beside(
        cls, target: TargetModel, *, dtype: str, support: int, pages: int | None, kernel: str
    ) -> HeadOptions:
        """Return the options of a head in its target's process; as many pages, if not stated."""
        cache = target.runner.cache
        return cls(
            cache.device,
            dtype,
            pages or cache.num_pages,
            cache.page_size,
            cache.prefix_caching,
            target.info.vocab_size,
            target.info.max_context,
            support,
            kernel,
        )

    @classmethod
    def apart(cls, config: Config, target: ModelInfo) -> HeadOptions:
        """Return the options of a head on a device of its own."""
        draft = config.draft
        anticipates = config.speculation.anticipation.enabled
        return cls(
            resolve_device(draft.device),
            draft.dtype,
            target.num_pages + (PAGES_FOR_BRANCHES if anticipates else 0),
            target.page_size,
            target.prefix_caching,
            target.vocab_size,
            target.max_context,
            draft.support,
            config.weights.kernel,
        )

    def make_cache(
        self,
        *,
        num_layers: int,
        kv_heads: int,
        head_dim: int,
        v_head_dim: int,
        state_width: int,
        dtype: torch.dtype,
    ) -> PagedCache:
        return PagedCache(
            num_layers=num_layers,
            kv_heads=kv_heads,
            head_dim=head_dim,
            v_head_dim=v_head_dim,
            state_width=state_width,
            num_pages=self.num_pages,
            page_size=self.page_size,
            dtype=dtype,
            device=self.device,
            prefix_caching=self.prefix_caching,
        )

    def grouped_attention(self) -> GroupedAttention:
        return GroupedAttention(sdpa_kernel if self.device.type == "cuda" else invariant_kernel)


def find_head(config: Config) -> Path:
    """Return the directory of the head of a config."""
    draft = config.draft
    assert draft.path is not None, "the config has been checked"
    return find_checkpoint(draft.path, revision=draft.revision, key="draft.path")
