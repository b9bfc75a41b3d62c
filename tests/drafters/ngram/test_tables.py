"""Tables of what follows what: counted, kept in a file, learnt, and refused when they are not tables."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from specserve.drafters.ngram.online_counts import Learnt, Tally
from specserve.drafters.ngram.tables import (
    FILE,
    Bigram,
    Counts,
    Row,
    Uniform,
    Unigram,
    count,
    load,
    save,
)
from specserve.errors import BadValue, ModelError, ModelNotFound
from specserve.tools.count_ngrams import tabulate

TEXTS = st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=30), min_size=1, max_size=4)


def shares(row: Row | None) -> dict[int, float]:
    assert row is not None
    assert row.probs.sum() == pytest.approx(1, abs=1e-6)
    assert (np.diff(row.probs) <= 0).all()
    assert row.sums == pytest.approx(np.cumsum(row.probs[: row.support]), abs=1e-6)
    return {
        int(token): float(prob) for token, prob in zip(row.ids, row.probs, strict=True) if prob > 0
    }


def expected(counts: Counter[int], width: int) -> dict[int, float]:
    kept = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))[:width]
    total = sum(times for _, times in kept)
    return {token: pytest.approx(times / total) for token, times in kept}


@given(TEXTS, st.integers(1, 7))
def test_rows_are_the_shares_of_what_followed_the_rest_falls_back_on_single_tokens(
    texts: list[list[int]], width: int
) -> None:
    counts = count(texts, keep=width)
    bigram, unigram = Bigram(counts, width=width), Unigram(counts, width=width)
    singles = Counter(token for text in texts for token in text)
    followers = {
        token: Counter(b for text in texts for a, b in pairwise(text) if a == token)
        for token in range(8)
    }
    assert shares(unigram.row(0, 0)) == expected(singles, width)
    for token in range(8):
        assert shares(bigram.row(token, 3)) == expected(followers[token] or singles, width)


@given(TEXTS)
def test_learning_a_text_in_pieces_counts_what_counting_it_counts(texts: list[list[int]]) -> None:
    """But for a text's first token, which followed nothing."""
    learnt = Learnt(width=8)
    for text in texts:
        cut = len(text) // 2
        learnt.learn(text[:cut])
        learnt.learn(text[max(cut - 1, 0) :])
    counted = Bigram(count(texts, keep=8), width=8)
    for token in range(6):
        if any(a == token for text in texts for a, _ in pairwise(text)):
            assert shares(learnt.row(token, 0)) == pytest.approx(shares(counted.row(token, 0)))


def test_what_is_learnt_is_added_to_the_file() -> None:
    learnt = Learnt(count([[1, 2, 1, 2, 1, 3]], keep=4), width=4)
    learnt.learn([1, 3, 1, 3])
    assert shares(learnt.row(1, 0)) == {3: pytest.approx(3 / 5), 2: pytest.approx(2 / 5)}
    assert shares(learnt.row(7, 0)) == {
        1: pytest.approx(4 / 9),
        3: pytest.approx(3 / 9),
        2: pytest.approx(2 / 9),
    }


def test_what_was_handed_out_does_not_change_while_the_counts_go_on() -> None:
    tally = Tally({}, width=2, room=8)
    assert tally.row() is None
    tally.add(5)
    before = tally.row()
    for _ in range(9):
        tally.add(6)
    assert shares(before) == {5: 1}
    assert shares(tally.row()) == {6: pytest.approx(0.9), 5: pytest.approx(0.1)}


def test_a_tally_forgets_the_rare_and_never_outgrows_its_room() -> None:
    tally = Tally({}, width=4, room=16)
    for i in range(2000):
        tally.add(1000 + i if i % 4 else 7)
        assert len(tally._counts) <= 16
    row = tally.row()
    assert row is not None
    assert row.first == 7


def test_rows_of_a_common_token_are_not_made_anew_for_every_count() -> None:
    tally = Tally({3: 800}, width=4, room=16)
    first = tally.row()
    tally.add(4)
    assert tally.row() is first


def test_the_uniform_row_is_a_stretch_of_the_vocabulary_and_every_token_gets_its_turn() -> None:
    table = Uniform(vocab_size=20, width=6)
    rows = [table.row(3, position) for position in range(400)]
    assert all(sorted(row.probs.tolist()) == pytest.approx([1 / 6] * 6) for row in rows)
    assert all(len(set(row.ids.tolist())) == 6 for row in rows)
    turns = Counter(token for row in rows for token in row.ids.tolist())
    assert set(turns) == set(range(20))
    assert max(turns.values()) < 2 * min(turns.values())


def test_tables_come_back_from_a_file_as_they_were(tmp_path: Path) -> None:
    counts = count([[1, 2, 3, 2, 3, 9]], keep=4, fingerprint="abc")
    save(counts, tmp_path / FILE)
    for path in (tmp_path, tmp_path / FILE):
        found = load(path)
        assert found.fingerprint == "abc"
        for name in ("unigram", "starts", "ids", "counts"):
            np.testing.assert_array_equal(getattr(found, name), getattr(counts, name))


def test_what_is_no_file_of_tables_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="specserve tables"):
        load(tmp_path)
    (tmp_path / "noise").write_bytes(b"not tensors")
    with pytest.raises(ModelError, match="read as tables"):
        load(tmp_path / "noise")
    save_file({"weight": np.zeros(3)}, tmp_path / "model")
    with pytest.raises(ModelError, match="read as tables"):
        load(tmp_path / "model")


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
    tmp_path: Path, change: dict[str, np.ndarray]
) -> None:
    sound = Counts(
        np.ones(4, np.int64),
        np.array([0, 1, 2, 2, 3]),
        np.array([1, 2, 3]),
        np.array([5, 5, 5]),
        "",
    )
    save(sound, tmp_path / FILE)
    load(tmp_path)
    save(replace(sound, **change), tmp_path / FILE)
    with pytest.raises(ModelError, match="fit together"):
        load(tmp_path)


def test_texts_become_tables_with_the_tokenizers_fingerprint(tmp_path: Path) -> None:
    from specserve.api.tokenizer import Text
    from specserve.config.tree import DEMO

    first, second = tmp_path / "a.txt", tmp_path / "b.txt"
    first.write_text("import os\nimport sys\n" * 20)
    second.write_text("def f(x):\n    return x\n")
    told = tabulate(str(DEMO / "target"), [first, second], tmp_path / FILE)
    text, counts = Text.load(DEMO / "target"), load(tmp_path)
    assert counts.fingerprint == text.fingerprint
    assert f"{int(counts.unigram.sum()):,} tokens in 2 files" in told
    start, follower, *_ = text.encode("import os", special=False)
    row = Bigram(counts, width=4).row(start, 0)
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
            tabulate(str(DEMO / "target"), [tmp_path / text], tmp_path / FILE, keep=keep)
    assert not (tmp_path / FILE).exists()
