"""Tables of what follows what in counted texts: rows of likely tokens, from a file of counts.

Knows no prompts and no draws.
"""

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

TABLES_FILE = "tables.safetensors"
"""Name of the file in its directory."""
_MAX_CACHED_ROWS = 4096
"""Rows of a table that are kept ready to be drawn from."""

Ints = NDArray[np.int64]
_NONE: Ints = np.empty(0, np.int64)
_TOKEN_BITS = 32
"""Low bits of a pair, which are its second token."""


@dataclass(frozen=True, slots=True, eq=False)
class TableRow:
    """A distribution on its support, in falling order, padded to the table's width with 0.

    A row is equal only to itself.
    """

    ids: Ints  # [width]
    probs: NDArray[np.float32]  # [width]
    sums: tuple[float, ...]
    """[support] of the probabilities up to each; the last is about 1."""
    support: int

    @classmethod
    def from_weights(
        cls, ids: Sequence[int] | Ints, weights: Sequence[float] | NDArray[Any], *, width: int
    ) -> TableRow:
        """Return a row of the first `width` weights, which are above 0 and in falling order."""
        share = np.asarray(weights[:width], dtype=np.float64)
        support = len(share)
        assert support > 0
        padded, probs = np.zeros(width, np.int64), np.zeros(width, np.float32)
        padded[:support] = ids[:support]
        probs[:support] = share / share.sum()
        return cls(padded, probs, tuple(accumulate(probs[:support].tolist())), support)

    @property
    def top_token(self) -> int:
        return int(self.ids[0])

    def token_at(self, u: float) -> int:
        """Return the token whose part of the running sums contains `u`, between 0 and 1."""
        return int(self.ids[min(bisect_right(self.sums, u * self.sums[-1]), self.support - 1)])


class Table(Protocol):
    """A distribution of the next token, by the token before and the position."""

    def row(self, token: int, position: int) -> TableRow | None:
        """Return None if nothing is known."""
        ...


class TrainableTable(Table, Protocol):
    """A table that learns from committed tokens."""

    def learn(self, tokens: Sequence[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class Counts:
    """Frequencies of tokens in some texts, and the most frequent followers of each."""

    unigram: Ints  # [vocab]
    starts: Ints
    """[vocab + 1] index of each token's first follower."""
    ids: Ints
    """[pairs] the followers of all tokens, one token after another, most frequent first."""
    counts: Ints  # [pairs]
    fingerprint: str
    """Fingerprint of the tokenizer."""

    @property
    def vocab_size(self) -> int:
        return len(self.unigram)


def count_texts(texts: Iterable[Sequence[int]], *, keep: int, fingerprint: str = "") -> Counts:
    """Count tokens and the `keep` most frequent followers of each.

    The vocabulary ends with the highest id. Nothing follows the end of a text.
    """
    # Each: the distinct values in rising order, and how often each occurred.
    singles, pairs = (_NONE, _NONE), (_NONE, _NONE)
    for text in texts:
        tokens = np.asarray(text, dtype=np.int64)
        singles = _add_counts(singles, tokens)
        pairs = _add_counts(pairs, tokens[:-1] << _TOKEN_BITS | tokens[1:])
    firsts, ids, counts = (
        pairs[0] >> _TOKEN_BITS,
        pairs[0] & (1 << _TOKEN_BITS) - 1,
        pairs[1],
    )
    # By token, then the most frequent first, then the lowest id.
    order = np.lexsort((ids, -counts, firsts))
    firsts, ids, counts = firsts[order], ids[order], counts[order]
    kept = np.arange(len(firsts)) - np.searchsorted(firsts, firsts) < keep
    unigram = np.bincount(singles[0], singles[1]).astype(np.int64)
    starts = np.searchsorted(firsts[kept], np.arange(len(unigram) + 1))
    return Counts(unigram, starts, ids[kept], counts[kept], fingerprint)


def save_tables(counts: Counts, path: Path) -> None:
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


def load_tables(path: Path) -> Counts:
    """Return the counts of a file, or of the directory that holds it.

    Raises ModelNotFound or ModelError.
    """
    file = path / TABLES_FILE if path.is_dir() else path
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
    if not _is_consistent(found):
        raise ModelError(f"{file} holds tables that do not fit together")
    return found


class UnigramTable:
    """A table that has one row for all positions."""

    def __init__(self, counts: Counts, *, width: int) -> None:
        self._counts, self._width = counts, width

    def row(self, token: int, position: int) -> TableRow | None:
        return self._row

    @cached_property
    def _row(self) -> TableRow | None:
        likeliest = np.argsort(-self._counts.unigram, kind="stable")[: self._width]
        weights = self._counts.unigram[likeliest]
        return (
            TableRow.from_weights(likeliest, weights[weights > 0], width=self._width)
            if weights[0] > 0
            else None
        )


class BigramTable:
    """A table by the token before.

    The frequent tokens follow a token that nothing ever followed.
    """

    def __init__(self, counts: Counts, *, width: int) -> None:
        self._counts, self._width = counts, width
        self._unigram = UnigramTable(counts, width=width)
        self._cached_row = lru_cache(_MAX_CACHED_ROWS)(self._make_row)

    def row(self, token: int, position: int) -> TableRow | None:
        return self._cached_row(token)

    def _make_row(self, token: int) -> TableRow | None:
        # Padding of the model's embedding.
        if token >= self._counts.vocab_size:
            return self._unigram.row(token, 0)
        followers = slice(int(self._counts.starts[token]), int(self._counts.starts[token + 1]))
        if followers.start == followers.stop:
            return self._unigram.row(token, 0)
        return TableRow.from_weights(
            self._counts.ids[followers], self._counts.counts[followers], width=self._width
        )


class UniformTable:
    """A table whose ids are equally likely: another part of the vocabulary at each position.

    A part has as many ids as a row is wide.
    """

    def __init__(self, *, vocab_size: int, width: int) -> None:
        self._vocab_size = vocab_size
        self._ids = np.arange(vocab_size + width, dtype=np.int64) % vocab_size
        self._even = TableRow.from_weights(self._ids, [1.0] * width, width=width)
        self._cached_row = lru_cache(_MAX_CACHED_ROWS)(self._make_row)

    def row(self, token: int, position: int) -> TableRow:
        # The hash of numbers is the same in every process.
        return self._cached_row(hash((token, position)) % self._vocab_size)

    def _make_row(self, start: int) -> TableRow:
        return replace(self._even, ids=self._ids[start : start + self._even.support])


def _add_counts(counted: tuple[Ints, Ints], more: Ints) -> tuple[Ints, Ints]:
    values, counts = np.unique(more, return_counts=True)
    merged, where = np.unique(np.concatenate([counted[0], values]), return_inverse=True)
    return merged, np.bincount(
        where, np.concatenate([counted[1], counts]), minlength=len(merged)
    ).astype(np.int64)


def _is_consistent(found: Counts) -> bool:
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
