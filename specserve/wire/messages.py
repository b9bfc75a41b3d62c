"""Messages between processes, and the frames that carry them. It knows no sockets.

Frame 0, the head, is a stream of msgpack arrays: one that opens the message, then one for each of
its items (codec.py). Frame 1, if there is one, has all sparse distributions of the message: first
every id, then every probability. Frame 2, if there is one, has all its hidden states, as they are.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack  # type: ignore[import-untyped]

from specserve import errors
from specserve.errors import BadFrame, SpecserveError, WorkerLost
from specserve.hidden_states import HiddenStates
from specserve.types import (
    Chunk,
    DraftStep,
    PreparedProposal,
    Proposal,
    Span,
    Verdict,
    VerifyStep,
)
from specserve.wire.codec import (
    ArrayReader,
    ArrayWriter,
    Row,
    pack_column,
    read_chunk,
    read_draft_step,
    read_hidden_states,
    read_prepared_proposal,
    read_proposal,
    read_span,
    read_verdict,
    read_verify_step,
    require_text,
    unpack_column,
    write_chunk,
    write_draft_step,
    write_hidden_states,
    write_prepared_proposal,
    write_proposal,
    write_span,
    write_verdict,
    write_verify_step,
)
from specserve.wire.version import VERSION, require_same_version

MAGIC = b"specserve"
Frame = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Propose:
    """Request to drop the released sequences, then draft.

    `number` is the round's, so that a late answer to an earlier round is recognised.
    """

    number: int
    deadline: float  # seconds from now, since clocks differ between hosts
    steps: tuple[DraftStep, ...]
    released: tuple[int, ...] = ()
    hidden: tuple[HiddenStates, ...] = ()  # for a head that reads them; the last verdicts' states


@dataclass(frozen=True, slots=True)
class Proposals:
    """Answer to Propose."""

    number: int
    proposals: tuple[Proposal, ...]
    seconds: float  # that the worker spent
    pages_used: int
    spans: tuple[Span, ...] = ()  # of its work since the last answer, by its own clock


@dataclass(frozen=True, slots=True)
class PreparedProposals:
    """The next proposals, pushed after the answer of the same number.

    A drafter apart prepares them for the likelier verdicts; one in the target's process has seen
    the verdicts.
    """

    number: int
    prepared_proposals: tuple[PreparedProposal, ...]


@dataclass(frozen=True, slots=True)
class Verify:
    """Request to drop the released sequences, then verify."""

    number: int
    steps: tuple[VerifyStep, ...]
    released: tuple[int, ...] = ()

    @property
    def wants_drafts(self) -> bool:
        """True if a drafter in the target's process pushes proposals after the answer."""
        return any(step.gamma for step in self.steps)


@dataclass(frozen=True, slots=True)
class Verdicts:
    """Answer to Verify."""

    number: int
    verdicts: tuple[Verdict, ...]
    seconds: float
    pages_used: int
    prefix_queries: int = 0  # prompt tokens looked up in the prefix cache so far
    prefix_hits: int = 0  # of these, tokens found
    spans: tuple[Span, ...] = ()
    # Of committed positions that the pass computed, where a head in another process reads them.
    hidden: tuple[HiddenStates, ...] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    """Answer of a worker that could not execute a request.

    `kind` is the name of a class in errors.py, or of any other exception.
    """

    number: int
    kind: str
    message: str

    @classmethod
    def from_error(cls, number: int, error: BaseException) -> Failure:
        return cls(number, type(error).__name__, str(error) or type(error).__name__)

    def error(self) -> SpecserveError:
        """Return the worker's exception if it is a SpecserveError, and else WorkerLost.

        A worker with any other exception cannot be relied on.
        """
        kind = vars(errors).get(self.kind)
        if isinstance(kind, type) and issubclass(kind, SpecserveError):
            return kind(self.message)
        return WorkerLost(f"the worker failed: {self.kind}: {self.message}")


@dataclass(frozen=True, slots=True)
class Chunks:
    """Tokens that one round committed for the requests of one gateway.

    `seq_id` is the gateway's own number of the request.
    """

    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """Request to end a worker's run."""


Message = Propose | Proposals | PreparedProposals | Verify | Verdicts | Failure | Chunks | Stop


def pack(message: Message) -> list[bytes]:
    """Return the frames of a message.

    Texts that are not Unicode are escaped: a message about an error must not fail itself.
    """
    layout, arrays = _LAYOUTS[type(message)], ArrayWriter()
    items = layout.items(message)
    packer = msgpack.Packer(autoreset=False, buf_size=4096, unicode_errors="backslashreplace")
    packer.pack(
        (MAGIC, VERSION, type(message).__name__, len(items), layout.fields(message, arrays))
    )
    for item in items:
        packer.pack(layout.write(item, arrays))
    head: bytes = packer.bytes()
    return [head, *arrays.frames()]


def unpack(frames: Sequence[Frame]) -> Message:
    """Return the message of these frames, or raise BadFrame; VersionMismatch if that is why.

    Every version begins a message with an array of MAGIC, its own number, and more. Sparse
    distributions are read-only views of one array for the whole message.
    """
    try:
        return _unpack(frames)
    except (ValueError, TypeError, IndexError, struct.error, msgpack.UnpackException) as error:
        raise BadFrame(f"a malformed message: {error}") from error


_MAX_WIDTH = 16
"""Longest array in the head. A small frame of nested arrays thus cannot claim much memory."""
_NUM_OPENING_FIELDS = 5
"""Fields of the array that opens a message: MAGIC, VERSION, kind, number of items, own fields."""


def _unpack(frames: Sequence[Frame]) -> Message:
    if not frames or not len(frames[0]):
        raise BadFrame("a message has a head and perhaps arrays")
    size = len(frames[0])
    limits = {
        "max_array_len": _MAX_WIDTH,
        "max_map_len": 0,
        "max_ext_len": 0,
        "max_buffer_size": size,
    }
    unpacker = msgpack.Unpacker(use_list=False, read_size=size, **limits)
    unpacker.feed(frames[0])
    num_fields = unpacker.read_array_header()
    if unpacker.unpack() != MAGIC:
        raise BadFrame("not a message of specserve")
    require_same_version(unpacker.unpack())
    if num_fields != _NUM_OPENING_FIELDS or len(frames) > 3 or not all(map(len, frames[2:])):
        raise BadFrame("a message of another shape")
    kind, num_items, fields = unpacker.unpack(), unpacker.unpack(), unpacker.unpack()
    layout = _KINDS.get(require_text(kind))
    if layout is None or type(num_items) is not int or num_items < 0:
        raise BadFrame("a message of no known kind or size")
    arrays = ArrayReader(*(frames[1:] or [b""]))
    items = tuple([layout.read(unpacker.unpack(), arrays) for _ in range(num_items)])
    message = layout.build(fields, items, arrays)
    if unpacker.tell() != size or not arrays.is_empty:
        raise BadFrame("a message with more in it than it says")
    return message


@dataclass(frozen=True, slots=True)
class _Layout:
    """Layout of one kind of message: its own fields, and a row for each of its items."""

    fields: Callable[[Any, ArrayWriter], Row]
    build: Callable[[Any, tuple[Any, ...], ArrayReader], Message]
    items: Callable[[Any], Sequence[Any]] = lambda message: ()
    write: Callable[[Any, ArrayWriter], Row] = lambda item, arrays: ()
    read: Callable[[Any, ArrayReader], Any] = lambda row, arrays: None


_PROPOSE = struct.Struct("<Qd")  # number, deadline
_PROPOSALS = struct.Struct("<QdQ")  # number, seconds, pages_used
_VERDICTS = struct.Struct("<QdQQQ")  # number, seconds, pages_used, prefix_queries, prefix_hits
_NUMBER = struct.Struct("<Q")


def _propose(fields: Any, steps: tuple[DraftStep, ...], arrays: ArrayReader) -> Propose:
    numbers, released, hidden = fields
    number, deadline = _PROPOSE.unpack(numbers)
    states = read_hidden_states(hidden, arrays)
    return Propose(number, deadline, steps, unpack_column("Q", released), states)


def _proposals(fields: Any, proposals: tuple[Proposal, ...], arrays: ArrayReader) -> Proposals:
    numbers, spans = fields
    number, seconds, pages_used = _PROPOSALS.unpack(numbers)
    return Proposals(
        number, proposals, seconds, pages_used, tuple([read_span(span) for span in spans])
    )


def _prepared_proposals(
    fields: Any, prepared_proposals: tuple[PreparedProposal, ...], arrays: ArrayReader
) -> PreparedProposals:
    (numbers,) = fields
    (number,) = _NUMBER.unpack(numbers)
    return PreparedProposals(number, prepared_proposals)


def _verify(fields: Any, steps: tuple[VerifyStep, ...], arrays: ArrayReader) -> Verify:
    numbers, released = fields
    (number,) = _NUMBER.unpack(numbers)
    return Verify(number, steps, unpack_column("Q", released))


def _verdicts(fields: Any, verdicts: tuple[Verdict, ...], arrays: ArrayReader) -> Verdicts:
    numbers, spans, hidden = fields
    number, seconds, pages_used, queries, hits = _VERDICTS.unpack(numbers)
    return Verdicts(
        number,
        verdicts,
        seconds,
        pages_used,
        queries,
        hits,
        tuple([read_span(span) for span in spans]),
        read_hidden_states(hidden, arrays),
    )


def _failure(fields: Any, nothing: tuple[()], arrays: ArrayReader) -> Failure:
    (numbers, kind, message), () = fields, nothing
    (number,) = _NUMBER.unpack(numbers)
    return Failure(number, require_text(kind), require_text(message))


def _chunks(fields: Any, chunks: tuple[Chunk, ...], arrays: ArrayReader) -> Chunks:
    () = fields
    return Chunks(chunks)


def _stop(fields: Any, nothing: tuple[()], arrays: ArrayReader) -> Stop:
    (), () = fields, nothing
    return Stop()


_LAYOUTS: dict[type[Any], _Layout] = {
    Propose: _Layout(
        fields=lambda message, arrays: (
            _PROPOSE.pack(message.number, message.deadline),
            pack_column("Q", message.released),
            write_hidden_states(message.hidden, arrays),
        ),
        build=_propose,
        items=lambda message: message.steps,
        write=write_draft_step,
        read=read_draft_step,
    ),
    Proposals: _Layout(
        fields=lambda message, arrays: (
            _PROPOSALS.pack(message.number, message.seconds, message.pages_used),
            [write_span(span) for span in message.spans],
        ),
        build=_proposals,
        items=lambda message: message.proposals,
        write=write_proposal,
        read=read_proposal,
    ),
    PreparedProposals: _Layout(
        fields=lambda message, arrays: (_NUMBER.pack(message.number),),
        build=_prepared_proposals,
        items=lambda message: message.prepared_proposals,
        write=write_prepared_proposal,
        read=read_prepared_proposal,
    ),
    Verify: _Layout(
        fields=lambda message, arrays: (
            _NUMBER.pack(message.number),
            pack_column("Q", message.released),
        ),
        build=_verify,
        items=lambda message: message.steps,
        write=write_verify_step,
        read=read_verify_step,
    ),
    Verdicts: _Layout(
        fields=lambda message, arrays: (
            _VERDICTS.pack(
                message.number,
                message.seconds,
                message.pages_used,
                message.prefix_queries,
                message.prefix_hits,
            ),
            [write_span(span) for span in message.spans],
            write_hidden_states(message.hidden, arrays),
        ),
        build=_verdicts,
        items=lambda message: message.verdicts,
        write=write_verdict,
        read=read_verdict,
    ),
    Failure: _Layout(
        fields=lambda message, arrays: (
            _NUMBER.pack(message.number),
            message.kind,
            message.message,
        ),
        build=_failure,
    ),
    Chunks: _Layout(
        fields=lambda message, arrays: (),
        build=_chunks,
        items=lambda message: message.chunks,
        write=write_chunk,
        read=read_chunk,
    ),
    Stop: _Layout(fields=lambda message, arrays: (), build=_stop),
}
_KINDS = {kind.__name__: layout for kind, layout in _LAYOUTS.items()}
