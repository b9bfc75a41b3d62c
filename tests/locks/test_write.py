"""Locking, without uv and the network: which packages are kept, and what ends it."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.locks import write
from deploy.locks.lock_file import TORCH_CPU, LockedPackage, read_lock, write_lock

TORCH = LockedPackage("torch", "2.99.0", ("0" * 64,))


@pytest.mark.parametrize(
    ("marker", "is_kept"),
    [
        (None, True),
        ("sys_platform == 'linux'", True),
        ("sys_platform == 'win32'", False),
        ("python_full_version >= '3.12' and sys_platform == 'emscripten'", False),
        ("platform_machine == 'aarch64'", True),
        ("platform_machine == 'x86_64' and platform_system == 'Linux'", True),
    ],
)
def test_what_linux_never_needs_is_left_out(
    marker: str | None, is_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = LockedPackage("a", "1", ("0" * 64,), marker)

    def compile_lock(command: list[str], *, check: bool) -> None:
        write_lock(Path(command[command.index("-o") + 1]), "", [package])

    monkeypatch.setattr("subprocess.run", compile_lock)
    assert write.resolve(["a"], [], upgrade=False) == ((package,) if is_kept else ())


def test_the_cpu_build_has_the_hashes_of_the_wheels_of_its_version(tmp_path: Path) -> None:
    for python, version in (("cp311", "2.99.0"), ("cp312", "2.99.0"), ("cp311", "2.98.0")):
        wheel = f"torch-{version}+cpu-{python}-{python}-manylinux_2_28_x86_64.whl"
        (tmp_path / wheel).write_bytes(wheel.encode())
    found = write.without_cuda(TORCH, tmp_path)
    wanted = {
        hashlib.sha256(file.read_bytes()).hexdigest() for file in tmp_path.glob("*2.99.0*.whl")
    }
    assert len(found.hashes) == 2
    assert set(found.hashes) == wanted


def test_a_new_torch_without_its_cpu_wheels_writes_no_lock(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"torch 2\.99\.0 are needed: CPU_WHEELS"):
        write.without_cuda(TORCH, None)
    with pytest.raises(ValueError, match="has no CPU wheel"):
        write.without_cuda(TORCH, tmp_path)


def test_the_cpu_build_stays_while_torchs_version_does() -> None:
    (known,) = read_lock(TORCH_CPU)
    assert write.without_cuda(replace(TORCH, version=known.version), None) == known


def test_a_dependency_that_constraints_leave_open_writes_no_lock() -> None:
    with pytest.raises(ValueError, match="does not pin brand-new"):
        write.require_pinned([LockedPackage("brand-new", "1", ("0" * 64,))])
