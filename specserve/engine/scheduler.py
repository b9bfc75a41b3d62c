"""Choice of the running sequences, and of what fits into a round: slots, tokens and pages.

Pages are counted by arithmetic alone, as if no two sequences shared any. Knows no workers.
"""

from __future__ import annotations

from collections import abc

from specserve.config.sections import MAX_CATCH_UP
from specserve.engine.batch import Batch, BatchEntry
from specserve.engine.budget import TokenBudget
from specserve.engine.prefill import distinct_prompts, encoder_inputs, prompt_chunks
from specserve.engine.prefixes import IN_DRAFTER, PrefixIndex
from specserve.engine.sequence import Sequence
from specserve.engine.waiting_queue import WaitingQueue, held_back
from specserve.types import ModelInfo


class Scheduler:
    """Continuous batching, with fair shares for clients.

    A preempted sequence runs again before any that has not run yet. Of a client's sequences, the
    one with the lowest priority number that has run for longest is the last to be preempted, so
    whatever is preempted, some sequence comes nearer to its end each round.
    """

    def __init__(
        self,
        info: ModelInfo,
        *,
        max_running: int,
        max_queued: int,
        budget: TokenBudget,
        max_gamma: int,
        drafts_prompts: bool = True,  # the drafter reads them while the target does
    ) -> None:
        self.running: list[Sequence] = []  # in the order in which they began
        self.waiting = WaitingQueue()
        # Sequences whose pages the workers may free; the coordinator sends the ids and empties it.
        self.released: list[int] = []
        self.num_preempted = 0
        self._page_size = info.page_size
        self._num_pages = info.num_pages
        self._has_encoder = info.decoder_start is not None
        shares_prefixes = info.prefix_caching and not self._has_encoder
        self._prefixes = PrefixIndex(info.page_size) if shares_prefixes else None
        self._max_running = max_running
        self._max_queued = max_queued
        self._budget = budget
        self._drafts_prompts = drafts_prompts
        self._num_begun = 0
        self._last_turn = 0  # of the sequence that decoded last while they took turns
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
        self.waiting.add(sequence)

    def displace_for(self, client: str) -> Sequence | None:
        """Remove the newest sequence that has not run, of a client with more than its share.

        Returns None if no client has at least two sequences more than this one.
        """
        newest = self.waiting.newest_beyond_share(client, self.running)
        if newest is not None:
            self.waiting.remove(newest)
        return newest

    def remove_finished(self) -> None:
        finished = [sequence for sequence in self.running if sequence.finish]
        self.released += [sequence.seq_id for sequence in finished]
        if self._prefixes is not None:
            for sequence in finished:
                self._prefixes.drop_later(sequence)
        self.running = [sequence for sequence in self.running if not sequence.finish]
        self.waiting.remove_finished()

    def select_running(self) -> None:
        """Preempt what does not fit, youngest first, then admit what does.

        What must fit are the committed tokens.
        """
        while self.num_used_pages > self._num_pages:
            self._preempt()
        if self.waiting and len(self.running) < self._max_running:
            self._admit()

    def next_batch(self, gammas: abc.Sequence[int], *, isolated: Sequence | None = None) -> Batch:
        """Return what fits into a round.

        That is a token for each decoding sequence, chunks of prompts, and draft tokens: at most
        `gammas`, one for each running sequence. Half of what decoding leaves is kept for prompts
        while there are any, and at least a quarter of the budget. An `isolated` sequence runs
        alone.
        """
        kept_out = held_back(self.running) if isolated is None else set()
        wanted = [
            (sequence, gamma and max(0, min(gamma, sequence.max_drafts)))
            for sequence, gamma in zip(self.running, gammas, strict=True)
            if sequence not in kept_out and (isolated is None or sequence is isolated)
        ]
        decoding = [pair for pair in wanted if pair[0].num_pending == 1]
        prompts = distinct_prompts(
            [pair for pair in wanted if pair[0].num_pending > 1], self._prefixes
        )
        pending = sum(prompt.num_pending for prompt in prompts)
        kept = self._budget.for_prompts(pending)
        limit = self._budget.limit(len(decoding), prompts=kept)
        decoding = self._take_turns(decoding, limit - kept)
        left = limit - len(decoding)
        entries = self._decode_entries(
            decoding,
            budget=left - max(kept, min(left // 2, pending)),
            free=self._num_pages - self.num_used_pages,
        )
        left -= sum(entry.gamma for entry in entries)
        chunks = (encoder_inputs if self._has_encoder else prompt_chunks)(prompts, budget=left)
        self._claim_pages(chunks)
        if not self._drafts_prompts:
            for entry in chunks:
                entry.draft_stop = None
        num_prompt_tokens = sum(
            entry.stop - entry.sequence.target_cached + len(entry.sequence.encoder_input)
            for entry in chunks
        )
        _set_next_gammas(entries + chunks, dict(wanted))
        return Batch(
            entries + chunks,
            num_prompt_tokens=num_prompt_tokens,
            num_caught_up=self._limit_drafter(
                entries + chunks, limit if self._drafts_prompts else max(limit, MAX_CATCH_UP)
            ),
            awaits_grammars=any(sequence.awaits_grammar for sequence, _ in wanted),
        )

    def _pages(self, length: int) -> int:
        return -(-length // self._page_size)

    def _need(self, sequence: Sequence, more: int = 0) -> int:
        """Return the pages of a sequence with `more` tokens; encoder input has pages of its own."""
        pages = self._pages(len(sequence.committed) + more)
        return pages + self._pages(len(sequence.encoder_input)) if self._has_encoder else pages

    def _preempt(self) -> None:
        """Take the pages of a sequence of the client whose sequence is the youngest.

        It is the one with the highest priority number, and of several the youngest.
        """
        client = self.running[-1].client
        own = [sequence for sequence in reversed(self.running) if sequence.client == client]
        preempted = max(own, key=lambda sequence: sequence.priority)
        self.running.remove(preempted)
        assert self.running, "a sequence alone always fits: its context is bounded by the pages"
        preempted.reset_caches()
        if self._prefixes is not None:
            self._prefixes.drop(preempted)
        self.released.append(preempted.seq_id)
        self.waiting.put_back(preempted)
        self.num_preempted += 1

    def _admit(self) -> None:
        """Move waiting sequences to the running ones, in the order of the queue.

        There must be room for one more round of all of them, so that what is admitted is not
        preempted at once.
        """
        need = sum(self._need(sequence, self._headroom) for sequence in self.running)
        while self.waiting and len(self.running) < self._max_running:
            head = self.waiting.next(self.running)
            need += self._need(head, self._headroom)
            if need > self._num_pages and self.running:
                return
            self.waiting.remove(head)
            self._num_begun += 1
            head.turn = self._num_begun
            self.running.append(head)

    def _take_turns(
        self, decoding: list[tuple[Sequence, int]], count: int
    ) -> list[tuple[Sequence, int]]:
        """Return the decoding sequences of this round, all of them if they are not too many.

        Otherwise each round goes on after the last one of the round before.
        """
        if len(decoding) <= count:
            return decoding
        first = next(
            (i for i, (sequence, _) in enumerate(decoding) if sequence.turn > self._last_turn), 0
        )
        turn = (decoding[first:] + decoding[:first])[:count]
        self._last_turn = turn[-1][0].turn
        return sorted(turn, key=lambda pair: pair[0].turn)

    def _claim_pages(self, chunks: list[BatchEntry]) -> None:
        if self._prefixes is not None:
            for entry in chunks:
                self._prefixes.claim(entry.sequence, entry.stop)
            self._prefixes.drop_finished()

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
            entry = BatchEntry(sequence, len(sequence.committed), needs_verdict=True)
            if wanted:
                pages = self._pages(entry.stop)
                entry.gamma = min(wanted, cap, (pages + free) * self._page_size - entry.stop)
                free -= self._pages(entry.stop + entry.gamma) - pages
                entry.draft_stop = entry.stop if entry.gamma else None
            entries.append(entry)
        return entries

    def _limit_drafter(self, entries: list[BatchEntry], limit: int) -> int:
        """Bound what the drafter prefills, and return how many tokens it catches up on.

        A drafter that lacks too much (a hole of many rounds, a restart) catches up over several
        rounds, and drafts again then. The newest token of each entry does not count.
        """
        left = limit
        for entry in entries:
            sequence = entry.sequence
            if (
                entry.draft_stop is not None
                and sequence.encoder_input
                and not sequence.draft_cached
            ):
                left = self._take_encoder_input(entry, left, limit)
            if entry.draft_stop is not None:
                cached = sequence.draft_cached + self._num_draft_shared(entry)
                entry.draft_stop = min(entry.draft_stop, cached + left + 1)
                left -= entry.draft_stop - cached - 1
                if entry.draft_stop < entry.stop:
                    entry.gamma = 0
        return limit - left

    def _num_draft_shared(self, entry: BatchEntry) -> int:
        """Return how many of an entry's tokens the drafter finds in its own prefix cache."""
        sequence, stop = entry.sequence, entry.draft_stop
        if (
            self._prefixes is None
            or stop is None
            or stop - sequence.draft_cached <= self._page_size
        ):
            return 0
        shared = self._prefixes.num_shared(sequence, IN_DRAFTER)
        return min(shared, stop - sequence.draft_cached - 1)

    def _take_encoder_input(self, entry: BatchEntry, left: int, limit: int) -> int:
        """Return the drafter's remaining budget after it has read the whole encoder input.

        An input that is too long waits for a round in which it is the first.
        """
        length = len(entry.sequence.encoder_input)
        if length <= left:
            return left - length
        if left == limit:
            return 0
        entry.draft_stop, entry.gamma = None, 0
        return left


def _set_next_gammas(entries: abc.Sequence[BatchEntry], wanted: abc.Mapping[Sequence, int]) -> None:
    """Want as many draft tokens in the next round, if they are still of use there."""
    for entry in entries:
        if gamma := wanted[entry.sequence]:
            entry.next_gamma = max(0, min(gamma, entry.sequence.max_drafts - 1))
