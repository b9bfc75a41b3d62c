"""API keys and their limits: the format of their file. Only hashes of the keys are kept."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from specserve.config.model_list import MODEL_NAME
from specserve.errors import ConfigError

MAX_KEYS = 1000  # each request is compared with all of them, which then takes 0.4 ms
RATES = ("requests_per_minute", "tokens_per_minute")
CONCURRENT = "concurrent_requests"
LIMITS = (*RATES, CONCURRENT)
EXPIRES = "expires"
GENERATE, TRACE, METRICS, ADAPTERS = "generate", "trace", "metrics", "adapters"
DEFAULT_SCOPES = (GENERATE, TRACE, METRICS)
"""Scopes of a key that names none: what changes the server for all clients has to be named."""
ALL_SCOPES = (*DEFAULT_SCOPES, ADAPTERS)
SCOPES = "scopes"
OF_MODEL = ":"
"""Between a limit, or a client's name, and the model that it is for."""
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True, order=True)
class ModelLimit:
    """A client's limit for one model."""

    model: str
    limit: str  # of LIMITS
    value: float

    def __str__(self) -> str:
        return f"{self.limit}:{self.model}"


@dataclass(frozen=True, slots=True)
class ApiClient:
    """The holder of a key. Names may be logged, keys never are."""

    name: str
    digest: bytes = field(repr=False)
    requests_per_minute: float | None = None  # None: no limit
    tokens_per_minute: float | None = None
    concurrent_requests: float | None = None
    expires: date | None = None  # the key's last day, by UTC
    scopes: frozenset[str] = frozenset(DEFAULT_SCOPES)  # what the key may be used for
    of_models: tuple[ModelLimit, ...] = ()  # limits of single models, beside the limits of all
    line: int = field(default=0, compare=False)  # of the file

    @property
    def rates(self) -> tuple[float | None, float | None]:
        return self.requests_per_minute, self.tokens_per_minute

    @property
    def limits(self) -> tuple[float | None, ...]:
        return (*self.rates, self.concurrent_requests)

    def for_model(self, model: str) -> ApiClient | None:
        """Return the client with its limits for one model alone; None if it has none."""
        values = {one.limit: one.value for one in self.of_models if one.model == model}
        if not values:
            return None
        requests, tokens, concurrent = map(values.get, LIMITS)
        return replace(
            self,
            name=f"{self.name}{OF_MODEL}{model}",
            requests_per_minute=requests,
            tokens_per_minute=tokens,
            concurrent_requests=concurrent,
            of_models=(),
        )

    def is_valid_on(self, day: date) -> bool:
        return self.expires is None or day <= self.expires


class ApiKeys:
    """The valid keys."""

    def __init__(self, clients: Sequence[ApiClient]) -> None:
        self._clients = tuple(clients)

    @classmethod
    def from_file(cls, file: Path) -> ApiKeys:
        """Parse lines of `NAME KEY`, limits as `requests_per_minute=N` after it, or of a key.

        A comment begins with `#`. A file without a key is an error: every request would be
        refused.
        """
        try:
            return read_keys(file)
        except ValueError as error:
            raise ConfigError(f"http.api_keys_file {file}: {error}") from error

    def __len__(self) -> int:
        return len(self._clients)

    def named(self, names: Collection[str]) -> list[ApiClient]:
        return [client for client in self._clients if client.name in names]

    def limited_models(self) -> frozenset[str]:
        """Return the models for which clients have limits of their own."""
        return frozenset(one.model for client in self._clients for one in client.of_models)

    def find(self, key: str, today: date | None = None) -> ApiClient | None:
        """Return the client of a key that is valid today, by UTC unless another day is given.

        All are compared, so that the time reveals nothing.
        """
        digest, found = _hash(key), None
        for client in self._clients:
            if hmac.compare_digest(digest, client.digest):
                found = client
        return found if found is not None and found.is_valid_on(today or utc_today()) else None

    def is_valid(self, client: ApiClient) -> bool:
        """Return whether the key by which a client was found is still there and has not expired."""
        known = next((one for one in self._clients if one.digest == client.digest), None)
        return known is not None and known.is_valid_on(utc_today())


def read_keys(file: Path) -> ApiKeys:
    """Return the keys of a file. Raises ValueError, which says why without quoting a line."""
    clients, problems = parse_keys(read_lines(file))
    if problems:
        raise ValueError(problems[0])
    return ApiKeys(clients)


def read_lines(file: Path) -> list[str]:
    """Return the lines of a file of keys. Raises ValueError."""
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"it cannot be read: {error.strerror or type(error).__name__}") from error
    except UnicodeDecodeError as error:
        raise ValueError("it cannot be read: it is not UTF-8") from error


def parse_keys(lines: Sequence[str]) -> tuple[list[ApiClient], list[str]]:
    """Return the keys, and everything that is wrong, by line and without quoting one."""
    clients: list[ApiClient] = []
    problems: list[str] = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        try:
            if words:
                clients.append(_parse_line(words, number))
        except ValueError as error:
            problems.append(str(error))
    return clients, problems or list(_conflicts(clients))


def _parse_line(words: Sequence[str], number: int) -> ApiClient:
    """Return the client of a line.

    An error names the line by its number, because its words may be keys.
    """
    if len(words) == 1:
        return ApiClient(f"line-{number}", _hash(words[0]), line=number)
    name, key, *settings = words
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"line {number} must begin with a name of up to 64 letters, digits, dots, "
            "dashes and underscores"
        )
    client, given = ApiClient(name, _hash(key), line=number), set[str]()
    for setting in settings:
        what, _, value = setting.partition("=")
        changed = None if what in given else _with_setting(client, what, value)
        if changed is None:
            raise ValueError(
                f"line {number} may say {', '.join(f'{limit}=N' for limit in LIMITS)}, "
                f"{EXPIRES}=YYYY-MM-DD and {SCOPES}=A,B behind the key, once each, "
                "N a whole number above 0; a limit may end with :MODEL"
            )
        client = changed
        given.add(what)
    return client


def _with_setting(client: ApiClient, what: str, value: str) -> ApiClient | None:
    """Return the client with one more setting of its line; None if it is none, or has no count."""
    if what == EXPIRES:
        return replace(client, expires=_day(value, client.line))
    if what == SCOPES:
        return replace(client, scopes=_scopes(value, client.line))
    if not value.isdecimal() or not 0 < int(value[:19]) < 10**12:
        return None
    if what in LIMITS:
        limit: dict[str, Any] = {what: float(value)}
        return replace(client, **limit)
    kind, _, model = what.partition(OF_MODEL)
    if kind not in LIMITS or not MODEL_NAME.fullmatch(model):
        return None
    of_models = sorted((*client.of_models, ModelLimit(model, kind, float(value))))
    return replace(client, of_models=tuple(of_models))


def _day(value: str, number: int) -> date:
    try:
        return date.fromisoformat(value)
    except ValueError:
        raise ValueError(f"line {number}: {EXPIRES} must be a day, as 2027-01-31") from None


def _scopes(value: str, number: int) -> frozenset[str]:
    scopes = frozenset(value.split(","))
    if not scopes <= set(ALL_SCOPES):
        raise ValueError(f"line {number}: {SCOPES} must be some of {','.join(ALL_SCOPES)}")
    return scopes


def _conflicts(clients: Sequence[ApiClient]) -> Iterator[str]:
    """Yield what is wrong with all keys together: missing, too many, repeated, different limits.

    A client may have several keys, so that a new one can be handed out before the old one goes.
    Its limits are the same for all of them.
    """
    if not clients:
        yield "it has no key; write one a line, or leave http.api_keys_file out"
    if len(clients) > MAX_KEYS:
        yield f"it has {len(clients)} keys; {MAX_KEYS} is the most"
    first_use: dict[bytes, int] = {}
    limits: dict[str, object] = {}
    for client in clients:
        line = first_use.setdefault(client.digest, client.line)
        if line != client.line:
            yield f"line {client.line}: a key is there twice; it is that of line {line}"
        own = client.limits, client.of_models
        if limits.setdefault(client.name, own) != own:
            yield (
                f"line {client.line}: the keys of {client.name} have different rates; "
                "a client's rates and limits are the same for all its keys"
            )


def utc_today() -> date:
    return datetime.now(UTC).date()


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
