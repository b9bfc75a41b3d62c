"""Pack FlashInfer with compiled kernels in the place of their sources.

For a machine with a GPU that has no nvcc and reaches no package index; `make gpu-wheels`
runs it where GPU_ARCHITECTURES names cards.
"""

from __future__ import annotations

import argparse
import zipfile
from collections.abc import Sequence
from pathlib import Path

DATA = "flashinfer/data/"
TEMPLATES = DATA + "csrc/"
"""Files of it are read whenever kernels are opened, even where nothing is compiled."""


def is_kept(name: str) -> bool:
    """Return whether a file is Python or a template, and no source of kernels."""
    if not name.startswith(DATA):
        return True
    return name.startswith(TEMPLATES) and "/" not in name.removeprefix(TEMPLATES)


def pack(wheel: Path, kernels: Path, out: Path) -> Path:
    """Write the wheel of that name to `out`; `kernels` is what was compiled for it."""
    out.mkdir(exist_ok=True)
    packed = out / wheel.name
    with (
        zipfile.ZipFile(wheel) as whole,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as small,
    ):
        kept = [name for name in whole.namelist() if is_kept(name)]
        (record,) = [name for name in kept if name.endswith(".dist-info/RECORD")]
        added = {f"{DATA}aot/{file.relative_to(kernels)}": file for file in kernels.rglob("*.*")}
        for name in kept:
            if name != record:
                small.writestr(name, whole.read(name))
        for name, file in added.items():
            small.write(file, name)
        lines = whole.read(record).decode().splitlines()
        lines = [line for line in lines if is_kept(line.partition(",")[0])]
        small.writestr(record, "\n".join([*lines, *(f"{name},," for name in added), ""]))
    return packed


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("kernels", type=Path, help="the folder of specserve/flashinfer_kernels.py")
    parser.add_argument("out", type=Path)
    options = parser.parse_args(arguments)
    packed = pack(options.wheel, options.kernels, options.out)
    print(f"{packed}: {packed.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
