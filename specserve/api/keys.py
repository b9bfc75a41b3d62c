"""API keys and what each may ask for, from a file that may change while the server runs. Only hashes of keys are kept."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specserve.errors import ConfigError

log = logging.getLogger(__name__)

MAX_KEYS = 1000  # each request is compared with all of them, which then takes 0.4 ms
LOOK_EVERY_S = 1.0
RATES = ("requests_per_minute", "tokens_per_minute")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class Client:
    """Who holds a key. Names may stand in logs, keys never do."""

    name: str
    digest: bytes = field(repr=False)
    requests_per_minute: float | None = None  # None: as many as it likes
    tokens_per_minute: float | None = None

    @property
    def rates(self) -> tuple[float | None, float | None]:
        return self.requests_per_minute, self.tokens_per_minute


class Keys:
    """The keys that open the server."""

    def __init__(self, clients: Sequence[Client]) -> None:
        self._clients = tuple(clients)

    @classmethod
    def read(cls, file: Path) -> Keys:
        """`NAME KEY [requests_per_minute=N] [tokens_per_minute=N]` a line, or a key alone; `#` begins a comment.

        Without a single key nobody could ask for anything, which is surely an error.
        """
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"http.api_keys_file {file} cannot be read: {error}") from error
        try:
            clients = list(_clients(lines))
            _check(clients)
        except ValueError as error:
            raise ConfigError(f"http.api_keys_file {file}: {error}") from None
        return cls(clients)

    def __len__(self) -> int:
        return len(self._clients)

    def find(self, key: str) -> Client | None:
        """Compares with all of them, so that the time says nothing."""
        given, found = _hash(key), None
        for client in self._clients:
            if hmac.compare_digest(given, client.digest):
                found = client
        return found


class KeyFile:
    """The keys as the file has them now, or had them a second ago. A new file that cannot be used changes nothing; the log says why."""

    def __init__(self, file: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._file, self._clock = file, clock
        self._stamp, self._looked = _stamp(file), clock()
        self._keys = Keys.read(file)

    def find(self, key: str) -> Client | None:
        self._refresh()
        return self._keys.find(key)

    def _refresh(self) -> None:
        if (now := self._clock()) - self._looked < LOOK_EVERY_S:
            return
        self._looked = now
        if (stamp := _stamp(self._file)) == self._stamp:
            return
        self._stamp = stamp  # before reading: what is written meanwhile is seen next time, and a broken file is told of once
        try:
            self._keys = Keys.read(self._file)
        except ConfigError as error:
            log.error("the %d keys known until now stay: %s", len(self._keys), error)
        else:
            log.info("took %d keys from the changed %s", len(self._keys), self._file)


def _clients(lines: Sequence[str]) -> Iterator[Client]:
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if words:
            yield _client(words, number)


def _client(words: Sequence[str], number: int) -> Client:
    """What is wrong is said by the number of the line: its words may be keys."""
    if len(words) == 1:
        return Client(f"line-{number}", _hash(words[0]))
    name, key, *rates = words
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"line {number} must begin with a name of up to 64 letters, digits, dots, dashes and underscores"
        )
    given: dict[str, float] = {}
    for rate in rates:
        what, _, value = rate.partition("=")
        if (
            what not in RATES
            or what in given
            or not value.isdecimal()
            or not 0 < int(value[:19]) < 10**12
        ):
            raise ValueError(
                f"line {number} may say {' and '.join(f'{what}=N' for what in RATES)} behind the key, once each, N a whole number above 0"
            )
        given[what] = float(value)
    return Client(name, _hash(key), **given)


def _check(clients: Sequence[Client]) -> None:
    """A client may have several keys, so that a new one can be handed out before the old one goes; its rates are the same for all."""
    if not clients:
        raise ValueError("it has no key; write one a line, or leave http.api_keys_file out")
    if len(clients) > MAX_KEYS:
        raise ValueError(f"it has {len(clients)} keys; {MAX_KEYS} is the most")
    if len({client.digest for client in clients}) < len(clients):
        raise ValueError("a key is there twice")
    rates = {client.name: client.rates for client in clients}
    for client in clients:
        if rates[client.name] != client.rates:
            raise ValueError(
                f"the keys of {client.name} have different rates; a client's rates are the same for all its keys"
            )


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _stamp(file: Path) -> tuple[int, int, int] | None:
    """Differs when the file does, also where a link was turned to another file, as Kubernetes does with secrets."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
