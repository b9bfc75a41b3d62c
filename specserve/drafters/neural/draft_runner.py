"""The interface of a model to a drafter: passes over the tokens of sequences, and their cache.

`models.runner.Runner` is one. Another may be spoken to in other ids than its model has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.models.cache import Fork
from specserve.models.runner import Runner
from specserve.types import Step


class DraftCache(Protocol):
    """The cached tokens of sequences, in the ids and positions of the steps that wrote them."""

    @property
    def page_size(self) -> int: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def num_free(self) -> int: ...
    @property
    def num_used(self) -> int: ...
    @property
    def prefix_queries(self) -> int: ...
    @property
    def prefix_hits(self) -> int: ...
    def check(self) -> None: ...
    def length(self, seq_id: int) -> int: ...
    def tokens(self, seq_id: int, start: int = 0, stop: int | None = None) -> NDArray[np.int64]: ...
    def holds(self, seq_id: int, start: int, tokens: Sequence[int]) -> bool: ...
    def append(self, seq_id: int, tokens: Sequence[int]) -> None: ...


class DraftPasses(Protocol):
    """Passes of one token a sequence, as `models.runner.DecodePasses`."""

    def logits(self, ids: Tensor) -> Tensor: ...  # [rows] -> [rows, vocab]


class DraftRunner(Protocol):
    """The methods of `models.runner.Runner` that a drafter calls."""

    @property
    def device(self) -> torch.device: ...
    @property
    def cache(self) -> DraftCache: ...
    @property
    def drawable(self) -> NDArray[np.bool_] | None:
        """Mask of the ids that can be drawn; None: all."""
        ...

    def positions(self, step: Step) -> range: ...
    def run(self, steps: Sequence[Step], num_logits: Sequence[int]) -> Tensor: ...
    def decode_passes(self, seq_ids: Sequence[int], counts: Sequence[int]) -> DraftPasses: ...
    def fork_many(self, forks: Sequence[Fork]) -> None: ...
    def promote_branch(self, seq_id: int, branch_id: int) -> None: ...
    def release(self, seq_ids: Sequence[int]) -> None: ...


Translate = Callable[[Runner, int, int], DraftRunner]
"""Makes a runner of a target's ids of one whose tokenizer is another.

The numbers count the model's ids and the target's.
"""
