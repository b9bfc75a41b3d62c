"""The locks: they agree with constraints.txt, hold all that a server needs, and images use them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deploy.locks.closure import closure, runtime_requirements
from deploy.locks.lock_file import (
    FLASHINFER,
    NVCC,
    ROOT,
    RUNTIME,
    TOOLS,
    TORCH_CPU,
    TORCH_CUDA,
    LockedPackage,
    parse_lock,
    read_lock,
    read_pins,
)
from deploy.locks.write import CUDA, TOOL_NAMES, without
from specserve.flashinfer_kernels import ARCHITECTURES

LOCKS = (RUNTIME, TORCH_CPU, TORCH_CUDA, FLASHINFER, NVCC, TOOLS)
IMAGES = ("Dockerfile", "deploy/Dockerfile")
each_lock = pytest.mark.parametrize("file", LOCKS, ids=lambda file: file.name)
each_image = pytest.mark.parametrize("image", IMAGES)


def names(*files: Path) -> set[str]:
    return {package.name for file in files for package in read_lock(file)}


def pins() -> dict[str, str]:
    return read_pins((ROOT / "constraints.txt").read_text(encoding="utf-8"))


def instructions(image: str, word: str) -> list[str]:
    """Return an image's instructions that begin with a word, each as one line."""
    text = (ROOT / image).read_text(encoding="utf-8").replace("\\\n", " ")
    return re.findall(rf"^{word} (.*)$", text, re.MULTILINE)


# The files


@each_lock
def test_each_version_has_the_hashes_of_its_files(file: Path) -> None:
    for package in read_lock(file):
        assert package.hashes, package.name
        assert all(re.fullmatch(r"[0-9a-f]{64}", each) for each in package.hashes), package.name


@each_lock
def test_no_package_is_locked_twice(file: Path) -> None:
    packages = read_lock(file)
    assert len(packages) == len({package.name for package in packages})


@each_lock
def test_a_lock_names_no_index(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert "://" not in text
    assert not re.findall(r"(?m)^\s*(?:-i|-f|--(?:extra-)?index\S*|--find-links)\b", text)


@each_lock
def test_locked_versions_are_those_of_the_constraints(file: Path) -> None:
    pinned = pins()
    differing = {
        package.name: (package.version, pinned[package.name])
        for package in read_lock(file)
        if pinned.get(package.name, package.version) != package.version
    }
    assert differing == {}


def test_whatever_a_server_needs_is_pinned_and_only_cudas_libraries_are_left_to_torch() -> None:
    assert names(RUNTIME, TORCH_CPU) - set(pins()) == set()
    assert all(CUDA.fullmatch(name) for name in names(TORCH_CUDA) - {"torch"})
    assert not any(CUDA.fullmatch(name) for name in names(RUNTIME))


def test_the_runtime_lock_holds_the_closure_of_the_packages_dependencies_and_no_more() -> None:
    needed = set(closure(runtime_requirements()))
    assert {"transformers", "ray", "uvicorn", "opentelemetry-sdk"} <= needed
    assert needed - names(RUNTIME, TORCH_CUDA) == set()
    assert names(RUNTIME) - needed == set()


def test_both_builds_of_torch_have_one_version_and_their_own_files() -> None:
    (cpu,) = read_lock(TORCH_CPU)
    (cuda,) = [package for package in read_lock(TORCH_CUDA) if package.name == "torch"]
    assert cpu.version == cuda.version
    assert not set(cpu.hashes) & set(cuda.hashes)


def test_flashinfer_and_nvcc_are_locked_beside_what_images_without_them_have() -> None:
    runtime = names(RUNTIME, TORCH_CUDA)
    assert {"flashinfer-python", "apache-tvm-ffi", "ninja"} <= names(FLASHINFER)
    assert {"nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm"} <= names(NVCC)
    assert not names(FLASHINFER) & runtime
    assert not names(NVCC) & (runtime | names(FLASHINFER))


def test_nvcc_is_of_the_cuda_that_torch_has() -> None:
    versions = {each.name: each.version for file in (TORCH_CUDA, NVCC) for each in read_lock(file)}
    assert (
        versions["nvidia-cuda-nvcc"].split(".")[:2]
        == versions["nvidia-cuda-runtime"].split(".")[:2]
    )


def test_a_package_that_two_locks_would_have_at_two_versions_is_refused() -> None:
    one, other, more = (LockedPackage(*each, ()) for each in (("a", "1"), ("a", "2"), ("b", "1")))
    assert without([one, more], [one]) == [more]
    with pytest.raises(ValueError, match="a is resolved to 2 and to 1"):
        without([one, more], [other])


def test_the_tools_are_locked() -> None:
    assert set(TOOL_NAMES) <= names(TOOLS)


# Reading them


def test_a_package_is_written_as_it_is_read() -> None:
    package = LockedPackage("a-b", "1.2", ("0" * 64, "f" * 64), "sys_platform == 'linux'")
    assert parse_lock(f"# opening\n{package}\n") == (package,)


@pytest.mark.parametrize("line", ["a", "a>=1", "--index-url x", "-r other.txt", "a @ file:///a"])
def test_a_line_without_a_version_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="no package at a version"):
        parse_lock(f"{line} --hash=sha256:{'0' * 64}")


# The images


@each_image
def test_an_image_installs_nothing_without_a_hash(image: str) -> None:
    runs = [run for run in instructions(image, "RUN") if "pip install" in run]
    with_hashes = [run for run in runs if "--require-hashes --only-binary :all:" in run]
    without = [run for run in runs if run not in with_hashes]
    assert all("-r locks/" in run or "-r /tmp/locks/" in run for run in with_hashes)
    *tools, packages, nvcc = with_hashes
    assert all("locks/tools.txt" in run for run in tools)
    assert "locks/runtime.txt" in packages
    assert "locks/torch-" in packages
    assert "locks/flashinfer.txt" in packages
    assert "locks/nvcc.txt" in nvcc
    assert all("--no-deps --no-build-isolation" in run for run in without)
    assert all(run.count("pip install") == 1 for run in runs)


@each_image
def test_the_base_of_an_image_can_be_named_by_its_digest(image: str) -> None:
    (base,) = [each for each in instructions(image, "ARG") if each.startswith("BASE=")]
    assert base != "BASE="
    stages = [each.split() for each in instructions(image, "FROM")]
    bases = {stage[0] for stage in stages} - {stage[-1] for stage in stages if "AS" in stage}
    assert bases == {"${BASE}"}
    assert "--build-arg BASE=" in (ROOT / image).read_text(encoding="utf-8")


@each_image
def test_an_image_has_the_kernels_of_flashinfer_and_leaves_nvcc_behind(image: str) -> None:
    text = (ROOT / image).read_text(encoding="utf-8")
    before, kernels = text.split("FROM dependencies AS kernels\n")
    kernels, _, after = kernels.partition("\nFROM ")
    assert "nvcc.txt" in kernels
    assert "nvcc.txt" not in before + after
    assert "flashinfer_kernels.py" in kernels
    assert f'ARG GPU_ARCHITECTURES="{" ".join(ARCHITECTURES)}"' in kernels
    assert "from=kernels" in after
    assert "/flashinfer/data/aot" in after
    assert "FLASHINFER_WORKSPACE_BASE=/tmp/" in after, "the root file system may be read-only"
