"""Imports within the package and the lab: no circle between files."""

from __future__ import annotations

from pathlib import Path

from tests.support.imports import circles, module_name, read_graph

ROOT = Path(__file__).parents[1]
GRAPH = read_graph(
    {
        module_name(path.relative_to(ROOT)): path
        for folder in ("specserve", "lab")
        for path in sorted((ROOT / folder).rglob("*.py"))
    }
)


def test_no_files_import_one_another_in_a_circle() -> None:
    found = circles(GRAPH)
    assert not found, "\n".join(" <-> ".join(circle) for circle in found)


def test_a_circle_is_seen() -> None:
    graph = {
        "a": frozenset({"b"}),
        "b": frozenset({"c"}),
        "c": frozenset({"b"}),
        "d": frozenset({"a"}),
    }
    assert circles(graph) == [("b", "c")]
