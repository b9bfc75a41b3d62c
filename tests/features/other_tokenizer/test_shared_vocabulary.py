"""Tokens with equal bytes are one token, and every other token is spelt by its bytes."""

from __future__ import annotations

import pytest

from specserve.api.tokenizer import Tokenizer
from specserve.errors import TokenizerMismatch
from specserve.features.other_tokenizer.shared_vocabulary import (
    MIN_SHARED,
    SharedVocabulary,
    Speller,
    make_translation,
)
from tests.api.test_tokenizer import byte_level, sentence_piece
from tests.support.other_tokenizer import demo_tokenizer

PAIRS = {
    "bytes to pieces": (byte_level, sentence_piece),
    "pieces to bytes": (sentence_piece, byte_level),
    "demo to pieces": (demo_tokenizer, sentence_piece),
    "pieces to demo": (sentence_piece, demo_tokenizer),
    "demo to bytes": (demo_tokenizer, byte_level),
}


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest) -> tuple[Tokenizer, Tokenizer]:
    target, draft = PAIRS[request.param]
    return target(), draft()


def test_every_token_with_text_is_spelt_by_its_bytes(pair: tuple[Tokenizer, Tokenizer]) -> None:
    target, draft = pair
    shared = SharedVocabulary.from_tokenizers(target, draft)
    translation = make_translation(shared, target, draft)
    for token in target.token_ids:
        if target.token_bytes(token):
            spelling = translation.spellings[token]
            assert b"".join(map(draft.token_bytes, spelling)) == target.token_bytes(token)


def test_shared_tokens_are_the_same_bytes_and_themselves(
    pair: tuple[Tokenizer, Tokenizer],
) -> None:
    target, draft = pair
    shared = SharedVocabulary.from_tokenizers(target, draft)
    translation = make_translation(shared, target, draft)
    assert translation.num_shared >= shared.num_shared > 200
    assert len(set(translation.target_ids.tolist())) == translation.num_shared
    for ours, theirs in zip(
        translation.target_ids.tolist(), translation.draft_ids.tolist(), strict=True
    ):
        assert target.token_bytes(ours) == draft.token_bytes(theirs)
        assert translation.spellings[ours] == (theirs,)


def test_a_space_is_a_space_in_either_notation() -> None:
    shared = SharedVocabulary.from_tokenizers(byte_level(), sentence_piece())
    both = shared.target.keys() & shared.draft.keys()
    assert b" " in both
    assert byte_level().token_name(shared.target[b" "]) == "Ġ"
    assert sentence_piece().token_name(shared.draft[b" "]) == "▁"


def test_tokens_that_begin_and_end_texts_are_shared_whatever_their_names() -> None:
    target, draft = byte_level(), sentence_piece()
    translation = make_translation(SharedVocabulary.from_tokenizers(target, draft), target, draft)
    assert target.end_id is not None
    assert translation.spellings[target.end_id] == (draft.end_id,)


def test_bytes_that_are_no_whole_character_are_spelt_too() -> None:
    for tokenizer in (byte_level(), sentence_piece(), demo_tokenizer()):
        ids = SharedVocabulary.from_tokenizers(tokenizer, tokenizer).draft
        speller = Speller(tokenizer, ids)
        texts = ["日".encode()[:2], "x日".encode()[1:3] + b"a", b"foo", b" foo", "é".encode()]
        for text, spelling in zip(texts, speller.spell_many(texts), strict=True):
            assert b"".join(map(tokenizer.token_bytes, spelling)) == text


def test_little_overlap_is_refused_in_a_sentence() -> None:
    target = {bytes([i]): i for i in range(100)}
    few = {bytes([i]): i for i in range(100 - int(100 * MIN_SHARED) + 1, 200)}
    with pytest.raises(TokenizerMismatch, match=r"draft.path d has another tokenizer, which shar"):
        SharedVocabulary(target, few, {}).require_overlap("draft.path d")
    enough = {bytes([i]): i for i in range(100 - int(100 * MIN_SHARED), 200)}
    SharedVocabulary(target, enough, {}).require_overlap("draft.path d")
