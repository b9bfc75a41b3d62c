"""Encoding, decoding, and incremental detokenizing with stop strings."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from specserve.api.detokenizer import IncrementalDetokenizer
from specserve.api.tokenizer import Tokenizer
from specserve.errors import BadValue, ModelError, ModelNotFound, TokenizerMismatch

CORPUS = [
    "def f(x):\n    return x + 1\n\n\nclass Reader:\n    pass\n",
    "the quick brown fox jumps over the lazy dog, and the END of it",
    "Ein Bär fraß süße Möhren. Ça alors, où est-il ?",
    "Привет, мир! Как дела? سلام دنیا  नमस्ते दुनिया",
    "日本語のテキスト、中文文本。한국어 텍스트 ภาษาไทย",
    "👩‍👩‍👧‍👦 👍🏽 🇫🇷 é ☃",
] * 3
SCRIPTS = st.lists(
    st.sampled_from(
        [
            "the ",
            " fox",
            "Bär",
            "süße",
            "Привет",
            "नमस्ते",
            "سلام",
            "日本",
            "語",
            "한국어",
            "ภาษา",
            "👩‍👩‍👧‍👦",
            "👍🏽",
            "🇫🇷",
            "e\u0301",
            "\n",
            "  ",
            "\u200d",
            "\x00",
            "\ufffd",
        ]
    )
    | st.text(max_size=4),
    max_size=12,
).map("".join)


def wrap(tokenizer: tokenizers.Tokenizer, **special_tokens: str) -> Tokenizer:
    fast: Any = PreTrainedTokenizerFast
    return Tokenizer(
        fast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special_tokens)
    )


@cache
def byte_level(size: int = 420) -> Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    # Without the regex, tokens may end inside characters.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=["<end>"],
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    tokenizer.add_tokens([AddedToken("<tool call>", normalized=False)])
    return wrap(tokenizer, eos_token="<end>")


@cache
def sentence_piece() -> Tokenizer:
    """Return a tokenizer like that of Llama 2.

    A space becomes part of the next word, one is put in front, and unknown characters become
    bytes.
    """
    words = ["▁", *"▁abcdefghijklmnopqrstuvwxyz.,!END", "▁the", "▁fox", "▁▁", "日", "é"]
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *[f"<0x{byte:02X}>" for byte in range(256)],
        *dict.fromkeys(words),
    ]
    ids = {piece: i for i, piece in enumerate(pieces)}
    merges = [("▁t", "he"), ("▁", "▁")]
    ids |= {piece: len(ids) + i for i, piece in enumerate(["▁t", "he", "▁th"])}
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "▁")]
    tokenizer = tokenizers.Tokenizer(
        models.BPE(ids, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return wrap(tokenizer, bos_token="<s>", eos_token="</s>")


@cache
def metaspace() -> Tokenizer:
    tokenizer = tokenizers.Tokenizer(
        models.Unigram(
            [
                ("<unk>", 0.0),
                ("▁the", -1.0),
                ("▁", -2.0),
                ("fox", -2.5),
                *[(char, -4.0) for char in "abcdefghijklmnopqrstuvwxyz日本"],
            ],
            unk_id=0,
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return wrap(tokenizer, unk_token="<unk>")


TOKENIZERS = [byte_level, sentence_piece, metaspace]


def library_decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    decoded: str = tokenizer._tokenizer.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return decoded


def push_in_parts(
    detokenizer: IncrementalDetokenizer, ids: list[int], cuts: list[int]
) -> list[str]:
    borders = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [detokenizer.push(ids[a:b]) for a, b in pairwise(borders)] + [detokenizer.finish()]


@pytest.mark.parametrize("make", TOKENIZERS)
@given(content=SCRIPTS, cuts=st.lists(st.integers(0, 99)))
@settings(deadline=None, max_examples=150)
def test_streamed_text_is_the_whole_text_however_tokens_are_chunked(
    make: Callable[[], Tokenizer], content: str, cuts: list[int]
) -> None:
    tokenizer = make()
    ids = list(tokenizer.encode(content, special=False))
    emitted = push_in_parts(IncrementalDetokenizer(tokenizer), ids, cuts)
    assert "".join(emitted) == library_decode(tokenizer, ids)
    if make is byte_level:
        assert "".join(emitted) == content
        assert all("\ufffd" not in part for part in emitted) or "\ufffd" in content


@given(ids=st.lists(st.integers(0, 421), max_size=30), cuts=st.lists(st.integers(0, 99)))
@settings(deadline=None, max_examples=300)
def test_broken_bytes_come_out_as_the_library_decodes_them(ids: list[int], cuts: list[int]) -> None:
    tokenizer = byte_level()
    assert "".join(push_in_parts(IncrementalDetokenizer(tokenizer), ids, cuts)) == library_decode(
        tokenizer, ids
    )


@given(data=st.binary(max_size=24), cuts=st.lists(st.integers(0, 99)))
@settings(deadline=None)
def test_byte_tokens_of_any_kind_are_decoded_once_they_are_whole(
    data: bytes, cuts: list[int]
) -> None:
    tokenizer = sentence_piece()
    ids = [3 + byte for byte in data]
    expected = data.decode("utf-8", "replace")
    assert (
        "".join(
            push_in_parts(
                IncrementalDetokenizer(tokenizer, [tokenizer.encode("the")[0]]), ids, cuts
            )
        )
        == expected
    )


@pytest.mark.parametrize("make", TOKENIZERS)
@given(
    content=SCRIPTS,
    stops=st.lists(
        st.text(alphabet="the fox日\nä.", min_size=1, max_size=4), min_size=1, max_size=4
    ),
    cuts=st.lists(st.integers(0, 99)),
)
@settings(deadline=None, max_examples=150)
def test_text_ends_before_the_stop_string_that_is_complete_first(
    make: Callable[[], Tokenizer], content: str, stops: list[str], cuts: list[int]
) -> None:
    tokenizer = make()
    ids = list(tokenizer.encode(content, special=False))
    whole = library_decode(tokenizer, ids)
    found = [(whole.find(stop) + len(stop), whole.find(stop)) for stop in stops if stop in whole]
    detokenizer = IncrementalDetokenizer(tokenizer, stop=stops)
    emitted = push_in_parts(detokenizer, ids, cuts)
    assert "".join(emitted) == (whole[: min(found)[1]] if found else whole)
    assert detokenizer.hit_stop_string == bool(found)
    if found:
        end = min(found)[0]
        # The stop string is complete with these tokens, and not with fewer.
        assert len(library_decode(tokenizer, ids[: detokenizer.num_tokens])) >= end
        fewer = IncrementalDetokenizer(tokenizer, stop=stops)
        fewer.push(ids[: detokenizer.num_tokens - 1])
        assert not fewer.hit_stop_string


def test_nothing_of_a_possible_stop_string_is_shown_before_it_is_decided() -> None:
    tokenizer = byte_level(257)  # every token is a byte
    detokenizer = IncrementalDetokenizer(tokenizer, stop=["END", "ENOUGH"])
    emitted = [detokenizer.push(tokenizer.encode(char)) for char in "theENENO"]
    assert emitted == ["t", "h", "e", "", "", "EN", "", ""]
    assert detokenizer.push(tokenizer.encode("UGH!")) == ""
    assert detokenizer.hit_stop_string
    assert detokenizer.num_tokens == len("theENENOUGH")
    assert detokenizer.push(tokenizer.encode("more")) == detokenizer.finish() == ""


@pytest.mark.parametrize("cuts", [[], [1, 2, 3, 4, 5, 6, 7, 8], [4]])
@pytest.mark.parametrize(
    ("min_tokens", "text"),
    [
        (0, "a"),
        (3, "a"),
        (4, "aba"),
        (5, "ababca"),
        (8, "ababcabca"),
        (11, "ababc"),
        (12, "ababcabcabcx"),
    ],
)
def test_a_stop_string_counts_if_a_later_token_completes_it(
    min_tokens: int, text: str, cuts: list[int]
) -> None:
    """Let it begin in the first tokens; it is text if it ends there, as in vLLM."""
    tokenizer = byte_level(257)  # every token is a byte
    detokenizer = IncrementalDetokenizer(
        tokenizer, stop=["bc", "bab", "abcabcx"], min_tokens=min_tokens
    )
    emitted = push_in_parts(detokenizer, list(tokenizer.encode("ababcabcabcx")), cuts)
    assert "".join(emitted) == text
    assert detokenizer.hit_stop_string == (len(text) < 12)


def test_held_back_text_is_emitted_at_the_end() -> None:
    tokenizer = byte_level()
    detokenizer = IncrementalDetokenizer(tokenizer, stop=["END of it"])
    assert detokenizer.push(tokenizer.encode("the END of")) + detokenizer.finish() == "the END of"
    assert not detokenizer.hit_stop_string


def test_a_continuation_keeps_its_leading_space() -> None:
    tokenizer = sentence_piece()
    prompt, more = tokenizer.encode("the"), tokenizer.encode("fox")
    assert library_decode(tokenizer, list(more)) == "fox"
    assert IncrementalDetokenizer(tokenizer, prompt).push(more) == " fox"
    assert IncrementalDetokenizer(tokenizer).push((1, *more)) == "fox"


def test_a_character_that_the_prompt_began_is_completed() -> None:
    tokenizer = byte_level(257)
    ids = tokenizer.encode("日")
    assert IncrementalDetokenizer(tokenizer, ids[:1]).push(ids[1:]) == "日"


def test_special_tokens_and_padding_rows_have_no_text() -> None:
    tokenizer = byte_level()
    ids = [0, *tokenizer.encode("the"), 0, 100_000, -1, 2**70]
    assert tokenizer.decode(ids) == "the"


def test_pushing_costs_the_same_however_long_the_text_is() -> None:
    tokenizer = byte_level()
    ids = [*tokenizer.encode("the 日本 \ufffd fox "), tokenizer.encode("\u00e9")[0]]
    detokenizer = IncrementalDetokenizer(tokenizer, stop=["never" * 50])

    def seconds() -> float:
        start = time.process_time()
        for _ in range(200):
            detokenizer.push(ids)
        return time.process_time() - start

    early = min(seconds() for _ in range(5))
    for _ in range(50):
        seconds()
    assert min(seconds() for _ in range(5)) < 3 * early


@given(content=SCRIPTS)
@settings(deadline=None)
def test_encode_is_what_the_library_encodes(content: str) -> None:
    tokenizer = byte_level()
    assert list(tokenizer.encode(content)) == tokenizer._tokenizer(content)["input_ids"]


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(BadValue, match="Unicode"):
        byte_level().encode("a\ud83d")


def test_equal_vocabularies_are_the_same_whatever_the_object() -> None:
    byte_level().require_same_vocabulary(byte_level.__wrapped__())


def test_another_vocabulary_is_refused_naming_the_first_difference() -> None:
    with pytest.raises(
        TokenizerMismatch, match=r"token 0 is '<end>' to the target and '<unk>' to the draft"
    ):
        byte_level().require_same_vocabulary(sentence_piece())
    with pytest.raises(
        TokenizerMismatch, match=r"token 400 is .* to the target and '<tool call>' to the draft"
    ):
        byte_level().require_same_vocabulary(byte_level(400))


def test_a_tokenizer_loads_from_a_directory_and_nothing_else_does(tmp_path: Path) -> None:
    byte_level()._tokenizer.save_pretrained(tmp_path / "saved")
    loaded = Tokenizer.load(tmp_path / "saved")
    loaded.require_same_vocabulary(byte_level())
    assert loaded.decode(loaded.encode("süße 日本")) == "süße 日本"
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="no tokenizer can be loaded"):
        Tokenizer.load(tmp_path / "empty")
    with pytest.raises(ModelNotFound, match="no tokenizer can be loaded"):
        Tokenizer.load(tmp_path / "missing" / "entirely")
    for name in ("tokenizer_config.json", "tokenizer.json"):
        (tmp_path / "saved" / name).write_bytes(b'{"a": "\xff"}')
        with pytest.raises(ModelError, match=f": {name} is no UTF-8: "):
            Tokenizer.load(tmp_path / "saved")


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]


def test_a_model_without_a_template_gets_a_plain_one() -> None:
    tokenizer = byte_level()
    assert (
        tokenizer.decode(tokenizer.apply_chat_template(MESSAGES))
        == "system: Be brief.\nuser: Why?\nassistant:"
    )


def test_the_models_own_template_is_used() -> None:
    tokenizer = byte_level.__wrapped__()
    tokenizer._tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}|{{ m.content }}]{% endfor %}"
        "{% if add_generation_prompt %}[me|{% endif %}"
    )
    assert (
        tokenizer.decode(tokenizer.apply_chat_template(MESSAGES))
        == "[system|Be brief.][user|Why?][me|"
    )


def test_a_template_that_refuses_is_the_callers_error() -> None:
    tokenizer = byte_level.__wrapped__()
    tokenizer._tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(BadValue, match="roles must alternate"):
        tokenizer.apply_chat_template(MESSAGES)


@pytest.mark.parametrize(
    "messages", [[], "hello", [{"role": "user"}], [{"role": "user", "content": 3}], ["hello"]]
)
def test_messages_of_another_shape_are_refused(messages: Any) -> None:
    with pytest.raises(BadValue, match="messages"):
        byte_level().apply_chat_template(messages)
