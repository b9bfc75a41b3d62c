"""The index of endings and the strands that share it: what they find is what brute force finds, however the text came about."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specserve.drafters.ngram.forkable_text import Plain, Strand, Written
from specserve.drafters.ngram.suffix_index import Endings, Match

SMALL = 5  # tokens that are compared, so that short texts reach the bound
TOKENS = st.lists(st.sampled_from([0, 1, 2, 300, 70_000, 2**31]), max_size=12)


def agreeing(text: list[int], after: int, *, longest: int = SMALL) -> int:
    """How many tokens before `after` are those at the end."""
    length = 0
    while length < min(after, longest) and text[after - 1 - length] == text[len(text) - 1 - length]:
        length += 1
    return length


def check(endings: Endings, text: list[int]) -> None:
    assert endings.tokens == text
    lengths = {after: agreeing(text, after) for after in range(1, len(text))}
    longest = max(lengths.values(), default=0)
    match = endings.match()
    if not longest:
        assert match is None
        assert endings.nexts(3) == []
        return
    assert match is not None
    assert (match.length, lengths[match.after]) == (longest, longest)
    places = [after for after, length in lengths.items() if length == longest]
    if longest == SMALL or len(places) <= 4:
        assert match.after == max(places)
    copied = list(endings.copied(match, 9))
    assert copied == [(text + copied)[match.after + i] for i in range(9)]
    nexts = endings.nexts(3)
    assert len(set(nexts)) == len(nexts) <= 3
    assert nexts[0] in {text[after] for after in places}


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 30), TOKENS), max_size=12))
def test_the_longest_match_is_that_of_brute_force_however_the_text_grew_and_shrank(
    changes: list[tuple[int, list[int]]],
) -> None:
    endings, text = Endings(longest=SMALL), list[int]()
    for dropped, tokens in changes:
        length = max(len(text) - dropped, 0)
        endings.truncate(length)
        endings.extend(tokens)
        text[length:] = tokens
        check(endings, text)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_strands_that_share_a_trunk_do_not_disturb_one_another(data: st.DataObject) -> None:
    draw = data.draw

    def fresh() -> Written:
        return Endings(longest=SMALL)

    strands, texts, read = {0: Strand(fresh)}, {0: list[int]()}, {0: 0}
    for number in range(1, draw(st.integers(1, 25))):
        which = draw(st.sampled_from(sorted(strands)))
        strand, text = strands[which], texts[which]
        action = draw(st.sampled_from(["write", "write", "read", "fork", "release"]))
        length = draw(st.integers(0, len(text)))
        if action == "write":
            tokens = draw(TOKENS)
            strand.write(length, tokens)
            text[length:] = tokens
            read[which] = min(read[which], length)
        elif action == "read":
            read[which] = max(read[which], length)
            found = strand.text(read[which])
            assert isinstance(found, Endings)
            check(found, text[: read[which]])
        elif action == "fork":
            strands[number], texts[number], read[number] = (
                strand.fork(length),
                text[:length],
                min(read[which], length),
            )
        elif len(strands) > 1:
            strands.pop(which).release()
            texts.pop(which)
        assert [len(strands[i]) for i in strands] == [len(texts[i]) for i in strands]
    for which, strand in strands.items():
        assert strand.text(len(strand)).tokens == texts[which]


def test_what_is_read_is_given_back_to_the_trunk_once_the_forks_are_gone() -> None:
    strand = Strand(Plain)
    strand.write(0, range(100))
    fork = strand.fork(90)
    strand.write(100, [1, 2, 3])
    strand.text(103)
    assert len(strand._own) == 103
    fork.release()
    strand.text(103)
    assert strand._own == []
    assert strand.fork(103)._own == []


def test_a_loop_is_copied_as_a_loop() -> None:
    endings = Endings()
    endings.extend([9, 8, 1, 2, 3, 1, 2, 3])
    assert endings.match() == Match(after=5, length=3)
    assert endings.copied(Match(5, 3), 8) == (1, 2, 3, 1, 2, 3, 1, 2)


@pytest.mark.parametrize("text", ["one token", "loop", "two tokens", "mixed"])
def test_a_long_context_costs_microseconds(text: str) -> None:
    """Generous bounds, for a busy machine: 32k tokens; quadratic work would take seconds."""
    tokens = {
        "one token": [7] * 32_768,
        "loop": list(range(64)) * 512,
        "two tokens": [hash((i, i % 7)) % 2 for i in range(32_768)],
        "mixed": [hash((i, 1)) % 4096 for i in range(32_768)],
    }[text]
    endings = Endings()
    begun = time.process_time()
    endings.extend(tokens)
    grown = time.process_time()
    for _ in range(200):
        match = endings.match()
        assert match is not None
        endings.copied(match, 8)
    asked = time.process_time()
    endings.truncate(16_384)
    shrunk = time.process_time()
    assert (grown - begun) / len(tokens) < 50e-6
    assert (asked - grown) / 200 < 200e-6
    assert (shrunk - asked) / 16_384 < 50e-6
