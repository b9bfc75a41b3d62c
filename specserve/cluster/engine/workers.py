"""Workers, which hold the models: a rank of the target, or the drafter.

Each lives in a process of its own (forked_worker.py) and answers one coordinator, over a link of
its own.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from specserve.checkpoint_files import draft_translation
from specserve.claimed_memory import ClaimedMemory
from specserve.cluster.engine.hidden_relay import MAX_SENT_BYTES, newest_states
from specserve.cluster.engine.long_lived import freeze_objects
from specserve.cluster.engine.placement_trial import try_placements, warm_drafter_up
from specserve.cluster.engine.rendezvous import find_store, join_ranks, open_store
from specserve.cluster.engine.worker_host import WorkerHello, WorkerReady, WorkerSite
from specserve.cluster.engine.worker_setup import (
    check_device,
    set_drafter_up,
    set_num_threads,
    warm_up_alone,
    worker_place,
)
from specserve.cluster.transport.endpoint import KeyPair
from specserve.cluster.transport.link import Server
from specserve.config.tree import Config
from specserve.drafters.after_verify import DraftAfterVerify
from specserve.drafters.registry import OpenDrafter, open_local_drafter
from specserve.engine.draft_placement import APART, PlacementChoice
from specserve.host import usable_cores
from specserve.models.checkpoints.widened_copy import target_checkpoint
from specserve.models.device_formats import resolve_device
from specserve.models.hidden_taps import HiddenRows, pack_hidden
from specserve.models.shard import Shard
from specserve.models.target import TargetModel, open_target
from specserve.models.warmup import require_finite, warm_up, warm_up_briefly
from specserve.types import Curve, ModelInfo, Span, Verdict
from specserve.wire.messages import (
    Failure,
    Message,
    PreparedProposals,
    Proposals,
    Propose,
    Stop,
    Verdicts,
    Verify,
)

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from specserve.models.target import TargetFollower

log = logging.getLogger(__name__)

# A drafter polls this long for its next message before it sleeps: the whole round waits for it, and
# a core takes long to wake up.
SPIN_S = 0.02


class TargetWorker:
    """One rank of the target. Call `open`, then `run`, which lasts for the rest of its life."""

    def __init__(self, site: WorkerSite, config: Config, client_key: bytes, rank: int) -> None:
        self._site, self._config, self._rank = site, config, rank
        self._server = Server(KeyPair.generate(), site.address, client_key)
        self._store: TCPStore | None = None
        self._model: TargetModel | TargetFollower | None = None
        self._drafter: DraftAfterVerify | None = None  # if the draft lives here
        self._to_draft: tuple[Verify, tuple[Verdict, ...]] | None = None
        self._idle_spans: tuple[Span, ...] = ()  # drafting since the last answer
        self._hidden: list[HiddenRows] = []  # of the pass under way, for a head apart

    def hello(self) -> WorkerHello:
        return WorkerHello(self._server.address, self._site.node, os.getpid())

    def find_checkpoint(self) -> None:
        """Download the checkpoint if this node lacks it, or make the demo's copy."""
        target_checkpoint(self._config)

    def open_rendezvous(self) -> tuple[str, int]:
        """Start the store where the ranks find one another, on rank 0; return its host and port."""
        self._store = open_store(self._site.address, self._size)
        return self._site.address, self._store.port

    def open(self, rendezvous: tuple[str, int] | None, curve: Curve | None) -> WorkerReady:
        """Load this rank's share of the weights and warm up. Call it on all ranks concurrently.

        A rank that replaces a lost one is given the `curve` of the first one, and warms up briefly.
        """
        target, draft = self._config.target, self._config.draft
        check_device(self._site, target.device)
        is_tried = draft.placement == "auto" and draft.may_be_apart
        is_apart = draft.may_be_apart and not is_tried
        set_num_threads(
            self._config.rank_threads(with_draft=not is_apart), sharers=self._size + is_apart
        )
        self._model = open_target(
            target_checkpoint(self._config),
            self._config,
            shard=None if rendezvous is None else self._join_ranks(rendezvous),
        )
        curve = self._warm_up(self._model, curve)
        draft_context = choice = None
        if isinstance(self._model, TargetModel):
            if draft.reads_sent_hidden:
                self._model.on_hidden = self._hidden.extend
            if draft.kind != "none" and not is_apart:
                draft_context = self._open_drafter(self._model)
            if is_tried:
                choice, curve = self._try_placements(self._model, curve)
            if (compiler := self._model.grammar_states.grammar_compiler) is not None:
                compiler.preload_tokenizer()
        freeze_objects()
        ClaimedMemory.claim_all()
        info = replace(self._model.info, curve=curve)
        return WorkerReady(
            self._server.address,
            worker_place(self._site, self._model.runner.device),
            info.max_context,
            info.num_pages,
            info,
            draft_context,
            choice,
        )

    def run(self) -> None:
        """Answer rounds until `Stop`. The worker is alive as long as this call lasts."""
        _serve(self._server, self._answer, self._draft, spin_s=0.0)

    def _warm_up(self, model: TargetModel | TargetFollower, curve: Curve | None) -> Curve:
        """Warm up and measure the curve; briefly, where one is known. Raises ModelError."""
        require_finite(model)
        if curve is None:
            return warm_up(model, timed=self._size == 1)
        warm_up_briefly(model)
        return curve

    def _open_drafter(self, model: TargetModel) -> int:
        """Open the drafter here, and return the context that it has."""
        drafter = open_local_drafter(self._config, model, draft_translation(self._config))
        self._drafter = DraftAfterVerify(drafter, model.runner.cache)
        if self._size == 1:
            warm_drafter_up(model, self._drafter)
        else:  # the other ranks take no part, so without a pass of the target
            assert isinstance(drafter, OpenDrafter), "the config has been checked"
            warm_up_alone(drafter, model.info)
        return drafter.context

    def _try_placements(self, model: TargetModel, curve: Curve) -> tuple[PlacementChoice, Curve]:
        """Measure both placements, and drop the drafter if it is better apart.

        Returns the choice, and the curve with the threads that the target has there.
        """
        assert self._drafter is not None
        target, draft = self._config.target, self._config.draft
        share = max(1, usable_cores() // (self._size + 1))
        choice, curve = try_placements(
            model,
            self._drafter,
            curve,
            self._config,
            target_threads=target.threads or share,
            draft_threads=draft.threads or share,
        )
        if choice.placement == APART:
            self._drafter = None
            set_num_threads(target.threads, sharers=self._size + 1)
        return choice, curve

    @property
    def _size(self) -> int:
        return self._config.target.tensor_parallel

    def _join_ranks(self, rendezvous: tuple[str, int]) -> Shard:
        target = self._config.target
        join_ranks(
            self._store or find_store(*rendezvous, self._size),
            self._rank,
            self._size,
            device=resolve_device(target.device),
        )
        return Shard(self._rank, self._size, gathers=target.degree_invariant)

    def _answer(self, message: Message) -> Message:
        assert self._model is not None
        assert isinstance(message, Verify)
        start = time.perf_counter()
        if self._drafter is not None:
            self._drafter.release(message.released)
        self._model.release(message.released)
        verdicts = tuple(self._model.verify(message.steps))
        hidden = newest_states(pack_hidden(self._hidden), MAX_SENT_BYTES)
        self._hidden.clear()
        spans = (*self._idle_spans, Span("verify", start, time.perf_counter()))
        self._to_draft, self._idle_spans = (message, verdicts), ()
        cache = self._model.runner.cache
        return Verdicts(
            message.number,
            verdicts,
            sum(span.end - span.start for span in spans),
            cache.num_used,
            cache.prefix_queries,
            cache.prefix_hits,
            spans,
            hidden,
        )

    def _draft(self) -> None:
        """Draft after the verdicts that have just been sent, and push the proposals."""
        todo, self._to_draft = self._to_draft, None
        if self._drafter is None or todo is None:
            return
        message, verdicts = todo
        start = time.perf_counter()
        prepared = self._drafter.draft_after(message.steps, verdicts)
        if message.wants_drafts:
            self._server.send(PreparedProposals(message.number, prepared))
            self._idle_spans = (Span("draft", start, time.perf_counter()),)


class DraftWorker:
    """Drafter on a device of its own. Between two messages it prepares likely next proposals."""

    def __init__(self, site: WorkerSite, config: Config, client_key: bytes) -> None:
        self._site, self._config = site, config
        self._server = Server(KeyPair.generate(), site.address, client_key)
        self._drafter: OpenDrafter | None = None
        self._idle_spans: tuple[Span, ...] = ()  # work done since the last answer
        self._number = 0  # of the last round

    def hello(self) -> WorkerHello:
        return WorkerHello(self._server.address, self._site.node, os.getpid())

    def open(self, target: ModelInfo) -> WorkerReady:
        """Load the weights and warm up."""
        self._drafter = set_drafter_up(self._config, self._site, target)
        return WorkerReady(
            self._server.address,
            worker_place(self._site, self._drafter.device),
            self._drafter.context,
            self._drafter.num_pages,
        )

    def run(self) -> None:
        """Answer rounds until `Stop`. The worker is alive as long as this call lasts."""
        _serve(self._server, self._answer, self._prepare, spin_s=SPIN_S)

    def _answer(self, message: Message) -> Message:
        assert self._drafter is not None
        assert isinstance(message, Propose)
        start, self._number = time.perf_counter(), message.number
        self._drafter.release(message.released)
        self._drafter.receive_hidden(message.hidden)
        proposals = tuple(self._drafter.propose(message.steps, start + message.deadline))
        ended = time.perf_counter()
        spans, self._idle_spans = (*self._idle_spans, Span("draft", start, ended)), ()
        return Proposals(
            message.number, proposals, ended - start, self._drafter.num_pages_used, spans
        )

    def _prepare(self) -> None:
        assert self._drafter is not None
        start = time.perf_counter()
        self._drafter.prepare(self._server.has_message)
        if not self._server.has_message() and (prepared := self._drafter.prepared_proposals()):
            self._server.send(PreparedProposals(self._number, prepared))
        self._idle_spans = (Span("anticipate", start, time.perf_counter()),)


def _serve(
    server: Server,
    answer: Callable[[Message], Message],
    idle: Callable[[], None],
    *,
    spin_s: float,
) -> None:
    """Answer each message, then call `idle`, until `Stop`.

    An exception is answered with a `Failure` of its round. One of `idle` has no round: it ends the
    worker, which is then replaced.
    """
    while not isinstance(message := server.receive(spin_s=spin_s), Stop):
        if not isinstance(message, (Propose, Verify)):
            continue
        try:
            server.send(answer(message))
        except Exception as error:
            log.exception("round %d failed", message.number)
            server.send(Failure.from_error(message.number, error))
        else:
            idle()
    server.close()
