"""The sequences that wait, and which of them is next: fair shares among clients, and priorities.

Knows no pages.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter, abc, deque
from itertools import chain
from operator import attrgetter

from specserve.engine.sequence import Sequence
from specserve.types import Grammar

_PRIORITY = attrgetter("priority")


class WaitingQueue:
    """Preempted sequences, then new ones, each client's by priority and order of arrival.

    The next one is of the client with the fewest running sequences (max-min fairness), and of
    those the first to arrive. With one client that is first come first served. A priority has an
    effect among the sequences of one client alone, so that no client gains by it over another.
    """

    def __init__(self) -> None:
        self._preempted: deque[Sequence] = deque()
        self._new: dict[str, list[Sequence]] = {}  # by client; no list is empty

    def __len__(self) -> int:
        return len(self._preempted) + sum(map(len, self._new.values()))

    def __iter__(self) -> abc.Iterator[Sequence]:
        """Yield the preempted sequences, then the others in order of arrival."""
        yield from self._preempted
        yield from sorted(chain(*self._new.values()), key=lambda sequence: sequence.seq_id)

    def add(self, sequence: Sequence) -> None:
        insort(self._new.setdefault(sequence.client, []), sequence, key=_PRIORITY)

    def put_back(self, sequence: Sequence) -> None:
        """Put a preempted sequence before all others."""
        self._preempted.appendleft(sequence)

    def next(self, running: abc.Sequence[Sequence]) -> Sequence:
        """Return the sequence to run next, beside those that run; it stays in the queue."""
        if self._preempted:
            # Of its client's with the lowest priority number, since the highest is preempted first.
            return self._preempted[0]
        heads = [own[0] for own in self._new.values()]
        if len(heads) == 1:
            return heads[0]
        num_running = Counter(sequence.client for sequence in running)
        return min(heads, key=lambda head: (num_running[head.client], head.seq_id))

    def remove(self, sequence: Sequence) -> None:
        if sequence in self._preempted:
            self._preempted.remove(sequence)
            return
        own = self._new[sequence.client]
        own.remove(sequence)
        if not own:
            del self._new[sequence.client]

    def remove_finished(self) -> None:
        waiting = chain(self._preempted, *self._new.values())
        for sequence in [sequence for sequence in waiting if sequence.finish]:
            self.remove(sequence)

    def newest_beyond_share(self, client: str, running: abc.Sequence[Sequence]) -> Sequence | None:
        """Return the last new sequence of the client that has the most, if that is more.

        It must have at least two more than `client`, so that exchanging one does not turn the
        inequality round.
        """
        counts = Counter(sequence.client for sequence in (*running, *self._preempted))
        counts.update({name: len(own) for name, own in self._new.items()})
        largest = max(self._new, key=lambda name: counts[name], default=client)
        return self._new[largest][-1] if counts[largest] > counts[client] + 1 else None


def held_back(running: abc.Sequence[Sequence]) -> set[Sequence]:
    """Return the sequences that stay out of the round, since their grammar is not compiled yet.

    The oldest sequence of each such grammar takes part, and finds out whether it is.
    """
    oldest: dict[Grammar | None, Sequence] = {}
    waiting = [sequence for sequence in running if sequence.awaits_grammar]
    for sequence in waiting:
        oldest.setdefault(sequence.grammar, sequence)
    return set(waiting).difference(oldest.values())
