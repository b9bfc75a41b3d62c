"""Code compiled once for all processes of a user, in the user's cache."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from specserve.cached_directory import cached_directory


def cached_code(key: str, compile_code: Callable[[], bytes]) -> bytes:
    """Return the code of this key.

    What is broken on disk is not taken, and without a cache that can be written it is compiled each
    time.
    """

    def write(directory: Path) -> None:
        directory.mkdir()
        code = compile_code()
        (directory / _digest(code)).write_bytes(code)

    with suppress(OSError, RuntimeError):  # the latter where the user has no home
        for file in cached_directory(f"code-{_digest(key.encode())}", write).iterdir():
            code = file.read_bytes()
            if _digest(code) == file.name:
                return code
    return compile_code()


def _digest(content: bytes) -> str:
    return sha256(content).hexdigest()
