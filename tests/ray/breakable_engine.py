"""An engine that a test breaks. Imports no torch, which each replica of it would import, too."""

from __future__ import annotations

from collections.abc import Sequence

from specserve.cluster.deployments import Engine
from specserve.errors import OutOfPages
from specserve.types import Chunk, FinishReason, Request, Verdict, VerifyStep


class BreakableEngine(Engine):
    """Engine whose target can be made to fail every pass while its workers live on."""

    _num_cancelled = 0
    _num_awaited = 0

    async def break_target(self) -> str:
        """Break the target of this replica, and return the replica's id."""

        async def fail(steps: Sequence[VerifyStep]) -> list[Verdict]:
            raise OutOfPages("no page is free")

        self._group.target.verify = fail  # type: ignore[method-assign]
        return self._replica

    async def replica(self) -> str:
        return self._replica

    async def await_submitted_and_cancelled(self, count: int) -> None:
        """Begin no round until this many sequences came; after the next tokens, until they left."""
        coordinator = self._coordinator
        submit, cancel = coordinator.submit, coordinator.cancel
        num_submitted = 0

        def submit_and_count(request: Request) -> int:
            nonlocal num_submitted
            seq_id = submit(request)
            num_submitted += 1
            if num_submitted == count:
                coordinator.submit = submit  # type: ignore[method-assign]
                coordinator.resume()
            return seq_id

        def cancel_and_count(seq_id: int) -> None:
            cancel(seq_id)
            self._num_awaited -= 1
            if self._num_awaited == 0:
                coordinator.cancel = cancel  # type: ignore[method-assign]
                coordinator.resume()

        self._num_awaited = count
        coordinator.submit = submit_and_count  # type: ignore[method-assign]
        coordinator.cancel = cancel_and_count  # type: ignore[method-assign]
        coordinator.pause()

    async def num_cancelled(self) -> int:
        """Return how many sequences were cancelled."""
        return self._num_cancelled

    def _emit(self, chunks: Sequence[Chunk]) -> None:
        self._num_cancelled += sum(chunk.finish is FinishReason.CANCELLED for chunk in chunks)
        super()._emit(chunks)
        if self._num_awaited and any(chunk.tokens for chunk in chunks):
            self._coordinator.pause()
