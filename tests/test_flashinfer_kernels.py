"""FlashInfer's kernels: the compiler that is found, what is compiled ahead, and what may run it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specserve import flashinfer_kernels
from specserve.flashinfer_kernels import (
    MODULES,
    AttentionModule,
    CompiledKernels,
    Toolkit,
    compile_kernels,
    compiled_kernels,
    find_toolkit,
    missing_for_compiling,
    prepare,
)
from specserve.models.gpu import flashinfer_attention
from specserve.models.gpu.flashinfer_attention import FlashInferUnusable, find_flashinfer
from specserve.models.gpu.flashinfer_plans import LayerKind, PageLists, Plan
from specserve.tools.doctor import machine
from specserve.tools.doctor.findings import Grade

INSTALLED = "0.7.2"
COMPILED = CompiledKernels(INSTALLED, "13.0", ("8.0", "9.0a", "10.0f"), ("sampling",))


def program(file: Path, text: str = "exit 0") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)
    return file


def toolkit(home: Path) -> Path:
    program(home / "bin/nvcc")
    (home / "include").mkdir()
    for header in ("cuda_runtime.h", "curand_kernel.h"):
        (home / "include" / header).touch()
    return home


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """Return a folder of packages that has nvcc as the package index has it."""
    home = toolkit(tmp_path / "site/nvidia/cu13")
    (home / "lib").mkdir()
    (home / "lib/libcudart.so.13").touch()
    return tmp_path / "site"


@pytest.fixture
def is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_kernels, "version", lambda: INSTALLED)


# The compiler


def test_an_installed_toolkit_is_taken_before_that_of_the_package_index(
    tmp_path: Path, wheels: Path
) -> None:
    nowhere = tmp_path / "nowhere"
    mine, systems = toolkit(tmp_path / "mine"), toolkit(tmp_path / "system")
    packages = [str(wheels)]
    assert find_toolkit({"CUDA_HOME": str(mine)}, systems, packages) == Toolkit(mine)
    assert find_toolkit({}, systems, packages) == Toolkit(systems)
    path = {"PATH": str(mine / "bin")}
    assert find_toolkit(path, nowhere, packages) == Toolkit(mine)
    of_wheels = Toolkit(wheels / "nvidia/cu13", is_of_wheels=True)
    assert find_toolkit({}, nowhere, packages) == of_wheels
    assert find_toolkit({}, nowhere, []) is None


def test_an_nvcc_without_all_headers_is_no_toolkit(tmp_path: Path, wheels: Path) -> None:
    program(tmp_path / "local/bin/nvcc", "exec /usr/local/cuda/bin/nvcc")
    without_random = toolkit(tmp_path / "cuda")
    (without_random / "include/curand_kernel.h").unlink()
    path = {"PATH": str(tmp_path / "local/bin")}
    found = find_toolkit(path, without_random, [str(wheels)])
    assert found == Toolkit(wheels / "nvidia/cu13", is_of_wheels=True)


def test_what_is_missing_for_compiling_is_named(tmp_path: Path) -> None:
    stated = {"CUDA_HOME": str(tmp_path / "empty"), "PATH": ""}
    named = "bin/nvcc, include/cuda_runtime.h, include/curand_kernel.h"
    assert missing_for_compiling(stated) == f"{named} in {tmp_path}/empty"
    home = str(toolkit(tmp_path / "cuda"))
    assert missing_for_compiling({"CUDA_HOME": home, "PATH": ""}) == "a C++ compiler"
    path = str(program(tmp_path / "bin/c++").parent)
    assert missing_for_compiling({"CUDA_HOME": home, "PATH": path}) is None


@pytest.mark.usefixtures("is_installed")
def test_flashinfer_is_led_to_the_toolkit_of_the_package_index_and_can_link_with_it(
    tmp_path: Path, wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = wheels / "nvidia/cu13"
    found = Toolkit(home, is_of_wheels=True)
    monkeypatch.setattr(flashinfer_kernels, "find_toolkit", lambda _: found)
    monkeypatch.setattr(flashinfer_kernels, "_driver_library", lambda: None)
    compiler = program(tmp_path / "bin/cc", 'while [ $# -gt 1 ]; do shift; done; echo > "$1"')
    environ = {"FLASHINFER_WORKSPACE_BASE": str(tmp_path), "CXX": str(compiler), "PATH": "/bin"}
    prepare(environ)
    assert environ["CUDA_HOME"] == str(home)
    folder = environ["FLASHINFER_EXTRA_LDFLAGS"].split()[0].removeprefix("-L")
    assert (Path(folder) / "libcudart.so").resolve() == home / "lib/libcudart.so.13"
    assert sorted(path.name for path in Path(folder).iterdir()) == ["libcuda.so", "libcudart.so"]
    monkeypatch.undo()
    monkeypatch.setattr(flashinfer_kernels, "version", lambda: INSTALLED)
    before = dict(environ)
    prepare(environ)
    assert environ == before, "a second call adds nothing"


def test_without_flashinfer_no_variable_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_kernels, "version", lambda: None)
    environ: dict[str, str] = {}
    prepare(environ)
    assert environ == {}


# What was compiled ahead of time


@pytest.mark.parametrize(
    ("capability", "runs"),
    [
        ((7, 5), False),
        ((8, 0), True),
        ((8, 9), True),  # code of an architecture runs on later ones of its generation
        ((9, 0), True),
        ((10, 0), True),
        ((10, 3), True),  # as a family
        ((12, 0), False),
    ],
)
def test_compiled_kernels_say_on_which_gpus_they_run(
    capability: tuple[int, int], runs: bool
) -> None:
    assert COMPILED.covers(capability) is runs
    assert (COMPILED.fault(capability, INSTALLED) is None) is runs


def test_kernels_for_one_chip_run_on_no_other() -> None:
    only = CompiledKernels(INSTALLED, "13.0", ("10.0a",), ())
    assert only.covers((10, 0))
    assert not only.covers((10, 3))


@pytest.mark.usefixtures("is_installed")
def test_kernels_of_another_version_or_for_other_gpus_are_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(flashinfer_kernels, "compiled_kernels", lambda: COMPILED)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    with pytest.raises(FlashInferUnusable, match=r"for GPUs of 8\.0.*, and this one is 7\.5"):
        find_flashinfer(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(flashinfer_kernels, "version", lambda: "0.8.0")
    with pytest.raises(FlashInferUnusable, match=r"for 0\.7\.2, and 0\.8\.0 is installed"):
        find_flashinfer(torch.device("cuda"))


# Which are compiled ahead of time


def module_of(plan: dict[str, Any]) -> AttentionModule:
    """Return the module that FlashInfer takes for a plan, as its `plan` chooses it."""
    page_dtype, dtype = (
        str(plan[key]).removeprefix("torch.") for key in ("kv_data_type", "q_data_type")
    )
    dims, softcap = (plan["head_dim_qk"], plan["head_dim_vo"]), plan["logits_soft_cap"] or 0
    assert dims[0] == dims[1]
    return AttentionModule(dims[0], plan["window_left"] >= 0, softcap > 0, page_dtype, dtype)


class Planned:
    """A wrapper that keeps what it was planned for."""

    def plan(self, *lists: Any, **options: Any) -> None:
        *_, dim, _ = lists
        self.options = options | {"head_dim_qk": dim}


FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("dim", "window", "softcap", "page_dtype"),
    [
        pytest.param(64, None, None, torch.bfloat16, id="llama-3.2-1b"),
        pytest.param(64, None, None, FP8, id="llama-3.2-1b-fp8-pages"),
        pytest.param(128, None, None, torch.bfloat16, id="llama-3-8b-and-qwen"),
        pytest.param(128, None, None, FP8, id="llama-3-8b-and-qwen-fp8-pages"),
        pytest.param(128, 4096, None, torch.bfloat16, id="mistral"),
        pytest.param(128, 4096, None, FP8, id="mistral-fp8-pages"),
        pytest.param(256, 512, None, torch.bfloat16, id="gemma-3"),
        pytest.param(256, 4096, 50.0, torch.bfloat16, id="gemma-2"),
    ],
)
def test_kernels_of_common_models_are_compiled_ahead(
    dim: int,
    window: int | None,
    softcap: float | None,
    page_dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = SimpleNamespace(head_dim=dim, v_head_dim=dim)
    config = SimpleNamespace(sliding_window=window, attn_logit_softcapping=softcap)
    loaded: Any = SimpleNamespace(spec=spec, config=config)
    event = SimpleNamespace(record=lambda stream: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    nothing = torch.zeros(1, dtype=torch.int32)
    lists = PageLists(nothing, nothing, nothing, nothing, nothing)
    runs: Any = SimpleNamespace(size=None)
    asked = set()
    for variant in flashinfer_attention._variants(loaded):
        kind = LayerKind(
            8, 8, dim, dim, torch.bfloat16, page_dtype, 1.0, variant.window, variant.softcap
        )
        plan = Plan(Planned(), kind)
        plan.make(runs, lists, 16, torch.device("cpu"))
        asked.add(module_of(plan.wrapper.options))
    assert len(asked) == (1 if window is None else 2)
    assert asked <= set(MODULES)


class Spec:
    """A module of kernels of FlashInfer that can be compiled."""

    folder: Path

    def __init__(self, name: str) -> None:
        self.name = name
        self.jit_library_path = self.folder / f"{name}.so"

    def build_and_load(self) -> Any:
        raise AssertionError("nothing is loaded where there may be no GPU")


@dataclass
class FakeFlashInfer:
    """A record of the modules that were compiled, and of their GPUs."""

    architectures: dict[str, str] = field(default_factory=dict)  # by module


@pytest.fixture
def flashinfer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeFlashInfer:
    """Let a stand-in compile modules to files with their names in them."""
    fake, Spec.folder = FakeFlashInfer(), tmp_path
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "")

    def build(specs: list[Spec], *, skip_prebuilt: bool) -> None:
        assert not skip_prebuilt
        for spec in specs:
            assert spec.name not in fake.architectures, "it is compiled once"
            fake.architectures[spec.name] = os.environ["FLASHINFER_CUDA_ARCH_LIST"]
            spec.jit_library_path.write_text(spec.name)

    def batch_prefill(backend: str, *chosen: Any) -> Any:
        return Spec("_".join(map(str, (backend, *chosen)))).build_and_load()

    core = {"JitSpec": Spec, "build_jit_specs": build}
    modules: dict[str, dict[str, Any]] = {
        "flashinfer": {},
        "flashinfer.jit": {},
        "flashinfer.jit.core": core,
        "flashinfer.jit.cpp_ext": {"get_cuda_version": lambda: "13.0"},
        "flashinfer.prefill": {"get_batch_prefill_module": batch_prefill},
        "flashinfer.sampling": {"get_sampling_module": lambda: Spec("sampling").build_and_load()},
    }
    for name, members in modules.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    return fake


@pytest.mark.usefixtures("is_installed")
def test_modules_are_compiled_where_flashinfer_asks_for_them_and_said_in_a_manifest(
    flashinfer: FakeFlashInfer, tmp_path: Path
) -> None:
    asked = Spec.build_and_load
    out = tmp_path / "out"
    found = compile_kernels(["8.0", "9.0a"], out)
    assert Spec.build_and_load is asked, "it was put back"
    assert len(flashinfer.architectures) == 1 + len(MODULES)
    for name, architectures in flashinfer.architectures.items():
        assert (out / name / f"{name}.so").read_text() == name
        assert name.startswith(("fa2", "sampling"))
        assert architectures == "8.0 9.0a"
    assert compiled_kernels(out) == found
    assert found.architectures == ("8.0", "9.0a")
    assert found.fault((8, 6), INSTALLED) is None


@pytest.mark.usefixtures("is_installed", "flashinfer")
def test_modules_are_added_to_those_of_the_same_settings_and_to_no_others(tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = compile_kernels(["9.0a"], out, only="sampling")
    both = compile_kernels(["9.0a"], out, only="heads of 64, bfloat16, pages in bfloat16")
    assert both.modules == (*first.modules, "heads of 64, bfloat16, pages in bfloat16")
    assert compiled_kernels(out) == both
    with pytest.raises(SystemExit, match=r"for 9\.0a; compile all modules again"):
        compile_kernels(["8.0"], out, only="sampling")
    assert compiled_kernels(out) == both


@pytest.mark.usefixtures("is_installed")
def test_all_modules_take_the_place_of_those_for_other_gpus(
    flashinfer: FakeFlashInfer, tmp_path: Path
) -> None:
    """The doctor advises it where a GPU cannot run those that are there."""
    compile_kernels(["9.0a"], tmp_path, only="sampling")
    flashinfer.architectures.clear()
    found = compile_kernels(["8.0"], tmp_path)
    assert compiled_kernels(tmp_path) == found
    assert found.architectures == ("8.0",)
    assert len(found.modules) == len(MODULES) + 1


def test_the_file_alone_lists_what_it_would_compile(tmp_path: Path) -> None:
    """A stage of the images has nothing else of specserve."""
    file = shutil.copy(flashinfer_kernels.__file__, tmp_path)
    listed = subprocess.run(
        [sys.executable, "-I", file, "--list", "--architectures", "9.0a"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    assert len(listed) == len(MODULES) + 1
    assert "heads of 128, bfloat16, pages in bfloat16: 9.0a" in listed
    assert "heads of 128, bfloat16, pages in float8_e4m3fn, window: 9.0a" in listed


# The doctor


@pytest.mark.usefixtures("is_installed")
def test_the_doctor_says_where_flashinfers_kernels_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flashinfer_kernels, "compiled_kernels", lambda: COMPILED)
    found = machine.flashinfer()
    assert found.grade is Grade.OK
    assert "FlashInfer 0.7.2, 1 modules compiled for GPUs of 8.0, 9.0a, 10.0f;" in found.found
    monkeypatch.setattr(flashinfer_kernels, "compiled_kernels", lambda: None)
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "cuda")))
    monkeypatch.setenv("CXX", str(program(tmp_path / "c++")))
    found = machine.flashinfer()
    assert found.grade is Grade.OK
    assert f"compiled at the first use by {tmp_path}/cuda/bin/nvcc" in found.found
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    found = machine.flashinfer()
    assert found.grade is Grade.WARN
    assert "compiling them needs bin/nvcc, " in found.found
    assert f" in {tmp_path}" in found.found
    assert "pip install 'specserve[gpu]' brings nvcc" in found.remedy
