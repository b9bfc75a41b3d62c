"""Every part of a feature that the core names is defined there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import specserve
from specserve.config.features import FEATURES, part

PACKAGE = Path(specserve.__file__).parent
NAME = re.compile(rf'"((?:{"|".join(FEATURES)})\.[a-z_.]+:\w+)"')
NAMED = sorted(
    {
        name
        for path in PACKAGE.rglob("*.py")
        if "features" not in path.relative_to(PACKAGE).parts
        for name in NAME.findall(path.read_text(encoding="utf-8"))
    }
)


def test_names_of_parts_are_found() -> None:
    assert "eagle.train:train" in NAMED
    assert len(NAMED) > 20


@pytest.mark.parametrize("name", NAMED)
def test_a_named_part_is_defined(name: str) -> None:
    assert callable(part(name))
