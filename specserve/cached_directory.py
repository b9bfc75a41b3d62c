"""Directories in the user's cache that can be made again, each made once for all processes.

Imports no torch, which a gateway's process may lack.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_directory() -> Path:
    """Return the directory for files that can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "specserve"


def cached_directory(name: str, write: Callable[[Path], object]) -> Path:
    """Return the directory `name` of the cache, which `write` fills if it has to be.

    Of several processes one writes it, while the others wait. Raises OSError, and what `write`
    raises.
    """
    cache = cache_directory()
    directory = cache / name
    if directory.is_dir():
        return directory
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _lock(cache / f"{name}.lock"):
        if not directory.is_dir():  # another process may have been faster
            _write(directory, write)
    return directory


def _write(directory: Path, write: Callable[[Path], object]) -> None:
    """Write the directory under another name first, so that no reader finds half of one.

    The name is always the same, so that what a killed process left is removed by the next.
    """
    unfinished = directory.with_name(f".unfinished-{directory.name}")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        write(unfinished)
        unfinished.rename(directory)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
