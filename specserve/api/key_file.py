"""The file of API keys while the server runs: re-read when it changes, and distrusted when broken.

Knows no HTTP; the format is that of `keys.py`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from specserve.api.keys import ApiClient, ApiKeys, read_keys
from specserve.errors import Unavailable

log = logging.getLogger(__name__)

CHECK_EVERY_S = 1.0
GRACE_S = 60.0
"""Seconds for which the keys known until then stay valid while the file is broken.

An editor that writes it in two steps, or a secret that is being replaced, thus ends no service.
"""


@dataclass(frozen=True, slots=True)
class KeyTrouble:
    """A file of keys that cannot be used any more. Its text names no path and quotes no key."""

    why: str
    age_s: float

    @property
    def is_over_grace(self) -> bool:
        return self.age_s >= GRACE_S

    @property
    def text(self) -> str:
        until_now = (
            "every key is refused"
            if self.is_over_grace
            else f"the keys known until then are valid for {GRACE_S - self.age_s:.0f} s more"
        )
        return f"http.api_keys_file cannot be used, {self.why}; {until_now}"


class KeyFile:
    """The keys in the file, re-read at most once a second when it changes.

    While a changed file is invalid, the keys known until then stay for GRACE_S; afterwards every
    key is refused, since nothing says which of them have been revoked.
    """

    def __init__(
        self,
        file: Path,
        clock: Callable[[], float] = time.monotonic,
        *,
        set_valid: Callable[[bool], None] = lambda valid: None,
    ) -> None:
        """Read the file; `set_valid` is called after each reading. Raises ConfigError."""
        self._file, self._clock, self._set_valid = file, clock, set_valid
        self._stamp, self._checked_at = _stamp(file), clock()
        self._keys = ApiKeys.from_file(file)
        self._broken: tuple[str, float] | None = None  # why, and since when
        set_valid(True)

    def find(self, key: str) -> ApiClient | None:
        """Return the client of a valid key. Raises Unavailable if keys cannot be checked."""
        trouble = self.trouble()
        if trouble is not None and trouble.is_over_grace:
            raise Unavailable("API keys cannot be checked; the server's /health says why")
        return self._keys.find(key)

    def is_valid(self, client: ApiClient) -> bool:
        """Return whether the key of a client that was found earlier is valid still.

        It is while the file is broken: what has been revoked is not known then.
        """
        self._refresh()
        return self._keys.is_valid(client)

    def named(self, names: Collection[str]) -> list[ApiClient]:
        """Return the clients of these names, one for each of their keys."""
        return self._keys.named(names)

    def limited_models(self) -> frozenset[str]:
        """Return the models for which clients have limits of their own."""
        return self._keys.limited_models()

    def trouble(self) -> KeyTrouble | None:
        """Return what is wrong with the file, as of the last second."""
        self._refresh()
        if self._broken is None:
            return None
        why, since = self._broken
        return KeyTrouble(why, self._clock() - since)

    def _refresh(self) -> None:
        if (now := self._clock()) - self._checked_at < CHECK_EVERY_S:
            return
        self._checked_at = now
        if (stamp := _stamp(self._file)) == self._stamp and self._broken is None:
            return
        # The stamp is set before reading. What is written meanwhile is seen at the next check.
        self._stamp = stamp
        try:
            self._keys = read_keys(self._file)
        except ValueError as error:
            self._note_broken(str(error), now)
        else:
            self._broken = None
            log.info("took %d keys from the changed %s", len(self._keys), self._file)
        self._set_valid(self._broken is None)

    def _note_broken(self, why: str, now: float) -> None:
        """Log each reason once; the grace counts from the first."""
        known, since = self._broken or ("", now)
        self._broken = why, since
        if why != known:
            log.error(
                "%s: %s; the %d keys known until now stay for %g s",
                self._file,
                why,
                len(self._keys),
                max(0.0, GRACE_S - (now - since)),
            )


def _stamp(file: Path) -> tuple[int, ...] | None:
    """Return what differs when the file, or who may read it, does.

    The inode is in it because Kubernetes updates secrets by turning a link to another file.
    """
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
