"""Apply token rules to logits: allowed ids, a least number of tokens, bad words.

Each part, in this order, forbids tokens only in the rows where it leaves at least one of those that
grammar, biases and the parts before it have left. So no row is ever without a token. It knows no
models and no text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from specserve.sampling.penalties import History
from specserve.transfers import to_device
from specserve.types import TokenRule


def apply_rule(rows: Tensor, rule: TokenRule, history: History) -> None:
    """Set the logits of forbidden tokens to -inf in place: [rows, vocab].

    The last row follows all of the history's drafts, the row before it all but the last. Ids past
    the vocabulary, which a smaller draft model may lack, are ignored.
    """
    num_rows, vocab = rows.shape
    if rule.allowed_ids:
        _allow_only(rows, [token for token in rule.allowed_ids if token < vocab])
    num_new = len(history.tokens) - history.prompt_length + len(history.drafts) + 1 - num_rows
    num_early = min(max(rule.min_tokens - num_new, 0), num_rows)
    _forbid(rows, [(row, token) for row in range(num_early) for token in rule.end_ids])
    if rule.bad_words:
        words = BadWords.from_sequences(rule.bad_words)
        text = words.text_before(history)
        first = len(text) + 1 - num_rows
        _forbid(
            rows,
            [
                (row, token)
                for row in range(num_rows)
                for token in words.forbidden_after(text[: max(first + row, 0)])
            ],
        )


@dataclass(frozen=True, slots=True)
class BadWords:
    """Bad words by the token before their last one."""

    single: tuple[int, ...]
    """Words of one token."""
    by_end: Mapping[int, Sequence[tuple[tuple[int, ...], int]]]
    """Beginnings that end with a token, each with the token that completes the word."""
    num_before: int
    """Tokens before the last one of the longest word."""

    @classmethod
    @lru_cache(maxsize=256)  # a request's words come with each of its rows, always the same
    def from_sequences(cls, words: tuple[tuple[int, ...], ...]) -> BadWords:
        by_end = defaultdict(list)
        for *beginning, last in words:
            if beginning:
                by_end[beginning[-1]].append((tuple(beginning), last))
        return cls(
            tuple(word[0] for word in words if len(word) == 1),
            dict(by_end),
            max(map(len, words)) - 1,
        )

    def text_before(self, history: History) -> tuple[int, ...]:
        """Return the end of the new tokens, as long as words look back from any of the drafts."""
        new_tokens = history.tokens[history.prompt_length :]
        known = new_tokens[max(len(new_tokens) - self.num_before, 0) :].tolist()
        return (*known, *history.drafts)

    def forbidden_after(self, text: tuple[int, ...]) -> Iterator[int]:
        """Yield the tokens that would complete a word after a text."""
        yield from self.single
        for beginning, last in self.by_end.get(text[-1], ()) if text else ():
            if text[-len(beginning) :] == beginning:
                yield last


def _allow_only(rows: Tensor, ids: Sequence[int]) -> None:
    columns = to_device(np.array(ids, dtype=np.int64), rows.device)
    allowed = torch.full_like(rows, -torch.inf)
    allowed[:, columns] = rows[:, columns]
    rows.copy_(torch.where(_has_tokens(allowed), allowed, rows))


def _forbid(rows: Tensor, cells: Sequence[tuple[int, int]]) -> None:
    """Forbid tokens, given with their rows, unless the row would have no token then."""
    known = [(row, token) for row, token in cells if token < rows.shape[1]]
    if not known:
        return
    at, tokens = to_device(np.array(known, dtype=np.int64).T.copy(), rows.device)
    before = rows[at, tokens]
    rows[at, tokens] = -torch.inf
    rows[at, tokens] = torch.where(_has_tokens(rows)[at, 0], -torch.inf, before)


def _has_tokens(rows: Tensor) -> Tensor:  # [rows, vocab] -> [rows, 1] bool
    return rows.amax(-1, keepdim=True) > -torch.inf
