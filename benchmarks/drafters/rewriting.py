"""The task of repeating a text with one name changed, in tokens of the demo tokenizer. Knows no model.

    END old new SOURCE text COPY text, with old replaced by new, END

A name is a token that is a word. Both names come first, so that whoever reads the text knows already what will become of each token. No four tokens
of a text come twice in the same order: where they do, only counting tells which of the places comes next.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from specserve.api.tokenizer import Text
from specserve.config.tree import DEMO
from specserve.demo.corpus import standard_library
from specserve.models.checkpoints.load import read_config

SOURCE, COPY = "\x1d", "\x1e"  # one token each, and in no Python file
MOST = 4  # times that a name occurs in a text of SHORT tokens; in longer ones as much more
SHORT = 64
TRIES = 100_000  # one stretch in forty of 200 tokens will do
ALIKE = 4


@dataclass(frozen=True, slots=True)
class Task:
    prompt: tuple[int, ...]
    answer: tuple[int, ...]  # the end included


@dataclass(frozen=True, slots=True)
class Rewriting:
    """Tasks over Python's standard library."""

    train: tuple[int, ...]
    held_out: tuple[int, ...]
    names: Mapping[int, str]
    end: int
    source: int
    copy: int

    @classmethod
    def of_library(cls) -> Rewriting:
        text, config, corpus = (
            Text.load(DEMO / "target"),
            read_config(DEMO / "target"),
            standard_library(),
        )
        words = {token: text.decode([token]) for token in range(config.vocab_size)}
        names = {token: word for token, word in words.items() if is_name(word)}
        (source,), (copy,) = (text.encode(mark, special=False) for mark in (SOURCE, COPY))
        train, held_out = (
            tuple(chain.from_iterable(text.encode(one, special=False) for one in texts))
            for texts in (corpus.train, corpus.held_out)
        )
        return cls(train, held_out, names, config.eos_token_id, source, copy)

    def drawn(
        self, length: int, chance: random.Random, *, held_out: bool = False, shuffled: bool = False
    ) -> Task:
        """A stretch of the text, or as many of its names in no order, where nothing can be guessed from what usually follows."""
        for _ in range(TRIES):
            tokens = (
                self._shuffled(length, chance)
                if shuffled
                else self._stretch(length, chance, held_out=held_out)
            )
            old = None if repeats(tokens) else self._recurring(tokens, chance)
            if old is not None:
                return self.task(
                    tokens, old, chance.choice([name for name in self.names if name not in tokens])
                )
        raise AssertionError("among so many texts one will do")

    def task(self, tokens: Sequence[int], old: int, new: int) -> Task:
        answer = tuple(new if token == old else token for token in tokens)
        return Task((self.end, old, new, self.source, *tokens, self.copy), (*answer, self.end))

    def _stretch(self, length: int, chance: random.Random, *, held_out: bool) -> tuple[int, ...]:
        text = self.held_out if held_out else self.train
        start = chance.randrange(len(text) - length)
        return text[start : start + length]

    def _shuffled(self, length: int, chance: random.Random) -> tuple[int, ...]:
        tokens = chance.choices(list(self.names), k=length)
        old = chance.choice(tokens)
        for place in chance.sample(range(length), k=max(2, length // 32)):
            tokens[place] = old
        return tuple(tokens)

    def _recurring(self, tokens: Sequence[int], chance: random.Random) -> int | None:
        most = MOST * max(1, len(tokens) // SHORT)
        counted = Counter(token for token in tokens if token in self.names)
        return chance.choice(
            [name for name, times in counted.items() if 2 <= times <= most] or [None]
        )


def repeats(tokens: Sequence[int]) -> bool:
    """Some tokens in a row."""
    rows = [tuple(tokens[i : i + ALIKE]) for i in range(len(tokens) - ALIKE + 1)]
    return len(set(rows)) < len(rows)


def is_name(word: str) -> bool:
    bare = word.removeprefix(" ")
    return len(bare) > 2 and bare.isidentifier()
