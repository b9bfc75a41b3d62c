"""Files that processes share: written once, never half, removed when unused."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest

from specserve.models.checkpoints import store as store_module
from specserve.models.checkpoints.store import (
    GRACE_S,
    DamagedWeights,
    UnsafeDirectory,
    WeightStore,
    remove_unused_weights,
)

CONTENTS = b"weights"


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the default directory elsewhere."""
    path = tmp_path / "shared"
    monkeypatch.setattr(store_module, "default_directory", lambda: path)
    return path


def read(fd: int) -> int:
    """Return the open file, which the caller closes, if it is whole."""
    if os.pread(fd, 100, 0) != CONTENTS:
        raise DamagedWeights
    return fd


class Writer:
    """Counts how often a file was written."""

    def __init__(self, contents: bytes = CONTENTS) -> None:
        self.contents, self.calls = contents, 0

    def __call__(self, file: BinaryIO) -> None:
        self.calls += 1
        file.write(self.contents)


def get(write: Callable[[BinaryIO], None], key: str = "key") -> int:
    return WeightStore().get(key, read, write)


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.suffix != ".lock")


def test_a_file_is_written_once_and_read_by_all(directory: Path) -> None:
    write = Writer()
    for _ in range(3):
        os.close(get(write))
    assert write.calls == 1
    os.close(get(write, "other"))
    assert write.calls == 2
    assert files(directory) == ["key.weights", "other.weights"]


def test_only_the_owner_can_read_directory_and_files(directory: Path) -> None:
    os.close(get(Writer()))
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o600}
    assert directory.stat().st_mode & 0o777 == 0o700


def test_a_damaged_file_is_written_again(directory: Path) -> None:
    write = Writer()
    os.close(get(write))
    os.truncate(directory / "key.weights", 3)
    os.close(get(write))
    assert write.calls == 2


def test_a_writer_that_fails_leaves_nothing(directory: Path) -> None:
    def write(file: BinaryIO) -> None:
        file.write(b"half")
        raise OSError(28, "no space left")

    with pytest.raises(OSError, match="no space left"):
        get(write)
    assert files(directory) == []
    os.close(get(Writer()))


def test_a_directory_that_others_can_write_to_or_own_is_not_used(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.mkdir(mode=0o700)
    directory.chmod(0o770)
    with pytest.raises(UnsafeDirectory, match="mode 700"):
        WeightStore()
    directory.chmod(0o700)
    WeightStore()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UnsafeDirectory, match="remove it"):
        WeightStore()


def test_a_link_in_place_of_the_directory_is_not_followed(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    directory.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafeDirectory):
        WeightStore()


def test_the_end_of_a_server_removes_unused_files(directory: Path) -> None:
    used, unused = get(Writer(), "used"), get(Writer(), "unused")
    os.close(unused)
    remove_unused_weights()
    assert files(directory) == ["used.weights"]
    os.close(used)
    remove_unused_weights()
    assert files(directory) == []


def test_files_of_workers_that_died_are_kept_for_those_that_replace_them(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.close(get(Writer()))
    now = time.time()
    for seconds, there in ((0, True), (GRACE_S - 1, True), (GRACE_S + 1, False)):
        monkeypatch.setattr(time, "time", lambda after=seconds: now + after)
        WeightStore()
        assert bool(files(directory)) is there, seconds


def test_a_file_in_use_stays_however_old_it_is(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used, later = get(Writer()), time.time() + 2 * GRACE_S
    for _ in range(2):
        monkeypatch.setattr(time, "time", lambda: later)
        WeightStore()
        assert files(directory) == ["key.weights"]
    os.close(used)


def test_files_in_a_directory_of_the_user_s_stay(tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "mine" / "weights")
    os.close(store.get("key", read, Writer()))
    store.remove_unused()
    assert files(store.directory) == ["key.weights"]


def write_slowly(directory: Path, written: Path) -> None:
    """Get a file, and leave a trace if this process had to write it."""

    def write(file: BinaryIO) -> None:
        (written / str(os.getpid())).touch()
        file.write(CONTENTS[:3])
        file.flush()
        time.sleep(0.05)
        file.write(CONTENTS[3:])

    WeightStore(directory).get("key", read, write)


def test_of_processes_that_start_together_one_writes(tmp_path: Path) -> None:
    written = tmp_path / "written"
    written.mkdir()
    fork = multiprocessing.get_context("fork")
    processes = [
        fork.Process(target=write_slowly, args=(tmp_path / "mine", written)) for _ in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * 4
    assert len(list(written.iterdir())) == 1
