"""The language of the tree: the field's words, one class name in one module, lines that fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.language import findings
from tests.support.survey import shared_class_names, survey, tracked

ROOT = Path(__file__).parents[1]
SOURCES = tracked(ROOT, "*.py")
PAGES = tracked(ROOT, "*.md")
FOLDERS = sorted({path.relative_to(ROOT).parts[0] for path in SOURCES + PAGES})


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_line_breaks_a_rule_of_the_language(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {reason}"
        for path in SOURCES + PAGES
        if path.relative_to(ROOT).parts[0] == folder and path.name != "language.py"
        for line, reason in findings(path, root=ROOT)
    ]
    assert not found, "\n".join(found)


def test_a_public_class_name_stands_in_one_module_only() -> None:
    package = [path for path in SOURCES if path.relative_to(ROOT).parts[0] != "tests"]
    assert not shared_class_names(ROOT, package)


@pytest.mark.parametrize(
    ("word", "file"),
    [
        ("reject", "specserve/sampling/verify.py"),
        ("accept", "specserve/sampling/verify.py"),
        ("draft tokens", "specserve/engine/coordinator.py"),
        ("prefill", "specserve/engine/scheduler.py"),
        ("preempt", "specserve/engine/scheduler.py"),
        ("roll back", "specserve/models/cache.py"),
        ("truncate", "specserve/models/cache.py"),
        ("block table", "specserve/models/cache.py"),
        ("KV cache", "specserve/models/cache.py"),
        ("backoff", "specserve/cluster/engine/supervisor.py"),
        ("encoder input", "specserve/features/encoder_decoder/encoder_cache.py"),
    ],
)
def test_the_field_s_words_are_found_where_they_are_implemented(word: str, file: str) -> None:
    assert word.lower() in (ROOT / file).read_text(encoding="utf-8").lower()


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a.py", '"""Of whatever stands first."""\n', "docstring opens with 'of'"),
        ("a.py", "def acquit() -> None: ...\n", "the name acquit"),
        ("a.py", "def drop(victims: int) -> None: ...\n", "the name victims"),
        ("a.py", "x = 1  # lest it be 0\n", "the word 'lest'"),
        ("a.py", '"""A strand."""\n', "the word 'strand'"),
        ("a.py", f"x = '{'x' * 100}'\n", "106 columns"),
        ("specserve/engine/a.py", '"""Refuse draft tokens."""\n', "the word 'Refuse'"),
        ("a.md", "It forgets.\n", "the word 'forgets'"),
        ("lab/a.py", "x = 1  # so many rows\n", "the word 'so many'"),
        ("docs/guides/a.md", "Logprobs are those of a chat.\n", "the word 'those of'"),
        (
            "tests/a.py",
            "x = 1  # logits behind the last token\n",
            "the word 'behind the last token'",
        ),
    ],
)
def test_each_kind_of_finding_is_found(tmp_path: Path, name: str, text: str, reason: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    assert [found for _, found in findings(file, root=tmp_path)] == [reason]


def test_plain_words_are_no_findings(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text('"""Return the rejected draft tokens."""\n\nREFUSED = "told"\n')
    assert not list(findings(file, root=tmp_path))


def test_the_survey_counts_this_tree() -> None:
    figures = survey(ROOT).figures
    assert figures["modules of the core"] > 50
    assert figures["class names in several modules"] == 0


def test_the_readme_fits_on_three_screens() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120
