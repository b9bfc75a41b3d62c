"""Logprobs of prompts, and the wish for them, as rows of plain values and bytes, and back.

A malformed row raises ValueError, TypeError or struct.error.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from specserve.types import PromptLogprobs, PromptScoring

Row = tuple[Any, ...]

_REAL, _COUNT = np.dtype("<f4"), np.dtype("<u4")
_SCORING = struct.Struct("<I?I")  # num_top, has_next, next_token
_SHAPE = struct.Struct("<QII")  # start, tokens, alternatives


def write_scoring(scoring: PromptScoring | None) -> bytes | None:
    if scoring is None:
        return None
    after = scoring.next_token
    return _SCORING.pack(scoring.num_top, after is not None, after or 0)


def read_scoring(numbers: Any) -> PromptScoring | None:
    if numbers is None:
        return None
    num_top, has_next, next_token = _SCORING.unpack(numbers)
    return PromptScoring(num_top, next_token if has_next else None)


def write_prompt_logprobs(logprobs: PromptLogprobs | None) -> Row | None:
    if logprobs is None:
        return None
    return (
        _SHAPE.pack(logprobs.start, *logprobs.top.shape),
        logprobs.token.astype(_REAL).tobytes(),
        logprobs.rank.astype(_COUNT).tobytes(),
        logprobs.top_ids.astype(_COUNT).tobytes(),
        logprobs.top.astype(_REAL).tobytes(),
    )


def read_prompt_logprobs(row: Any) -> PromptLogprobs | None:
    """Return views of the row; a column that is too long or too short raises ValueError."""
    if row is None:
        return None
    numbers, token, rank, top_ids, top = row
    start, num_tokens, num_top = _SHAPE.unpack(numbers)
    return PromptLogprobs(
        start,
        _array(token, _REAL, num_tokens),
        _array(rank, _COUNT, num_tokens),
        _array(top_ids, _COUNT, num_tokens, num_top),
        _array(top, _REAL, num_tokens, num_top),
    )


def _array(column: Any, dtype: np.dtype[Any], *shape: int) -> np.ndarray[Any, np.dtype[Any]]:
    return np.frombuffer(column, dtype).reshape(shape)
