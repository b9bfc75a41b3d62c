"""A target's worker and the engine in front of it, in this process and without sockets.

Messages are packed and unpacked as on a link.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from specserve.cluster.remote import PushedProposals, RemoteTarget
from specserve.cluster.workers import TargetWorker
from specserve.drafters.after_verify import AfterVerify, DraftAfterVerify
from specserve.models.target import TargetModel
from specserve.types import Chunk, Request
from specserve.wire.messages import Message, PreparedProposals, pack, unpack
from tests.support.engines import Answer, PacerLike, Run, finish
from tests.support.fakes import open_coordinator


class LocalWorker:
    """Client whose worker lives here: it answers, and pushes proposals a moment later."""

    def __init__(self, model: TargetModel, drafter: AfterVerify) -> None:
        self.on_prepared: Callable[[PreparedProposals], None] | None = None
        self.is_late, self.num_pushed = False, 0
        worker: Any = object.__new__(TargetWorker)
        worker._model, worker._server = model, self
        worker._drafter = DraftAfterVerify(drafter, model.runner.cache)
        worker._to_draft, worker._idle_spans = None, ()
        self._worker: TargetWorker = worker

    async def call(self, message: Message, timeout_s: float) -> Message:
        answer = self._worker._answer(_sent(message))
        asyncio.get_running_loop().call_soon(self._worker._draft)
        return _sent(answer)

    def send(self, message: Message) -> None:
        """Push what the worker sends between two answers."""
        pushed = _sent(message)
        assert isinstance(pushed, PreparedProposals)
        assert self.on_prepared is not None
        self.num_pushed += bool(pushed.prepared_proposals)
        self.on_prepared(pushed)


def run_together(
    model: TargetModel,
    drafter: AfterVerify,
    requests: Sequence[Request],
    *,
    pacer: PacerLike | None = None,
    **options: Any,
) -> Run:
    """Generate all requests at once with a drafter in the target's worker."""
    answers: dict[int, Answer] = {}

    def emit(chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            answers[chunk.seq_id].add(chunk)

    target: Any = RemoteTarget(deadline_s=30.0)
    pushed = PushedProposals(target)
    target.attach([LocalWorker(model, drafter)])
    coordinator = open_coordinator(target, pushed, info=model.info, emit=emit, **options)
    if pacer is not None:
        coordinator.pacer = pacer  # type: ignore[assignment]
    for request in requests:
        answers[coordinator.submit(request)] = Answer()
    num_rounds = asyncio.run(finish(coordinator))
    return Run(list(answers.values()), coordinator.scheduler.num_preempted, num_rounds)


def _sent(message: Message) -> Message:
    """Return the message as it comes out of a link."""
    return unpack(pack(message))
