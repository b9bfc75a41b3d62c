"""Formulas give the papers' figures; the rest is measured even if something is missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.papers import family, formulas
from lab.papers.__main__ import main
from lab.papers.contest import DraftCounts, _count_round
from lab.papers.options import TABLES
from lab.papers.published import TABLE_1, TABLE_2, TRADE_OFFS
from specserve import theory
from specserve.demo.corpus import Corpus, standard_library

TINY = [
    "--params",
    "7M",
    "--text-tokens",
    "300",
    "--prompts",
    "1",
    "--max-tokens",
    "8",
    "--turns",
    "1",
]


def test_table_1_of_the_cascade_paper_is_within_a_hundredth() -> None:
    for setup in TABLE_1:
        assert formulas.factor(setup) == pytest.approx(setup.factor, abs=0.01)


def test_table_1_of_the_first_paper_comes_out_to_the_last_digit() -> None:
    for row in TRADE_OFFS:
        assert formulas.operations(row) == pytest.approx(row.operations, abs=0.0051)
        assert formulas.speed(row) == pytest.approx(row.speed, abs=0.0051)


def test_published_speeds_are_of_the_size_that_the_theorem_expects() -> None:
    """Speeds agree within a third for c from 0.02 to 0.11, so a mistyped digit would be found."""
    costs = {"T5-small (77M)": 0.02, "T5-base (250M)": 0.04, "T5-large (800M)": 0.11}
    for row in TABLE_2:
        assert row.factor == pytest.approx(
            theory.walltime_factor(row.alpha, row.gamma, costs[row.draft]), rel=0.34
        )


def test_the_curves_are_the_formulas() -> None:
    section = formulas.figures()
    tokens, best = section.pictures["figures-2-3"]
    speed, operations = section.pictures["figure-4"]
    at = formulas.ALPHAS.index(0.8)
    for i, gamma in enumerate(formulas.GAMMAS):
        assert (
            tokens.curves[i].ys[at] == speed.curves[i].ys[at] == theory.tokens_per_round(0.8, gamma)
        )
        assert operations.curves[i].ys[at] == pytest.approx(
            (gamma + 1) / theory.tokens_per_round(0.8, gamma)
        )
    assert [curve.ys[at] for curve in best.curves] == sorted(
        (curve.ys[at] for curve in best.curves), reverse=True
    )


def test_what_lies_behind_a_rejection_is_not_counted() -> None:
    count = _count_round(_count_round(DraftCounts(), 5, 2), 5, 5)
    assert count == DraftCounts(rounds=2, drafted=10, verified=8, accepted=7)
    assert count.alpha == 7 / 8
    assert count.tokens == 9


def test_a_formula_table_is_printed_without_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table-1"]) == 0
    assert "base x 5 + small x 8" in capsys.readouterr().out


def test_the_whole_page_is_written_with_its_plots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = standard_library()
    few = Corpus(corpus.train[:20], corpus.held_out)  # to count tables from
    monkeypatch.setattr(family, "standard_library", lambda: few)
    assert main(["--out", str(tmp_path), *TINY]) == 0
    page = (tmp_path / "reproduction.md").read_text()
    assert capsys.readouterr().out.strip() == page.strip()
    assert page.count("\n## ") == len(TABLES)
    for picture in tmp_path.glob("*.png"):
        assert f"({picture.name})" in page
    assert len(list(tmp_path.glob("*.png"))) == page.count(".png)")
    for name in (
        "unigram",
        "bigram",
        "autoregressive",
        "max_gram",
        "vertical",
        "horizontal",
        "cascade",
    ):
        assert f"| {name}" in page


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["table-9"], "one of table-1, figures, alphas, speed, cascades, not 'table-9'"),
        (["--out", "/nowhere/at/all"], "is no directory"),
        (["--turns", "0"], "--turns"),
        (["alphas", "--max-tokens", "1"], "2 or more"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments]) == 2
    assert complaint in capsys.readouterr().err
