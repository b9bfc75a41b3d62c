"""FlashInfer's kernels: which are compiled ahead of time, with what, and where they are kept.

FlashInfer compiles a module of kernels at its first use, by nvcc and a C++ compiler, unless a
folder of its package has the module. `python -m specserve.flashinfer_kernels` compiles MODULES into
that folder. Imports nothing of specserve, so that a stage of an image can hold this file alone.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.machinery
import json
import logging
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

ARCHITECTURES = ("8.0", "9.0a", "10.0f", "12.0f")
"""Of images: Ampere and Ada, Hopper, Blackwell of data centres and of workstations."""
BACKEND = "fa2"
"""For every GPU: on Hopper fa3, which FlashInfer would choose, divides no keys among blocks."""
MANIFEST = "specserve.json"
SAMPLING = "sampling"
SYSTEM_TOOLKIT = Path("/usr/local/cuda")
TOOLKIT_FILES = ("bin/nvcc", "include/cuda_runtime.h", "include/curand_kernel.h")
"""Files that compiling needs; some toolkits are without the last."""
BRING_COMPILER = "pip install 'specserve[gpu]' brings nvcc; g++ is a package of the system"


@dataclass(frozen=True, slots=True)
class AttentionModule:
    """A module of paged attention, by what distinguishes it from the others."""

    dim: int
    window: bool = False
    softcap: bool = False
    page_dtype: str = "bfloat16"
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        variant = "".join([", window" * self.window, ", softcap" * self.softcap])
        return f"heads of {self.dim}, {self.dtype}, pages in {self.page_dtype}{variant}"


FP8 = "float8_e4m3fn"
MODULES = (
    AttentionModule(64),
    AttentionModule(128),
    AttentionModule(128, window=True),
    AttentionModule(256),
    AttentionModule(256, window=True),
    AttentionModule(256, softcap=True),
    AttentionModule(256, window=True, softcap=True),
    AttentionModule(64, page_dtype=FP8),
    AttentionModule(128, page_dtype=FP8),
    AttentionModule(128, window=True, page_dtype=FP8),
)
"""Compiled ahead of time. Other models' modules are compiled at their first use, by nvcc if any."""


# The compiler


@dataclass(frozen=True, slots=True)
class Toolkit:
    """A folder with nvcc and CUDA's headers: an installed toolkit, or that of the package index."""

    home: Path
    is_of_wheels: bool = False

    @property
    def is_complete(self) -> bool:
        return all((self.home / name).is_file() for name in TOOLKIT_FILES)


def find_toolkit(
    environ: MutableMapping[str, str] = os.environ,
    system: Path = SYSTEM_TOOLKIT,
    packages: Sequence[str] | None = None,
) -> Toolkit | None:
    """Return the toolkit to compile with. CUDA_HOME, where it is set, excludes all others."""
    stated = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    if stated is not None:
        found = Toolkit(Path(stated))
        return found if found.is_complete else None
    on_path = shutil.which("nvcc", path=environ.get("PATH", ""))
    installed = [system, *([] if on_path is None else [Path(on_path).resolve().parents[1]])]
    choices = [
        *map(Toolkit, installed),
        *(Toolkit(home, is_of_wheels=True) for home in _wheel_folders(packages)),
    ]
    return next((choice for choice in choices if choice.is_complete), None)


def _wheel_folders(packages: Sequence[str] | None) -> Iterator[Path]:
    """Yield the folders in which the packages `nvidia-*` of CUDA 13 and later lie together."""
    spec = importlib.machinery.PathFinder.find_spec("nvidia", packages)
    for folder in (spec and spec.submodule_search_locations) or ():
        yield from sorted(Path(folder).glob("cu[0-9]*"), reverse=True)


def missing_for_compiling(environ: MutableMapping[str, str] = os.environ) -> str | None:
    """Return what is missing to compile kernels at their first use, or None."""
    stated = environ.get("CUDA_HOME") or environ.get("CUDA_PATH")
    if find_toolkit(environ) is None:
        return ", ".join(TOOLKIT_FILES) + f" in {stated or 'a CUDA toolkit'}"
    if shutil.which(environ.get("CXX", "c++"), path=environ.get("PATH", "")) is None:
        return "a C++ compiler"
    return None


def prepare(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let FlashInfer find the toolkit and ninja. Call it before FlashInfer is imported."""
    if version() is None:
        return
    scripts = sysconfig.get_path("scripts")
    if shutil.which("ninja", path=environ.get("PATH", "")) is None:
        environ["PATH"] = os.pathsep.join(filter(None, [environ.get("PATH"), scripts]))
    toolkit = find_toolkit(environ)
    if toolkit is None:
        return
    if toolkit.is_of_wheels:
        try:
            folder = _link_libraries(toolkit.home, environ)
        except (OSError, subprocess.CalledProcessError) as error:
            log.info("FlashInfer's kernels cannot be linked here: %s", error)
            return
        known = environ.get("FLASHINFER_EXTRA_LDFLAGS", "")
        # Some linkers drop libraries of which they need nothing, such as an empty one.
        flags = f"-L{folder} -Wl,--no-as-needed -lcuda"
        environ["FLASHINFER_EXTRA_LDFLAGS"] = f"{known} {flags}".strip()
    environ["CUDA_HOME"] = str(toolkit.home)


def _link_libraries(home: Path, environ: MutableMapping[str, str]) -> Path:
    """Return a folder with libcudart.so and libcuda.so.

    The packages have the first with its version in the name alone. The second is the driver's, or
    where there is none an empty library of that name.
    """
    base = Path(environ.get("FLASHINFER_WORKSPACE_BASE") or Path.home())
    folder = base / ".cache/specserve" / home.name
    folder.mkdir(parents=True, exist_ok=True)
    (runtime,) = (home / "lib").glob("libcudart.so.*[0-9]")
    _place(folder / "libcudart.so", lambda path: path.symlink_to(runtime))
    driver = _driver_library()
    if driver is not None:
        _place(folder / "libcuda.so", lambda path: path.symlink_to(driver))
    elif not (folder / "libcuda.so").exists():
        compiler = environ.get("CXX", "c++")
        command = f"{compiler} -shared -nostdlib -Wl,-soname,libcuda.so.1 -x c /dev/null -o"
        _place(
            folder / "libcuda.so",
            lambda path: subprocess.run(
                [*command.split(), str(path)], check=True, capture_output=True
            ),
        )
    return folder


def _place(path: Path, write: Any) -> None:
    """Write a file of the folder at once, since other processes may link with it."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        write(Path(folder, path.name))
        os.replace(Path(folder, path.name), path)


def _driver_library() -> Path | None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return next((Path(line.split()[-1]) for line in lines if "/libcuda.so" in line), None)


# Kernels that were compiled ahead of time


@dataclass(frozen=True, slots=True)
class CompiledKernels:
    """The modules in FlashInfer's folder, as the manifest beside them lists them."""

    flashinfer: str
    cuda: str
    architectures: tuple[str, ...]
    modules: tuple[str, ...]

    def covers(self, capability: tuple[int, int]) -> bool:
        """Return whether a GPU of that compute capability runs them."""
        return any(_runs_on(architecture, capability) for architecture in self.architectures)

    def fault(self, capability: tuple[int, int], installed: str | None) -> str | None:
        """Return why a GPU cannot run them, though FlashInfer would try. None: it can."""
        if self.flashinfer != installed:
            return f"its kernels were compiled for {self.flashinfer}, and {installed} is installed"
        if not self.covers(capability):
            known = ", ".join(self.architectures)
            gpu = ".".join(map(str, capability))
            return f"its kernels were compiled for GPUs of {known}, and this one is {gpu}"
        return None


def _runs_on(architecture: str, capability: tuple[int, int]) -> bool:
    """Code for 8.0 runs on 8.6 and 8.9, as that for 10.0f does on 10.3; that for 9.0a on 9.0."""
    major, minor = architecture.rstrip("af").split(".")
    exact = architecture.endswith("a")
    return capability[0] == int(major) and (
        capability[1] == int(minor) if exact else capability[1] >= int(minor)
    )


def flashinfer_folder() -> Path | None:
    """Return where FlashInfer looks for compiled modules; None if it is not installed."""
    spec = importlib.machinery.PathFinder.find_spec("flashinfer")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "data/aot"


def compiled_kernels(folder: Path | None = None) -> CompiledKernels | None:
    folder = folder or flashinfer_folder()
    if folder is None or not (folder / MANIFEST).is_file():
        return None
    found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    lists = {key: tuple(found[key]) for key in ("architectures", "modules")}
    return CompiledKernels(found["flashinfer"], found["cuda"], **lists)


def version() -> str | None:
    """Return the version of the FlashInfer that is installed."""
    try:
        return metadata.version("flashinfer-python")
    except metadata.PackageNotFoundError:
        return None


# Compiling them


class _Found(Exception):
    """Carries the module that FlashInfer is about to compile."""


def _stop(spec: Any) -> None:
    """Take the place of `JitSpec.build_and_load`."""
    raise _Found(spec)


def _find(ask: Any, *arguments: Any) -> Any:
    """Return the module that FlashInfer would compile to answer a call."""
    try:
        ask(*arguments)
    except _Found as found:
        return found.args[0]
    raise AssertionError(f"{ask} compiled nothing")


def collect() -> dict[str, Any]:
    """Return the modules to compile as FlashInfer describes them, by our own descriptions.

    They are those that FlashInfer's wrappers ask for: each is taken where it would be compiled.
    """
    import torch
    from flashinfer import prefill, sampling
    from flashinfer.jit.core import JitSpec

    build_and_load, JitSpec.build_and_load = JitSpec.build_and_load, _stop
    try:
        found = {SAMPLING: _find(sampling.get_sampling_module)}
        for module in MODULES:
            dtype, page_dtype = (getattr(torch, x) for x in (module.dtype, module.page_dtype))
            found[str(module)] = _find(
                prefill.get_batch_prefill_module,
                BACKEND,
                dtype,
                page_dtype,
                dtype,
                torch.int32,
                module.dim,
                module.dim,
                0,  # positions are not encoded
                module.window,
                module.softcap,
                False,  # sums of queries and keys in fp32
            )
    finally:
        JitSpec.build_and_load = build_and_load
    return found


def compile_kernels(architectures: Sequence[str], out: Path, only: str = "") -> CompiledKernels:
    """Compile the modules whose descriptions have `only` in them, and copy them to `out`.

    With `only`, those that were compiled into it before with the same settings are kept.
    """
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = " ".join(architectures)
    from flashinfer.jit import cpp_ext
    from flashinfer.jit.core import build_jit_specs

    installed = version()
    assert installed is not None
    empty = CompiledKernels(installed, str(cpp_ext.get_cuda_version()), tuple(architectures), ())
    earlier = (compiled_kernels(out) if only else None) or empty
    if replace(earlier, modules=()) != empty:
        sys.exit(
            f"{out} has kernels of FlashInfer {earlier.flashinfer} and CUDA {earlier.cuda} for "
            f"{', '.join(earlier.architectures)}; compile all modules again (without --only), "
            "or give another folder (--out)"
        )
    chosen = {key: spec for key, spec in collect().items() if only in key}
    build_jit_specs(list(chosen.values()), skip_prebuilt=False)
    for spec in chosen.values():
        (out / spec.name).mkdir(parents=True, exist_ok=True)
        shutil.copy2(spec.jit_library_path, out / spec.name)
    compiled = replace(earlier, modules=tuple(dict.fromkeys([*earlier.modules, *chosen])))
    (out / MANIFEST).write_text(json.dumps(asdict(compiled), indent=1) + "\n", encoding="utf-8")
    return compiled


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--architectures",
        default=" ".join(ARCHITECTURES),
        help="compute capabilities as FlashInfer writes them (default: %(default)s)",
    )
    parser.add_argument("--out", type=Path, help="a folder, instead of FlashInfer's own")
    parser.add_argument("--only", default="", help="modules with these words in their description")
    parser.add_argument("--list", action="store_true", help="print the modules and compile nothing")
    options = parser.parse_args(arguments)
    architectures = options.architectures.split()
    if options.list:
        for name in (*map(str, MODULES), SAMPLING):
            print(f"{name}: {' '.join(architectures)}")
        return
    out = options.out or flashinfer_folder()
    if out is None:
        sys.exit("FlashInfer is not installed: pip install 'specserve[gpu]'")
    missing = missing_for_compiling()
    if missing is not None:
        sys.exit(f"compiling needs {missing}: {BRING_COMPILER}")
    prepare()
    started = time.monotonic()
    compiled = compile_kernels(architectures, out, options.only)
    size = sum(file.stat().st_size for file in out.rglob("*.so")) / 2**20
    print(
        f"{len(compiled.modules)} modules for {', '.join(architectures)} by CUDA {compiled.cuda}: "
        f"{time.monotonic() - started:.0f} s, {size:.1f} MiB in {out}"
    )


if __name__ == "__main__":
    main()
