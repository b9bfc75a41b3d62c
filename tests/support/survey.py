"""Survey a checkout: size, names and language in numbers, for this tree or an older one.

`make survey` prints a table, `make survey ARGS=ROOT` that of another checkout. The changelog of
version 0.2.0 has both: before and after the renaming.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.language import MAX_COLUMNS, findings
from tests.support.syntax import parsed

BESIDE = {
    *("bench", "demo", "doctor", "planning", "reference", "reproduce", "simulate", "tools", "cli"),
    *("benchmarks", "docs", "fitting.py", "count_ngrams.py", "arguments.py", "cli.py"),
    *("completion.py", "examples.py", "progress.py", "terminal.py"),
}
"""Parts of the package off the path of a request, in the layout before 0.2.0 and in today's."""
TRACE = """
import sys, threading
from specserve import LLM, Sampling

ran = set()
def note(frame, event, argument):
    ran.add(frame.f_code.co_filename)

threading.setprofile(note)
with LLM(**{"speculation.gamma": 4}) as llm:
    sys.setprofile(note)
    ran.clear()
    llm.generate(["def main():"], Sampling(max_tokens=8, temperature=0))
    sys.setprofile(None)
print(len([file for file in ran if "/specserve/" in file]))
"""


@dataclass(frozen=True, slots=True)
class Survey:
    """Figures of one tree."""

    figures: dict[str, int]

    def table(self) -> str:
        width = max(map(len, self.figures))
        return "\n".join(f"{name:<{width}}  {count:>7,}" for name, count in self.figures.items())


def survey(root: Path) -> Survey:
    """Return the figures of the checkout at `root`."""
    sources = [
        path for path in tracked(root, "*.py") if "tests" not in path.relative_to(root).parts
    ]
    package = [path for path in sources if path.is_relative_to(root / "specserve")]
    serving = [path for path in package if _is_serving(path.relative_to(root / "specserve"))]
    pages = tracked(root, "docs/*.md") + tracked(root, "docs/**/*.md")
    docstrings = [doc for path in sources for doc in _docstrings(path)]
    reasons = [reason for path in sources for _, reason in findings(path, root=root)]
    return Survey(
        {
            "serving modules": len([path for path in serving if path.name != "__init__.py"]),
            "modules in the wheel": len(package),
            "lines in the wheel": _lines(package),
            "lines on the serving path": _lines(serving),
            "lines of code outside tests": _lines(sources),
            "modules that run in one request": request_modules(root),
            "class names in several modules": len(shared_class_names(root, sources)),
            "docstrings": len(docstrings),
            "docstrings that open with neither subject nor verb": sum(
                reason.startswith("docstring opens") for reason in reasons
            ),
            "banned words in docstrings, comments and names": sum(
                reason.startswith("the ") for reason in reasons
            ),
            f"lines over {MAX_COLUMNS} columns": sum(
                len(line) > MAX_COLUMNS
                for path in tracked(root, "*.py")
                for line in path.read_text(encoding="utf-8").splitlines()
            ),
            "pages in docs": len(set(pages)),
            "words in docs": sum(
                len(path.read_text(encoding="utf-8").split()) for path in set(pages)
            ),
            "words of docs outside tables": sum(
                prose_words(path.read_text(encoding="utf-8")) for path in set(pages)
            ),
            "lines of README": len((root / "README.md").read_text(encoding="utf-8").splitlines()),
        }
    )


def tracked(root: Path, pattern: str) -> list[Path]:
    """Return the files of the checkout that match `pattern`."""
    command = ["git", "-C", str(root), "ls-files", pattern]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [root / name for name in listed.splitlines() if (root / name).is_file()]


def prose(markdown: str) -> Iterator[str]:
    """Yield the lines of a page that are neither of a table nor of a block of code."""
    fence = ""
    for line in markdown.splitlines():
        text = line.strip()
        if fence:
            fence = "" if text == fence else fence
        elif found := re.match(r"`{3,}", text):
            fence = found[0]
        elif not text.startswith("|"):
            yield line


def prose_words(markdown: str) -> int:
    """Return how many words of a page stand outside tables and blocks of code."""
    return sum(len(line.split()) for line in prose(markdown))


def shared_class_names(root: Path, sources: list[Path]) -> dict[str, list[str]]:
    """Return the public class names that stand in more than one module, each with its modules."""
    modules: dict[str, list[str]] = defaultdict(list)
    for path in sources:
        for node in ast.walk(parsed(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules[node.name].append(str(path.relative_to(root)))
    return {name: where for name, where in sorted(modules.items()) if len(where) > 1}


def request_modules(root: Path) -> int:
    """Return how many modules run while one greedy prompt is continued in process with drafts."""
    command = [sys.executable, "-c", TRACE]
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=root, env=environment
    )
    return int(done.stdout.splitlines()[-1])


def _is_serving(path: Path) -> bool:
    return path.parts[0] not in BESIDE


def _docstrings(path: Path) -> Iterator[str]:
    documented = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    for node in ast.walk(parsed(path.read_text(encoding="utf-8"))):
        if isinstance(node, documented) and (doc := ast.get_docstring(node)):
            yield doc


def _lines(paths: list[Path]) -> int:
    return sum(path.read_text(encoding="utf-8").count("\n") for path in paths)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=re.split(r"\n\n", __doc__ or "")[0])
    parser.add_argument("root", type=Path, nargs="?", default=Path(__file__).parents[2])
    print(survey(parser.parse_args().root.resolve()).table())
