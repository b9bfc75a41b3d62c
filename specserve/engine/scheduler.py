"""Who runs, and what fits into a round: slots, tokens and pages. Counts pages by arithmetic alone, as if no two sequences shared any."""

from __future__ import annotations

from collections import abc, deque

from specserve.engine.batch import Batch, Row
from specserve.engine.sequence import Sequence
from specserve.types import ModelInfo


class Scheduler:
    """Continuous batching, first come first served.

    Every running sequence arrived before every waiting one. The oldest always progresses: its pages are the last to be taken away,
    so whatever is preempted, some sequence comes nearer to its end each round.
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
        self.waiting: deque[Sequence] = deque()  # likewise; never run yet, or preempted
        self.released: list[
            int
        ] = []  # what the workers may forget; the coordinator tells them and empties it
        self.num_preempted = 0
        self._page_size = info.page_size
        self._num_pages = info.num_pages
        self._decoder_start = info.decoder_start
        self._max_running = max_running
        self._max_queued = max_queued
        self._max_batch_tokens = max_batch_tokens
        self._headroom = max_gamma + 1  # what a sequence may grow by in a round

    @property
    def num_sequences(self) -> int:
        return len(self.running) + len(self.waiting)

    @property
    def num_used(self) -> int:
        """Pages for all committed tokens of the running sequences, and for their sources, read already or not."""
        return sum(self._need(sequence) for sequence in self.running)

    @property
    def num_wanted(self) -> int:
        """The same if all that wait ran as well; may be more than there are."""
        return self.num_used + sum(self._need(sequence) for sequence in self.waiting)

    @property
    def can_queue(self) -> bool:
        return self.num_sequences < self._max_running + self._max_queued

    def queue(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def sweep(self) -> None:
        """Lets go of the sequences that have finished."""
        self.released += [sequence.seq_id for sequence in self.running if sequence.finish]
        self.running = [sequence for sequence in self.running if not sequence.finish]
        if any(sequence.finish for sequence in self.waiting):
            self.waiting = deque(sequence for sequence in self.waiting if not sequence.finish)

    def select(self, ready: Batch | None = None) -> None:
        """Decides who runs: preempts the youngest while the committed tokens, and the drafts of a batch that is ready, do not fit.

        Then it admits as many as do.
        """
        while self.num_used + self._promised(ready) > self._num_pages:
            self._preempt()
        if self.waiting and len(self.running) < self._max_running:
            self._admit()

    def next_batch(
        self,
        gammas: abc.Sequence[int],
        *,
        apart_from: Batch | None = None,
        half: bool = False,
        alone: Sequence | None = None,
    ) -> Batch:
        """What fits of it: a token for each decoding sequence, chunks of prompts, and drafts, `gammas` at most.

        Without the sequences of another batch that is under way, or with every other sequence only, or with one sequence alone.
        While prompts are waiting for their turn, half of the round is kept for them.
        """
        wishes = [
            max(0, min(gamma, sequence.max_drafts))
            for sequence, gamma in zip(self.running, gammas, strict=True)
        ]
        elsewhere = (
            set() if apart_from is None else {row.sequence.seq_id for row in apart_from.rows}
        )
        wanted = [
            pair
            for pair in zip(self.running, wishes, strict=True)
            if pair[0].seq_id not in elsewhere
        ][:: 2 if half else 1]
        if alone is not None:
            wanted = [pair for pair in wanted if pair[0] is alone]
        decoding = [pair for pair in wanted if pair[0].pending == 1]
        prompts = [pair for pair in wanted if pair[0].pending > 1]
        budget = self._max_batch_tokens - len(decoding)
        kept = (
            max(1, min(budget // 2, sum(sequence.pending for sequence, _ in prompts)))
            if prompts
            else 0
        )
        rows = self._decode_rows(
            decoding,
            budget=max(0, budget - kept),
            free=self._num_pages - self.num_used - self._promised(apart_from),
        )
        rows_of = _prompt_rows if self._decoder_start is None else _source_rows
        chunks = rows_of(prompts, budget=max(kept, budget - sum(row.gamma for row in rows)))
        num_prompt_tokens = sum(
            row.stop - row.sequence.target_held + len(row.sequence.source) for row in chunks
        )
        return Batch(
            rows + chunks,
            num_prompt_tokens=num_prompt_tokens,
            num_caught_up=self._limit_drafter(rows + chunks),
        )

    def _pages(self, length: int) -> int:
        return -(-length // self._page_size)

    def _need(self, sequence: Sequence, more: int = 0) -> int:
        """Pages for the sequence, `more` tokens included. A source has pages of its own."""
        return self._pages(sequence.length + more) + self._pages(len(sequence.source))

    def _promised(self, batch: Batch | None) -> int:
        """Pages for the drafts of a batch that the target has yet to see."""
        if batch is None:
            return 0
        rows = [row for row in batch.rows if row.sequence in self.running]
        return sum(
            self._pages(row.sequence.length + row.gamma) - self._pages(row.sequence.length)
            for row in rows
        )

    def _preempt(self) -> None:
        youngest = self.running.pop()
        assert self.running, "a sequence alone always fits: its context is bounded by the pages"
        youngest.forget()
        self.released.append(youngest.seq_id)
        self.waiting.appendleft(youngest)
        self.num_preempted += 1

    def _admit(self) -> None:
        """In order of arrival, with room for everyone's next round, so that what is admitted is not preempted at once."""
        need = sum(self._need(sequence, self._headroom) for sequence in self.running)
        while self.waiting and len(self.running) < self._max_running:
            head = self.waiting[0]
            need += self._need(head, self._headroom)
            if need > self._num_pages and self.running:
                return
            self.running.append(self.waiting.popleft())

    def _decode_rows(
        self, decoding: list[tuple[Sequence, int]], *, budget: int, free: int
    ) -> list[Row]:
        """Drafts give way twice: all alike when the round has too few tokens, the younger ones when the cache has too few pages."""
        cap = self._headroom
        if decoding and sum(wish for _, wish in decoding) > budget:
            cap = budget // len(decoding)
        rows = []
        for sequence, wish in decoding:
            length = sequence.length
            held = self._pages(length)
            gamma = min(wish, cap, (held + free) * self._page_size - length)
            free -= self._pages(length + gamma) - held
            rows.append(
                Row(
                    sequence,
                    length,
                    decides=True,
                    gamma=gamma,
                    draft_stop=length if gamma else None,
                )
            )
        return rows

    def _limit_drafter(self, rows: list[Row]) -> int:
        """A drafter that lacks too much (a hole of many rounds, a restart) catches up over several rounds, and drafts again then.

        Returns the tokens that it catches up on: all that it reads but each row's newest.
        """
        left = self._max_batch_tokens
        for row in rows:
            if row.draft_stop is not None and row.sequence.source and not row.sequence.draft_held:
                left = self._with_source(row, left)
            if row.draft_stop is not None:
                held = row.sequence.draft_held
                row.draft_stop = min(row.draft_stop, held + left + 1)
                left -= row.draft_stop - held - 1
                if row.draft_stop < row.stop:
                    row.gamma = 0
        return self._max_batch_tokens - left

    def _with_source(self, row: Row, left: int) -> int:
        """What is left once the drafter has read the row's source, whole. One that is too long waits for a round in which it is the first."""
        length = len(row.sequence.source)
        if length <= left:
            return left - length
        if left == self._max_batch_tokens:
            return 0
        row.draft_stop, row.gamma = None, 0
        return left


def _prompt_rows(prompts: list[tuple[Sequence, int]], *, budget: int) -> list[Row]:
    """Chunks of prompts. They carry no drafts, but a drafter that will be wanted later reads along."""
    rows = []
    for (sequence, wish), chunk in zip(
        prompts, _share([sequence.pending for sequence, _ in prompts], budget=budget), strict=True
    ):
        if chunk:
            stop = sequence.target_held + chunk
            rows.append(
                Row(
                    sequence,
                    stop,
                    decides=stop == sequence.length,
                    draft_stop=stop if wish else None,
                )
            )
    return rows


def _source_rows(prompts: list[tuple[Sequence, int]], *, budget: int) -> list[Row]:
    """Sources with what was written of their texts before they lost their places. Each is read whole; the oldest, be it ever so long."""
    rows: list[Row] = []
    for sequence, wish in prompts:
        if rows and sequence.pending > budget:
            break
        budget -= sequence.pending
        rows.append(
            Row(
                sequence,
                sequence.length,
                decides=True,
                draft_stop=sequence.length if wish else None,
            )
        )
    return rows


def _share(pending: list[int], *, budget: int) -> list[int]:
    """Half of the budget in equal parts, so that a short prompt does not wait for a long one; the rest in order of arrival."""
    equal = budget // 2 // max(1, len(pending))
    chunks = [min(tokens, equal) for tokens in pending]
    left = budget - sum(chunks)
    for i, tokens in enumerate(pending):
        more = min(tokens - chunks[i], left)
        chunks[i] += more
        left -= more
    return chunks
