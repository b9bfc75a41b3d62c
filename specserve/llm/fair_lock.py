"""A lock that one thread after the other gets."""

from __future__ import annotations

import threading


class FairLock:
    """A lock that its threads get in turn.

    With a plain lock, a thread that asks again as soon as its turn is over mostly gets the next
    one, too. A thread may take a turn in its own turn, as what the garbage collector runs may do.
    """

    def __init__(self) -> None:
        self._queue, self._taken = threading.Lock(), threading.Lock()
        self._owner: int | None = None
        self._depth = 0  # turns that the owner has within one another

    def __enter__(self) -> None:
        thread = threading.get_ident()
        if self._owner != thread:
            with self._queue:  # the next thread waits in here, and the others for it
                self._taken.acquire()
            self._owner = thread
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._taken.release()
