"""Which pages are made, and what Markdown written by hand goes through on its way to the site. Knows no site generator."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from docs._build import commands
from docs._build import configuration
from docs._build import endpoints
from docs._build import metrics
from docs._build.formulas import mathml

PAGES: Mapping[str, Callable[[], str]] = {
    "reference/http.md": endpoints.page,
    "reference/commands.md": commands.page,
    "reference/configuration.md": configuration.page,
    "reference/metrics.md": metrics.page,
}
FORMULAS = re.compile(r"^```math\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BESIDE = ("deploy/", "cluster.yaml", "CHANGELOG.md")  # files beside docs/ that the site has copies of
OUTSIDE = re.compile(rf"\]\(\.\./(?={'|'.join(map(re.escape, BESIDE))})")


def rendered(markdown: str) -> str:
    """Formulas drawn, and links to files beside docs/ turned to the copies that the site has of them."""
    drawn = FORMULAS.sub(lambda found: f'<div class="formula">\n{mathml(found[1])}\n</div>', markdown)
    return OUTSIDE.sub("](", drawn)
