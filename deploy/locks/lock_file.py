"""Files of locked packages in pip's format: read, and written.

Knows names, versions, markers and hashes; no network.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
RUNTIME = ROOT / "deploy/locks/runtime.txt"
"""All that a server needs but torch, of which there are two builds."""
TORCH_CPU = ROOT / "deploy/locks/torch-cpu.txt"
TORCH_CUDA = ROOT / "deploy/locks/torch-cuda.txt"
FLASHINFER = ROOT / "deploy/locks/flashinfer.txt"
"""What images for GPUs have beside torch's build for CUDA."""
NVCC = ROOT / "deploy/locks/nvcc.txt"
"""What compiles FlashInfer's kernels, in a stage of the images that is left behind."""
TOOLS = ROOT / "deploy/locks/tools.txt"
"""What builds, locks and audits."""
_PACKAGE = re.compile(r"(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;]+)(?:\s*;\s*(?P<marker>.+))?")
_HASH = "--hash=sha256:"


@dataclass(frozen=True, slots=True)
class LockedPackage:
    """A version of a package, and the SHA-256 of each of its files that may be installed."""

    name: str  # in small letters with hyphens
    version: str
    hashes: tuple[str, ...]
    marker: str | None = None  # the environments that need it; None: all

    def __str__(self) -> str:
        marker = f" ; {self.marker}" if self.marker else ""
        lines = [f"{self.name}=={self.version}{marker}", *(f"    {_HASH}{h}" for h in self.hashes)]
        return " \\\n".join(lines)


def canonical(name: str) -> str:
    """Return a package's name in small letters with hyphens, by which names are compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def parse_lock(text: str) -> tuple[LockedPackage, ...]:
    """Return the packages of a lock; raise ValueError at a line that pip would not check."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return tuple(map(_parse_package, "\n".join(lines).replace("\\\n", " ").splitlines()))


def _parse_package(line: str) -> LockedPackage:
    stated, *hashes = line.split(_HASH)
    found = _PACKAGE.fullmatch(stated.strip())
    if found is None:
        raise ValueError(f"{line[:80]!r} is no package at a version")
    return LockedPackage(
        canonical(found["name"]),
        found["version"],
        tuple(each.strip() for each in hashes),
        found["marker"],
    )


def read_lock(file: Path) -> tuple[LockedPackage, ...]:
    return parse_lock(file.read_text(encoding="utf-8"))


def write_lock(file: Path, opening: str, packages: Iterable[LockedPackage]) -> None:
    """Write a lock. `opening` says in a comment what it is."""
    lines = [f"# {line}" for line in opening.splitlines()]
    file.write_text("\n".join([*lines, *map(str, packages)]) + "\n", encoding="utf-8")


def read_pins(text: str) -> dict[str, str]:
    """Return the versions of a constraints file, by name."""
    pins = re.findall(r"^([A-Za-z0-9._-]+)==(\S+)$", text, re.MULTILINE)
    return {canonical(name): version for name, version in pins}
