"""Calls of the transformers library, which may not run code that a checkpoint brings along."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import specserve
from tests.support.syntax import parsed

PACKAGE = Path(specserve.__file__).parent
LOADERS = ("from_pretrained", "from_config")


def loads_without_refusal(source: str) -> list[str]:
    """Return the uses of a loader that do not say trust_remote_code=False where they stand.

    A `from_config` counts in modules that import transformers, unless it is of a class of ours.
    """
    tree = parsed(source)
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in _loaders(tree)
        if id(node) not in calls or not _refuses(calls[id(node)])
    ]


def _loaders(tree: ast.Module) -> Iterator[ast.Attribute]:
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    ours = {
        alias.asname or alias.name
        for node in imports
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("specserve")
        for alias in node.names
    } | {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    knows_library = any(
        name.split(".")[0] == "transformers" for node in imports for name in _imported(node)
    )
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or node.attr not in LOADERS:
            continue
        is_ours = isinstance(node.value, ast.Name) and node.value.id in ours
        if node.attr == "from_pretrained" or (knows_library and not is_ours):
            yield node


def _imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return [alias.name for alias in node.names]


def _refuses(call: ast.Call) -> bool:
    return any(
        keyword.arg == "trust_remote_code"
        and isinstance(keyword.value, ast.Constant)
        and keyword.value.value is False
        for keyword in call.keywords
    )


def test_every_call_of_the_package_refuses_remote_code() -> None:
    found = {
        str(path.relative_to(PACKAGE)): loads_without_refusal(path.read_text(encoding="utf-8"))
        for path in PACKAGE.rglob("*.py")
    }
    assert {name: uses for name, uses in found.items() if uses} == {}


def test_nothing_turns_remote_code_on() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(parsed(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                assert isinstance(node.value, ast.Constant), path
                assert node.value.value is False, path


@pytest.mark.parametrize(
    "source",
    [
        "AutoConfig.from_pretrained(path)",
        "AutoConfig.from_pretrained(path, trust_remote_code=True)",
        "AutoConfig.from_pretrained(path, trust_remote_code=flag)",
        "load = AutoModel.from_pretrained",
        "import transformers\nchoose(config).from_config(config)",
        "from transformers import AutoModel\nAutoModel.from_config(config)",
    ],
)
def test_a_call_that_leaves_it_to_the_library_is_found(source: str) -> None:
    assert loads_without_refusal(source)


@pytest.mark.parametrize(
    "source",
    [
        "AutoConfig.from_pretrained(path, trust_remote_code=False)",
        "LLM.from_config(config)",
        "import transformers\nfrom specserve.models.plans import Heads\nHeads.from_config(config)",
    ],
)
def test_a_call_that_refuses_and_a_class_of_ours_are_not(source: str) -> None:
    assert not loads_without_refusal(source)
