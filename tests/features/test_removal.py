"""The core runs without any feature: each folder is deleted in a copy of the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specserve.config.features import FEATURES

ROOT = Path(__file__).parents[2]
FAST = (
    *("tests/config", "tests/engine", "tests/sampling", "tests/wire", "tests/drafters"),
    *("tests/cluster/test_app.py", "tests/llm/test_llm.py", "tests/models/test_runner.py"),
)
"""Tests of the core that take seconds."""
PROGRAM = """
import importlib, pkgutil
import specserve
from specserve import LLM, Sampling

for module in pkgutil.walk_packages(specserve.__path__, "specserve."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
assert specserve.__path__[0].startswith(SOURCE), specserve.__path__
with LLM(**{"speculation.gamma": 4}) as llm:
    [output] = llm.generate(["def main():"], Sampling(max_tokens=8, temperature=0))
assert output.text
"""


def copy_without(features: tuple[str, ...], into: Path) -> Path:
    """Copy the repository's code and tests, but for the folders of some features."""
    ignored = shutil.ignore_patterns("__pycache__")
    for folder in ("specserve", "tests", "deploy", "docs"):
        shutil.copytree(ROOT / folder, into / folder, ignore=ignored)
    for file in ("pyproject.toml", "Makefile", "cluster.yaml"):
        shutil.copy(ROOT / file, into)
    for feature in features:
        shutil.rmtree(into / "specserve" / "features" / feature)
        shutil.rmtree(into / "tests" / "features" / feature)
    return into


def run(arguments: list[str], tree: Path) -> None:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]


def test_every_feature_has_a_folder_and_its_tests() -> None:
    for tree in (ROOT / "specserve", ROOT / "tests"):
        folders = {path.parent.name for path in (tree / "features").glob("*/__init__.py")}
        assert folders == set(FEATURES)


@pytest.mark.parametrize("feature", FEATURES)
def test_the_rest_is_imported_and_writes_a_text_without(feature: str, tmp_path: Path) -> None:
    tree = copy_without((feature,), tmp_path)
    run(["-c", PROGRAM.replace("SOURCE", repr(str(tree)))], tree)


def test_the_core_s_fast_tests_pass_without_all_features(tmp_path: Path) -> None:
    tree = copy_without(tuple(FEATURES), tmp_path)
    run(["-m", "pytest", "-q", "-x", *FAST], tree)
