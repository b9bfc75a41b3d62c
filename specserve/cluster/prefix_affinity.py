"""Choice of an engine by the prompts that engines have computed, and by how busy they are.

Knows token ids and names of engines; no Ray, and no pages: what an engine has cached is inferred
from what was sent to it, and a mistake costs time.
"""

from __future__ import annotations

import zlib
from array import array
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

    def __init__(self) -> None:
        self._sent: dict[str, _SentPrefixes] = {}

    def rank(
        self, tokens: Sequence[int], salt: bytes, engines: Mapping[str, EngineState]
    ) -> list[str]:
        """Return the engines, the one that costs all requests the least time first.

        A second copy of a prefix costs its tokens twice: they are computed now, and so is what
        they displace in a full cache when it is next asked for. Of equals, the prefix itself
        decides, so that several gateways take the same one.
        """
        hashes = block_hashes(tokens, salt)
        start = array("q", tokens[:BLOCK]).tobytes() + salt
        matched = {
            name: self._num_matched(name, engine, hashes) for name, engine in engines.items()
        }
        longest = max(matched.values(), default=0)

        def cost(name: str) -> tuple[int, int]:
            engine = engines[name]
            computed = len(tokens) - BLOCK * matched[name]
            displaced = BLOCK * (longest - matched[name])
            waiting = max(0, engine.requests + 1 - engine.max_running)
            return (
                computed + displaced + REQUEST_COST * engine.requests + QUEUED_COST * waiting,
                zlib.crc32(start + name.encode()),
            )

        return sorted(engines, key=cost)

    def record(self, name: str, tokens: Sequence[int], salt: bytes, engine: EngineState) -> None:
        """Record that a prompt was sent to an engine. The blocks used longest ago are dropped."""
        sent = self._blocks_of(name, engine)
        for block in reversed(block_hashes(tokens, salt)):  # a prefix outlives what follows it
            sent.pop(block, None)
            sent[block] = None
        limit = DEFAULT_CACHED_TOKENS if engine.cached_tokens is None else engine.cached_tokens
        while len(sent) > limit // BLOCK:
            sent.popitem(last=False)

    def keep(self, names: Iterable[str]) -> None:
        """Drop what was sent to all other engines: they are gone."""
        kept = frozenset(names)
        self._sent = {name: sent for name, sent in self._sent.items() if name in kept}

    def _num_matched(self, name: str, engine: EngineState, hashes: Sequence[int]) -> int:
        """Return how many of the first blocks the engine has."""
        sent = self._blocks_of(name, engine)
        return next((i for i, block in enumerate(hashes) if block not in sent), len(hashes))

    def _blocks_of(self, name: str, engine: EngineState) -> OrderedDict[int, None]:
        """Return the blocks of an engine; none after its target was restarted."""
        sent = self._sent.get(name)
        if sent is None or sent.restarts != engine.restarts:
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
