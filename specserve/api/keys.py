"""API keys: only their hashes are kept, and looking for one takes as long whichever it is."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from specserve.errors import ConfigError


class Keys:
    """The keys that open the server."""

    def __init__(self, keys: list[str]) -> None:
        self._hashes = [_hash(key) for key in keys]

    @classmethod
    def read(cls, file: Path) -> Keys:
        """One key a line; `#` begins a comment. Without a single key nobody could ask for anything, which is surely an error."""
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"http.api_keys_file {file} cannot be read: {error}") from error
        keys = [key for line in lines if (key := line.partition("#")[0].strip())]
        if not keys:
            raise ConfigError(f"http.api_keys_file {file} has no key; write one a line, or leave http.api_keys_file out")
        return cls(keys)

    def admits(self, key: str) -> bool:
        """Compares with all of them, so that the time says nothing."""
        given = _hash(key)
        return sum(hmac.compare_digest(given, known) for known in self._hashes) > 0


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
