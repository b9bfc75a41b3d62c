"""Memory that is left: files in memory are no use of it, and a container's limit counts."""

from __future__ import annotations

from pathlib import Path
from weakref import WeakSet

import pytest

from specserve import host_memory
from specserve.claimed_memory import ClaimedMemory
from specserve.host_memory import available_memory

GB = 2**30


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in for the files of a host with 8 GiB available, of which 1 GiB holds nothing."""
    (tmp_path / "meminfo").write_text(
        f"MemTotal: {16 << 20} kB\nMemFree: {1 << 20} kB\nMemAvailable: {8 << 20} kB\n"
    )
    (tmp_path / "own").write_text("1:cpu:/\n0::/server\n")
    (tmp_path / "groups" / "server").mkdir(parents=True)
    monkeypatch.setattr(host_memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "OWN_GROUP", tmp_path / "own")
    monkeypatch.setattr(host_memory, "GROUPS", tmp_path / "groups")
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
