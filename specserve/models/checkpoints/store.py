"""Files of packed weights that the processes of a node share. Knows files and locks, no tensors.

A process holds a shared lock on every file that it has mapped, so that no other removes it; the
lock ends with the process, however it ends.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

T = TypeVar("T")

IN_USE = 0
"""Modification time of a file since a process mapped it."""
GRACE_S = 600.0
"""Time for which the files of workers that died are kept for those that replace them."""


class DamagedWeights(Exception):
    """A file does not hold packed weights, or not all of them."""


class UnsafeDirectory(Exception):
    """Others could write into the directory."""


def default_directory() -> Path:
    return Path("/dev/shm") / f"specserve-weights-{os.geteuid()}"


class WeightStore:
    """The files of a directory, by key.

    In the default directory, which is memory, unused files are removed: those older than
    GRACE_S whenever a store is opened, and the others by `remove_unused`. In a directory of the
    user's, they stay.
    """

    def __init__(self, directory: Path | None = None) -> None:
        """Open the directory, the default one if none is given.

        Raises OSError, or UnsafeDirectory.
        """
        self.keeps_unused = directory is not None
        self.directory = directory or default_directory()
        self.directory.mkdir(mode=0o700, parents=self.keeps_unused, exist_ok=True)
        _check_private(self.directory)
        self.remove_unused(grace_s=GRACE_S)

    def get(self, key: str, read: Callable[[int], T], write: Callable[[BinaryIO], None]) -> T:
        """Return what `read` makes of the file of a key, which is written if it has to be.

        `read` gets an open file of its own, locked, and raises DamagedWeights for one that has to
        be written again. Of several processes one writes, while the others wait for it.
        """
        found = self._read(key, read)
        if found is None:
            with self._writing(key):
                found = self._read(key, read)  # another process may have been faster
                if found is None:
                    self._write(key, write)
                    found = self._read(key, read)
        if found is None:
            raise OSError(f"the file of {key} has gone")
        return found

    def has(self, key: str) -> bool:
        return self._path(key).is_file()

    def free_bytes(self) -> int:
        free = os.statvfs(self.directory)
        return free.f_bavail * free.f_frsize

    def remove_unused(self, *, grace_s: float = 0.0) -> None:
        """Remove the files that no process uses.

        With a grace, those that an earlier call has found unused, and that long ago.
        """
        if self.keeps_unused:
            return
        for path in self.directory.iterdir():
            with suppress(OSError), path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                modified = os.fstat(file.fileno()).st_mtime
                if modified == IN_USE and grace_s:
                    os.utime(path)
                elif time.time() - modified >= grace_s:
                    path.unlink()

    def _read(self, key: str, read: Callable[[int], T]) -> T | None:
        path = self._path(key)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_SH)
            if not os.fstat(fd).st_nlink:  # removed before we had the lock
                raise DamagedWeights
            os.utime(fd, (IN_USE, IN_USE))
            return read(fd)
        except DamagedWeights:
            os.close(fd)
            with suppress(FileNotFoundError):
                path.unlink()
            return None
        except BaseException:
            os.close(fd)
            raise

    def _write(self, key: str, write: Callable[[BinaryIO], None]) -> None:
        fd, temporary = tempfile.mkstemp(dir=self.directory)  # readable for its owner alone
        try:
            with os.fdopen(fd, "wb") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                write(file)
                file.flush()
                os.fsync(file.fileno())  # on a disk, data must not come after the name
                os.rename(temporary, self._path(key))
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
            raise

    @contextmanager
    def _writing(self, key: str) -> Iterator[None]:
        path = self.directory / f"{key}.lock"
        fd = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}.weights"


def remove_unused_weights() -> None:
    """Remove the files in the default directory that no process uses, as a server does at its end.

    Nothing happens where there are none.
    """
    if default_directory().is_dir():
        with suppress(OSError, UnsafeDirectory):
            WeightStore().remove_unused()


def _check_private(directory: Path) -> None:
    status = directory.lstat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o077 or directory.is_symlink():
        raise UnsafeDirectory(
            f"{directory} is not a directory that you alone can use; remove it, or set "
            "weights.directory to one with mode 700"
        )
