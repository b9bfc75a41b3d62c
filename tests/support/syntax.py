"""Syntax trees of the repository's sources."""

from __future__ import annotations

import ast


def parsed(source: str) -> ast.Module:
    """Return the tree of a source.

    CPython 3.11 raises a SystemError now and then where other code parses while a tree is built,
    in another thread or as garbage is collected (python/cpython#106905); the second try succeeds.
    """
    try:
        return ast.parse(source)
    except SystemError:
        return ast.parse(source)
