"""Tables of followers: counted, saved, learned online, and refused when they are broken."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from specserve.drafters.ngram.online_counts import OnlineCounts, OnlineTable
from specserve.drafters.ngram.tables import (
    TABLES_FILE,
    BigramTable,
    Counts,
    TableRow,
    UniformTable,
    UnigramTable,
    count_texts,
    load_tables,
    save_tables,
)
from specserve.errors import BadValue, ModelError, ModelNotFound
from specserve.tools.count_ngrams import count_ngrams

TEXTS = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=30), min_size=1, max_size=4)


def shares(row: TableRow | None) -> dict[int, float]:
    assert row is not None
    assert row.probs.sum() == pytest.approx(1, abs=1e-6)
    assert (np.diff(row.probs) <= 0).all()
    assert row.sums == pytest.approx(np.cumsum(row.probs[: row.support]), abs=1e-6)
    return {
        int(token): float(prob) for token, prob in zip(row.ids, row.probs, strict=True) if prob > 0
    }


def expected(counts: Counter[int], width: int) -> dict[int, object]:
    kept = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))[:width]
    total = sum(count for _, count in kept)
    return {token: pytest.approx(count / total) for token, count in kept}


@given(TEXTS, st.integers(1, 7))
def test_rows_are_the_shares_of_followers_or_else_of_single_tokens(
    texts: list[list[int]], width: int
) -> None:
    counts = count_texts(texts, keep=width)
    bigram, unigram = BigramTable(counts, width=width), UnigramTable(counts, width=width)
    singles = Counter(token for text in texts for token in text)
    followers = {
        token: Counter(b for text in texts for a, b in pairwise(text) if a == token)
        for token in range(8)
    }
    assert shares(unigram.row(0, 0)) == expected(singles, width)
    for token in range(8):
        assert shares(bigram.row(token, 3)) == expected(followers[token] or singles, width)


@given(TEXTS)
def test_learning_a_text_in_pieces_equals_counting_it(texts: list[list[int]]) -> None:
    """Count all tokens but a text's first, which followed nothing."""
    online = OnlineTable(width=8)
    for text in texts:
        cut = len(text) // 2
        online.learn(text[:cut])
        online.learn(text[max(cut - 1, 0) :])
    counted = BigramTable(count_texts(texts, keep=8), width=8)
    for token in range(6):
        if any(a == token for text in texts for a, _ in pairwise(text)):
            assert shares(online.row(token, 0)) == pytest.approx(shares(counted.row(token, 0)))


def test_learned_counts_are_added_to_those_of_the_file() -> None:
    online = OnlineTable(count_texts([[1, 2, 1, 2, 1, 3]], keep=4), width=4)
    online.learn([1, 3, 1, 3])
    assert shares(online.row(1, 0)) == {3: pytest.approx(3 / 5), 2: pytest.approx(2 / 5)}
    assert shares(online.row(7, 0)) == {
        1: pytest.approx(4 / 9),
        3: pytest.approx(3 / 9),
        2: pytest.approx(2 / 9),
    }


def test_a_returned_row_does_not_change_while_counting_continues() -> None:
    counts = OnlineCounts({}, width=2, max_tokens=8)
    assert counts.row() is None
    counts.add(5)
    before = counts.row()
    for _ in range(9):
        counts.add(6)
    assert shares(before) == {5: 1}
    assert shares(counts.row()) == {6: pytest.approx(0.9), 5: pytest.approx(0.1)}


def test_online_counts_drop_rare_tokens_and_stay_within_their_limit() -> None:
    counts = OnlineCounts({}, width=4, max_tokens=16)
    for i in range(2000):
        counts.add(1000 + i if i % 4 else 7)
        assert len(counts._counts) <= 16
    row = counts.row()
    assert row is not None
    assert row.top_token == 7


def test_rows_of_a_common_token_are_not_rebuilt_for_every_count() -> None:
    counts = OnlineCounts({3: 800}, width=4, max_tokens=16)
    first = counts.row()
    counts.add(4)
    assert counts.row() is first


def test_uniform_rows_are_parts_of_the_vocabulary_and_cover_it_evenly() -> None:
    table = UniformTable(vocab_size=20, width=6)
    rows = [table.row(3, position) for position in range(400)]
    assert all(sorted(row.probs.tolist()) == pytest.approx([1 / 6] * 6) for row in rows)
    assert all(len(set(row.ids.tolist())) == 6 for row in rows)
    occurrences = Counter(token for row in rows for token in row.ids.tolist())
    assert set(occurrences) == set(range(20))
    assert max(occurrences.values()) < 2 * min(occurrences.values())


def test_tables_come_back_from_a_file_as_they_were(tmp_path: Path) -> None:
    counts = count_texts([[1, 2, 3, 2, 3, 9]], keep=4, fingerprint="abc")
    save_tables(counts, tmp_path / TABLES_FILE)
    for path in (tmp_path, tmp_path / TABLES_FILE):
        found = load_tables(path)
        assert found.fingerprint == "abc"
        for name in ("unigram", "starts", "ids", "counts"):
            np.testing.assert_array_equal(getattr(found, name), getattr(counts, name))


def test_a_file_without_tables_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="specserve tables"):
        load_tables(tmp_path)
    (tmp_path / "noise").write_bytes(b"not tensors")
    with pytest.raises(ModelError, match="read as tables"):
        load_tables(tmp_path / "noise")
    save_file({"weight": np.zeros(3)}, tmp_path / "model")
    with pytest.raises(ModelError, match="read as tables"):
        load_tables(tmp_path / "model")


@pytest.mark.parametrize(
    "change",
    [
        {"starts": np.array([0, 1])},
        {"starts": np.array([0, 3, 1, 3, 3])},
        {"ids": np.array([0, 1, 9])},
        {"ids": np.array([0, -1, 2])},
        {"counts": np.array([1, 1])},
        {"counts": np.array([1, 0, 1])},
        {"unigram": np.zeros(0, np.int64), "starts": np.zeros(1, np.int64)},
        {"unigram": np.ones((2, 2), np.int64)},
    ],
    ids=str,
)
def test_tables_that_do_not_fit_together_are_refused(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    consistent = Counts(
        np.ones(4, np.int64),
        np.array([0, 1, 2, 2, 3]),
        np.array([1, 2, 3]),
        np.array([5, 5, 5]),
        "",
    )
    save_tables(consistent, tmp_path / TABLES_FILE)
    load_tables(tmp_path)
    save_tables(replace(consistent, **change), tmp_path / TABLES_FILE)
    with pytest.raises(ModelError, match="fit together"):
        load_tables(tmp_path)


def test_texts_become_tables_with_the_tokenizers_fingerprint(tmp_path: Path) -> None:
    from specserve.api.tokenizer import Tokenizer
    from specserve.config.tree import DEMO

    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text("import os\nimport sys\n" * 20)
    second.write_text("def f(x):\n    return x\n")
    message = count_ngrams(str(DEMO / "target"), [first, second], tmp_path / TABLES_FILE)
    text, counts = Tokenizer.load(DEMO / "target"), load_tables(tmp_path)
    assert counts.fingerprint == text.fingerprint
    assert f"{int(counts.unigram.sum()):,} tokens in 2 files" in message
    start, follower, *_ = text.encode("import os", special=False)
    row = BigramTable(counts, width=4).row(start, 0)
    assert row is not None
    assert follower in row.ids[: row.support]


def test_texts_that_cannot_be_counted_are_refused(tmp_path: Path) -> None:
    from specserve.config.tree import DEMO

    (tmp_path / "latin").write_bytes(b"caf\xe9")
    (tmp_path / "empty").write_text("")
    for text, keep, match in (
        ("latin", 4, "UTF-8"),
        ("missing", 4, "UTF-8"),
        ("empty", 4, "empty"),
        ("empty", 0, "keep"),
    ):
        with pytest.raises(BadValue, match=match):
            count_ngrams(str(DEMO / "target"), [tmp_path / text], tmp_path / TABLES_FILE, keep=keep)
    assert not (tmp_path / TABLES_FILE).exists()
