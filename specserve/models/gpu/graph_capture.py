"""Capture of passes as CUDA graphs, and the check that a replay computes what the pass did.

Knows streams, graphs and ranks; no model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specserve.models.shard import Shard

TOLERANCE = 0.05
"""Difference of a replay's results from the pass's, which may run by other kernels."""


@dataclass(frozen=True, slots=True)
class CapturedPass:
    """A graph, and the tensor that its replays write their result into."""

    graph: torch.cuda.CUDAGraph
    result: Tensor


class GraphCapture:
    """Captures passes on one device, with one pool of memory for all their graphs.

    The ranks of a model capture the same passes in the same order, sums over the ranks included.
    """

    def __init__(self, device: torch.device, shard: Shard | None = None) -> None:
        self._device, self._shard = device, shard
        # Without these, torch captures what runs on the current device, whatever the model's is.
        with torch.cuda.device(device):
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def capture(self, run: Callable[[], Tensor], expected: Callable[[], Tensor]) -> CapturedPass:
        """Capture a pass, which runs twice before to warm its kernels up.

        `expected` runs on its own what a replay has to compute: a step is idempotent. Raises
        RuntimeError on all ranks if one of them cannot capture the pass, or replays another.
        """
        # A capture that fails leaves the thread on its own stream.
        own = torch.cuda.current_stream(self._device)
        with torch.cuda.device(self._device), torch.cuda.stream(own):
            side = self._stream
            side.wait_stream(own)
            with torch.cuda.stream(side):
                for _ in range(2):
                    run()
                wanted = expected()[-1].clone()
            own.wait_stream(side)
            graph, failure = torch.cuda.CUDAGraph(), None
            try:
                # Other threads may go on calling the driver meanwhile.
                with torch.cuda.graph(
                    graph, pool=self._pool, stream=side, capture_error_mode="thread_local"
                ):
                    result = run()
            except RuntimeError as error:
                failure = error
            self._agree(failure)
            result.zero_()  # an empty graph would leave the right result here
            graph.replay()
            is_close = torch.isclose(result[-1], wanted, rtol=TOLERANCE, atol=TOLERANCE)
            if not is_close.all().item():
                failure = RuntimeError("a replay gives other results than the pass")
            self._agree(failure)
        return CapturedPass(graph, result)

    def _agree(self, failure: RuntimeError | None) -> None:
        """Raise the failure, on the ranks that had none, too: a replay sums over all ranks."""
        is_good = failure is None
        if self._shard is not None:
            is_good = bool(self._shard.minimum(int(is_good), device=self._device))
        if failure is not None:
            raise failure
        if not is_good:
            raise RuntimeError("another rank cannot capture the pass")
