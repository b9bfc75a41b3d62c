"""Pages of the site that the program writes, and the changes to pages written by hand.

Knows no site generator.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from docs._build import commands, configuration, endpoints, metrics
from docs._build.formulas import mathml

PAGES: Mapping[str, Callable[[], str]] = {
    "reference/http.md": endpoints.page,
    "reference/commands.md": commands.page,
    "reference/configuration.md": configuration.page,
    "reference/metrics.md": metrics.page,
}
FORMULAS = re.compile(r"^```math\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BESIDE = ("deploy/", "cluster.yaml", "CHANGELOG.md", "CONTRIBUTING.md")
"""Files beside docs/ of which the site has copies."""
OUTSIDE = re.compile(rf"\]\(((?:\.\./)*)\.\./(?={'|'.join(map(re.escape, BESIDE))})")


def rendered(markdown: str) -> str:
    """Return the page with formulas as MathML and links to the site's copies of outside files."""
    drawn = FORMULAS.sub(_displayed, markdown)
    return OUTSIDE.sub(r"](\1", drawn)


def _displayed(formula: re.Match[str]) -> str:
    return f'<div class="formula">\n{mathml(formula[1])}\n</div>'
