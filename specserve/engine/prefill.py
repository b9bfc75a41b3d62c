"""Chunks of prompts for a round: who waits for an equal prompt, and how prompts share the tokens.

Knows no pages beyond the index of prefixes, and no workers.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass

from specserve.engine.batch import BatchEntry
from specserve.engine.prefixes import PrefixIndex
from specserve.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PendingPrompt:
    """A sequence that is prefilled, with the gamma that it will draft with."""

    sequence: Sequence
    gamma: int
    num_shared: int = 0  # next tokens that the target finds in its prefix cache

    @property
    def num_pending(self) -> int:
        """Tokens that a pass has yet to compute, encoder input included."""
        return self.sequence.num_pending - self.num_shared


def distinct_prompts(
    pairs: abc.Sequence[tuple[Sequence, int]], prefixes: PrefixIndex | None
) -> list[PendingPrompt]:
    """Return the prompts that are prefilled in this round, in order of arrival.

    Only one of several prompts with the same next page takes part: the one with the fewest tokens
    left, in the place of the oldest. The others attach the page afterwards. Whether they wait is
    decided in each round for itself, so that no sequence waits for one that has gone.
    """
    if prefixes is None:
        return [PendingPrompt(sequence, gamma) for sequence, gamma in pairs]
    prompts = [
        PendingPrompt(sequence, gamma, prefixes.num_shared(sequence)) for sequence, gamma in pairs
    ]
    # Such a sequence computes its next page in any case, and the others may wait for it.
    begun = {
        prefixes.page_behind(prompt.sequence, 0)
        for prompt in prompts
        if prefixes.must_compute(prompt.sequence)
    }
    chosen: dict[int | Sequence, PendingPrompt] = {}
    for prompt in prompts:
        page = prefixes.page_behind(prompt.sequence, prompt.num_shared)
        if page is None or prefixes.must_compute(prompt.sequence):
            chosen[prompt.sequence] = prompt
        elif page not in begun:
            chosen[page] = min(
                chosen.get(page, prompt), prompt, key=lambda prompt: prompt.num_pending
            )
    return list(chosen.values())


def prompt_chunks(prompts: abc.Sequence[PendingPrompt], *, budget: int) -> list[BatchEntry]:
    """Return chunks of prompts.

    They carry no draft tokens, but a drafter that will be wanted later prefills along.
    """
    chunks = share([prompt.num_pending for prompt in prompts], budget=budget)
    entries = []
    for prompt, chunk in zip(prompts, chunks, strict=True):
        if chunk:
            sequence = prompt.sequence
            stop = sequence.target_cached + prompt.num_shared + chunk
            entries.append(
                BatchEntry(
                    sequence,
                    stop,
                    needs_verdict=stop == sequence.length,
                    draft_stop=stop if prompt.gamma else None,
                )
            )
    return entries


def encoder_inputs(prompts: abc.Sequence[PendingPrompt], *, budget: int) -> list[BatchEntry]:
    """Return encoder inputs, each with any tokens generated before a preemption.

    Encoder inputs are not chunked; the oldest is scheduled even when it exceeds the budget.
    """
    entries: list[BatchEntry] = []
    for prompt in prompts:
        if entries and prompt.num_pending > budget:
            break
        budget -= prompt.num_pending
        length = prompt.sequence.length
        entries.append(
            BatchEntry(
                prompt.sequence,
                length,
                needs_verdict=True,
                draft_stop=length if prompt.gamma else None,
            )
        )
    return entries


def share(pending: abc.Sequence[int], *, budget: int) -> list[int]:
    """Split the budget among prompts with these numbers of tokens left.

    One half is split in equal parts, and what short prompts leave of it, or rounding does, goes to
    those with the fewest tokens left: a short prompt does not wait for long ones. The other half
    goes by arrival: no stream of short prompts holds a long one up for ever.
    """
    equal = budget // 2 // max(1, len(pending))
    chunks = [min(tokens, equal) for tokens in pending]
    by_arrival = range(len(pending))
    by_length = sorted(by_arrival, key=lambda i: pending[i])
    for order, part in ((by_length, budget // 2 - sum(chunks)), (by_arrival, budget)):
        left = min(part, budget - sum(chunks))
        for i in order:
            more = min(pending[i] - chunks[i], left)
            chunks[i] += more
            left -= more
    return chunks
