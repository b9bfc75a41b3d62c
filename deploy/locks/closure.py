"""Dependencies among the installed packages. Reads their metadata; no network."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from importlib import metadata
from typing import Any

from packaging.requirements import Requirement

from deploy.locks.lock_file import ROOT, canonical

PACKAGED_EXTRAS = ("cpu",)
"""Extras of specserve that its images have."""


def runtime_requirements() -> list[str]:
    """Return the package's own dependencies, with those of the extras that images have."""
    extras = [name for extra in PACKAGED_EXTRAS for name in extra_requirements(extra)]
    return [*_project()["dependencies"], *extras]


def extra_requirements(extra: str) -> list[str]:
    return list(_project()["optional-dependencies"][extra])


def _project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return dict(project["project"])


def closure(requirements: Iterable[str]) -> dict[str, frozenset[str]]:
    """Return what requirements lead to here: each package, with those that it needs itself.

    A package that is not installed needs none.
    """
    found: dict[str, frozenset[str]] = {}
    pending = [each for each in map(Requirement, requirements) if _applies(each, ())]
    seen: set[tuple[str, str]] = set()  # packages with an extra, or with none
    while pending:
        wanted = pending.pop()
        name = canonical(wanted.name)
        for extra in {"", *wanted.extras}:
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            needed = [each for each in _requires(name) if _applies(each, (extra,))]
            found[name] = found.get(name, frozenset()) | {canonical(each.name) for each in needed}
            pending += needed
    return found


def _requires(name: str) -> list[Requirement]:
    try:
        return [Requirement(each) for each in metadata.requires(name) or ()]
    except metadata.PackageNotFoundError:
        return []


def _applies(requirement: Requirement, extras: Iterable[str]) -> bool:
    return requirement.marker is None or any(
        requirement.marker.evaluate({"extra": extra}) for extra in (*extras, "")
    )
