"""Read the logprobs of prompts from the logits of a pass. Knows no cache and no network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, chain, pairwise

import numpy as np
from torch import Tensor

from specserve.models.runner import LogitsReader
from specserve.sampling.distribution import score
from specserve.transfers import to_device
from specserve.types import PromptLogprobs, Verdict, VerifyStep


class PromptScores:
    """The logprobs of the prompt's tokens after the positions of one pass.

    They are of the unwarped distribution, like generated tokens' logprobs. Slices are reduced as
    they come, so that no more than one slice of the logits is held.
    """

    def __init__(self, steps: Sequence[VerifyStep], vocab_size: int) -> None:
        self._steps = steps
        self._scored = [step for step in steps if step.scoring is not None]
        self._tokens = np.fromiter(
            chain.from_iterable(step.scored_tokens for step in self._scored), np.int64
        )
        self._num_top = min(max(map(_num_top, self._scored), default=0), vocab_size)
        self._parts = [PromptLogprobs.empty(1, self._num_top)]
        self._num_read, self._vocab_size = 0, vocab_size
        self.reader = reader_of(steps, self._read)

    def _read(self, logits: Tensor) -> None:  # [rows, vocab], of the next rows
        """Score the next rows; columns past the vocabulary are not logits."""
        first, self._num_read = self._num_read, self._num_read + len(logits)
        tokens = to_device(self._tokens[first : self._num_read], logits.device)
        self._parts.append(score(logits[:, : self._vocab_size], tokens, self._num_top))

    def add_to(self, verdicts: Sequence[Verdict]) -> list[Verdict]:
        """Return the verdicts of the pass with the logprobs, in the order of all answered steps.

        A chunk of a prompt that needed no decision gets a verdict without one.
        """
        by_id = self._by_sequence()
        decided = {verdict.seq_id: verdict for verdict in verdicts}
        answered = [step.seq_id for step in self._steps if step.is_answered]
        return [
            replace(
                decided.get(seq_id) or Verdict(seq_id, 0, 0, None, is_decision=False),
                prompt_logprobs=by_id.get(seq_id),
            )
            for seq_id in answered
        ]

    def _by_sequence(self) -> dict[int, PromptLogprobs]:
        scores = PromptLogprobs.join(self._parts)
        stops = accumulate((len(step.scored_tokens) for step in self._scored), initial=0)
        return {
            step.seq_id: scores.part(first, stop, start=step.start + 1, num_top=_num_top(step))
            for step, (first, stop) in zip(self._scored, pairwise(stops), strict=True)
        }


def reader_of(steps: Sequence[VerifyStep], read: Callable[[Tensor], None]) -> LogitsReader | None:
    """Return the reader of the rows that steps score; None: they score none."""
    num_rows = [len(step.scored_tokens) for step in steps]
    return LogitsReader(num_rows, read) if any(num_rows) else None


def _num_top(step: VerifyStep) -> int:
    assert step.scoring is not None
    return step.scoring.num_top
