"""The README's snippet for Python runs as it stands, with nothing put in the place of names."""

from __future__ import annotations

import pytest

from tests.support import pages as guide


def test_the_readmes_snippet_for_python_runs_as_it_stands(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (snippet,) = (
        block.text
        for block in guide.blocks()
        if block.page.name == "README.md" and "from specserve import" in block.text
    )
    exec(compile(snippet, "README.md", "exec", dont_inherit=True), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert "Stats(" in printed
    assert printed.strip()
