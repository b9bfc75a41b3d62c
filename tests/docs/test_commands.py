"""The commands that are not `specserve`'s: few targets in the Makefile, and lab/README.md."""

from __future__ import annotations

import re
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.pages import ROOT, blocks_of
from tests.support.pages import commands as shell_commands

LAB = (ROOT / "lab" / "README.md").read_text(encoding="utf-8")
MODULES = sorted(set(re.findall(r"python -m ((?:lab|tests|specserve)\.[\w.]+)", LAB)))
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
MOST_TARGETS = 15
NOT_LISTED = {
    "lab.bench.peers.gguf_file",  # what follows is run by lab.bench.peers
    "lab.bench.peers.llama",
    "lab.bench.peers.llm",
    "lab.bench.peers.openvino",
    "lab.bench.peers.specserve",
    "lab.bench.peers.transformers",
    "lab.bench.peers.vllm",
}


@pytest.mark.parametrize("module", MODULES)
def test_every_command_of_the_lab_exists(module: str) -> None:
    found = find_spec(module)
    assert found is not None
    if found.submodule_search_locations is not None:
        found = find_spec(f"{module}.__main__")
    assert found is not None, f"{module} has no __main__"
    assert found.origin is not None
    assert 'if __name__ == "__main__":' in Path(found.origin).read_text(encoding="utf-8")


def test_every_command_of_the_lab_is_listed() -> None:
    runnable = {
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
        for file in (ROOT / "lab").rglob("*.py")
        if 'if __name__ == "__main__":' in file.read_text(encoding="utf-8")
    }
    assert runnable - NOT_LISTED == {module for module in MODULES if module.startswith("lab.")}


def test_every_page_of_the_lab_exists() -> None:
    pages = re.findall(r"\]\((\.\./docs/[^)#]+)\)", LAB)
    assert pages
    assert [page for page in pages if not (ROOT / "lab" / page).is_file()] == []


def test_git_ignores_what_the_quick_start_writes() -> None:
    page = ROOT / "docs/guides/quickstart.md"
    commands = [
        command
        for block in blocks_of(page, page.read_text(encoding="utf-8"))
        if block.language == "sh"
        for command in shell_commands(block.text)
    ]
    written = {command.into for command in commands} - {None}
    written |= {
        file
        for command in commands
        for option, file in pairwise(command.words)
        if option in ("--out", "--html")
    }
    assert {"trace.json", "trace.svg", "report.html"} <= written
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert {f"/{name}" for name in written} <= set(ignored)


def test_the_makefile_has_few_targets_and_help_shows_each() -> None:
    targets = re.findall(r"^([a-z][a-z-]*):(?!=)", MAKEFILE, re.MULTILINE)
    assert len(targets) <= MOST_TARGETS
    assert targets == re.findall(r"^([a-z-]+):.*?## ", MAKEFILE, re.MULTILINE)
    assert sorted(targets) == sorted(re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.M)[0].split())
