"""Two ranks of a target in a test: rank 0 has the coordinator, and the other takes its steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from specserve.models.target import TargetFollower, TargetModel
from specserve.types import Verdict, VerifyStep


class BroadcastTarget:
    """Rank 0 of a target, which makes the other rank take the same steps."""

    def __init__(self, inner: TargetModel) -> None:
        self.inner, self.info, self.runner = inner, inner.info, inner.runner

    def verify(self, steps: Sequence[VerifyStep]) -> Sequence[Verdict]:
        dist.broadcast_object_list([("verify", steps)], src=0)
        return self.inner.verify(steps)

    def release(self, seq_ids: Sequence[int]) -> None:
        dist.broadcast_object_list([("release", seq_ids)], src=0)
        self.inner.release(seq_ids)

    def end(self) -> None:
        """Let the other rank stop following."""
        dist.broadcast_object_list([None], src=0)


def follow(target: TargetFollower) -> None:
    """Take the steps of rank 0 on the other rank, until None arrives."""
    while True:
        order: list[Any] = [None]
        dist.broadcast_object_list(order, src=0)
        if order[0] is None:
            return
        name, argument = order[0]
        getattr(target, name)(argument)
