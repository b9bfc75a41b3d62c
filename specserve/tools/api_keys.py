"""Create, list and check keys in a file of API keys. Prints nothing, and shows a new key alone."""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import date
from pathlib import Path

from specserve.api.keys import (
    ALL_SCOPES,
    EXPIRES,
    LIMITS,
    SCOPES,
    ApiClient,
    parse_keys,
    read_lines,
    utc_today,
)
from specserve.errors import ConfigError

PRIVATE = 0o600
KEY_BYTES = 32


def create_key(
    file: Path,
    name: str,
    limits: Mapping[str, float],
    *,
    expires: date | None = None,
    scopes: str | None = None,
) -> str:
    """Add a random key for a client to the file, which need not exist, and return the key.

    A client that has keys already gives the new one its limits, unless there are `limits`. The
    file is replaced in one step, by one that its owner alone may read. Raises ConfigError and
    changes nothing if the result would be invalid.
    """
    file = file.resolve()  # a link stays one
    with _alone_in(file.parent):
        lines = _lines(file) if file.exists() else []
        known, _ = parse_keys(lines)
        key = "sk-" + secrets.token_urlsafe(KEY_BYTES)
        inherited = next((_limits(one) for one in known if one.name == name), {})
        own: Mapping[str, float] = limits or inherited
        settings = [f"{limit}={value:.0f}" for limit, value in own.items()]
        if expires is not None:
            settings.append(f"{EXPIRES}={expires}")
        if scopes is not None:
            settings.append(f"{SCOPES}={scopes}")
        lines.append(" ".join([name, key, *settings]))
        _require_valid(file, parse_keys(lines)[1])
        _replace(file, "".join(line + "\n" for line in lines))
    return key


def list_keys(file: Path) -> str:
    """Return a table of the keys: line, name, limits, last day and scopes."""
    rows = [("line", "name", "limits", "expires", "scopes")]
    for client in _valid(file):
        limits = " ".join(f"{limit}={value:.0f}" for limit, value in _limits(client).items())
        scopes = ",".join(scope for scope in ALL_SCOPES if scope in client.scopes)
        rows.append((str(client.line), client.name, limits or "-", _last_day(client), scopes))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def check_keys(file: Path) -> str:
    """Return how many keys a valid file has, and what may surprise its owner.

    Raises ConfigError with everything that is wrong, by line.
    """
    clients = _valid(file)
    num_clients = len({client.name for client in clients})
    findings = [f"{file}: {len(clients)} keys of {num_clients} clients, all lines are valid"]
    mode = stat.S_IMODE(file.stat().st_mode)
    if mode & ~PRIVATE:
        findings.append(f"others may read or change it (mode {mode:03o}): chmod 600 {file}")
    findings += [
        f"line {client.line}: this key of {client.name} has expired"
        for client in clients
        if not client.is_valid_on(utc_today())
    ]
    return "\n".join(findings)


def _valid(file: Path) -> list[ApiClient]:
    clients, problems = parse_keys(_lines(file))
    _require_valid(file, problems)
    return clients


def _lines(file: Path) -> list[str]:
    try:
        return read_lines(file)
    except ValueError as error:
        raise ConfigError(f"{file}: {error}") from error


def _require_valid(file: Path, problems: list[str]) -> None:
    if problems:
        raise ConfigError(f"{file}: {'; '.join(problems)}")


def _limits(client: ApiClient) -> dict[str, float]:
    values = dict(zip(LIMITS, client.limits, strict=True))
    of_all = {limit: value for limit, value in values.items() if value is not None}
    return of_all | {str(one): one.value for one in client.of_models}


def _last_day(client: ApiClient) -> str:
    if client.expires is None:
        return "-"
    return f"{client.expires}{'' if client.is_valid_on(utc_today()) else ' (has expired)'}"


@contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Let one process at a time change files of keys in a directory."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be used: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace(file: Path, text: str) -> None:
    """Write the file in one step; it keeps its owner, since a server may run as another user."""
    try:
        descriptor, temporary = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as written:
                os.fchmod(written.fileno(), PRIVATE)
                if file.exists():
                    os.fchown(written.fileno(), file.stat().st_uid, file.stat().st_gid)
                written.write(text)
                written.flush()
                os.fsync(written.fileno())
            os.replace(temporary, file)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from error
