"""The wheel and the sdist: their files, and a package that runs without the repository."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

import specserve
from specserve.cli import health_check
from specserve.cli.arguments import build_parser
from tests.support import wheel
from tests.support.wheel import Built

ROOT = Path(specserve.__file__).parents[1]
# Files that the package reads or ships beside its code.
DATA = {".json", ".safetensors", ".html", ".js", ".css", ".svg", ".md", ".typed"}
LARGEST = 32 * 2**20


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return wheel.build(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def in_wheel(built: Built) -> set[str]:
    with zipfile.ZipFile(built.wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def in_sdist(built: Built) -> set[str]:
    with tarfile.open(built.sdist) as archive:
        return {name.partition("/")[2] for name in archive.getnames()}


def package_files() -> set[str]:
    return {
        str(path.relative_to(ROOT))
        for path in (ROOT / "specserve").rglob("*")
        if path.is_file() and path.suffix in DATA | {".py"}
    }


def test_every_module_and_every_data_file_is_in_the_wheel(in_wheel: set[str]) -> None:
    assert package_files() - in_wheel == set()
    assert {
        "specserve/py.typed",
        "specserve/api/playground/index.html",
        "specserve/demo/heads/heads.safetensors",
    } <= in_wheel


def test_the_wheel_has_nothing_but_the_package(built: Built, in_wheel: set[str]) -> None:
    others = {
        name
        for name in in_wheel
        if not name.startswith(("specserve/", f"specserve-{specserve.__version__}.dist-info/"))
    }
    assert others == set()
    assert not [name for name in in_wheel if name.endswith((".pyc", ".log"))]
    assert built.wheel.stat().st_size < LARGEST


def test_the_wheel_is_for_every_platform_and_has_the_version_of_the_package(built: Built) -> None:
    assert built.wheel.name == f"specserve-{specserve.__version__}-py3-none-any.whl"
    assert built.sdist.name == f"specserve-{specserve.__version__}.tar.gz"


def test_the_sdist_has_all_files_needed_to_test_and_deploy(in_sdist: set[str]) -> None:
    wanted = {
        "Makefile",
        "constraints.txt",
        "deploy/locks/runtime.txt",
        "CHANGELOG.md",
        "LICENSE",
        "README.md",
        "Dockerfile",
        "cluster.yaml",
        "pyproject.toml",
        ".ci/run",
    }
    wanted |= {
        str(path.relative_to(ROOT))
        for folder in ("tests", "deploy")
        for path in (ROOT / folder).rglob("*.[py]*")
        if path.suffix != ".pyc"
    }
    assert wanted | package_files() <= in_sdist
    assert not [name for name in in_sdist if name.endswith(".pyc") or "/.venv" in name]


def test_the_changelog_begins_with_this_version_or_unreleased_changes() -> None:
    headings = re.findall(r"^## \[?([^\]\s]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] in ("Unreleased", specserve.__version__)
    assert all(re.fullmatch(r"Unreleased|\d+\.\d+\.\d+", heading) for heading in headings)


def test_what_is_unreleased_stays_short_enough_to_be_read() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.split(r"^## ", changelog, flags=re.MULTILINE)[1]
    assert newest.count("\n") <= 80


def test_the_demo_pair_runs_from_the_wheel_in_an_empty_folder(built: Built, tmp_path: Path) -> None:
    bin = wheel.environment(tmp_path / "fresh", built.wheel, borrow=True)
    folder = tmp_path / "empty"
    folder.mkdir()
    assert (
        wheel.run([str(bin / "specserve"), "--version"], cwd=folder)
        == f"specserve {specserve.__version__}\n"
    )
    where = wheel.run(
        [str(bin / "python"), "-c", "import specserve; print(specserve.__file__)"], cwd=folder
    )
    assert where.startswith(str(tmp_path / "fresh"))
    command = [
        "generate",
        "--prompt",
        "import os",
        "--max-tokens",
        "8",
        "--temperature",
        "0",
        "--set",
        "target.threads=1",
    ]
    assert wheel.run([str(bin / "specserve"), *command], cwd=folder).strip()
    assert not list(folder.iterdir())


def test_an_editable_install_is_imported_from_the_folder_above_its_clone(tmp_path: Path) -> None:
    bin = wheel.environment(tmp_path / "fresh", wheel.build_editable(tmp_path), borrow=True)
    program = "from specserve import LLM; import specserve; print(specserve.__file__)"
    found = wheel.run([str(bin / "python"), "-c", program], cwd=tmp_path)
    assert Path(found.strip()) == tmp_path / "specserve" / "specserve" / "__init__.py"


def test_the_image_copies_only_files_that_exist_and_are_not_ignored() -> None:
    copied = re.findall(r"^COPY (?!--from)(.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    names = [name for line in copied for name in line.split()[:-1]]
    allowed = [
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    assert names
    assert all((ROOT / name).exists() for name in names)
    used = [{rule for rule in allowed if f"{name}/".startswith(f"{rule}/")} for name in names]
    assert all(used)
    assert set().union(*used) == set(allowed)


def image(programs: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `make image` where these programs and a few of the system are all that there is."""
    for name in ("make", "sh", "test", "id"):
        if found := shutil.which(name):
            (programs / name).symlink_to(found)
    return subprocess.run(
        ["make", "image", *arguments],
        cwd=ROOT,
        env={"PATH": str(programs)},
        capture_output=True,
        text=True,
        check=False,
    )


PODMAN = """#!/bin/sh
if [ "$2" != inspect ]; then echo podman "$@"; exit; fi
for base; do :; done
echo "${base%%:*}@sha256:12"
"""
"""Prints what it is called with; each image has the same digest."""


def podman(programs: Path) -> None:
    program = programs / "podman"
    program.write_text(PODMAN)
    program.chmod(0o755)


def test_make_image_builds_the_image_for_clusters_by_the_digest_of_its_own_base(
    tmp_path: Path,
) -> None:
    podman(tmp_path)
    built = image(tmp_path, "IMAGE=mine", "IMAGE_FILE=deploy/Dockerfile")
    assert built.returncode == 0, built.stderr
    printed = built.stdout.splitlines()
    (base,) = re.findall(r"^ARG BASE=(.*)$", (ROOT / "deploy/Dockerfile").read_text(), re.MULTILINE)
    assert f"podman pull {base}" in printed
    assert printed[-1].startswith(
        "podman build -f deploy/Dockerfile -t mine --build-arg BASE=rayproject/ray@sha256:12 "
    )


def test_make_image_builds_for_cpus_with_whatever_builds_images(tmp_path: Path) -> None:
    podman(tmp_path)
    built = image(tmp_path, "IMAGE=mine")
    assert built.returncode == 0, built.stderr
    last = built.stdout.splitlines()[-1]
    assert last.startswith("podman build -f Dockerfile -t mine --build-arg BASE=python@sha256:12 ")
    assert "--label org.opencontainers.image.base.name=python@sha256:12" in last
    assert "--build-arg TORCH=cpu" in last
    text = (ROOT / "Dockerfile").read_text()
    assert "ARG TORCH=cpu" in text, "a plain build would download CUDA's libraries"
    assert {f"ARG {name}" for name in ("TORCH", "TORCH_INDEX")} <= {
        line.partition("=")[0] for line in text.splitlines()
    }


def test_make_image_says_in_a_line_that_nothing_here_builds_images(tmp_path: Path) -> None:
    refused = image(tmp_path)
    assert refused.returncode != 0
    assert (
        refused.stderr.splitlines()[0] == "make image needs docker or podman, and neither is here"
    )
    assert not refused.stdout


def test_the_first_process_of_the_image_reaps_what_others_leave() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert re.search(r"apt-get install[^&]*\btini\b", text)
    assert '\nENTRYPOINT ["tini", "--", "specserve"]\n' in text


def test_the_image_checks_its_health_by_a_module_that_reads_where_the_server_listens() -> None:
    text = (ROOT / "Dockerfile").read_text()
    (check,) = re.findall(r"^HEALTHCHECK .*\\\n +CMD (.*)$", text, re.MULTILINE)
    assert json.loads(check) == ["python", "-m", health_check.__name__]


def test_the_image_runs_an_existing_command_as_another_user_than_root() -> None:
    text = (ROOT / "Dockerfile").read_text()
    command = json.loads(text.rpartition("CMD ")[2])
    assert build_parser().parse_args(command).command == "serve"
    assert text.index("USER specserve") < text.index("ENTRYPOINT")
