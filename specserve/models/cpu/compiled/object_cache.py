"""Code that was compiled before on this machine, so that a process does not compile it again.

One file a key, below `$XDG_CACHE_HOME/specserve` or `~/.cache/specserve`. A file that is cut short
or changed is as good as none; a folder that cannot be written costs a compilation each time.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from contextlib import suppress
from pathlib import Path

_DIGEST = hashlib.sha256().digest_size


def key_of(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def load(key: str) -> bytes | None:
    """Return the code that was stored by this key."""
    with suppress(OSError, RuntimeError):
        stored = (_folder() / key).read_bytes()
        digest, code = stored[:_DIGEST], stored[_DIGEST:]
        if digest == hashlib.sha256(code).digest():
            return code
    return None


def store(key: str, code: bytes) -> None:
    """Store code for the next processes, if this user can write the folder."""
    with suppress(OSError, RuntimeError):
        folder = _folder()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(hashlib.sha256(code).digest() + code)
        os.replace(file.name, folder / key)


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specserve"
