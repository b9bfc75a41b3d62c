"""A draft model with another tokenizer, run in the target's ids and positions.

Its logits are of the tokens that both share; the others have none. So penalties, biases,
grammars and noise, which all go by the target's ids, work as for any draft model, and q is what a
draft token was really drawn from. Knows no requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.features.other_tokenizer.text import TranslatedText
from specserve.features.other_tokenizer.translation import TokenTranslation
from specserve.models.cache import Fork, PagedCache
from specserve.models.runner import DecodePasses, Runner
from specserve.transfers import to_device
from specserve.types import Step


@dataclass(frozen=True, slots=True)
class TranslatedStep:
    """A step in the draft's tokens, and what it adds to the text."""

    text: TranslatedText
    start: int  # of the target's step
    tokens: tuple[int, ...]  # of the target's step
    step: Step
    lengths: tuple[int, ...]  # draft tokens up to the end of each of `tokens`

    def num_rows(self, num_logits: int) -> int:
        """Return how many of the last rows have those after the last `num_logits` tokens."""
        return self.lengths[-1] - self.lengths[-num_logits] + 1 if num_logits else 0

    def rows(self, num_logits: int) -> list[int]:
        """Return the rows after the last `num_logits` tokens, among the last ones."""
        first = self.lengths[-num_logits] if num_logits else 0
        return [length - first for length in self.lengths[len(self.lengths) - num_logits :]]


class TranslatedRunner:
    """A runner of a draft model that is spoken to in the target's tokens.

    It has what a drafter uses of a `Runner`. A step truncates at any of the target's positions:
    `TranslatedText` says how many of the draft's tokens are kept then.
    """

    def __init__(self, runner: Runner, translation: TokenTranslation, *, target_vocab: int) -> None:
        self._runner, self._translation = runner, translation
        self._target_vocab, self.device = target_vocab, runner.device
        self.network = runner.network
        self._texts: dict[int, TranslatedText] = {}
        self.cache = TranslatedCache(runner.cache, self._texts, translation)
        self._target_ids = to_device(translation.target_ids, self.device)
        self._draft_ids = to_device(translation.draft_ids, self.device)
        to_draft = np.array([spelling[0] for spelling in translation.spellings], np.int64)
        to_draft[translation.target_ids] = translation.draft_ids
        self._to_draft = to_device(to_draft, self.device)

    @property
    def drawable(self) -> NDArray[np.bool_]:  # [target's ids]
        """Mask of the target's tokens that can be drawn."""
        drawable = np.zeros(self._target_vocab, np.bool_)
        drawable[self._translation.target_ids] = True
        return drawable

    def positions(self, step: Step) -> range:
        """Return the positions of the draft's cache that a step writes; it must leave no gap."""
        translated = self._translate(step)
        return range(translated.step.start, translated.step.stop)

    def run(self, steps: Sequence[Step], num_logits: Sequence[int]) -> Tensor:
        """Return the logits [sum(num_logits), target's ids] after the last tokens of each step.

        Raises OutOfPages, as `Runner.run` does.
        """
        translated = [self._translate(step) for step in steps]
        for each in translated:
            each.text.truncate(each.start)
        num_rows = [
            each.num_rows(count) for each, count in zip(translated, num_logits, strict=True)
        ]
        logits = self._runner.run([each.step for each in translated], num_rows)
        for each in translated:
            each.text.extend(each.tokens, each.lengths)
            self._texts[each.step.seq_id] = each.text
        if num_rows != list(num_logits):
            firsts = [0, *accumulate(num_rows)]
            rows = [
                first + row
                for first, each, count in zip(firsts, translated, num_logits, strict=False)
                for row in each.rows(count)
            ]
            logits = logits[to_device(np.array(rows, np.int64), self.device)]
        return self.to_target(logits)

    def decode_passes(self, seq_ids: Sequence[int], counts: Sequence[int]) -> TranslatedPasses:
        """Prepare passes that each write one more shared token of these sequences."""
        return TranslatedPasses(self, self._runner.decode_passes(seq_ids, counts), self._to_draft)

    def to_target(self, logits: Tensor) -> Tensor:  # [rows, draft's ids] -> [rows, target's ids]
        """Return the logits by the target's ids; tokens that are not shared have -inf."""
        found = logits.new_full((len(logits), self._target_vocab), -torch.inf)
        return found.index_copy_(1, self._target_ids, logits.index_select(1, self._draft_ids))

    def fork_many(self, forks: Sequence[Fork]) -> None:
        """Fork all sequences or none. Raises OutOfPages; nothing has changed then."""
        texts = {
            fork.branch_id: self._texts[fork.seq_id].fork(fork.length)
            for fork in forks
            if fork.seq_id in self._texts
        }
        self._runner.fork_many(
            [
                replace(fork, length=texts[fork.branch_id].lengths[fork.length])
                if fork.branch_id in texts
                else fork
                for fork in forks
            ]
        )
        self._texts.update(texts)

    def promote_branch(self, seq_id: int, branch_id: int) -> None:
        """Replace `seq_id` with `branch_id`."""
        self._runner.promote_branch(seq_id, branch_id)
        self._texts[seq_id] = self._texts.pop(branch_id)

    def release(self, seq_ids: Sequence[int]) -> None:
        self._runner.release(seq_ids)
        for seq_id in seq_ids:
            self._texts.pop(seq_id, None)

    def _translate(self, step: Step) -> TranslatedStep:
        text = self._texts.get(step.seq_id) or TranslatedText()
        start = text.lengths[step.start]
        spellings = [self._translation.spellings[token] for token in step.tokens]
        if step.start == 0:
            spellings[0] = self._translation.prefix + spellings[0]
        own = Step(
            step.seq_id,
            start,
            tuple(chain.from_iterable(spellings)),
            cache_salt=step.cache_salt,
        )
        _, *lengths = accumulate(map(len, spellings), initial=start)
        return TranslatedStep(text, step.start, step.tokens, own, tuple(lengths))


class TranslatedPasses:
    """Passes of one token a sequence, of `DecodePasses`, in the target's ids."""

    def __init__(self, runner: TranslatedRunner, passes: DecodePasses, to_draft: Tensor) -> None:
        self._runner, self._passes, self._to_draft = runner, passes, to_draft

    def logits(self, ids: Tensor) -> Tensor:  # [rows] -> [rows, target's ids]
        return self._runner.to_target(self._passes.logits(self._to_draft[ids]))


class TranslatedCache:
    """The draft's cache, in the target's tokens and positions. Pages are the draft's own."""

    def __init__(
        self, cache: PagedCache, texts: dict[int, TranslatedText], translation: TokenTranslation
    ) -> None:
        self._cache, self._texts = cache, texts
        self._shared = dict(
            zip(translation.target_ids.tolist(), translation.draft_ids.tolist(), strict=True)
        )
        self.page_size = cache.page_size

    @property
    def num_pages(self) -> int:
        return self._cache.num_pages

    @property
    def num_free(self) -> int:
        return self._cache.num_free

    @property
    def num_used(self) -> int:
        return self._cache.num_used

    @property
    def prefix_queries(self) -> int:
        """Number of draft tokens looked up in the prefix cache."""
        return self._cache.prefix_queries

    @property
    def prefix_hits(self) -> int:
        """Number of draft tokens found there."""
        return self._cache.prefix_hits

    def check(self) -> None:
        """Check the invariants of the pages."""
        self._cache.check()

    def length(self, seq_id: int) -> int:
        text = self._texts.get(seq_id)
        return 0 if text is None else len(text)

    def tokens(self, seq_id: int, start: int = 0, stop: int | None = None) -> NDArray[np.int64]:
        """Return a copy of the target's tokens that are cached, or of those between."""
        return np.array(self._texts[seq_id].tokens[start:stop], dtype=np.int64)

    def holds(self, seq_id: int, start: int, tokens: Sequence[int]) -> bool:
        """Return whether these tokens are cached from `start` on."""
        text = self._texts.get(seq_id)
        return text is not None and text.tokens[start : start + len(tokens)] == list(tokens)

    def append(self, seq_id: int, tokens: Sequence[int]) -> None:
        """Record shared tokens, which are one draft token each, written into reserved room."""
        self._cache.append(seq_id, [self._shared[token] for token in tokens])
        stop = self._cache.length(seq_id)
        self._texts[seq_id].extend(tokens, range(stop - len(tokens) + 1, stop + 1))
