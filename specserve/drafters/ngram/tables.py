"""What follows what, as counted in texts: rows of likely tokens, from a file of counts. Knows no prompts and no draws."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from specserve.errors import ModelError, ModelNotFound

FILE = "tables.safetensors"  # beside a model
_ROWS_KEPT = 4096  # of a table, ready to be drawn from

Ints = NDArray[np.int64]
_NONE: Ints = np.empty(0, np.int64)
_HALF = 32  # bits of a pair that are its second token


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A distribution on its support, in falling order, padded to the table's width with probability 0. Equal only to itself."""

    ids: Ints  # [width]
    probs: NDArray[np.float32]  # [width]
    sums: tuple[float, ...]  # [support] of the probabilities up to each; the last is about 1
    support: int

    @classmethod
    def of(
        cls, ids: Sequence[int] | Ints, weights: Sequence[float] | NDArray[Any], *, width: int
    ) -> Row:
        """Of weights above 0 in falling order; the first `width` of them."""
        share = np.asarray(weights[:width], dtype=np.float64)
        support = len(share)
        assert support > 0
        padded, probs = np.zeros(width, np.int64), np.zeros(width, np.float32)
        padded[:support] = ids[:support]
        probs[:support] = share / share.sum()
        return cls(padded, probs, tuple(accumulate(probs[:support].tolist())), support)

    @property
    def first(self) -> int:
        return int(self.ids[0])

    def at(self, share: float) -> int:
        """The token that such a share of the whole, between 0 and 1, falls to."""
        return int(self.ids[min(bisect_right(self.sums, share * self.sums[-1]), self.support - 1)])


class Table(Protocol):
    """What comes next, by the token before and the position."""

    def row(self, token: int, position: int) -> Row | None:
        """None if nothing is known."""
        ...


@dataclass(frozen=True, slots=True)
class Counts:
    """How often each token stood in some texts, and after each the tokens that most often followed it."""

    unigram: Ints  # [vocab]
    starts: Ints  # [vocab + 1]: where the followers of each token begin
    ids: Ints  # [pairs]: the followers of one token after those of another, each one's in falling order
    counts: Ints  # [pairs]
    fingerprint: str  # of the tokenizer

    @property
    def vocab_size(self) -> int:
        return len(self.unigram)


def count(texts: Iterable[Sequence[int]], *, keep: int, fingerprint: str = "") -> Counts:
    """The `keep` most frequent followers of each token; the vocabulary ends with the highest id. Nothing follows the end of a text."""
    singles, pairs = (_NONE, _NONE), (_NONE, _NONE)  # each: what, in rising order, and how often
    for text in texts:
        tokens = np.asarray(text, dtype=np.int64)
        singles = _added(singles, tokens)
        pairs = _added(pairs, tokens[:-1] << _HALF | tokens[1:])
    firsts, ids, times = pairs[0] >> _HALF, pairs[0] & (1 << _HALF) - 1, pairs[1]
    order = np.lexsort(
        (ids, -times, firsts)
    )  # by token, then the most frequent first, then the lowest id
    firsts, ids, times = firsts[order], ids[order], times[order]
    kept = np.arange(len(firsts)) - np.searchsorted(firsts, firsts) < keep
    unigram = np.bincount(singles[0], singles[1]).astype(np.int64)
    starts = np.searchsorted(firsts[kept], np.arange(len(unigram) + 1))
    return Counts(unigram, starts, ids[kept], times[kept], fingerprint)


def save(counts: Counts, path: Path) -> None:
    tensors = {
        "unigram": counts.unigram,
        "starts": counts.starts,
        "ids": counts.ids.astype(np.int32),
        "counts": counts.counts,
    }
    save_file(
        {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()},
        path,
        metadata={"fingerprint": counts.fingerprint},
    )


def load(path: Path) -> Counts:
    """From a file, or from the directory that holds it."""
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise ModelNotFound(
            f"there are no tables at {file}; `specserve tables` counts them from texts"
        )
    try:
        with safe_open(file, framework="np") as opened:
            unigram, starts, ids, counts = (
                opened.get_tensor(name).astype(np.int64)
                for name in ("unigram", "starts", "ids", "counts")
            )
            fingerprint = (opened.metadata() or {}).get("fingerprint", "")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file} cannot be read as tables: {error}") from error
    found = Counts(unigram, starts, ids, counts, fingerprint)
    if not _is_sound(found):
        raise ModelError(f"{file} holds tables that do not fit together")
    return found


class Unigram:
    """The same row everywhere."""

    def __init__(self, counts: Counts, *, width: int) -> None:
        self._counts, self._width = counts, width

    def row(self, token: int, position: int) -> Row | None:
        return self._row

    @cached_property
    def _row(self) -> Row | None:
        likeliest = np.argsort(-self._counts.unigram, kind="stable")[: self._width]
        weights = self._counts.unigram[likeliest]
        return (
            Row.of(likeliest, weights[weights > 0], width=self._width) if weights[0] > 0 else None
        )


class Bigram:
    """By the token before; one that nothing ever followed is followed by what is frequent."""

    def __init__(self, counts: Counts, *, width: int) -> None:
        self._counts, self._width = counts, width
        self._unigram = Unigram(counts, width=width)
        self._made = lru_cache(_ROWS_KEPT)(self._make)

    def row(self, token: int, position: int) -> Row | None:
        return self._made(token)

    def _make(self, token: int) -> Row | None:
        if token >= self._counts.vocab_size:  # a row of padding in the model's embedding
            return self._unigram.row(token, 0)
        followers = slice(int(self._counts.starts[token]), int(self._counts.starts[token + 1]))
        if followers.start == followers.stop:
            return self._unigram.row(token, 0)
        return Row.of(
            self._counts.ids[followers], self._counts.counts[followers], width=self._width
        )


class Uniform:
    """As many ids as a row is wide, each as likely: another stretch of the vocabulary for each place."""

    def __init__(self, *, vocab_size: int, width: int) -> None:
        self._vocab_size = vocab_size
        self._ids = np.arange(vocab_size + width, dtype=np.int64) % vocab_size
        self._even = Row.of(self._ids, [1.0] * width, width=width)
        self._made = lru_cache(_ROWS_KEPT)(self._make)

    def row(self, token: int, position: int) -> Row:
        return self._made(
            hash((token, position)) % self._vocab_size
        )  # of numbers, hence the same in every process

    def _make(self, start: int) -> Row:
        return replace(self._even, ids=self._ids[start : start + self._even.support])


def _added(counted: tuple[Ints, Ints], more: Ints) -> tuple[Ints, Ints]:
    what, times = np.unique(more, return_counts=True)
    together, where = np.unique(np.concatenate([counted[0], what]), return_inverse=True)
    return together, np.bincount(
        where, np.concatenate([counted[1], times]), minlength=len(together)
    ).astype(np.int64)


def _is_sound(found: Counts) -> bool:
    sizes = (
        found.unigram.ndim == found.starts.ndim == found.ids.ndim == 1
        and found.ids.shape == found.counts.shape
    )
    if not sizes or found.vocab_size == 0 or len(found.starts) != found.vocab_size + 1:
        return False
    ordered = (
        found.starts[0] == 0
        and found.starts[-1] == len(found.ids)
        and bool((np.diff(found.starts) >= 0).all())
    )
    inside = bool(((found.ids >= 0) & (found.ids < found.vocab_size)).all())
    return (
        ordered and inside and bool((found.counts > 0).all()) and bool((found.unigram >= 0).all())
    )
