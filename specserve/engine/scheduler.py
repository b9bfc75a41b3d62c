"""Choice of the running sequences, and of what fits into a round: slots, tokens and pages.

Pages are counted by arithmetic alone, as if no two sequences shared any. Knows no workers.
"""

from __future__ import annotations

from collections import abc, deque

from specserve.engine.batch import Batch, BatchEntry
from specserve.engine.sequence import Sequence
from specserve.types import ModelInfo


class Scheduler:
    """Continuous batching, first come first served.

    Every running sequence arrived before every waiting one. The oldest always progresses: its
    pages are the last to be taken away, so whatever is preempted, some sequence comes nearer to its
    end each round.
    """

    def __init__(
        self,
        info: ModelInfo,
        *,
        max_running: int,
        max_queued: int,
        max_batch_tokens: int,
        max_gamma: int,
    ) -> None:
        self.running: list[Sequence] = []  # in order of arrival
        self.waiting: deque[Sequence] = deque()  # in order of arrival; new ones and preempted ones
        # Sequences whose pages the workers may free; the coordinator sends the ids and empties it.
        self.released: list[int] = []
        self.num_preempted = 0
        self._page_size = info.page_size
        self._num_pages = info.num_pages
        self._decoder_start = info.decoder_start
        self._max_running = max_running
        self._max_queued = max_queued
        self._max_batch_tokens = max_batch_tokens
        self._headroom = max_gamma + 1  # tokens that a sequence may grow by in a round

    @property
    def num_sequences(self) -> int:
        return len(self.running) + len(self.waiting)

    @property
    def num_used_pages(self) -> int:
        """Pages of all committed tokens and encoder inputs of the running sequences.

        Those that are not computed yet count, too.
        """
        return sum(self._need(sequence) for sequence in self.running)

    @property
    def num_wanted_pages(self) -> int:
        """Pages that running and waiting sequences would use together.

        They may be more than there are.
        """
        return self.num_used_pages + sum(self._need(sequence) for sequence in self.waiting)

    @property
    def can_queue(self) -> bool:
        return self.num_sequences < self._max_running + self._max_queued

    def queue(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def remove_finished(self) -> None:
        self.released += [sequence.seq_id for sequence in self.running if sequence.finish]
        self.running = [sequence for sequence in self.running if not sequence.finish]
        if any(sequence.finish for sequence in self.waiting):
            self.waiting = deque(sequence for sequence in self.waiting if not sequence.finish)

    def select_running(self, drafted: Batch | None = None) -> None:
        """Preempt what does not fit, youngest first, then admit what does.

        What must fit are the committed tokens, and the draft tokens of a `drafted` batch that waits
        for its verification.
        """
        while self.num_used_pages + self._draft_pages(drafted) > self._num_pages:
            self._preempt()
        if self.waiting and len(self.running) < self._max_running:
            self._admit()

    def next_batch(
        self,
        gammas: abc.Sequence[int],
        *,
        members: abc.Sequence[Sequence] | None = None,
        drafted: Batch | None = None,
    ) -> Batch:
        """Return what fits into a round.

        That is a token for each decoding sequence, chunks of prompts, and draft tokens: at most
        `gammas`, one for each running sequence. Half of the round is kept for prompts while there
        are any. Only `members` take part, if given; the draft tokens of a `drafted` batch that
        waits for its verification keep their pages.
        """
        ids = None if members is None else {sequence.seq_id for sequence in members}
        wanted = [
            (sequence, max(0, min(gamma, sequence.max_drafts)))
            for sequence, gamma in zip(self.running, gammas, strict=True)
            if ids is None or sequence.seq_id in ids
        ]
        decoding = [pair for pair in wanted if pair[0].num_pending == 1]
        prompts = [pair for pair in wanted if pair[0].num_pending > 1]
        budget = self._max_batch_tokens - len(decoding)
        for_prompts = 0
        if prompts:
            pending = sum(sequence.num_pending for sequence, _ in prompts)
            for_prompts = max(1, min(budget // 2, pending))
        entries = self._decode_entries(
            decoding,
            budget=max(0, budget - for_prompts),
            free=self._num_pages - self.num_used_pages - self._draft_pages(drafted),
        )
        prefill = _prefill_entries if self._decoder_start is None else _encoder_entries
        left = budget - sum(entry.gamma for entry in entries)
        chunks = prefill(prompts, budget=max(for_prompts, left))
        num_prompt_tokens = sum(
            entry.stop - entry.sequence.target_cached + len(entry.sequence.encoder_input)
            for entry in chunks
        )
        return Batch(
            entries + chunks,
            num_prompt_tokens=num_prompt_tokens,
            num_caught_up=self._limit_drafter(entries + chunks),
        )

    def _pages(self, length: int) -> int:
        return -(-length // self._page_size)

    def _need(self, sequence: Sequence, more: int = 0) -> int:
        """Return the pages of a sequence with `more` tokens; encoder input has pages of its own."""
        return self._pages(sequence.length + more) + self._pages(len(sequence.encoder_input))

    def _draft_pages(self, drafted: Batch | None) -> int:
        """Return the pages that the draft tokens of a batch will need beyond the committed ones."""
        if drafted is None:
            return 0
        entries = [entry for entry in drafted.entries if entry.sequence in self.running]
        return sum(
            self._pages(entry.sequence.length + entry.gamma) - self._pages(entry.sequence.length)
            for entry in entries
        )

    def _preempt(self) -> None:
        youngest = self.running.pop()
        assert self.running, "a sequence alone always fits: its context is bounded by the pages"
        youngest.reset_caches()
        self.released.append(youngest.seq_id)
        self.waiting.appendleft(youngest)
        self.num_preempted += 1

    def _admit(self) -> None:
        """Move waiting sequences to the running ones, in order of arrival.

        There must be room for one more round of all of them, so that what is admitted is not
        preempted at once.
        """
        need = sum(self._need(sequence, self._headroom) for sequence in self.running)
        while self.waiting and len(self.running) < self._max_running:
            head = self.waiting[0]
            need += self._need(head, self._headroom)
            if need > self._num_pages and self.running:
                return
            self.running.append(self.waiting.popleft())

    def _decode_entries(
        self, decoding: list[tuple[Sequence, int]], *, budget: int, free: int
    ) -> list[BatchEntry]:
        """Return the entries of decoding sequences, with as many draft tokens as fit.

        All sequences get fewer when the round has too few tokens, the younger ones when the cache
        has too few pages.
        """
        cap = self._headroom
        if decoding and sum(gamma for _, gamma in decoding) > budget:
            cap = budget // len(decoding)
        entries = []
        for sequence, wanted in decoding:
            length = sequence.length
            pages = self._pages(length)
            gamma = min(wanted, cap, (pages + free) * self._page_size - length)
            free -= self._pages(length + gamma) - pages
            draft_stop = length if gamma else None
            entries.append(
                BatchEntry(sequence, length, needs_verdict=True, gamma=gamma, draft_stop=draft_stop)
            )
        return entries

    def _limit_drafter(self, entries: list[BatchEntry]) -> int:
        """Bound what the drafter prefills, and return how many tokens it catches up on.

        A drafter that lacks too much (a hole of many rounds, a restart) catches up over several
        rounds, and drafts again then. The newest token of each entry does not count.
        """
        left = self._max_batch_tokens
        for entry in entries:
            sequence = entry.sequence
            if (
                entry.draft_stop is not None
                and sequence.encoder_input
                and not sequence.draft_cached
            ):
                left = self._take_encoder_input(entry, left)
            if entry.draft_stop is not None:
                cached = sequence.draft_cached
                entry.draft_stop = min(entry.draft_stop, cached + left + 1)
                left -= entry.draft_stop - cached - 1
                if entry.draft_stop < entry.stop:
                    entry.gamma = 0
        return self._max_batch_tokens - left

    def _take_encoder_input(self, entry: BatchEntry, left: int) -> int:
        """Return the drafter's remaining budget after it has read the whole encoder input.

        An input that is too long waits for a round in which it is the first.
        """
        length = len(entry.sequence.encoder_input)
        if length <= left:
            return left - length
        if left == self._max_batch_tokens:
            return 0
        entry.draft_stop, entry.gamma = None, 0
        return left


def _prefill_entries(prompts: list[tuple[Sequence, int]], *, budget: int) -> list[BatchEntry]:
    """Return chunks of prompts.

    They carry no draft tokens, but a drafter that will be wanted later prefills along.
    """
    chunks = _share([sequence.num_pending for sequence, _ in prompts], budget=budget)
    entries = []
    for (sequence, gamma), chunk in zip(prompts, chunks, strict=True):
        if chunk:
            stop = sequence.target_cached + chunk
            entries.append(
                BatchEntry(
                    sequence,
                    stop,
                    needs_verdict=stop == sequence.length,
                    draft_stop=stop if gamma else None,
                )
            )
    return entries


def _encoder_entries(prompts: list[tuple[Sequence, int]], *, budget: int) -> list[BatchEntry]:
    """Return encoder inputs, each with any tokens generated before a preemption.

    Encoder inputs are not chunked; the oldest is scheduled even when it exceeds the budget.
    """
    entries: list[BatchEntry] = []
    for sequence, gamma in prompts:
        if entries and sequence.num_pending > budget:
            break
        budget -= sequence.num_pending
        entries.append(
            BatchEntry(
                sequence,
                sequence.length,
                needs_verdict=True,
                draft_stop=sequence.length if gamma else None,
            )
        )
    return entries


def _share(pending: list[int], *, budget: int) -> list[int]:
    """Split the budget: one half in equal parts, the other half in order of arrival.

    A short prompt thus does not wait for a long one.
    """
    equal = budget // 2 // max(1, len(pending))
    chunks = [min(tokens, equal) for tokens in pending]
    left = budget - sum(chunks)
    for i, tokens in enumerate(pending):
        more = min(tokens - chunks[i], left)
        chunks[i] += more
        left -= more
    return chunks
