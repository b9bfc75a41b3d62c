"""The interface of low-rank adapters (LoRA), a feature, to the passes of a target.

Knows steps and sequences; no files and no factors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from specserve.types import Adapter, Step, Verdict, VerifyStep


class Adapters(Protocol):
    """The adapters of a target: in memory when a pass begins, and applied to their own rows."""

    def verify(
        self,
        steps: Sequence[VerifyStep],
        verify: Callable[[Sequence[VerifyStep]], Sequence[Verdict]],
    ) -> Sequence[Verdict]:
        """Verify steps in one pass, or in more if their adapters do not fit in memory together."""
        ...

    def running(
        self, adapters: Sequence[Adapter | None], counts: Sequence[int]
    ) -> AbstractContextManager[None]:
        """Apply each sequence's adapter to its `counts[i]` rows of the pass that runs meanwhile."""
        ...

    def release(self, seq_ids: Sequence[int]) -> None:
        """Release what sequences that have ended hold."""
        ...


def adapters_of(steps: Sequence[Step], loaded: Adapters | None) -> AbstractContextManager[None]:
    """Return a context in which the network applies the adapters of these steps."""
    adapters = [step.adapter for step in steps]
    if loaded is None:
        assert not any(adapters), "a network without adaptable layers"
        return nullcontext()
    return loaded.running(adapters, [len(step.tokens) for step in steps])
