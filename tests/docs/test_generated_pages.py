"""Pages made from the program are complete; formulas are drawn or refused."""

from __future__ import annotations

import re
from html import unescape
from xml.etree import ElementTree

import pytest

from docs._build import commands, configuration, endpoints, metrics
from docs._build.formulas import BadFormula, mathml
from docs._build.pages import rendered
from docs._build.table import code, table
from specserve.metric_families import FAMILIES
from tests.support import pages as guide


@pytest.fixture(scope="module")
def paths() -> str:
    return endpoints.page()


def test_every_key_has_a_meaning_and_every_meaning_a_key() -> None:
    assert {key.name for key in configuration.all_keys()} == set(configuration.MEANINGS)


def test_the_configuration_says_default_and_range() -> None:
    assert "| `max_gamma` | `16` | a whole number from 0 to 64 |" in configuration.page()
    assert "| `gamma` | `auto` | auto, or a whole number from 0 to 64 |" in configuration.page()


def test_every_path_has_a_section_and_every_section_says_what_it_is_for(paths: str) -> None:
    for path, methods in endpoints.openapi()["paths"].items():
        for method in methods:
            assert re.search(
                rf"^## {method.upper()} {re.escape(path)}\n\n\w", paths, re.MULTILINE
            ), path


def test_a_parameter_has_the_range_that_it_is_refused_by(paths: str) -> None:
    temperature = "0 is greedy. Left out, it is what the model recommends, or 1."
    assert f"| `temperature` | number | from 0 to 100; 1.0 | {temperature} |" in paths
    assert (
        "| `max_tokens` | whole number | from 0 to 2147483648; what the context has room for "
        in paths
    )


def test_every_error_code_is_listed(paths: str) -> None:
    for name in (
        "context_length_exceeded",
        "overloaded",
        "rate_limit_exceeded",
        "worker_lost",
        "invalid_api_key",
    ):
        assert f"`{name}`" in paths


def test_every_command_has_a_section_with_its_options() -> None:
    page = commands.page()
    for name, _, parser in commands.commands():
        assert f"## `specserve {name}`" in page
        for action in parser._actions:
            assert all(spelling in page for spelling in action.option_strings if spelling != "-h")


def test_every_metric_is_listed_and_every_panel_has_a_query() -> None:
    page = metrics.page()
    assert all(f"| `{family.name}` |" in page for family in FAMILIES)
    assert "histogram_quantile" in page
    assert "$__rate_interval" not in page


def test_a_cell_cannot_break_its_table() -> None:
    assert (
        table(("a", "b"), [("x | y", "two\nlines")]).splitlines()[-1] == "| x \\| y | two lines |"
    )
    assert code("a`b") == "`` a`b ``"


FORMULAS = [
    line for block in guide.blocks() if block.language == "math" for line in block.text.splitlines()
]


@pytest.mark.parametrize("formula", FORMULAS)
def test_the_guide_s_formulas_are_drawn(formula: str) -> None:
    ElementTree.fromstring(mathml(formula))


def test_a_formula_has_fractions_scripts_and_feet() -> None:
    formula = mathml(r"\frac{1 - \alpha^{\gamma + 1}}{1 - \alpha} + \sum_{x} p_1")
    drawn = unescape(re.sub(r"<(/?\w+)[^>]*>", r"<\1>", formula))
    assert "<mfrac><mrow><mn>1</mn><mo>\u2212</mo>" in drawn
    assert "<msup><mi>\u03b1</mi><mrow><mi>\u03b3</mi><mo>+</mo><mn>1</mn></mrow></msup>" in drawn
    assert "<munder><mo>\u2211</mo><mrow><mi>x</mi></mrow></munder>" in drawn
    assert "<msub><mi>p</mi><mn>1</mn></msub>" in drawn


@pytest.mark.parametrize(
    "formula", [r"\nosuch{2}", r"\frac{1}", r"a^", r"\text{open", r"a } b", r"{a"]
)
def test_what_cannot_be_drawn_is_refused(formula: str) -> None:
    with pytest.raises(BadFormula):
        mathml(formula)


def test_formulas_and_links_beside_the_docs_are_changed_on_their_way_and_nothing_else() -> None:
    assert rendered("```math\na\n```\n").startswith('<div class="formula">')
    assert (
        rendered("[x](../deploy/demo.yaml) [y](../api.md)")
        == "[x](deploy/demo.yaml) [y](../api.md)"
    )
    assert rendered("```sh\nls\n```\n") == "```sh\nls\n```\n"
