"""What may come next in a text: the same however it was reached, and what the grammar's bytes say."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from llguidance import LLTokenizer

from specserve.config.tree import DEMO
from specserve.grammar.mask import Allowed
from specserve.grammar.matcher import KEPT, Grammars, Parse, rows_of
from specserve.models.checkpoints.load import load_tokenizer
from specserve.types import Grammar
from tests.support import checkpoints
from tests.support.constrained_texts import (
    END,
    GRAMMAR,
    TOKENS,
    allowed,
    tiny_grammars,
    tiny_tokenizer,
)

SCHEMA = Grammar(
    "json_schema",
    '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}, "tags": {"type": "array", "items": {"enum": ["alpha", "beta"]}}},'
    ' "required": ["name", "tags"], "additionalProperties": false}',
)


@pytest.fixture(scope="module")
def demo() -> Grammars:
    return Grammars.of(
        lambda: load_tokenizer(DEMO / "target"), vocab_size=4100, end_ids=frozenset({0})
    )


def ids(parse: Parse, vocab: int) -> list[int]:
    return np.flatnonzero(
        np.unpackbits(parse.bits().view(np.uint8), count=vocab, bitorder="little")
    ).tolist()


def walked(grammars: Grammars, grammar: Grammar, *, seed: int, steps: int, vocab: int):
    """A parse that grows by allowed tokens and goes back, at random; it is handed out at each step."""
    rng, parse = np.random.default_rng(seed), grammars.begun(grammar)
    for _ in range(steps):
        own = [token for token in ids(parse, vocab) if token not in grammars.end_ids]
        if parse.tokens and (not own or rng.random() < 0.4):
            parse.write(len(parse.tokens) - int(rng.integers(1, min(len(parse.tokens), 6) + 1)), ())
        else:
            parse.write(len(parse.tokens), (int(rng.choice(own)),))
        if rng.random() < 0.3:
            parse.forced(4)
        if rng.random() < 0.1:
            parse = parse.fork(int(rng.integers(0, len(parse.tokens) + 1)))
        yield parse


@pytest.mark.parametrize("seed", range(3))
def test_what_is_allowed_follows_from_the_tokens_alone_wherever_the_text_has_been_before(
    demo: Grammars, seed
):
    for i, parse in enumerate(walked(demo, SCHEMA, seed=seed, steps=300, vocab=4100)):
        if i % 5 == 0:
            fresh = demo.begun(SCHEMA)
            fresh.write(0, parse.tokens)
            assert ids(fresh, 4100) == ids(parse, 4100)
            assert not parse.is_over


def test_allowed_are_the_tokens_that_some_text_goes_on_with_and_where_one_spelling_is_forced_that_one():
    texts = {"".join(parts) for n in range(8) for parts in product(("ab", "c"), repeat=n)}
    texts |= {text + tail for text in texts for tail in ("ddb", "ddc")}
    assert all(re.fullmatch(GRAMMAR.text, text) for text in texts)
    for length in range(4):
        for prefix in product(
            [token for token in range(len(TOKENS)) if token != END], repeat=length
        ):
            written = b"".join(TOKENS[token] for token in prefix).decode()
            if not any(text.startswith(written) for text in texts):
                continue
            lawful = {
                token
                for token in range(len(TOKENS))
                if token != END
                and any(text.startswith(written + TOKENS[token].decode()) for text in texts)
            }
            lawful |= {END} & ({END} if written in texts else set())
            found = set(np.flatnonzero(allowed(prefix)).tolist()) if len(written) <= 4 else set()
            if found:
                assert found == lawful or (len(found) == 1 and found <= lawful)


def test_the_rows_of_drafts_are_those_of_the_texts_that_they_would_make(demo: Grammars):
    tokens = demo.tokenizer.tokenize_str('{"name": "bob", "tags": ["beta"]}')
    parses = [demo.begun(SCHEMA) for _ in range(3)]
    parses[1].write(0, tokens[:5])
    wrong = [*tokens[5:7], 1, 5]
    wrong[2] = next(
        token for token in range(1, 4096) if demo_forbids(demo, [*tokens[:5], *wrong[:2]], token)
    )
    bits = rows_of(demo, [(parses[0], tokens[:6]), (parses[1], wrong), (parses[2], [])])
    step = demo.begun(SCHEMA)
    for row, token in zip(bits, [*tokens[:6], None], strict=False):
        assert row.tolist() == step.bits().tolist()
        if token is not None:
            step.write(len(step.tokens), (token,))
    assert not np.array_equal(bits[7], bits[9])
    assert (bits[10] == -1).all()  # behind a draft that may not stand
    assert parses[1].tokens == tokens[:5]
    assert ids(parses[2], 4100) == ids(demo.begun(SCHEMA), 4100)


def demo_forbids(demo: Grammars, text: list[int], token: int) -> bool:
    parse = demo.begun(SCHEMA)
    parse.write(0, [*text, token])
    return parse.is_over


def test_a_text_ends_where_the_grammar_can_and_with_any_end_token():
    grammars = Grammars(
        lambda: LLTokenizer(tiny_wrapper(), eos_token=[END, 7]), end_ids=frozenset({END, 7})
    )
    parse = grammars.begun(Grammar("regex", "ab"))
    assert not {END, 7} & set(ids(parse, 8))
    parse.write(0, (3,))
    assert ids(parse, 8) == [END, 7]
    parse.write(1, (7,))
    assert parse.is_over
    assert parse.error is None
    assert ids(parse, 8) == [END, 7]
    parse.write(0, (0,))
    assert ids(parse, 8) == [1]


def tiny_wrapper() -> object:
    from llguidance import TokenizerWrapper

    from tests.support.constrained_texts import Spelling

    return TokenizerWrapper(Spelling())


def test_a_token_that_breaks_the_grammar_ends_the_parse_until_it_is_taken_back():
    parse = tiny_grammars().begun(GRAMMAR)
    parse.write(0, (3, 7, 0, 4))
    assert parse.is_over
    assert parse.forced(4) == []
    parse.write(2, ())
    assert not parse.is_over
    assert parse.forced(4)[:1] == [7]


def test_one_lawful_token_left_is_forced_also_the_end():
    parse = tiny_grammars().begun(Grammar("regex", "abcd"))
    found = []
    while tokens := parse.forced(8):
        parse.write(len(parse.tokens), tokens)
        found += tokens
    assert b"".join(TOKENS[token] for token in found[:-1]) == b"abcd"
    assert found[-1] == END


def test_drafts_are_counted_up_to_the_first_that_may_not_stand():
    parse = tiny_grammars().begun(GRAMMAR)
    assert [
        parse.lawful(tokens)
        for tokens in ((3, 4, 7, 0), (7, 7, 1, END, 4), (3, 0, END), (), (END, 3))
    ] == [3, 4, 3, 0, 1]
    assert parse.tokens == []


def test_compiled_grammars_are_kept_up_to_a_number():
    grammars = tiny_grammars()
    for i in range(KEPT + 5):
        grammars.begun(Grammar("regex", "a" * (i + 1)))
    assert len(grammars._compiled) == KEPT
    assert Grammar("regex", "a") not in grammars._compiled


def test_a_model_without_an_end_token_says_so():
    assert "no token to end" in (
        Grammars(tiny_tokenizer, end_ids=frozenset()).begun(GRAMMAR).error or ""
    )


def test_ids_that_no_tokenizer_knows_are_never_allowed(demo: Grammars):
    parse = demo.begun(Grammar("regex", "(?s:.*)"))
    assert max(ids(parse, 4100)) < 4096


@pytest.mark.parametrize("rows", [[0, 2], [0, 1, 2]])
def test_packed_bits_take_from_the_logits_what_is_forbidden(rows):
    rng = np.random.default_rng(0)
    may = rng.random((3, 70)) < 0.3
    packed = np.packbits(np.pad(may, ((0, 0), (0, 26))), axis=1, bitorder="little").view(np.int32)[
        rows
    ]
    logits = torch.randn(3, 75)
    left = Allowed(np.array(rows), packed).applied(logits)
    expected = np.pad(may, ((0, 0), (0, 5)))
    expected[[row for row in range(3) if row not in rows]] = True
    assert torch.equal(torch.isfinite(left), torch.from_numpy(expected))
    assert torch.equal(left[torch.isfinite(left)], logits[torch.isfinite(left)])
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("kind", ["byte", "sentencepiece"])
def test_tokenizers_of_checkpoints_spell_what_they_say(tmp_path: Path, kind):
    if kind == "byte":
        checkpoints.add_tokenizer(tmp_path)
        size, end = checkpoints.VOCAB, checkpoints.EOS
    else:
        size, end = sentencepiece(tmp_path), 2
    grammars = Grammars.of(
        lambda: load_tokenizer(tmp_path), vocab_size=size, end_ids=frozenset({end})
    )
    parse = grammars.begun(Grammar("regex", "[a-c]{2}é"))
    while not parse.is_over:
        parse.write(len(parse.tokens), (ids(parse, size)[-1],))
    text = grammars.tokenizer.decode_bytes(parse.tokens[:-1]).decode()
    assert re.fullmatch("[a-c]{2}é", text)


def sentencepiece(directory: Path) -> int:
    """As Llama's: pieces that begin with a lower block for a space, and bytes to fall back on."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *[f"<0x{byte:02X}>" for byte in range(256)],
        "▁",
        "a",
        "b",
        "c",
        "▁a",
        "ab",
    ]
    backend = Tokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)},
            [("▁", "a"), ("a", "b")],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(directory)
    return len(pieces)
