"""The task of repeating a text with one name changed, in tokens of the demo tokenizer. Knows no model.

    END old new SOURCE text COPY text, with old replaced by new, END

A name is a token that is a word. Both names come first, so that whoever reads the text knows already what will become of each token.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from specserve.api.text import Text
from specserve.config import DEMO
from specserve.demo.train import standard_library
from specserve.models.load import read_config

SOURCE, COPY = "\x1d", "\x1e"  # one token each, and in no Python file
MOST = 4  # times that a name occurs in a text of SHORT tokens; in longer ones as much more
SHORT = 64
TRIES = 1000


@dataclass(frozen=True, slots=True)
class Task:
    prompt: tuple[int, ...]
    answer: tuple[int, ...]  # the end included


@dataclass(frozen=True, slots=True)
class Rewriting:
    """Tasks over Python's standard library."""

    train: tuple[int, ...]
    held_out: tuple[int, ...]
    names: tuple[int, ...]
    end: int
    source: int
    copy: int

    @classmethod
    def of_library(cls) -> Rewriting:
        text, config, corpus = Text.load(DEMO / "target"), read_config(DEMO / "target"), standard_library()
        names = tuple(token for token in range(config.vocab_size) if is_name(text.decode([token])))
        (source,), (copy,) = (text.encode(mark, special=False) for mark in (SOURCE, COPY))
        train, held_out = (tuple(chain.from_iterable(text.encode(one, special=False) for one in texts)) for texts in (corpus.train, corpus.held_out))
        return cls(train, held_out, names, config.eos_token_id, source, copy)

    def drawn(self, length: int, chance: random.Random, *, held_out: bool = False, shuffled: bool = False) -> Task:
        """A stretch of the text, or as many of its names in no order, where nothing can be guessed from what usually follows."""
        for _ in range(TRIES):
            tokens = self._shuffled(length, chance) if shuffled else self._stretch(length, chance, held_out=held_out)
            old, new = self._recurring(tokens, chance), chance.choice(self.names)
            if old is not None and new not in tokens:
                return self.task(tokens, old, new)
        raise AssertionError("among so many texts one repeats a name")

    def task(self, tokens: Sequence[int], old: int, new: int) -> Task:
        answer = tuple(new if token == old else token for token in tokens)
        return Task((self.end, old, new, self.source, *tokens, self.copy), (*answer, self.end))

    def _stretch(self, length: int, chance: random.Random, *, held_out: bool) -> tuple[int, ...]:
        text = self.held_out if held_out else self.train
        start = chance.randrange(len(text) - length)
        return text[start : start + length]

    def _shuffled(self, length: int, chance: random.Random) -> tuple[int, ...]:
        tokens = chance.choices(self.names, k=length)
        old = chance.choice(tokens)
        for place in chance.sample(range(length), k=max(2, length // 32)):
            tokens[place] = old
        return tuple(tokens)

    def _recurring(self, tokens: Sequence[int], chance: random.Random) -> int | None:
        known, most = set(self.names), MOST * max(1, len(tokens) // SHORT)
        counted = Counter(token for token in tokens if token in known)
        return chance.choice([name for name, times in counted.items() if 2 <= times <= most] or [None])


def is_name(word: str) -> bool:
    bare = word.removeprefix(" ")
    return len(bare) > 2 and bare.isidentifier()
