"""Windows of the texts that are served, in bounded memory. Nothing is written to disk.

Knows token ids; no model and no device.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from specserve.types import DraftStep

NEW_TOKENS = 64
"""Generated tokens that a window is learned from."""
CONTEXT_TOKENS = 64
"""Tokens before these, which are read and not learned."""
MIN_TOKENS = 8
"""A text that ends with fewer generated tokens since its last window leaves no window for them."""
MAX_WINDOWS = 4096
"""Windows that are kept, the newest; with 4 bytes a token they take 2 MB."""
HELD_OUT = 8
"""Texts are held out of training one in so many, to compare weights on."""
MAX_HELD_OUT = 64
"""Held-out windows that are kept, the newest."""
MAX_COLLECTED_TEXTS = 256
"""Running texts that windows are taken from at once; further ones are not learned from."""


@dataclass(frozen=True, slots=True)
class Window:
    """Consecutive tokens of a served text; the target wrote those from `first_new` on."""

    start: int  # position of the first token in the text
    tokens: array[int]
    first_new: int  # index in `tokens`, at least 1
    temperature: float  # 0: greedy


@dataclass(slots=True)
class _Text:
    """The end of a running text, as far as windows may need it."""

    prompt_length: int
    temperature: float
    is_held_out: bool
    start: int = 0  # position of the first of `tokens`
    tokens: array[int] = field(default_factory=lambda: array("i"))
    num_taken: int = 0  # positions that are in windows already

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    @property
    def first_new(self) -> int:
        """Position of the first generated token that is in no window; position 0 has no prefix."""
        return max(self.num_taken, self.prompt_length, 1)

    def write(self, start: int, tokens: Sequence[int]) -> None:
        del self.tokens[start - self.start :]
        self.tokens.extend(tokens)

    def take(self, stop: int) -> Window:
        """Return the window that ends at `stop`, and drop tokens that no later one reads."""
        first = max(self.start, self.first_new - CONTEXT_TOKENS)
        kept = self.tokens[first - self.start : stop - self.start]
        window = Window(first, kept, self.first_new - first, self.temperature)
        self.num_taken = stop
        drop = max(0, stop - CONTEXT_TOKENS - self.start)
        del self.tokens[:drop]
        self.start += drop
        return window


class WindowStates(Protocol):
    """Data that windows of some drafts have beside their tokens."""

    def take(self, seq_id: int, window: Window) -> Window | None:
        """Return the window of a running text with it; None if it lacks too much."""
        ...

    def release(self, seq_ids: Sequence[int]) -> None: ...


class ServedTexts:
    """The newest windows of served texts, some of them held out.

    Steps of the drafter bring the committed tokens, so no text is asked for.
    """

    def __init__(
        self,
        *,
        max_windows: int = MAX_WINDOWS,
        max_held_out: int = MAX_HELD_OUT,
        max_texts: int = MAX_COLLECTED_TEXTS,
        new_tokens: int = NEW_TOKENS,
        seed: int = 0,
        states: WindowStates | None = None,
    ) -> None:
        self.windows: deque[Window] = deque(maxlen=max_windows)
        self.held_out: deque[Window] = deque(maxlen=max_held_out)
        self.num_windows = 0  # to learn from, those that were dropped since included
        self._max_texts, self._new_tokens, self._states = max_texts, new_tokens, states
        self._texts: dict[int, _Text] = {}
        self._random = random.Random(seed)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in memory, those of running texts included."""
        kept = sum(len(window.tokens) for window in (*self.windows, *self.held_out))
        return kept + sum(len(text.tokens) for text in self._texts.values())

    def add(self, step: DraftStep) -> None:
        """Take the committed tokens of a step of the drafter, and windows that they fill."""
        text = self._texts.get(step.seq_id)
        if step.start == 0 and (text is None or text.start):
            text = self._begin(step)
        if text is None:
            return
        if not text.start <= step.start <= text.stop:  # it leaves a gap, or was rolled back far
            del self._texts[step.seq_id]
            return
        text.write(step.start, step.tokens)
        while text.stop - text.first_new >= self._new_tokens:
            self._keep(step.seq_id, text, text.first_new + self._new_tokens)
        if text.stop - text.start > 2 * CONTEXT_TOKENS + self._new_tokens and (
            text.stop <= text.first_new
        ):  # a prompt, of which the end alone is context
            drop = text.stop - text.start - CONTEXT_TOKENS
            del text.tokens[:drop]
            text.start += drop

    def release(self, seq_ids: Sequence[int]) -> None:
        """Drop texts that have ended, after a window of their last tokens."""
        for seq_id in seq_ids:
            text = self._texts.pop(seq_id, None)
            if text is not None and text.stop - text.first_new >= MIN_TOKENS:
                self._keep(seq_id, text, text.stop)
        if self._states is not None:
            self._states.release(seq_ids)

    def sample(self, count: int) -> list[Window]:
        """Return windows to learn from, drawn at random."""
        return [self.windows[self._random.randrange(len(self.windows))] for _ in range(count)]

    def _begin(self, step: DraftStep) -> _Text | None:
        self._texts.pop(step.seq_id, None)
        if len(self._texts) >= self._max_texts:
            return None
        text = self._texts[step.seq_id] = _Text(
            step.policy.prompt_length,
            step.policy.warp.temperature,
            # By chance: every eighth may be all of one kind, as requests come in batches.
            self._random.randrange(HELD_OUT) == 0,
        )
        return text

    def _keep(self, seq_id: int, text: _Text, stop: int) -> None:
        window: Window | None = text.take(stop)
        if self._states is not None and window is not None:
            window = self._states.take(seq_id, window)
        if window is None:
            return
        if text.is_held_out:
            self.held_out.append(window)
        else:
            self.windows.append(window)
            self.num_windows += 1
