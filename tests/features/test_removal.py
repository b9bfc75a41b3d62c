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
    *("tests/config", "tests/engine", "tests/sampling", "tests/drafters/test_registry.py"),
    *("tests/cluster/test_app.py", "tests/llm/test_llm.py"),
)
"""Tests of the core that take seconds."""
SLOW = "tests/engine/test_pacer_start.py"
"""It is imported with the others, and not run: it meets no more of the engine than they do."""
PROGRAM = """
import importlib, os, pkgutil, sys
# Once, for the processes of all trees:
import fastapi, llguidance, llvmlite.binding, ray.serve, rich.console, scipy.stats, torch, zmq
import transformers.generation, transformers.modeling_utils
from transformers import AutoModelForCausalLM, AutoTokenizer

def use(tree, writes):
    sys.path.insert(0, tree)
    import specserve
    from specserve import LLM, Sampling

    for module in pkgutil.walk_packages(specserve.__path__, "specserve."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    assert specserve.__path__[0].startswith(tree), specserve.__path__
    if writes:
        with LLM(**{"speculation.gamma": 4}) as llm:
            [output] = llm.generate(["def main():"], Sampling(max_tokens=8, temperature=0))
        assert output.text

*partial, bare = sys.argv[1:]
for tree in (*partial, bare):
    child = os.fork()
    if not child:
        os.chdir(tree)
        use(tree, writes=tree == bare)
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


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy without all features."""
    return copy_without(tuple(FEATURES), tmp_path_factory.mktemp("bare"))


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


def test_the_rest_is_imported_without_each_feature_and_a_text_is_written_without_all(
    bare: Path, tmp_path: Path
) -> None:
    trees = [copy_without((feature,), tmp_path / feature) for feature in FEATURES]
    run(["-c", PROGRAM, *map(str, (*trees, bare))], tmp_path)


def test_the_core_s_fast_tests_pass_without_all_features(bare: Path) -> None:
    run(["-m", "pytest", "-q", "-x", "--deselect", SLOW, *FAST], bare)
