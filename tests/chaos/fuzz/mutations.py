"""Damage to bytes, and values that JSON can hold and no parser expects."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

Mutation = Callable[[random.Random, bytes], bytes]


def flip_bits(rng: random.Random, data: bytes) -> bytes:
    damaged = bytearray(data or b"\0")
    for _ in range(rng.randint(1, 4)):
        damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def replace_bytes(alphabet: bytes) -> Mutation:
    """Return a mutation that writes bytes of an alphabet, which has those with a meaning."""

    def replace(rng: random.Random, data: bytes) -> bytes:
        damaged = bytearray(data or b"\0")
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(damaged))] = rng.choice(alphabet)
        return bytes(damaged)

    return replace


def cut(rng: random.Random, data: bytes) -> bytes:
    first, second = _two_places(rng, data)
    return data[:first] + data[second:]


def repeat(rng: random.Random, data: bytes) -> bytes:
    first, second = _two_places(rng, data)
    return data[:second] + data[first:second] * rng.randint(1, 50) + data[second:]


def truncate(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def splice(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Return the beginning of `data` and the end of `other`."""
    return data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :]


def _two_places(rng: random.Random, data: bytes) -> tuple[int, int]:
    first, second = rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)
    return min(first, second), max(first, second)


PLAIN: tuple[object, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    7,
    10**30,
    2**31,
    2**63,
    0.5,
    -2.5,
    1e308,
    math.nan,
    math.inf,
    "",
    "x",
    "\ud800",
    "日本",
    "x" * 3000,
)


def json_value(
    rng: random.Random, depth: int, *, words: Sequence[object] = (), members: Sequence[str] = ("x",)
) -> object:
    """Return a value of plain ones and `words`, with `members` as keys, nested up to `depth`."""
    if not depth or rng.random() < 0.6:
        return rng.choice((*PLAIN, *words))
    if rng.random() < 0.5:
        some = rng.randrange(4)
        items = [json_value(rng, depth - 1, words=words, members=members) for _ in range(some)]
        return items * (100 if depth == 1 and rng.random() < 0.2 else 1)
    return {
        rng.choice(members): json_value(rng, depth - 1, words=words, members=members)
        for _ in range(rng.randrange(4))
    }


def mutate_tree(rng: random.Random, tree: object, new_value: Callable[[], object]) -> object:
    """Return a copy of a JSON tree with one value or member replaced, removed, added or nested."""
    if isinstance(tree, dict) and tree and rng.random() < 0.8:
        key = rng.choice(list(tree))
        if rng.random() < 0.15:
            return {name: value for name, value in tree.items() if name != key}
        return {**tree, key: mutate_tree(rng, tree[key], new_value)}
    if isinstance(tree, list) and tree and rng.random() < 0.8:
        at = rng.randrange(len(tree))
        if rng.random() < 0.15:
            return [*tree[:at], *tree[at + 1 :]]
        return [*tree[:at], mutate_tree(rng, tree[at], new_value), *tree[at + 1 :]]
    return [tree] if rng.random() < 0.1 else new_value()
