"""An engine that a test breaks. Imports no torch, which each replica of it would import, too."""

from __future__ import annotations

from collections.abc import Sequence

from specserve.cluster.deployments import Engine
from specserve.errors import OutOfPages
from specserve.types import Chunk, FinishReason, Verdict, VerifyStep


class BreakableEngine(Engine):
    """Engine whose target can be made to fail every pass while its workers live on."""

    _num_cancelled = 0

    async def break_target(self) -> str:
        """Break the target of this replica, and return the replica's id."""

        async def fail(steps: Sequence[VerifyStep]) -> list[Verdict]:
            raise OutOfPages("no page is free")

        self._group.target.verify = fail  # type: ignore[method-assign]
        return self._replica

    async def replica(self) -> str:
        return self._replica

    async def num_cancelled(self) -> int:
        """Return how many sequences were cancelled."""
        return self._num_cancelled

    def _emit(self, chunks: Sequence[Chunk]) -> None:
        self._num_cancelled += sum(chunk.finish is FinishReason.CANCELLED for chunk in chunks)
        super()._emit(chunks)
