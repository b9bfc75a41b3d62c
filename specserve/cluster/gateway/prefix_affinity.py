"""Choice of an engine, or a draft, by the prompts that each has computed, and by how busy it is.

Knows token ids and names of engines; no Ray, and no pages: what an engine has cached is inferred
from what was sent to it, and a mistake costs time.
"""

from __future__ import annotations

import random
import zlib
from array import array
from bisect import bisect
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

BLOCK = 64
"""Tokens of a block: a prefix counts in full blocks."""
REQUEST_COST = 256
"""Tokens of a prompt that take as long as one more running request delays another.

With the demo target widened to 200M on two cores, a ninth stream makes an answer of 64 tokens some
0.07 s later, in which 130 tokens are prefilled; and it delays the other eight as well.
"""
QUEUED_COST = 4096
"""The same for a request that has to wait until another one ends."""
DEFAULT_CACHED_TOKENS = 1 << 18
"""Tokens that an engine is taken to cache before it has said how many."""

MAX_HOLDERS = 16
"""Engines that are compared since blocks of the prompt were last sent to them."""
NUM_HASHED = 16
"""Engines that are compared since the prompt's first block hashes to them, in every gateway."""
NUM_RANDOM = 32
"""Engines that are compared by chance, so that a prefix which all requests share spreads."""
MAX_COMPARED = MAX_HOLDERS + NUM_HASHED + NUM_RANDOM
"""Up to that many engines all are compared. The time of a choice thus has a bound."""


@dataclass(frozen=True, slots=True)
class EngineState:
    """State of one engine, as far as a router knows it."""

    requests: int = 0  # under way, waiting ones included
    max_running: int = 1
    cached_tokens: int | None = None  # that fit into its KV cache
    restarts: int = 0  # of its target; each empties the cache


@dataclass(slots=True)
class _SentPrefixes:
    """Hashes of prefixes that were sent to one engine, the most recently used last."""

    restarts: int = 0
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)


class PrefixAffinity:
    """The prefixes that were sent to each engine, as far as its KV cache may still have them."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()
        self._sent: dict[str, _SentPrefixes] = {}
        self._last_holders: dict[int, str] = {}  # block: engine that it was last sent to
        self._names: frozenset[str] = frozenset()
        self._ring: list[tuple[int, str]] = []  # engines in the order of their hashes

    def candidates(self, tokens: Sequence[int], salt: bytes) -> list[str]:
        """Return the engines of `keep` that are worth a comparison; all, if they are few.

        Of many, those that have a part of the prompt, some that its first block hashes to, which
        are the same ones in every gateway, and some by chance.
        """
        ring = self._ring
        if len(ring) <= MAX_COMPARED:
            return [name for _, name in ring]
        start = _start(tokens, salt)
        first = bisect(ring, (zlib.crc32(start), ""))
        hashed = (ring[(first + i) % len(ring)][1] for i in range(NUM_HASHED))
        drawn = (ring[int(self._rng.random() * len(ring))][1] for _ in range(NUM_RANDOM))
        found = self._holders(tokens, salt)
        found |= dict.fromkeys(sorted(hashed, key=lambda name: _tie_break(start, name)))
        return list(found | dict.fromkeys(drawn))

    def rank(
        self, tokens: Sequence[int], salt: bytes, engines: Mapping[str, EngineState]
    ) -> list[str]:
        """Return the engines, the one that costs all requests the least time first.

        A second copy of a prefix costs its tokens twice: they are computed now, and so is what
        they displace in a full cache when it is next requested. Of equals, the prefix itself
        decides, so that several gateways take the same one; of many engines, the order of
        `candidates`, which hashes the prefix as well.
        """
        hashes = block_hashes(tokens, salt)
        start = _start(tokens, salt)
        matched = {
            name: self._num_matched(name, engine, hashes) for name, engine in engines.items()
        }
        longest = max(matched.values(), default=0)
        is_ordered = len(self._ring) > MAX_COMPARED

        def cost(name: str) -> tuple[int, int]:
            engine = engines[name]
            computed = len(tokens) - BLOCK * matched[name]
            displaced = BLOCK * (longest - matched[name])
            waiting = max(0, engine.requests + 1 - engine.max_running)
            return (
                computed + displaced + REQUEST_COST * engine.requests + QUEUED_COST * waiting,
                0 if is_ordered else _tie_break(start, name),
            )

        return sorted(engines, key=cost)

    def record(self, name: str, tokens: Sequence[int], salt: bytes, engine: EngineState) -> None:
        """Record that a prompt was sent to an engine. The blocks used longest ago are dropped."""
        sent = self._blocks_of(name, engine)
        for block in reversed(block_hashes(tokens, salt)):  # a prefix outlives what follows it
            sent.pop(block, None)
            sent[block] = None
            self._last_holders[block] = name
        limit = DEFAULT_CACHED_TOKENS if engine.cached_tokens is None else engine.cached_tokens
        while len(sent) > limit // BLOCK:
            self._drop_holder(name, (sent.popitem(last=False)[0],))

    def keep(self, names: Iterable[str]) -> None:
        """Set the engines that there are, and drop what was sent to all others: they are gone."""
        kept = frozenset(names)
        if kept == self._names:
            return
        for name in self._sent.keys() - kept:
            self._drop_holder(name, self._sent.pop(name).blocks)
        self._names = kept
        self._ring = sorted((zlib.crc32(name.encode()), name) for name in kept)

    def _holders(self, tokens: Sequence[int], salt: bytes) -> dict[str, None]:
        """Return the engines to which blocks of the prompt were last sent, longest prefix first."""
        found: dict[str, None] = {}
        for block in reversed(block_hashes(tokens, salt)):
            if (holder := self._last_holders.get(block)) is not None:
                found[holder] = None
            if len(found) == MAX_HOLDERS:
                break
        return found

    def _drop_holder(self, name: str, blocks: Iterable[int]) -> None:
        for block in blocks:
            if self._last_holders.get(block) == name:
                del self._last_holders[block]

    def _num_matched(self, name: str, engine: EngineState, hashes: Sequence[int]) -> int:
        """Return how many of the first blocks the engine has."""
        sent = self._blocks_of(name, engine)
        return next((i for i, block in enumerate(hashes) if block not in sent), len(hashes))

    def _blocks_of(self, name: str, engine: EngineState) -> OrderedDict[int, None]:
        """Return the blocks of an engine; none after its target was restarted."""
        sent = self._sent.get(name)
        if sent is None or sent.restarts != engine.restarts:
            if sent is not None:
                self._drop_holder(name, sent.blocks)
            sent = self._sent[name] = _SentPrefixes(engine.restarts)
        return sent.blocks


def block_hashes(tokens: Sequence[int], salt: bytes) -> list[int]:
    """Return a hash of the salt and all tokens up to the end of each full block.

    The last token of a prompt is on no block: it must be computed for its logits.
    """
    hashes, last = [], hash(salt)
    for start in range(0, len(tokens) - BLOCK, BLOCK):
        last = hash((last, tuple(tokens[start : start + BLOCK])))
        hashes.append(last)
    return hashes


def _start(tokens: Sequence[int], salt: bytes) -> bytes:
    """Return the bytes by which all gateways take the same one of equal engines."""
    return array("q", tokens[:BLOCK]).tobytes() + salt


def _tie_break(start: bytes, name: str) -> int:
    return zlib.crc32(start + name.encode())
