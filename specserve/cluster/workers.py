"""The actors that hold the models: one rank of the target, or what drafts. Each answers one coordinator, over a link of its own."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING

import ray
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from specserve.cluster.transport.link import Address, Keys, Server
from specserve.config.tree import WITHOUT_WORKER, Config
from specserve.drafters.heads import HeadsDrafter, Unasked
from specserve.drafters.registry import open_drafter
from specserve.grammar.matcher import Grammars
from specserve.models.checkpoints.find import TOKENIZER_FILES, find_checkpoint, find_config
from specserve.models.checkpoints.load import load_tokenizer
from specserve.models.rank import open_rank
from specserve.models.shard import Shard
from specserve.models.target import TargetModel
from specserve.models.warmup import SEQUENCE, warm_up
from specserve.types import DraftStep, ModelInfo, Policy, Span, Verdict, Warp
from specserve.wire.messages import (
    Failed,
    Message,
    Prepared,
    Proposals,
    Propose,
    Stop,
    Verdicts,
    Verify,
)

if TYPE_CHECKING:
    from specserve.drafters.registry import OpenDrafter
    from specserve.models.rank import Follower

log = logging.getLogger(__name__)

RENDEZVOUS = timedelta(minutes=5)  # within which all ranks must have come
WATCH_S = 0.02  # that a drafter looks for its next message before it sleeps: everyone waits for it, and a core takes long to wake up
NICENESS = 5  # of a drafter on CPUs: it works all the time, and who shares its cores (coordinator, gateway) has little to do, at once
WARM_LENGTHS = (64, 8, 1)  # rows of the first passes of a drafter


@dataclass(frozen=True, slots=True)
class Place:
    """Where a worker runs."""

    node: str  # Ray's id of it
    pid: int
    device: str
    accelerators: tuple[str, ...]  # Ray's ids of those that are its own


@dataclass(frozen=True, slots=True)
class Born:
    """What a worker says of itself before it has read anything: from then on its silence is noticed."""

    address: Address
    node: str
    pid: int


@dataclass(frozen=True, slots=True)
class Ready:
    """What a worker says of itself once it can work."""

    address: Address
    place: Place
    context: int  # positions that one sequence may have
    num_pages: int
    info: ModelInfo | None = None  # of a target
    drafts: bool = False  # a target whose rank 0 drafts, too


class TargetWorker:
    """One rank of the target. `open`, then `run` for the rest of its life."""

    def __init__(self, config: Config, rank: int, admits: bytes) -> None:
        self._config, self._rank = config, rank
        self._server = Server(Keys.fresh(), ray.util.get_node_ip_address(), admits)
        self._store: TCPStore | None = None
        self._model: TargetModel | Follower | None = None
        self._unasked: Unasked | None = None

    def born(self) -> Born:
        return _born(self._server)

    def meet(self) -> tuple[str, int]:
        """Of rank 0: opens the place where the ranks find one another; its host and port."""
        host = ray.util.get_node_ip_address()
        self._store = TCPStore(
            host, 0, self._size, is_master=True, wait_for_workers=False, timeout=RENDEZVOUS
        )
        return host, self._store.port

    def open(self, meeting: tuple[str, int] | None) -> Ready:
        """Reads this rank's share of the weights and warms up. Every rank must be told to, at the same time."""
        own = self._config.target
        _use_threads(
            own.threads,
            sharers=own.tensor_parallel + (self._config.draft.kind not in WITHOUT_WORKER),
        )
        self._model = open_rank(
            find_checkpoint(own.path, revision=own.revision),
            self._config,
            shard=self._joined(meeting),
        )
        info = replace(self._model.info, curve=warm_up(self._model, timed=self._size == 1))
        if self._config.draft.kind == "heads":
            assert isinstance(self._model, TargetModel), "the only rank judges"
            self._unasked = Unasked(HeadsDrafter.of(self._config, self._model))
        if isinstance(self._model, TargetModel):
            self._model.parses.warm()
        _settle()
        return Ready(
            self._server.address,
            _place(self._model.runner.device),
            info.max_context,
            info.num_pages,
            info,
            self._unasked is not None,
        )

    def run(self) -> None:
        """Answers until it is told to stop. While this call is under way, the worker is alive."""
        _answer_all(self._server, self._answer, _rest, watch_s=0.0)

    @property
    def _size(self) -> int:
        return self._config.target.tensor_parallel

    def _joined(self, meeting: tuple[str, int] | None) -> Shard | None:
        if meeting is None:
            return None
        store = self._store or TCPStore(*meeting, self._size, is_master=False, timeout=RENDEZVOUS)
        on_cuda = self._config.target.device != "cpu" and torch.cuda.is_available()
        dist.init_process_group(
            "nccl" if on_cuda else "gloo", store=store, rank=self._rank, world_size=self._size
        )
        return Shard(self._rank, self._size)

    def _answer(self, message: Message) -> Message:
        assert self._model is not None
        assert isinstance(message, Verify)
        begun = time.perf_counter()
        self._model.release(message.released)
        verdicts = tuple(self._model.verify(message.steps))
        spans = [Span("verify", begun, time.perf_counter())]
        if self._unasked is not None:
            spans.append(self._draft(self._unasked, message, verdicts))
        cache, seconds = self._model.runner.cache, spans[-1].ended - begun
        return Verdicts(
            message.number,
            verdicts,
            seconds,
            cache.num_used,
            cache.prefix_queries,
            cache.prefix_hits,
            tuple(spans),
        )

    def _draft(self, unasked: Unasked, message: Verify, verdicts: Sequence[Verdict]) -> Span:
        """Sent before the verdicts: these call for the next round, which would find no proposals if they came later."""
        begun = time.perf_counter()
        unasked.release(message.released)
        if foreseen := unasked.after(message.steps, verdicts):
            self._server.send(Prepared(message.number, foreseen))
        return Span("draft", begun, time.perf_counter())


class DraftWorker:
    """What drafts, on a device of its own. Between two messages it prepares what the next one is likely to ask for."""

    def __init__(self, config: Config, admits: bytes) -> None:
        self._config = config
        self._server = Server(Keys.fresh(), ray.util.get_node_ip_address(), admits)
        self._drafter: OpenDrafter | None = None
        self._prepared: tuple[Span, ...] = ()  # since the last answer
        self._number = 0  # of the last round

    def born(self) -> Born:
        return _born(self._server)

    def open(self, target: ModelInfo) -> Ready:
        """Reads the weights and warms up."""
        own = self._config.draft
        _use_threads(own.threads, sharers=self._config.target.tensor_parallel + 1)
        grammars = Grammars.of(
            self._tokenizer, vocab_size=target.vocab_size, end_ids=target.end_ids
        )
        self._drafter = open_drafter(
            self._config, target_vocab_size=target.vocab_size, grammars=grammars, alone=True
        )
        for rows in WARM_LENGTHS:
            source = () if target.decoder_start is None else (0,)
            self._drafter.propose(
                [_draft_step(min(rows, self._drafter.context - 2), source)], float("inf")
            )
            self._drafter.prepare(bool)
            self._drafter.release([SEQUENCE])
        _settle()
        if own.device == "cpu" or not torch.cuda.is_available():
            os.nice(NICENESS)
        return Ready(
            self._server.address,
            _place(self._drafter.device),
            self._drafter.context,
            self._drafter.num_pages,
        )

    def run(self) -> None:
        """Answers until it is told to stop. While this call is under way, the worker is alive."""
        _answer_all(self._server, self._answer, self._prepare, watch_s=WATCH_S)

    def _tokenizer(self) -> str:
        """The target's: a draft has the same, if it has one at all."""
        own = self._config.target
        return load_tokenizer(find_config(own.path, revision=own.revision, wanted=TOKENIZER_FILES))

    def _answer(self, message: Message) -> Message:
        assert self._drafter is not None
        assert isinstance(message, Propose)
        begun, self._number = time.perf_counter(), message.number
        self._drafter.release(message.released)
        proposals = tuple(self._drafter.propose(message.steps, begun + message.deadline))
        ended = time.perf_counter()
        spans, self._prepared = (*self._prepared, Span("draft", begun, ended)), ()
        return Proposals(
            message.number, proposals, ended - begun, self._drafter.num_pages_used, spans
        )

    def _prepare(self) -> None:
        assert self._drafter is not None
        begun = time.perf_counter()
        self._drafter.prepare(self._server.waiting)
        if not self._server.waiting() and (foreseen := self._drafter.foreseen()):
            self._server.send(Prepared(self._number, foreseen))
        self._prepared = (Span("anticipate", begun, time.perf_counter()),)


def _born(server: Server) -> Born:
    return Born(server.address, ray.get_runtime_context().get_node_id(), os.getpid())


def _answer_all(
    server: Server,
    answer: Callable[[Message], Message],
    rest: Callable[[], None],
    *,
    watch_s: float,
) -> None:
    """One answer for each message, then whatever there is to do until the next. A failure is an answer too, of the round that asked."""
    while not isinstance(message := server.receive(None, watch_s=watch_s), Stop):
        if not isinstance(message, (Propose, Verify)):
            continue
        try:
            server.send(answer(message))
            rest()
        except Exception as error:
            log.exception("round %d failed", message.number)
            server.send(
                Failed(message.number, type(error).__name__, str(error) or type(error).__name__)
            )
    server.close()


def _rest() -> None:
    """A target has nothing to do between two rounds."""


def _settle() -> None:
    """What was made until now stays; the collector need not look at it again and again."""
    gc.collect()
    gc.freeze()


def _use_threads(wanted: int | None, *, sharers: int) -> None:
    """On CPUs: what the config says, or else a fair share of this node's cores, as if all workers were on it."""
    torch.set_num_threads(wanted or max(1, (os.cpu_count() or 1) // sharers))


def _place(device: torch.device) -> Place:
    context = ray.get_runtime_context()
    return Place(
        context.get_node_id(),
        os.getpid(),
        str(device),
        tuple(context.get_accelerator_ids().get("GPU", ())),
    )


def _draft_step(rows: int, source: tuple[int, ...]) -> DraftStep:
    return DraftStep(
        SEQUENCE,
        0,
        (0,) * max(1, rows),
        2,
        Policy(Warp(), "block", seed=0, prompt_length=rows),
        source,
    )
