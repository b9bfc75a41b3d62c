"""Memory and cores that a host leaves: kept files are no use of memory, and limits count."""

from __future__ import annotations

import os
from pathlib import Path
from weakref import WeakSet

import pytest

import specserve.host
from specserve.claimed_memory import ClaimedMemory
from specserve.host import available_memory, usable_cores

GB = 2**30


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in for the files of a host with 8 GiB available, of which 1 GiB holds nothing."""
    (tmp_path / "meminfo").write_text(
        f"MemTotal: {16 << 20} kB\nMemFree: {1 << 20} kB\nMemAvailable: {8 << 20} kB\n"
    )
    (tmp_path / "own").write_text("1:cpu:/\n0::/server\n")
    (tmp_path / "groups" / "server").mkdir(parents=True)
    monkeypatch.setattr(specserve.host, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(specserve.host, "OWN_GROUP", tmp_path / "own")
    monkeypatch.setattr(specserve.host, "GROUPS", tmp_path / "groups")
    monkeypatch.setattr(ClaimedMemory, "_living", WeakSet())
    return tmp_path


def limit(host: Path, limit: str, *, used: int, files: int) -> None:
    group = host / "groups" / "server"
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 5\ninactive_file {files}\nactive_file 0\n")


def test_files_that_the_system_keeps_in_memory_count_as_available(host: Path) -> None:
    assert available_memory() == 8 * GB


def test_a_container_has_what_its_limit_leaves(host: Path) -> None:
    limit(host, str(4 * GB), used=3 * GB, files=2 * GB)
    assert available_memory() == 3 * GB
    limit(host, str(4 * GB), used=5 * GB, files=0)
    assert available_memory() == 0


@pytest.mark.parametrize("stated", ["max", "a lot"])
def test_a_group_without_a_limit_has_what_the_host_has(host: Path, stated: str) -> None:
    limit(host, stated, used=3 * GB, files=0)
    assert available_memory() == 8 * GB


def test_a_host_that_says_less_has_what_holds_nothing(host: Path) -> None:
    (host / "meminfo").unlink()
    assert 0 < available_memory() < 2**60


def test_as_many_cores_as_the_affinity_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 9, 11})
    assert usable_cores() == 3


@pytest.mark.parametrize(
    ("of_server", "of_all", "expected"),
    [
        ("max 100000", None, 64),
        ("250000 100000", None, 2),
        ("max 100000", "300000 100000", 3),
        ("50000 100000", "300000 100000", 1),
        ("nothing", None, 64),
        (None, None, 64),
    ],
)
def test_a_container_has_the_cores_that_its_quota_leaves(
    host: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    of_server: str | None,
    of_all: str | None,
    expected: int,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    groups = host / "groups"
    for folder, stated in ((groups / "server", of_server), (groups, of_all)):
        if stated is not None:
            (folder / "cpu.max").write_text(f"{stated}\n")
    assert usable_cores() == expected
