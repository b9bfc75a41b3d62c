"""The workers of an engine and the engine itself, in this process and without sockets.

Messages are packed and unpacked as on a link.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from specserve.cluster.engine.hidden_relay import HiddenRelay
from specserve.cluster.engine.remote import PushedProposals, RemoteDrafter, RemoteTarget
from specserve.cluster.engine.workers import DraftWorker, TargetWorker
from specserve.drafters.after_verify import AfterVerify, DraftAfterVerify
from specserve.drafters.registry import OpenDrafter
from specserve.hidden_states import HiddenStates
from specserve.models.target import TargetModel
from specserve.types import Chunk, Drafter, Request, Target
from specserve.wire.messages import Message, PreparedProposals, Propose, pack, unpack
from tests.support.engines import Answer, PacerLike, Run, finish
from tests.support.fakes import open_coordinator


class LocalWorker:
    """Client whose worker lives here: it answers, and pushes proposals a moment later."""

    def __init__(self, model: TargetModel, drafter: AfterVerify | None = None) -> None:
        """Create the worker; without a drafter it sends hidden states to one apart."""
        self.on_prepared: Callable[[PreparedProposals], None] | None = None
        self.is_late, self.num_pushed = False, 0
        worker: Any = object.__new__(TargetWorker)
        worker._model, worker._server = model, self
        worker._drafter = None if drafter is None else DraftAfterVerify(drafter, model.runner.cache)
        worker._to_draft, worker._idle_spans, worker._hidden = None, (), []
        if drafter is None:
            model.on_hidden = worker._hidden.extend
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


class LocalDraftWorker:
    """Client whose draft worker lives here and works on after each answer.

    With a generator the next message interrupts that after a random number of passes, and some
    messages leave no time for proposals that were not prepared.
    """

    def __init__(self, drafter: OpenDrafter, rng: np.random.Generator | None = None) -> None:
        self.on_prepared: Callable[[PreparedProposals], None] | None = None
        self.is_late, self.num_calls, self.num_pushed = False, 0, 0
        self.received: list[HiddenStates] = []
        self._rng, self._looks = rng, 1
        worker: Any = object.__new__(DraftWorker)
        worker._drafter, worker._server = drafter, self
        worker._idle_spans, worker._number = (), 0
        self._worker: DraftWorker = worker

    async def call(self, message: Message, timeout_s: float) -> Message:
        self.num_calls += 1
        message = _sent(message)
        assert isinstance(message, Propose)
        if self._rng is not None and self._rng.random() < 0.3:
            message = replace(message, deadline=0.0)
        self.received += message.hidden
        answer = _sent(self._worker._answer(message))
        self._looks = 1 if self._rng is None else int(self._rng.integers(1, 12))
        self._worker._prepare()  # at once: an engine without sockets leaves the loop no time
        return answer

    def has_message(self) -> bool:
        return self._rng is not None and bool(self._rng.random() < 1 / self._looks)

    def send(self, message: Message) -> None:
        """Push what the worker has prepared."""
        pushed = _sent(message)
        assert isinstance(pushed, PreparedProposals)
        assert self.on_prepared is not None
        self.num_pushed += bool(pushed.prepared_proposals)
        self.on_prepared(pushed)


def run_apart(
    model: TargetModel,
    drafter: OpenDrafter,
    requests: Sequence[Request],
    *,
    pacer: PacerLike | None = None,
    rng: np.random.Generator | None = None,
    relay: HiddenRelay | None = None,
    **options: Any,
) -> tuple[Run, LocalDraftWorker]:
    """Generate all requests at once with a head in a worker of its own."""
    relay, worker = relay or HiddenRelay(), LocalDraftWorker(drafter, rng)
    target: Any = RemoteTarget(deadline_s=30.0, relay=relay)
    target.attach([LocalWorker(model)])
    remote: Any = RemoteDrafter(deadline_s=30.0, relay=relay)
    remote.attach([worker])
    options = {"remote_workers": True, "drafts_prompts": False, **options}
    return _run(target, remote, model, requests, pacer, options), worker


def run_together(
    model: TargetModel,
    drafter: AfterVerify,
    requests: Sequence[Request],
    *,
    pacer: PacerLike | None = None,
    **options: Any,
) -> Run:
    """Generate all requests at once with a drafter in the target's worker."""
    target: Any = RemoteTarget(deadline_s=30.0)
    pushed = PushedProposals(target)
    target.attach([LocalWorker(model, drafter)])
    return _run(target, pushed, model, requests, pacer, options)


def _run(
    target: Target,
    drafter: Drafter,
    model: TargetModel,
    requests: Sequence[Request],
    pacer: PacerLike | None,
    options: dict[str, Any],
) -> Run:
    answers: dict[int, Answer] = {}

    def emit(chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            answers[chunk.seq_id].add(chunk)

    coordinator = open_coordinator(target, drafter, info=model.info, emit=emit, **options)
    if pacer is not None:
        coordinator.pacer = pacer  # type: ignore[assignment]
    for request in requests:
        answers[coordinator.submit(request)] = Answer()
    num_rounds = asyncio.run(finish(coordinator))
    return Run(list(answers.values()), coordinator.scheduler.num_preempted, num_rounds)


def _sent(message: Message) -> Message:
    """Return the message as it comes out of a link."""
    return unpack(pack(message))
