"""Send the chunks of an engine's requests to their gateways. Knows no Ray and no workers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from specserve.cluster.transport.chunk_stream import ChunkSender
from specserve.cluster.transport.endpoint import Address, KeyPair
from specserve.errors import Displaced, SpecserveError, WorkerLost, first_line
from specserve.types import Chunk, FinishReason
from specserve.wire.messages import Chunks

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Reply:
    """Destination of the chunks of one request."""

    sender: ChunkSender
    number: int  # the gateway's own number of the request
    ended: asyncio.Future[SpecserveError | None]  # set to an error if the text did not finish

    def end(self, error: SpecserveError | None) -> None:
        if not self.ended.done():
            self.ended.set_result(error)


OpenSender = Callable[[Address, KeyPair, Callable[[], None]], ChunkSender]
"""Opens a sender to a gateway; the callback is called if that gateway is found gone."""


def open_chunk_sender(address: Address, keys: KeyPair, on_gone: Callable[[], None]) -> ChunkSender:
    return ChunkSender(address, keys, on_gone=on_gone)


class ReplyStreams:
    """The open replies of an engine, by sequence, and a sender for each gateway.

    Gateways know the engine by `public_key`; all its senders have the same keys. The replies to a
    gateway that is gone end with WorkerLost, and their sequences are then cancelled. One that lives
    behind a broken network resumes its requests.
    """

    def __init__(self, open_sender: OpenSender = open_chunk_sender) -> None:
        self._open_sender, self._keys = open_sender, KeyPair.generate()
        self._replies: dict[int, Reply] = {}
        self._senders: dict[Address, ChunkSender] = {}

    @property
    def public_key(self) -> bytes:
        return self._keys.public

    def connect(self, address: Address) -> None:
        """Have a sender to the gateway at `address`; raise ZMQError if there cannot be one."""
        self._sender(address)

    def open(self, seq_id: int, number: int, address: Address) -> Reply:
        """Send the chunks of the sequence to the gateway at `address` from now on."""
        ended = asyncio.get_running_loop().create_future()
        reply = self._replies[seq_id] = Reply(self._sender(address), number, ended)
        return reply

    def discard(self, seq_id: int) -> bool:
        """Send no more chunks of the sequence; return False if its last one has been sent."""
        return self._replies.pop(seq_id, None) is not None

    def end(self, seq_id: int, error: SpecserveError) -> None:
        """End the reply of a sequence that gets no chunk any more with an error."""
        reply = self._replies.pop(seq_id, None)
        if reply is not None:
            reply.end(error)

    def send(self, chunks: Sequence[Chunk], *, can_resume_elsewhere: bool) -> None:
        """Send one message to each gateway that has chunks in this round.

        A request that fails while it can resume elsewhere ends with Displaced instead of a chunk. A
        gateway whose message cannot be sent has its requests ended, for it to resume them; the
        others get their chunks.
        """
        by_sender: dict[ChunkSender, list[tuple[Reply, Chunk]]] = {}
        for chunk in chunks:
            reply = self._replies.get(chunk.seq_id)
            if reply is None or reply.ended.done():  # its gateway is gone
                continue
            if chunk.finish is not None:
                del self._replies[chunk.seq_id]
            if chunk.finish is FinishReason.ERROR and can_resume_elsewhere:
                reply.end(Displaced(chunk.error or "the engine ends"))
            else:
                by_sender.setdefault(reply.sender, []).append((reply, chunk))
        for sender, mine in by_sender.items():
            _send(sender, mine)

    def close(self) -> None:
        for sender in self._senders.values():
            sender.close()

    def _sender(self, address: Address) -> ChunkSender:
        if address not in self._senders:
            self._close_idle_senders()
            on_gone = partial(self._on_gone, address)
            self._senders[address] = self._open_sender(address, self._keys, on_gone)
        return self._senders[address]

    def _on_gone(self, address: Address) -> None:
        """End the replies to a gateway. If it lives, it gets a new sender with its next request."""
        sender = self._senders.pop(address)
        lost = [reply for reply in self._replies.values() if reply.sender is sender]
        for reply in lost:
            reply.end(WorkerLost("the gateway's connection broke and did not come back"))
        sender.close()
        log.warning("%s is gone; %d sequences of it are cancelled", sender, len(lost))

    def _close_idle_senders(self) -> None:
        """Close the senders without requests: when a new gateway appears, old ones may be gone."""
        busy = {id(reply.sender) for reply in self._replies.values()}
        for address, sender in list(self._senders.items()):
            if id(sender) not in busy:
                sender.close()
                del self._senders[address]


def _send(sender: ChunkSender, mine: Sequence[tuple[Reply, Chunk]]) -> None:
    error: SpecserveError | None = None
    try:
        sender.send(Chunks(tuple(replace(chunk, seq_id=reply.number) for reply, chunk in mine)))
    except Exception as failure:
        log.exception("chunks of %d requests were not sent", len(mine))
        error = WorkerLost(f"the chunks of a round were not sent: {first_line(failure)}")
    for reply, chunk in mine:
        if error is not None or chunk.finish is not None:
            reply.end(error)
