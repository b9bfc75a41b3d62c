"""Findings about Python, the installation, torch and the system's limits. Knows no config."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import torch
from huggingface_hub.constants import HF_HUB_CACHE

import specserve
from specserve import flashinfer_kernels
from specserve.config.tree import DEMO
from specserve.host import usable_cores
from specserve.models.cpu.linear_kernels import (
    compiles_for_amx,
    missing_for_compiled,
    multiplies_bf16,
)
from specserve.models.gpu.flashinfer_attention import FlashInferUnusable, find_flashinfer
from specserve.models.gpu.float8_kernels import float8_fault
from specserve.models.memory import free_memory
from specserve.processor import (
    CAP,
    CAP_VARIABLES,
    has_amx,
    limit_of_onednn,
    processor_flags,
    uses_amx,
)
from specserve.tools.doctor.findings import Finding, bad, gib, ok, warn

MIN_PYTHON = (3, 11)
MIN_OPEN_FILES = 4096
"""Each stream is a connection, and each worker has some dozens."""
MIN_SHARED_BYTES = 2**30
MIN_DISK_BYTES = 2 * 2**30
SHARED_MEMORY = Path("/dev/shm")
DRIVER_VERSION = Path("/proc/driver/nvidia/version")
DEMO_FILES = (
    "target/model.safetensors",
    "target/tokenizer.json",
    "draft/model.safetensors",
    "heads/heads.safetensors",
)
CPU_BUILD = (
    "torch's build for CPUs saves 4.5 GB: `uv pip install --torch-backend cpu --reinstall torch`, "
    "or pip with the index that torch's installation page names, in a fresh environment"
)
TORCHS_OWN = "torch's own, which copies all keys and values in each pass"
FAST_FLAGS = ("amx_tile", "avx512_bf16", "avx512f", "avx2")
"""Instruction sets that matter for speed, the best first."""


def python(version: tuple[int, ...] = sys.version_info[:3]) -> Iterator[Finding]:
    """Check the version of Python."""
    number = ".".join(map(str, version))
    machine = f"{platform.system()} {platform.machine()}"
    name = f"{platform.python_implementation()} {number} on {machine}"
    if version < MIN_PYTHON:
        yield bad(
            "python",
            name,
            "specserve needs Python 3.11 or newer: make the environment with another one",
        )
    else:
        yield ok("python", name)


def install(demo: Path = DEMO) -> Iterator[Finding]:
    """Check that the package is complete, and that the installed one is imported."""
    where = Path(specserve.__file__).parent
    try:
        installed = distribution("specserve").version
    except PackageNotFoundError:
        yield warn(
            "specserve",
            f"{specserve.__version__} in {where}, not installed",
            "run `pip install -e .`, so that `serve` and Ray find it anywhere",
        )
    else:
        if installed != specserve.__version__:
            yield warn(
                "specserve",
                f"{where} is {specserve.__version__}, and {installed} is installed",
                "install it again, or leave the directory",
            )
        else:
            yield ok("specserve", f"{installed} in {where}")
    missing = [name for name in DEMO_FILES if not (demo / name).is_file()]
    if missing:
        yield bad(
            "demo pair",
            f"{', '.join(missing)} missing in {demo}",
            "install specserve again; the demo pair is a part of the package",
        )
    else:
        yield ok("demo pair", f"{demo}")


def processor(flags: frozenset[str], *, bf16: bool, threads: int) -> Iterator[Finding]:
    """Check the processor: without bfloat16 the weights that a pass reads are twice as large."""
    has = [name for name in FAST_FLAGS if name in flags] or [
        torch.backends.cpu.get_cpu_capability().lower()
    ]
    found = f"torch {torch.__version__}, {threads} threads, {', '.join(has)}"
    if bf16 or torch.cuda.is_available():
        yield ok("torch", found)
    else:
        remedy = "on this CPU float32 is used: weights take twice the memory and twice the reading"
        yield warn("torch", f"{found}; bfloat16 is not fast here", remedy)


def linear_layers(missing: str | None, *, amx: bool = False) -> Iterator[Finding]:
    """Say in what linear layers on CPUs run; `missing` is what the compiled kernel lacks."""
    if missing is None:
        yield ok("linear layers", f"compiled for this processor{' and its AMX' if amx else ''}")
    elif "llvmlite" in missing:
        remedy = "pip install 'specserve[cpu]': passes of few tokens take some 0.7 times as long"
        yield warn("linear layers", "oneDNN, as llvmlite is not installed", remedy)
    else:
        yield ok("linear layers", f"oneDNN; compiled ones need {missing}")


def onednn() -> Iterator[Finding]:
    """Say whether oneDNN does without AMX, where the processor has it."""
    if not has_amx():
        return
    limit = "=".join(limit_of_onednn() or ("no limit",))
    if not uses_amx():
        yield ok("oneDNN", f"does without this processor's AMX, by {limit}")
        return
    yield warn(
        "oneDNN",
        f"uses AMX, as {limit} allows: texts in bf16 may depend on what else is served",
        f"unset {' and '.join(CAP_VARIABLES)}, or set {CAP_VARIABLES[0]}={CAP}",
    )


def cuda(driver: Path = DRIVER_VERSION) -> Iterator[Finding]:
    """Check GPUs, their driver and the build of torch."""
    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            free, total = torch.cuda.mem_get_info(number)
            name = torch.cuda.get_device_name(number)
            yield ok(
                f"cuda:{number}",
                f"{name}, {gib(free)} of {gib(total)} free, "
                f"CUDA {torch.version.cuda}{_driver(driver)}",
            )
        yield _attention()
        yield _float8()
    elif driver.is_file():
        cuda = torch.version.cuda
        built = f"torch was built {'for CPUs only' if cuda is None else f'for CUDA {cuda}'}"
        remedy = (
            "install a build of torch for the CUDA version of your driver (nvidia-smi shows it), "
            "or set target.device and draft.device to cpu"
        )
        yield warn(
            "cuda",
            f"there is an NVIDIA driver{_driver(driver)}, and torch sees no device; {built}",
            remedy,
        )
    else:
        if torch.version.cuda is None:
            yield ok("cuda", "none; models run on CPUs")
        else:
            found = f"none, and torch was built for CUDA {torch.version.cuda}; models run on CPUs"
            yield warn("cuda", found, CPU_BUILD)
        if flashinfer_kernels.version() is not None:  # an image that was built without a GPU
            yield flashinfer()


def _attention() -> Finding:
    """Say by which kernels attention on GPUs is computed."""
    try:
        for number in range(torch.cuda.device_count()):
            find_flashinfer(torch.device("cuda", number))
    except FlashInferUnusable as error:
        is_compiled = flashinfer_kernels.compiled_kernels() is not None
        again = "python -m specserve.flashinfer_kernels --architectures N.M` compiles them again"
        remedy = f"`{again}" if is_compiled else "pip install 'specserve[gpu]'"
        return warn("attention", f"{TORCHS_OWN}; FlashInfer: {error}", remedy)
    return flashinfer()


def flashinfer() -> Finding:
    """Say where FlashInfer's kernels come from: compiled ahead, or by a compiler that is here."""
    name = f"FlashInfer {flashinfer_kernels.version()}"
    compiled, toolkit = flashinfer_kernels.compiled_kernels(), flashinfer_kernels.find_toolkit()
    tried = "compared with ours when a model is opened"
    if compiled is not None:
        architectures = ", ".join(compiled.architectures)
        found = f"{len(compiled.modules)} modules compiled for GPUs of {architectures}; {tried}"
        return ok("attention", f"{name}, {found}")
    missing = flashinfer_kernels.missing_for_compiling()
    if toolkit is None or missing is not None:
        found = f"{name} has no compiled kernels here, and compiling them needs {missing}"
        return warn("attention", f"{TORCHS_OWN}; {found}", flashinfer_kernels.BRING_COMPILER)
    compiler = f"compiled at the first use by {toolkit.home}/bin/nvcc, which takes minutes"
    return ok("attention", f"{name}, {compiler}; {tried}")


def _float8() -> Finding:
    """Say whether GPUs multiply FP8 weights as they are."""
    faults = {
        float8_fault(torch.device("cuda", number), torch.bfloat16)
        for number in range(torch.cuda.device_count())
    } - {None}
    if faults:
        return ok("FP8", f"checkpoints and drafts in FP8 are widened; {min(map(str, faults))}")
    return ok("FP8", "checkpoints and drafts in FP8 are multiplied as they are")


def _driver(file: Path) -> str:
    if not file.is_file():
        return ""
    words = file.read_text(encoding="utf-8", errors="replace").split()
    versions = (word for word in words if word.count(".") >= 1 and word[0].isdigit())
    return f", driver {next(versions, 'unknown')}"


def memory() -> Iterator[Finding]:
    """Report the free memory."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield ok("memory", f"{gib(free_memory(torch.device('cpu')))} of {gib(whole)} free")


def shared(num_bytes: int | None) -> Iterator[Finding]:
    """Check the shared memory that Ray keeps objects in; None if there is none."""
    if num_bytes is None:
        yield warn(
            "shared memory",
            f"there is no {SHARED_MEMORY}",
            "Ray will use files instead, which is slower; on Linux, mount it",
        )
    elif num_bytes < MIN_SHARED_BYTES:
        yield warn(
            "shared memory",
            f"{gib(num_bytes)} free in {SHARED_MEMORY}",
            "Ray wants 1 GiB or more: in a container, `docker run --shm-size=2g`",
        )
    else:
        yield ok("shared memory", f"{gib(num_bytes)} free in {SHARED_MEMORY}")


def open_files(soft: int, hard: int) -> Iterator[Finding]:
    """Check how many files a process may open."""
    if soft != resource.RLIM_INFINITY and soft < MIN_OPEN_FILES:
        yield warn(
            "open files",
            f"{soft} for each process",
            f"`ulimit -n {MIN_OPEN_FILES}` or more before you start; the system allows {hard}",
        )
    else:
        yield ok(
            "open files",
            f"{'no limit' if soft == resource.RLIM_INFINITY else soft} for each process",
        )


def disk(folders: Iterable[tuple[str, Path]]) -> Iterator[Finding]:
    """Check the free disk space of `folders`, each with its purpose."""
    for purpose, folder in folders:
        there = next(path for path in (folder, *folder.parents) if path.exists())
        free = shutil.disk_usage(there).free
        if free < MIN_DISK_BYTES:
            yield warn(
                f"disk, {purpose}",
                f"{gib(free)} free at {folder}",
                "make room, or models and logs may not find a place",
            )
        else:
            yield ok(f"disk, {purpose}", f"{gib(free)} free at {folder}")


def system() -> Iterator[Finding]:
    """Check this machine."""
    threads = min(torch.get_num_threads(), usable_cores())
    yield from processor(processor_flags(), bf16=multiplies_bf16(), threads=threads)
    yield from onednn()
    yield from linear_layers(missing_for_compiled(), amx=compiles_for_amx())
    yield from cuda()
    yield from memory()
    yield from shared(shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else None)
    yield from open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))
    yield from disk(
        [
            ("temporary files", Path(tempfile.gettempdir())),
            ("models from the hub", Path(HF_HUB_CACHE)),
        ]
    )
