"""Text and ids, and text as it streams."""

from __future__ import annotations

import time
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from specserve.api.tokenizer import Text, TextStream
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


@cache
def byte_level(size: int = 420) -> Text:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )  # so that tokens end inside characters
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
    return Text(
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, eos_token="<end>", clean_up_tokenization_spaces=False
        )
    )


@cache
def sentence_piece() -> Text:
    """In the manner of Llama 2: a space becomes part of the next word, one is put in front, unknown characters become bytes."""
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
    tokenizer = Tokenizer(
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
    return Text(
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            bos_token="<s>",
            eos_token="</s>",
            clean_up_tokenization_spaces=False,
        )
    )


@cache
def metaspace() -> Text:
    tokenizer = Tokenizer(
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
    return Text(
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, unk_token="<unk>", clean_up_tokenization_spaces=False
        )
    )


TOKENIZERS = [byte_level, sentence_piece, metaspace]


def library_decode(text: Text, ids: list[int]) -> str:
    return text._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def pushes(stream: TextStream, ids: list[int], cuts: list[int]) -> list[str]:
    borders = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [stream.push(ids[a:b]) for a, b in pairwise(borders)] + [stream.finish()]


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@given(content=SCRIPTS, cuts=st.lists(st.integers(0, 99)))
@settings(deadline=None, max_examples=150)
def test_what_streams_is_the_whole_text_however_it_is_chunked(tokenizer, content, cuts):
    text = tokenizer()
    ids = list(text.encode(content, special=False))
    shown = pushes(TextStream(text), ids, cuts)
    assert "".join(shown) == library_decode(text, ids)
    if tokenizer is byte_level:
        assert "".join(shown) == content
        assert all("\ufffd" not in part for part in shown) or "\ufffd" in content


@given(ids=st.lists(st.integers(0, 421), max_size=30), cuts=st.lists(st.integers(0, 99)))
@settings(deadline=None, max_examples=300)
def test_broken_bytes_come_out_as_the_library_decodes_them(ids, cuts):
    text = byte_level()
    assert "".join(pushes(TextStream(text), ids, cuts)) == library_decode(text, ids)


@given(data=st.binary(max_size=24), cuts=st.lists(st.integers(0, 99)))
@settings(deadline=None)
def test_byte_tokens_of_any_kind_are_decoded_once_they_are_whole(data, cuts):
    text = sentence_piece()
    ids = [3 + byte for byte in data]
    expected = data.decode("utf-8", "replace")
    assert "".join(pushes(TextStream(text, [text.encode("the")[0]]), ids, cuts)) == expected


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@given(
    content=SCRIPTS,
    stops=st.lists(
        st.text(alphabet="the fox日\nä.", min_size=1, max_size=4), min_size=1, max_size=4
    ),
    cuts=st.lists(st.integers(0, 99)),
)
@settings(deadline=None, max_examples=150)
def test_text_ends_before_the_stop_string_that_is_complete_first(tokenizer, content, stops, cuts):
    text = tokenizer()
    ids = list(text.encode(content, special=False))
    whole = library_decode(text, ids)
    found = [(whole.find(stop) + len(stop), whole.find(stop)) for stop in stops if stop in whole]
    stream = TextStream(text, stop=stops)
    shown = pushes(stream, ids, cuts)
    assert "".join(shown) == (whole[: min(found)[1]] if found else whole)
    assert stream.stopped == bool(found)
    if found:
        end = min(found)[0]
        assert (
            len(library_decode(text, ids[: stream.num_tokens])) >= end
        )  # the stop string is complete with these tokens,
        fewer = TextStream(text, stop=stops)
        fewer.push(ids[: stream.num_tokens - 1])
        assert not fewer.stopped  # and not with fewer


def test_nothing_of_a_possible_stop_string_is_shown_before_it_is_decided():
    text = byte_level(257)  # every token is a byte
    stream = TextStream(text, stop=["END", "ENOUGH"])
    shown = [stream.push(text.encode(char)) for char in "theENENO"]
    assert shown == ["t", "h", "e", "", "", "EN", "", ""]
    assert stream.push(text.encode("UGH!")) == ""
    assert stream.stopped
    assert stream.num_tokens == len("theENENOUGH")
    assert stream.push(text.encode("more")) == stream.finish() == ""


def test_what_was_held_back_comes_at_the_end():
    text = byte_level()
    stream = TextStream(text, stop=["END of it"])
    assert stream.push(text.encode("the END of")) + stream.finish() == "the END of"
    assert not stream.stopped


def test_a_continuation_keeps_its_leading_space():
    text = sentence_piece()
    prompt, more = text.encode("the"), text.encode("fox")
    assert library_decode(text, list(more)) == "fox"
    assert TextStream(text, prompt).push(more) == " fox"
    assert TextStream(text).push((1, *more)) == "fox"


def test_a_character_that_the_prompt_began_is_completed():
    text = byte_level(257)
    ids = text.encode("日")
    assert TextStream(text, ids[:1]).push(ids[1:]) == "日"


def test_special_tokens_and_padding_rows_have_no_text():
    text = byte_level()
    ids = [0, *text.encode("the"), 0, 100_000, -1, 2**70]
    assert text.decode(ids) == "the"


def test_pushing_costs_the_same_however_long_the_text_is():
    text = byte_level()
    ids = [*text.encode("the 日本 \ufffd fox "), text.encode("\u00e9")[0]]
    stream = TextStream(text, stop=["never" * 50])

    def seconds() -> float:
        begun = time.perf_counter()
        for _ in range(200):
            stream.push(ids)
        return time.perf_counter() - begun

    early = min(seconds() for _ in range(5))
    for _ in range(50):
        seconds()
    assert min(seconds() for _ in range(5)) < 3 * early


@given(content=SCRIPTS)
@settings(deadline=None)
def test_encode_is_what_the_library_encodes(content):
    text = byte_level()
    assert list(text.encode(content)) == text._tokenizer(content)["input_ids"]


def test_half_a_surrogate_pair_is_refused():
    with pytest.raises(BadValue, match="Unicode"):
        byte_level().encode("a\ud83d")


def test_equal_vocabularies_are_the_same_whatever_the_object():
    byte_level().require_same(byte_level.__wrapped__())


def test_another_vocabulary_is_refused_naming_the_first_difference():
    with pytest.raises(
        TokenizerMismatch, match=r"token 0 is '<end>' to the target and '<unk>' to the draft"
    ):
        byte_level().require_same(sentence_piece())
    with pytest.raises(
        TokenizerMismatch, match=r"token 400 is .* to the target and '<tool call>' to the draft"
    ):
        byte_level().require_same(byte_level(400))


def test_a_tokenizer_loads_from_a_directory_and_nothing_else_does(tmp_path):
    byte_level()._tokenizer.save_pretrained(tmp_path / "saved")
    loaded = Text.load(tmp_path / "saved")
    loaded.require_same(byte_level())
    assert loaded.decode(loaded.encode("süße 日本")) == "süße 日本"
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="no tokenizer can be loaded"):
        Text.load(tmp_path / "empty")
    with pytest.raises(ModelNotFound, match="no tokenizer can be loaded"):
        Text.load(tmp_path / "missing" / "entirely")


MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]


def test_a_model_without_a_template_gets_a_plain_one():
    text = byte_level()
    assert text.decode(text.apply_chat(MESSAGES)) == "system: Be brief.\nuser: Why?\nassistant:"


def test_the_models_own_template_is_used():
    text = byte_level.__wrapped__()
    text._tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}|{{ m.content }}]{% endfor %}{% if add_generation_prompt %}[me|{% endif %}"
    assert text.decode(text.apply_chat(MESSAGES)) == "[system|Be brief.][user|Why?][me|"


def test_a_template_that_refuses_is_the_callers_error():
    text = byte_level.__wrapped__()
    text._tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(BadValue, match="roles must alternate"):
        text.apply_chat(MESSAGES)


@pytest.mark.parametrize(
    "messages", [[], "hello", [{"role": "user"}], [{"role": "user", "content": 3}], ["hello"]]
)
def test_messages_of_another_shape_are_refused(messages):
    with pytest.raises(BadValue, match="messages"):
        byte_level().apply_chat(messages)
