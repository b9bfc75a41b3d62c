"""Turn the formulas of the pages into MathML, which browsers draw without scripts or fonts."""

from __future__ import annotations

from xml.etree import ElementTree

from latex2mathml.converter import convert
from latex2mathml.exceptions import MissingSuperScriptOrSubscriptError

from specserve.errors import SpecserveError

_MATHML = "{http://www.w3.org/1998/Math/MathML}"


class BadFormula(SpecserveError):
    """A formula that would be drawn wrongly: the library draws unknown commands as text."""


def mathml(source: str) -> str:
    """Return one displayed formula for each line of LaTeX. Raises BadFormula."""
    return "\n".join(_formula(line) for line in source.strip().splitlines())


def _formula(line: str) -> str:
    depth = 0
    for mark in line:
        depth += (mark == "{") - (mark == "}")
        if depth < 0:
            raise BadFormula(f"a brace closes nothing in {line!r}")
    if depth:
        raise BadFormula(f"a brace is missing in {line!r}")
    try:
        formula = convert(line, display="block")
    except MissingSuperScriptOrSubscriptError as error:
        raise BadFormula(f"{line!r} ends where something must follow") from error
    root = ElementTree.fromstring(formula)
    if any(len(fraction) != 2 for fraction in root.iter(f"{_MATHML}mfrac")):
        raise BadFormula(f"a fraction in {line!r} lacks a part")
    if any("\\" in text for text in root.itertext()):
        raise BadFormula(f"{line!r} has a command that is not drawn")
    return formula
