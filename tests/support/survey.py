"""Survey a checkout: size, structure and language in numbers, for this tree or an older one.

`python -m tests.support.survey` prints a table, with ROOT that of another checkout.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.imports import Graph, circles, module_name, read_graph
from tests.support.language import MAX_COLUMNS, findings
from tests.support.syntax import parsed

FEATURES = (
    *("specserve.features.", "specserve.cluster.draft_pool", "specserve.cluster.pool_"),
    *("specserve.cluster.serve_llm", "specserve.drafters.cascade.", "specserve.drafters.eagle"),
    *("specserve.drafters.block_drafts", "specserve.drafters.heads", "specserve.drafters.pool."),
    *("specserve.drafters.layer_skip", "specserve.drafters.translated.", "specserve.models.eagle."),
    *("specserve.token_translation", "specserve.models.adapters.", "specserve.models.heads"),
    *(
        "specserve.models.t5",
        "specserve.models.encoder_cache",
        "specserve.api.adapters",
        "specserve.api.adapter_loading",
    ),
    *("specserve.tools.train_eagle", "specserve.tools.train_heads"),
)
"""How the names of modules of features begin, in today's layout and in that of 0.2.0."""
LAB = (
    *("lab.", "benchmarks.", "specserve.tools.simulate.", "specserve.tools.reproduce."),
    "specserve.tools.bench.chaos.",
)
LONG_FILE, LONG_FUNCTION = 300, 40
IMPORT = """
import time

begun = time.perf_counter()
from specserve import LLM
print(time.perf_counter() - begun)
"""
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
    files = {module_name(path.relative_to(root)): path for path in tracked(root, "*.py")}
    tests = [path for name, path in files.items() if name.startswith("tests")]
    lab = [path for name, path in files.items() if name.startswith(LAB)]
    package = {name: path for name, path in files.items() if name.startswith("specserve")}
    features = [path for name, path in package.items() if is_feature(name)]
    core = [path for path in package.values() if path not in {*features, *lab}]
    sources = [path for path in files.values() if path not in set(tests)]
    graph = read_graph({name: path for name, path in files.items() if path in set(sources)})
    pages = {*tracked(root, "docs/*.md"), *tracked(root, "docs/**/*.md")}
    reasons = [reason for path in sources for _, reason in findings(path, root=root)]
    return Survey(
        {
            "lines of the core": _lines(core),
            "lines of features": _lines(features),
            "lines of the lab": _lines(lab),
            "lines of tests": _lines(tests),
            "modules of the core": len([path for path in core if path.name != "__init__.py"]),
            "imports of features by the core": feature_imports(graph),
            "circles of imports": len(circles(graph)),
            f"functions over {LONG_FUNCTION} lines, in the package": sum(
                _long_functions(path) for path in package.values()
            ),
            f"files over {LONG_FILE} lines, in the package": sum(
                _lines([path]) > LONG_FILE for path in package.values()
            ),
            "class names in several modules": len(shared_class_names(root, sources)),
            "docstrings that open with neither subject nor verb": sum(
                reason.startswith("docstring opens") for reason in reasons
            ),
            "banned words in docstrings, comments and names": sum(
                reason.startswith("the ") for reason in reasons
            ),
            f"lines over {MAX_COLUMNS} columns": sum(
                len(line) > MAX_COLUMNS
                for path in files.values()
                for line in path.read_text(encoding="utf-8").splitlines()
            ),
            "targets of the Makefile": len(
                re.findall(r"^[a-z-]+:", (root / "Makefile").read_text(encoding="utf-8"), re.M)
            ),
            "pages in docs": len(pages),
            "words of docs outside tables": sum(
                prose_words(path.read_text(encoding="utf-8")) for path in pages
            ),
        }
    )


def measure(root: Path) -> Survey:
    """Return the figures of what the package of the checkout does when it runs."""
    return Survey(
        {
            "modules that run in one completion": request_modules(root),
            "milliseconds of `from specserve import LLM`": import_milliseconds(root),
        }
    )


def is_feature(module: str) -> bool:
    return module.startswith(FEATURES)


def feature_imports(graph: Graph) -> int:
    """Return how often a module of the core imports one of a feature."""
    return sum(
        is_feature(imported)
        for name, imports in graph.items()
        for imported in imports
        if name.startswith("specserve") and not name.startswith(LAB) and not is_feature(name)
    )


def import_milliseconds(root: Path) -> int:
    """Return the median of five imports of `LLM`, each in a process of its own."""
    return round(1000 * statistics.median(float(_run(root, IMPORT)) for _ in range(5)))


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
    return int(_run(root, TRACE))


def _run(root: Path, program: str) -> str:
    """Run a program with the package of a checkout, and return the last line that it prints."""
    command = [sys.executable, "-c", program]
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=root, env=environment
    )
    return done.stdout.splitlines()[-1]


def _long_functions(path: Path) -> int:
    return sum(
        (node.end_lineno or node.lineno) - node.lineno >= LONG_FUNCTION
        for node in ast.walk(parsed(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )


def _lines(paths: Sequence[Path]) -> int:
    return sum(path.read_text(encoding="utf-8").count("\n") for path in paths)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=re.split(r"\n\n", __doc__ or "")[0])
    parser.add_argument("root", type=Path, nargs="?", default=Path(__file__).parents[2])
    tree = parser.parse_args().root.resolve()
    print(Survey(survey(tree).figures | measure(tree).figures).table())
