"""The core runs without any feature: each folder is deleted in a copy of the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from specserve.config.features import FEATURES

ROOT = Path(__file__).parents[2]
FAST = (
    *("tests/config", "tests/engine", "tests/sampling", "tests/drafters/test_registry.py"),
    *("tests/cluster/test_app.py", "tests/llm/test_llm.py"),
)
"""Tests of the core that take seconds."""
PROGRAM = """
import importlib, os, pkgutil, sys
import fastapi, ray.serve, torch  # once, for the process of each tree
from transformers import AutoModelForCausalLM, AutoTokenizer

def use(tree):
    sys.path.insert(0, tree)
    import specserve
    from specserve import LLM, Sampling

    for module in pkgutil.walk_packages(specserve.__path__, "specserve."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    assert specserve.__path__[0].startswith(tree), specserve.__path__
    with LLM(**{"speculation.gamma": 4}) as llm:
        [output] = llm.generate(["def main():"], Sampling(max_tokens=8, temperature=0))
    assert output.text

for tree in sys.argv[1:]:
    child = os.fork()
    if not child:
        os.chdir(tree)
        use(tree)
        os._exit(0)  # another status if it raises
    assert os.waitpid(child, 0)[1] == 0, tree
"""


def copy_without(features: tuple[str, ...], into: Path) -> Path:
    """Copy the repository's code and tests, compiled too, but for the folders of some features."""
    for folder in ("specserve", "tests", "deploy", "docs"):
        shutil.copytree(ROOT / folder, into / folder)
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


def test_the_rest_is_imported_and_writes_a_text_without_each_feature(tmp_path: Path) -> None:
    trees = [copy_without((feature,), tmp_path / feature) for feature in FEATURES]
    run(["-c", PROGRAM, *map(str, trees)], tmp_path)


def test_the_core_s_fast_tests_pass_without_all_features(tmp_path: Path) -> None:
    tree = copy_without(tuple(FEATURES), tmp_path)
    run(["-m", "pytest", "-q", "-x", *FAST], tree)
