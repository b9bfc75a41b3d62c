"""Tasks of repeating a text with one name changed, in tokens of the demo tokenizer.

    END old new SOURCE text COPY text, with old replaced by new, END

A name is a token that is a word. Both names come first, so that a reader of the text already knows
what each token becomes. No four tokens of a text occur twice in the same order: where they do, only
counting shows which of the positions comes next. Knows no model.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from specserve.api.tokenizer import Tokenizer
from specserve.config.tree import DEMO
from specserve.demo.corpus import standard_library
from specserve.models.checkpoints.library import read_config

SOURCE, COPY = "\x1d", "\x1e"
"""Marks of one token each, which occur in no Python file."""
MAX_OCCURRENCES = 4
"""Occurrences of a name in a text of SHORT_TEXT tokens; longer texts allow proportionally more."""
SHORT_TEXT = 64
MAX_TRIES = 100_000
"""Tries per task; one slice in forty of 200 tokens is suitable."""
REPEAT_LENGTH = 4


@dataclass(frozen=True, slots=True)
class RewritingTask:
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    """Tokens to generate, the end token included."""


@dataclass(frozen=True, slots=True)
class RewritingCorpus:
    """Texts of Python's standard library, from which tasks are sampled."""

    train: tuple[int, ...]
    held_out: tuple[int, ...]
    names: Mapping[int, str]
    end: int
    source: int
    copy: int

    @classmethod
    def from_standard_library(cls) -> RewritingCorpus:
        tokenizer, config, corpus = (
            Tokenizer.load(DEMO / "target"),
            read_config(DEMO / "target"),
            standard_library(),
        )
        words = {token: tokenizer.decode([token]) for token in range(config.vocab_size)}
        names = {token: word for token, word in words.items() if is_name(word)}
        (source,), (copy,) = (tokenizer.encode(mark, special=False) for mark in (SOURCE, COPY))
        train, held_out = (
            tuple(chain.from_iterable(tokenizer.encode(text, special=False) for text in texts))
            for texts in (corpus.train, corpus.held_out)
        )
        return cls(train, held_out, names, config.eos_token_id, source, copy)

    def sample_task(
        self, length: int, rng: random.Random, *, held_out: bool = False, shuffled: bool = False
    ) -> RewritingTask:
        """Sample a slice of the text, or as many names in random order.

        In shuffled names nothing can be predicted from what usually follows.
        """
        for _ in range(MAX_TRIES):
            tokens = (
                self._shuffled_names(length, rng)
                if shuffled
                else self._slice(length, rng, held_out=held_out)
            )
            old = None if has_repeats(tokens) else self._recurring_name(tokens, rng)
            if old is not None:
                return self.make_task(
                    tokens, old, rng.choice([name for name in self.names if name not in tokens])
                )
        raise AssertionError("among so many texts one will do")

    def make_task(self, tokens: Sequence[int], old: int, new: int) -> RewritingTask:
        answer = tuple(new if token == old else token for token in tokens)
        return RewritingTask(
            (self.end, old, new, self.source, *tokens, self.copy), (*answer, self.end)
        )

    def _slice(self, length: int, rng: random.Random, *, held_out: bool) -> tuple[int, ...]:
        text = self.held_out if held_out else self.train
        start = rng.randrange(len(text) - length)
        return text[start : start + length]

    def _shuffled_names(self, length: int, rng: random.Random) -> tuple[int, ...]:
        tokens = rng.choices(list(self.names), k=length)
        old = rng.choice(tokens)
        for position in rng.sample(range(length), k=max(2, length // 32)):
            tokens[position] = old
        return tuple(tokens)

    def _recurring_name(self, tokens: Sequence[int], rng: random.Random) -> int | None:
        most = MAX_OCCURRENCES * max(1, len(tokens) // SHORT_TEXT)
        counted = Counter(token for token in tokens if token in self.names)
        return rng.choice([name for name, times in counted.items() if 2 <= times <= most] or [None])


def has_repeats(tokens: Sequence[int]) -> bool:
    """Return whether REPEAT_LENGTH consecutive tokens occur twice."""
    rows = [tuple(tokens[i : i + REPEAT_LENGTH]) for i in range(len(tokens) - REPEAT_LENGTH + 1)]
    return len(set(rows)) < len(rows)


def is_name(word: str) -> bool:
    bare = word.removeprefix(" ")
    return len(bare) > 2 and bare.isidentifier()
