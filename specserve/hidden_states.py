"""Hidden states of a target as bytes, on their way to a drafter in another process.

Knows no tensors and no messages.
"""

from __future__ import annotations

from dataclasses import dataclass

HIDDEN_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """Hidden states of consecutive positions of one sequence, as the bytes that a target computed.

    A drafter in another process drafts from them. Missing ones cost acceptance alone.
    """

    seq_id: int
    start: int
    num_positions: int  # at least 1
    dtype: str  # of HIDDEN_DTYPES
    data: bytes | memoryview  # of [positions, width], row by row

    @property
    def num_bytes(self) -> int:
        return len(self.data)
