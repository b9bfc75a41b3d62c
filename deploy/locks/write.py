"""Write the locks: each package that a server needs, with the hashes of all its files.

`make lock` runs it in the environment of deploy/locks/tools.txt. The versions are those of
constraints.txt; uv finds which of them a server needs, on every Python and processor, and the
hashes. Needs the network.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import Requirement

from deploy.locks.closure import extra_requirements, runtime_requirements
from deploy.locks.lock_file import (
    FLASHINFER,
    NVCC,
    ROOT,
    RUNTIME,
    TOOLS,
    TORCH_CPU,
    TORCH_CUDA,
    LockedPackage,
    canonical,
    read_lock,
    read_pins,
    write_lock,
)

TOOL_NAMES = ("build", "pip-audit", "setuptools", "uv")
CUDA = re.compile(r"(cuda|nvidia)-.*|triton")
"""Packages that torch's build for CUDA adds, and constraints.txt leaves to it."""
FOR_GPUS = "gpu"
"""The extra of specserve with FlashInfer, and with the toolkit that compiles it."""
NEW_CUDA_PYTHON = "cuda-python>=13"
"""FlashInfer takes any, and the resolver an old one, if only that fits the lock of before."""
MACHINES = ("x86_64", "aarch64")
UV = "--universal --generate-hashes --no-header --no-annotate --quiet"

RUNTIME_OPENING = """\
What a server needs but torch, with the hashes of all files of each version. Written by `make lock`.
  pip install --require-hashes -r deploy/locks/runtime.txt -r deploy/locks/torch-cuda.txt"""
CUDA_OPENING = """\
torch as the package index has it for Linux, and CUDA's libraries. Written by `make lock`."""
CPU_OPENING = """\
torch's builds without CUDA, which have an index of their own. Written by `make lock` from a folder
of wheels; a Python or processor whose wheel is not among them needs another run of it."""
FLASHINFER_OPENING = """\
FlashInfer, and what it needs beside runtime.txt and torch-cuda.txt. Written by `make lock`."""
NVCC_OPENING = """\
nvcc, of the CUDA of torch-cuda.txt, which compiles FlashInfer's kernels. Written by `make lock`."""
TOOLS_OPENING = "What builds, locks and audits. Written by `make lock`."


def resolve(
    requirements: Sequence[str], known: Iterable[LockedPackage], *, upgrade: bool
) -> tuple[LockedPackage, ...]:
    """Return the closure for Linux. Versions that constraints.txt leaves open stay as `known`."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, found = Path(folder) / "wanted.in", Path(folder) / "found.txt"
        wanted.write_text("\n".join(requirements), encoding="utf-8")
        write_lock(found, "", known)
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        command = [
            *(sys.executable, "-m", "uv", "pip", "compile", str(wanted), "-o", str(found)),
            *("-c", str(ROOT / "constraints.txt"), *UV.split()),
            *("--python-version", project["requires-python"].removeprefix(">=")),
            *(["--upgrade"] if upgrade else []),
        ]
        subprocess.run(command, check=True)
        return tuple(package for package in read_lock(found) if _is_for_linux(package))


def _is_for_linux(package: LockedPackage) -> bool:
    linux = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix"}
    return package.marker is None or any(
        Marker(package.marker).evaluate(linux | {"platform_machine": machine})
        for machine in MACHINES
    )


def without_cuda(torch: LockedPackage, wheels: Path | None) -> LockedPackage:
    """Return torch with the hashes of the CPU wheels in a folder; by default, the lock's own.

    Raises ValueError if there are none of torch's version.
    """
    if wheels is None:
        (known,) = read_lock(TORCH_CPU) if TORCH_CPU.is_file() else (None,)
        if known is not None and known.version == torch.version:
            return known
        raise ValueError(f"the CPU wheels of torch {torch.version} are needed: CPU_WHEELS=DIR")
    files = sorted(wheels.glob(f"torch-{torch.version}[+]cpu-*.whl"))
    if not files:
        raise ValueError(f"{wheels} has no CPU wheel of torch {torch.version}")
    hashes = []
    for file in files:
        with file.open("rb") as opened:
            hashes.append(hashlib.file_digest(opened, "sha256").hexdigest())
    return LockedPackage(torch.name, torch.version, tuple(hashes))


def partition(requirements: Iterable[str], name: str) -> tuple[list[str], list[str]]:
    """Return the requirements of one package, and the others."""
    stated = list(requirements)
    own = [each for each in stated if canonical(Requirement(each).name) == name]
    return own, [each for each in stated if each not in own]


def without(
    packages: Iterable[LockedPackage], others: Iterable[LockedPackage]
) -> list[LockedPackage]:
    """Return the packages that are not among others.

    Raises ValueError if one of them has another version there.
    """
    versions = {package.name: package.version for package in others}
    left = []
    for package in packages:
        version = versions.get(package.name)
        if version is None:
            left.append(package)
        elif version != package.version:
            raise ValueError(f"{package.name} is resolved to {version} and to {package.version}")
    return left


def require_pinned(packages: Iterable[LockedPackage]) -> None:
    """Raise ValueError for a package that the tests run with at no fixed version."""
    pins = read_pins((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    missing = [package.name for package in packages if package.name not in pins]
    if missing:
        raise ValueError(f"constraints.txt does not pin {', '.join(missing)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu-wheels", type=Path, help="a folder with torch's builds without CUDA")
    parser.add_argument(
        "--upgrade", action="store_true", help="newest versions of what constraints.txt leaves open"
    )
    options = parser.parse_args()
    files = (RUNTIME, TORCH_CUDA, FLASHINFER, NVCC, TOOLS)
    known = {file: read_lock(file) if file.is_file() else () for file in files}
    runtime_only = runtime_requirements()
    toolkit, flashinfer = partition(extra_requirements(FOR_GPUS), "cuda-toolkit")
    for_gpus = [*runtime_only, *flashinfer, NEW_CUDA_PYTHON]
    every = resolve(
        [*for_gpus, *toolkit],
        [package for file in files if file != TOOLS for package in known[file]],
        upgrade=options.upgrade,
    )
    # Fewer requirements, at the versions that all of them agree upon.
    found = resolve(runtime_only, every, upgrade=False)
    with_flashinfer = resolve(for_gpus, every, upgrade=False)
    cuda = [package for package in found if CUDA.fullmatch(package.name)]
    (torch,) = [package for package in found if package.name == "torch"]
    runtime = [package for package in found if package not in (*cuda, torch)]
    try:
        require_pinned([*runtime, torch])
        cpu = without_cuda(torch, options.cpu_wheels)
        beside, compilers = without(with_flashinfer, found), without(every, with_flashinfer)
    except ValueError as error:
        sys.exit(f"nothing was written: {error}")
    tools = resolve(TOOL_NAMES, known[TOOLS], upgrade=options.upgrade)
    write_lock(RUNTIME, RUNTIME_OPENING, runtime)
    write_lock(TORCH_CUDA, CUDA_OPENING, [torch, *cuda])
    write_lock(TORCH_CPU, CPU_OPENING, [cpu])
    write_lock(FLASHINFER, FLASHINFER_OPENING, beside)
    write_lock(NVCC, NVCC_OPENING, compilers)
    write_lock(TOOLS, TOOLS_OPENING, tools)
    print(
        f"{len(runtime)} packages, torch, {len(cuda)} of CUDA, {len(beside)} of FlashInfer, "
        f"{len(compilers)} of nvcc, {len(tools)} of tools"
    )


if __name__ == "__main__":
    main()
