"""The graph of the imports between the files of the repository, and the circles in it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.support.syntax import parsed

Graph = Mapping[str, frozenset[str]]
"""The modules that each module imports, wherever it does so, but for what types alone need."""


def read_graph(files: Mapping[str, Path]) -> Graph:
    """Return the graph of modules, given by name with their files."""
    return {
        name: frozenset(
            found
            for imported in _imports(parsed(path.read_text(encoding="utf-8")))
            if (found := _module(imported, files)) is not None and found != name
        )
        for name, path in files.items()
    }


def module_name(path: Path) -> str:
    """Return the name of the module at a path below the root."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def circles(graph: Graph) -> list[tuple[str, ...]]:
    """Return the modules of each circle, sorted."""
    reached = {name: _reach(graph, name) for name in graph}
    found = {
        tuple(sorted(other for other in reached[name] if name in reached[other]))
        for name in graph
        if name in reached[name]
    }
    return sorted(found)


def _reach(graph: Graph, start: str) -> set[str]:
    seen: set[str] = set()
    rest = list(graph[start])
    while rest:
        if (each := rest.pop()) not in seen:
            seen.add(each)
            rest += graph[each]
    return seen


def _imports(tree: ast.Module) -> Iterator[str]:
    """Yield what is imported: `a.b` of `import a.b`, and `a.b` of `from a import b`."""
    for_types = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and "TYPE_CHECKING" in ast.unparse(branch.test)
        for statement in branch.body
        for node in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _module(imported: str, files: Mapping[str, Path]) -> str | None:
    """Return the module that an import reads: the name itself, or the one that defines it."""
    if imported in files:
        return imported
    module = imported.rpartition(".")[0]
    return module if module in files else None
