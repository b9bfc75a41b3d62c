"""Render the logprobs of a prompt as JSON, in vLLM's format, block by block. Knows no HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence

from specserve.types import Logprobs, PromptLogprobs

BLOCK = 128  # tokens that are rendered before other requests get their turn

to_json = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode

Block = tuple[Sequence[int], list[Logprobs]]


def blocks(ids: Sequence[int], logprobs: PromptLogprobs, num_top: int) -> Iterator[Block]:
    """Yield the tokens after the first, with their logprobs, some at a time."""
    for first in range(0, len(logprobs), BLOCK):
        stop = min(first + BLOCK, len(logprobs))
        yield ids[1 + first : 1 + stop], logprobs.rows(first, stop, num_top)


class PromptLogprobsJson:
    """The list `prompt_logprobs` of a choice: null for the first token, an object for each other.

    An object has the token itself first, then the likeliest ones: logprob, rank and text, by id.
    """

    def __init__(
        self,
        ids: Sequence[int],
        num_top: int | None,
        *,
        token_text: Callable[[int], str],
        lowest: float,
    ) -> None:
        self._ids, self._num_top = ids, num_top
        self._token_text, self._lowest = token_text, lowest
        self._parts: list[str] = []

    def add(self, logprobs: PromptLogprobs) -> Iterator[None]:
        """Render the logprobs, a block at each step; nothing if they were not requested."""
        if self._num_top is None:
            return
        self._parts.append("null")
        for ids, rows in blocks(self._ids, logprobs, self._num_top):
            objects = (self._object(*pair) for pair in zip(ids, rows, strict=True))
            self._parts.append(to_json(list(objects))[1:-1])
            yield

    def member(self) -> str:
        """Return the list as a member after others; empty if there is none."""
        return f',"prompt_logprobs":[{",".join(self._parts)}]' if self._parts else ""

    def take_member(self) -> str:
        """Return the member once; it is empty from then on."""
        member, self._parts = self.member(), []
        return member

    def _object(self, token: int, logprobs: Logprobs) -> dict[str, dict[str, object]]:
        ranked = [(token, logprobs.token, logprobs.rank)]
        ranked += zip(logprobs.top_ids, logprobs.top, range(1, len(logprobs.top) + 1), strict=True)
        members: dict[str, dict[str, object]] = {}
        for token_id, logprob, rank in ranked:
            members.setdefault(
                str(token_id),
                {
                    "logprob": max(logprob, self._lowest),
                    "rank": rank,
                    "decoded_token": self._token_text(token_id),
                },
            )
        return members
