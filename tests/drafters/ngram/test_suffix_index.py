"""The suffix index and the forks that share it find what brute force finds, on any text."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.drafters.ngram.forkable_text import ForkableText, PlainText, TextBuffer
from specserve.drafters.ngram.suffix_index import Match, SuffixIndex

SMALL = 5
"""Tokens that are compared, so that short texts reach the bound."""
TOKENS = st.lists(st.sampled_from([0, 1, 2, 300, 70_000, 2**31]), max_size=12)


def num_matching(text: list[int], after: int, *, max_match: int = SMALL) -> int:
    """Return how many tokens before `after` equal those at the end."""
    length = 0
    while (
        length < min(after, max_match) and text[after - 1 - length] == text[len(text) - 1 - length]
    ):
        length += 1
    return length


def check(index: SuffixIndex, text: list[int]) -> None:
    assert index.tokens == text
    lengths = {after: num_matching(text, after) for after in range(1, len(text))}
    longest = max(lengths.values(), default=0)
    match = index.match()
    if not longest:
        assert match is None
        assert index.next_tokens(3) == []
        return
    assert match is not None
    assert (match.length, lengths[match.after]) == (longest, longest)
    positions = [after for after, length in lengths.items() if length == longest]
    if longest == SMALL or len(positions) <= 4:
        assert match.after == max(positions)
    continuation = list(index.continuation(match, 9))
    assert continuation == [(text + continuation)[match.after + i] for i in range(9)]
    next_tokens = index.next_tokens(3)
    assert len(set(next_tokens)) == len(next_tokens) <= 3
    assert next_tokens[0] in {text[after] for after in positions}


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), TOKENS), max_size=12))
def test_the_longest_match_is_that_of_brute_force_however_the_text_grew_and_shrank(
    changes: list[tuple[int, list[int]]],
) -> None:
    index, text = SuffixIndex(max_match=SMALL), list[int]()
    for dropped, tokens in changes:
        length = max(len(text) - dropped, 0)
        index.truncate(length)
        index.extend(tokens)
        text[length:] = tokens
        check(index, text)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_forks_that_share_a_prefix_do_not_disturb_one_another(data: st.DataObject) -> None:
    draw = data.draw

    def fresh() -> TextBuffer:
        return SuffixIndex(max_match=SMALL)

    forks, texts, read = {0: ForkableText(fresh)}, {0: list[int]()}, {0: 0}
    for number in range(1, draw(st.integers(1, 25))):
        which = draw(st.sampled_from(sorted(forks)))
        fork, text = forks[which], texts[which]
        action = draw(st.sampled_from(["write", "write", "read", "fork", "release"]))
        length = draw(st.integers(0, len(text)))
        if action == "write":
            tokens = draw(TOKENS)
            fork.write(length, tokens)
            text[length:] = tokens
            read[which] = min(read[which], length)
        elif action == "read":
            read[which] = max(read[which], length)
            found = fork.prefix(read[which])
            assert isinstance(found, SuffixIndex)
            check(found, text[: read[which]])
        elif action == "fork":
            forks[number], texts[number], read[number] = (
                fork.fork(length),
                text[:length],
                min(read[which], length),
            )
        elif len(forks) > 1:
            forks.pop(which).release()
            texts.pop(which)
        assert [len(forks[i]) for i in forks] == [len(texts[i]) for i in forks]
    for which, fork in forks.items():
        assert fork.prefix(len(fork)).tokens == texts[which]


def test_own_tokens_join_the_shared_prefix_once_the_forks_are_released() -> None:
    text = ForkableText(PlainText)
    text.write(0, range(100))
    fork = text.fork(90)
    text.write(100, [1, 2, 3])
    text.prefix(103)
    assert len(text._own) == 103
    fork.release()
    text.prefix(103)
    assert text._own == []
    assert text.fork(103)._own == []


def test_a_loop_is_copied_as_a_loop() -> None:
    index = SuffixIndex()
    index.extend([9, 8, 1, 2, 3, 1, 2, 3])
    assert index.match() == Match(after=5, length=3)
    assert index.continuation(Match(5, 3), 8) == (1, 2, 3, 1, 2, 3, 1, 2)


@pytest.mark.parametrize("text", ["one token", "loop", "two tokens", "mixed"])
def test_a_long_context_costs_microseconds(text: str) -> None:
    """Index 32k tokens within generous bounds, for a busy machine.

    Quadratic work would take seconds.
    """
    tokens = {
        "one token": [7] * 32_768,
        "loop": list(range(64)) * 512,
        "two tokens": [hash((i, i % 7)) % 2 for i in range(32_768)],
        "mixed": [hash((i, 1)) % 4096 for i in range(32_768)],
    }[text]
    index = SuffixIndex()
    start = time.process_time()
    index.extend(tokens)
    grown = time.process_time()
    for _ in range(200):
        match = index.match()
        assert match is not None
        index.continuation(match, 8)
    matched = time.process_time()
    index.truncate(16_384)
    shrunk = time.process_time()
    assert (grown - start) / len(tokens) < 50e-6
    assert (matched - grown) / 200 < 200e-6
    assert (shrunk - matched) / 16_384 < 50e-6
