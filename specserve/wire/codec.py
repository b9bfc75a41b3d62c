"""Steps, proposals, verdicts and chunks as rows of plain values and bytes, and back.

It knows no messages, and no format around the rows.

Numbers are packed in columns of fixed width, so what is read has the right types by construction,
and no count is negative. Arrays are gathered beside the rows. A malformed row raises ValueError,
TypeError, IndexError or struct.error.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain, islice
from typing import Any

import numpy as np

from specserve.hidden_states import HIDDEN_DTYPES, HiddenStates
from specserve.types import (
    GRAMMARS,
    VERIFIERS,
    Adapter,
    Chunk,
    DraftStep,
    FinishReason,
    Grammar,
    Logprobs,
    Origin,
    Policy,
    PreparedProposal,
    Proposal,
    Span,
    SparseDistribution,
    Stats,
    TokenRule,
    Verdict,
    VerifyStep,
    Warp,
)
from specserve.wire.prompt_logprobs import (
    read_prompt_logprobs,
    read_scoring,
    write_prompt_logprobs,
    write_scoring,
)

Row = tuple[Any, ...]

_ID, _PROB = np.dtype("<u4"), np.dtype("<f4")
_SIZES = {"I": 4, "Q": 8, "d": 8}  # tokens, ids of sequences, real numbers
_ORIGINS = tuple(Origin)
_ORIGIN_CODES = {origin: code for code, origin in enumerate(_ORIGINS)}

# seed, prompt_length, logprobs, lenience, constrained; a Warp up to its biases
_POLICY = struct.Struct("<QQ?Qd? dQddddd")
_DRAFT_STEP = struct.Struct("<QQQ")  # seq_id, start, gamma
_PROPOSAL = struct.Struct("<QQQB?I")  # seq_id, start, num_cached, anticipated, support
_VERIFY_STEP = struct.Struct("<QQQ??I")  # seq_id, start, gamma, needs_verdict, support
_VERDICT = struct.Struct("<QQQ?Q")  # seq_id, accepted, next_token, is_decision, cached_tokens
_STATS = struct.Struct("<?QQQQQQQQdd")  # the numbers of Stats
_SPAN = struct.Struct("<dd")  # start, end
_CHUNK = struct.Struct("<QQ")  # seq_id, start
_HIDDEN = struct.Struct("<QQQQ")  # seq_id, start, num_positions, num_bytes
_NUMBER = struct.Struct("<Q")


class ArrayWriter:
    """Arrays of a message: sparse distributions, gathered for one frame, and states for another.

    On an encrypted link a frame costs more than a copy.
    """

    __slots__ = ("_ids", "_probs", "_states")

    def __init__(self) -> None:
        self._ids: list[bytes] = []
        self._probs: list[bytes] = []
        self._states: list[bytes | memoryview] = []

    def put(self, q: SparseDistribution | None, num_tokens: int) -> tuple[bool, int]:
        """Append q, and return whether there are rows and their width. Each token has one row."""
        if q is None:
            return False, 0
        assert q.ids.shape == q.probs.shape
        assert len(q.ids) == num_tokens
        assert q.probs.dtype == _PROB
        # half of their size in memory: what is not sent need not be encrypted
        self._ids.append(q.ids.astype(_ID).tobytes())
        self._probs.append(q.probs.tobytes())
        return True, q.ids.shape[1]

    def put_states(self, states: bytes | memoryview) -> None:
        self._states.append(states)

    def frames(self) -> list[bytes]:
        frame, states = b"".join(self._ids + self._probs), b"".join(self._states)
        if states:
            return [frame, states]
        return [frame] if frame else []


class ArrayReader:
    """Arrays of a message's frames, taken in the order in which they were put."""

    __slots__ = ("_at", "_ids", "_probs", "_size", "_states")

    def __init__(self, frame: bytes | memoryview, states: bytes | memoryview = b"") -> None:
        self._states = memoryview(states)
        self._at, self._size = 0, len(frame) // 8
        if self._size * 8 != len(frame):
            raise ValueError("a frame of arrays that is cut off")
        if self._size:
            self._ids = np.frombuffer(frame, _ID, self._size).astype(np.int64)
            self._probs = np.frombuffer(frame, _PROB, self._size, self._size * _ID.itemsize)
        else:
            self._ids, self._probs = np.empty(0, np.int64), np.empty(0, np.float32)
        self._ids.flags.writeable = self._probs.flags.writeable = False

    def take(self, num_tokens: int, *, has_rows: bool, support: int) -> SparseDistribution | None:
        if not has_rows:
            return None
        at, stop = self._at, self._at + num_tokens * support
        if stop > self._size:
            raise ValueError("a frame of arrays that is too short for the message")
        self._at = stop
        shape = (num_tokens, support)
        return SparseDistribution(
            self._ids[at:stop].reshape(shape), self._probs[at:stop].reshape(shape)
        )

    def take_states(self, num_bytes: int) -> memoryview:
        taken, self._states = self._states[:num_bytes], self._states[num_bytes:]
        if len(taken) != num_bytes:
            raise ValueError("a frame of states that is too short for the message")
        return taken

    @property
    def is_empty(self) -> bool:
        return self._at == self._size and not len(self._states)


_ANTICIPATED = (None, False, True)  # by their codes
MAX_SALT = 64
"""Longest salt of page hashes, in bytes."""


def pack_column(code: str, numbers: Sequence[float]) -> bytes:
    """Pack numbers, each as wide as its struct code."""
    return struct.pack(f"<{len(numbers)}{code}", *numbers)


def unpack_column(code: str, column: bytes) -> tuple[Any, ...]:
    """Unpack a column. One that was cut off inside a number raises struct.error."""
    return struct.unpack(f"<{len(column) // _SIZES[code]}{code}", column)


def require_text(value: object) -> str:
    if type(value) is not str:
        raise TypeError("a text is missing")
    return value


def _optional(value: int | None) -> tuple[bool, int]:
    return (False, 0) if value is None else (True, value)


def _write_policy(policy: Policy) -> Row:
    warp = policy.warp
    numbers = _POLICY.pack(
        policy.seed,
        policy.prompt_length,
        *_optional(policy.logprobs),
        policy.lenience,
        policy.constrained,
        warp.temperature,
        warp.top_k,
        warp.top_p,
        warp.min_p,
        warp.presence_penalty,
        warp.frequency_penalty,
        warp.repetition_penalty,
    )
    rule = None if warp.rule is None else _write_rule(warp.rule)
    adapter = _write_adapter(policy.adapter)
    if not warp.logit_bias:
        return numbers, policy.verifier, policy.cache_salt, b"", b"", rule, adapter
    tokens, biases = zip(*warp.logit_bias, strict=True)
    columns = pack_column("I", tokens), pack_column("d", biases)
    return numbers, policy.verifier, policy.cache_salt, *columns, rule, adapter


@lru_cache(maxsize=256)  # a sequence's policy comes with each of its steps, always the same
def _read_policy(
    numbers: bytes,
    verifier: str,
    cache_salt: bytes,
    tokens: bytes,
    biases: bytes,
    rule: Row | None,
    adapter: Row | None,
) -> Policy:
    seed, prompt_length, has_logprobs, logprobs, lenience, constrained, *knobs = _POLICY.unpack(
        numbers
    )
    if verifier not in VERIFIERS:
        raise ValueError("an unknown verifier")
    if type(cache_salt) is not bytes or len(cache_salt) > MAX_SALT:
        raise ValueError("a salt that is none")
    logit_bias = tuple(zip(unpack_column("I", tokens), unpack_column("d", biases), strict=True))
    return Policy(
        replace(
            Warp(*knobs), logit_bias=logit_bias, rule=None if rule is None else _read_rule(*rule)
        ),
        verifier,
        seed,
        prompt_length,
        logprobs if has_logprobs else None,
        lenience,
        constrained,
        cache_salt,
        None if adapter is None else _read_adapter(*adapter),
    )


def _write_adapter(adapter: Adapter | None) -> Row | None:
    return None if adapter is None else (adapter.name, adapter.path, adapter.version)


def _read_adapter(name: object, path: object, version: object) -> Adapter:
    if type(version) is not bytes or len(version) > MAX_SALT:
        raise ValueError("a version of an adapter that is none")
    return Adapter(require_text(name), require_text(path), version)


def _write_rule(rule: TokenRule) -> Row:
    return (
        _NUMBER.pack(rule.min_tokens),
        pack_column("I", rule.end_ids),
        pack_column("I", [len(word) for word in rule.bad_words]),
        pack_column("I", list(chain.from_iterable(rule.bad_words))),
        pack_column("I", rule.allowed_ids),
    )


def _read_rule(
    number: bytes, end_ids: bytes, lengths: bytes, words: bytes, allowed_ids: bytes
) -> TokenRule:
    (min_tokens,) = _NUMBER.unpack(number)
    counts, tokens = unpack_column("I", lengths), unpack_column("I", words)
    if 0 in counts or sum(counts) != len(tokens):
        raise ValueError("bad words that are cut off")
    left = iter(tokens)
    return TokenRule(
        min_tokens,
        unpack_column("I", end_ids),
        tuple([tuple(islice(left, count)) for count in counts]),
        unpack_column("I", allowed_ids),
    )


def _write_grammar(grammar: Grammar | None) -> Row | None:
    return None if grammar is None else (grammar.kind, grammar.text)


def _read_grammar(row: Any) -> Grammar | None:
    if row is None:
        return None
    kind, grammar_text = row
    if kind not in GRAMMARS:
        raise ValueError("an unknown kind of grammar")
    return Grammar(kind, require_text(grammar_text))


def _write_logprobs(logprobs: tuple[Logprobs, ...] | None) -> Row | None:
    if logprobs is None:
        return None
    own, counts = [each.token for each in logprobs], [len(each.top) for each in logprobs]
    top_ids, top = [
        list(chain.from_iterable(parts))
        for parts in ([each.top_ids for each in logprobs], [each.top for each in logprobs])
    ]
    return (
        pack_column("d", own),
        pack_column("I", counts),
        pack_column("I", top_ids),
        pack_column("d", top),
    )


def _read_logprobs(row: Any) -> tuple[Logprobs, ...] | None:
    if row is None:
        return None
    own, counts, top_ids, top = (
        unpack_column(code, column) for code, column in zip("dIId", row, strict=True)
    )
    if not sum(counts) == len(top_ids) == len(top):
        raise ValueError("alternatives are missing")
    ids, logprobs = iter(top_ids), iter(top)
    return tuple(
        [
            Logprobs(each, tuple(islice(ids, n)), tuple(islice(logprobs, n)))
            for each, n in zip(own, counts, strict=True)
        ]
    )


def write_draft_step(step: DraftStep, arrays: ArrayWriter) -> Row:
    numbers = _DRAFT_STEP.pack(step.seq_id, step.start, step.gamma)
    return (
        numbers,
        pack_column("I", step.tokens),
        _write_policy(step.policy),
        pack_column("I", step.encoder_input),
        _write_grammar(step.grammar),
    )


def read_draft_step(row: Any, arrays: ArrayReader) -> DraftStep:
    numbers, tokens, policy, source, grammar = row
    seq_id, start, gamma = _DRAFT_STEP.unpack(numbers)
    return DraftStep(
        seq_id,
        start,
        unpack_column("I", tokens),
        gamma,
        _read_policy(*policy),
        unpack_column("I", source),
        _read_grammar(grammar),
    )


def write_proposal(proposal: Proposal, arrays: ArrayWriter) -> Row:
    shape = arrays.put(proposal.q, len(proposal.tokens))
    anticipated = _ANTICIPATED.index(proposal.anticipated)
    return _PROPOSAL.pack(
        proposal.seq_id, proposal.start, proposal.num_cached, anticipated, *shape
    ), pack_column("I", proposal.tokens)


def read_proposal(row: Any, arrays: ArrayReader) -> Proposal:
    numbers, tokens = row
    seq_id, start, num_cached, anticipated, has_rows, support = _PROPOSAL.unpack(numbers)
    tokens = unpack_column("I", tokens)
    return Proposal(
        seq_id,
        start,
        tokens,
        arrays.take(len(tokens), has_rows=has_rows, support=support),
        num_cached,
        _ANTICIPATED[anticipated],
    )


def write_prepared_proposal(prepared_proposals: PreparedProposal, arrays: ArrayWriter) -> Row:
    return _NUMBER.pack(prepared_proposals.token), *write_proposal(
        prepared_proposals.proposal, arrays
    )


def read_prepared_proposal(row: Any, arrays: ArrayReader) -> PreparedProposal:
    number, *proposal = row
    (token,) = _NUMBER.unpack(number)
    return PreparedProposal(token, read_proposal(proposal, arrays))


def write_verify_step(step: VerifyStep, arrays: ArrayWriter) -> Row:
    numbers = _VERIFY_STEP.pack(
        step.seq_id,
        step.start,
        step.gamma,
        step.needs_verdict,
        *arrays.put(step.q, len(step.drafts)),
    )
    tokens, drafts, source = (
        pack_column("I", step.tokens),
        pack_column("I", step.drafts),
        pack_column("I", step.encoder_input),
    )
    policy, grammar = _write_policy(step.policy), _write_grammar(step.grammar)
    return numbers, tokens, drafts, policy, source, grammar, write_scoring(step.scoring)


def read_verify_step(row: Any, arrays: ArrayReader) -> VerifyStep:
    numbers, tokens, drafts, policy, source, grammar, scoring = row
    seq_id, start, gamma, needs_verdict, has_rows, support = _VERIFY_STEP.unpack(numbers)
    drafts = unpack_column("I", drafts)
    q = arrays.take(len(drafts), has_rows=has_rows, support=support)
    source = unpack_column("I", source)
    return VerifyStep(
        seq_id,
        start,
        unpack_column("I", tokens),
        drafts,
        q,
        _read_policy(*policy),
        needs_verdict,
        source,
        _read_grammar(grammar),
        gamma,
        read_scoring(scoring),
    )


def write_verdict(verdict: Verdict, arrays: ArrayWriter) -> Row:
    return (
        _VERDICT.pack(
            verdict.seq_id,
            verdict.accepted,
            verdict.next_token,
            verdict.is_decision,
            verdict.cached_tokens,
        ),
        _write_logprobs(verdict.logprobs),
        verdict.error,
        write_prompt_logprobs(verdict.prompt_logprobs),
    )


def read_verdict(row: Any, arrays: ArrayReader) -> Verdict:
    numbers, logprobs, error, prompt_logprobs = row
    seq_id, accepted, next_token, is_decision, cached_tokens = _VERDICT.unpack(numbers)
    return Verdict(
        seq_id,
        accepted,
        next_token,
        _read_logprobs(logprobs),
        None if error is None else require_text(error),
        read_prompt_logprobs(prompt_logprobs),
        is_decision,
        cached_tokens,
    )


def write_hidden_states(hidden: Sequence[HiddenStates], arrays: ArrayWriter) -> Row:
    """Return the shapes of all states of a message, which have one number format."""
    if not hidden:
        return b"", ""
    assert len({each.dtype for each in hidden}) == 1, "the states of one target"
    for each in hidden:
        arrays.put_states(each.data)
    shapes = [(each.seq_id, each.start, each.num_positions, each.num_bytes) for each in hidden]
    return pack_column("Q", list(chain.from_iterable(shapes))), hidden[0].dtype


def read_hidden_states(row: Any, arrays: ArrayReader) -> tuple[HiddenStates, ...]:
    column, dtype = row
    hidden = []
    for seq_id, start, num_positions, num_bytes in _HIDDEN.iter_unpack(column):
        if dtype not in HIDDEN_DTYPES or not num_positions or num_bytes % num_positions:
            raise ValueError("hidden states of no known shape")
        data = arrays.take_states(num_bytes)
        hidden.append(HiddenStates(seq_id, start, num_positions, dtype, data))
    return tuple(hidden)


def _write_stats(stats: Stats) -> Row:
    counts = (
        stats.rounds,
        stats.drafted,
        stats.accepted,
        stats.target_passes,
        stats.anticipated,
        stats.resumed,
        stats.drafts,
        stats.cached_tokens,
    )
    numbers = _STATS.pack(stats.lossless, *counts, stats.queue_time_ms, stats.prefill_time_ms)
    by_position = pack_column("I", stats.accepted_by_position)
    return stats.verifier, numbers, stats.irreproducible, by_position


def _read_stats(row: Any) -> Stats:
    verifier, numbers, irreproducible, by_position = row
    *counts, drafts, cached_tokens, queue_time_ms, prefill_time_ms = _STATS.unpack(numbers)
    return replace(
        Stats(require_text(verifier), *counts),
        irreproducible=None if irreproducible is None else require_text(irreproducible),
        drafts=drafts,
        accepted_by_position=unpack_column("I", by_position),
        cached_tokens=cached_tokens,
        queue_time_ms=queue_time_ms,
        prefill_time_ms=prefill_time_ms,
    )


def write_chunk(chunk: Chunk, arrays: ArrayWriter) -> Row:
    origins = bytes([_ORIGIN_CODES[origin] for origin in chunk.origins])
    stats = None if chunk.stats is None else _write_stats(chunk.stats)
    return (
        _CHUNK.pack(chunk.seq_id, chunk.start),
        pack_column("I", chunk.tokens),
        origins,
        _write_logprobs(chunk.logprobs),
        chunk.finish,
        stats,
        chunk.error,
        write_prompt_logprobs(chunk.prompt_logprobs),
    )


def write_span(span: Span) -> Row:
    return span.name, _SPAN.pack(span.start, span.end)


def read_span(row: Any) -> Span:
    name, numbers = row
    return Span(require_text(name), *_SPAN.unpack(numbers))


def read_chunk(row: Any, arrays: ArrayReader) -> Chunk:
    numbers, tokens, origins, logprobs, finish, stats, error, prompt_logprobs = row
    seq_id, start = _CHUNK.unpack(numbers)
    return Chunk(
        seq_id,
        start,
        unpack_column("I", tokens),
        tuple([_ORIGINS[code] for code in origins]),
        _read_logprobs(logprobs),
        None if finish is None else FinishReason(require_text(finish)),
        None if stats is None else _read_stats(stats),
        None if error is None else require_text(error),
        read_prompt_logprobs(prompt_logprobs),
    )
