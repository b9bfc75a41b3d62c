"""Allowed next tokens: they follow the grammar, and do not depend on how the text was reached."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLTokenizer, TokenizerWrapper

from specserve.config.tree import DEMO
from specserve.grammar import sequences
from specserve.grammar.mask import TokenMask
from specserve.grammar.matcher import MAX_COMPILED, Bits, GrammarCompiler, GrammarMatcher
from specserve.grammar.request import parse_guided
from specserve.grammar.sequences import GrammarStates, SequenceGrammar, TextUpdate
from specserve.grammar.text_masks import mask_texts
from specserve.grammar.validate import validate_grammar
from specserve.models.checkpoints.library import load_tokenizer
from specserve.types import Grammar
from tests.support import checkpoints
from tests.support.constrained_texts import (
    END,
    GRAMMAR,
    TOKENS,
    TinyTokenizer,
    allowed,
    tiny_grammars,
    tiny_tokenizer,
)

SCHEMA = Grammar(
    "json_schema",
    '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 9},'
    ' "tags": {"type": "array", "items": {"enum": ["alpha", "beta"]}}},'
    ' "required": ["name", "tags"], "additionalProperties": false}',
)


@pytest.fixture(scope="module")
def demo() -> GrammarCompiler:
    return GrammarCompiler.from_tokenizer(
        lambda: load_tokenizer(DEMO / "target"), vocab_size=4100, end_ids=frozenset({0})
    )


def ids(matcher: GrammarMatcher, vocab: int) -> list[int]:
    bits = np.unpackbits(matcher.bits().view(np.uint8), count=vocab, bitorder="little")
    found: list[int] = np.flatnonzero(bits).tolist()
    return found


def random_walk(
    grammar_compiler: GrammarCompiler, grammar: Grammar, *, seed: int, steps: int, vocab: int
) -> Iterator[GrammarMatcher]:
    """Yield a matcher that grows by allowed tokens and is rolled back, at random."""
    rng, matcher = np.random.default_rng(seed), grammar_compiler.start(grammar)
    for _ in range(steps):
        own = [token for token in ids(matcher, vocab) if token not in grammar_compiler.end_ids]
        if matcher.tokens and (not own or rng.random() < 0.4):
            matcher.write(
                len(matcher.tokens) - int(rng.integers(1, min(len(matcher.tokens), 6) + 1)), ()
            )
        else:
            matcher.write(len(matcher.tokens), (int(rng.choice(own)),))
        if rng.random() < 0.3:
            matcher.forced_tokens(4)
        if rng.random() < 0.1:
            matcher = matcher.fork(int(rng.integers(0, len(matcher.tokens) + 1)))
        yield matcher


@pytest.mark.parametrize("seed", range(3))
def test_allowed_tokens_depend_only_on_the_current_text(demo: GrammarCompiler, seed: int) -> None:
    for i, matcher in enumerate(random_walk(demo, SCHEMA, seed=seed, steps=300, vocab=4100)):
        if i % 5 == 0:
            fresh = demo.start(SCHEMA)
            fresh.write(0, matcher.tokens)
            assert ids(fresh, 4100) == ids(matcher, 4100)
            assert not matcher.is_terminated


def test_allowed_tokens_continue_some_text_or_are_the_forced_one() -> None:
    texts = {"".join(parts) for n in range(8) for parts in product(("ab", "c"), repeat=n)}
    texts |= {text + tail for text in texts for tail in ("ddb", "ddc")}
    assert all(re.fullmatch(GRAMMAR.text, text) for text in texts)
    for length in range(4):
        for prefix in product(
            [token for token in range(len(TOKENS)) if token != END], repeat=length
        ):
            text_so_far = b"".join(TOKENS[token] for token in prefix).decode()
            if not any(text.startswith(text_so_far) for text in texts):
                continue
            valid = {
                token
                for token in range(len(TOKENS))
                if token != END
                and any(text.startswith(text_so_far + TOKENS[token].decode()) for text in texts)
            }
            valid |= {END} & ({END} if text_so_far in texts else set())
            found = (
                set(np.flatnonzero(allowed(prefix)).tolist()) if len(text_so_far) <= 4 else set()
            )
            if found:
                assert found == valid or (len(found) == 1 and found <= valid)


def test_masks_behind_drafts_equal_those_of_the_extended_texts(demo: GrammarCompiler) -> None:
    tokens = demo.tokenizer.tokenize_str('{"name": "bob", "tags": ["beta"]}')
    matchers = [demo.start(SCHEMA) for _ in range(3)]
    matchers[1].write(0, tokens[:5])
    wrong = [*tokens[5:7], 1, 5]
    wrong[2] = next(
        token for token in range(1, 4096) if demo_forbids(demo, [*tokens[:5], *wrong[:2]], token)
    )
    asked = [(matchers[0], tokens[:6]), (matchers[1], wrong), (matchers[2], [])]
    bits = mask_texts(demo, asked).bits
    step = demo.start(SCHEMA)
    for row, token in zip(bits, [*tokens[:6], None], strict=False):
        assert row.tolist() == step.bits().tolist()
        if token is not None:
            step.write(len(step.tokens), (token,))
    assert not np.array_equal(bits[7], bits[9])
    assert (bits[10] == -1).all()  # after a forbidden draft token
    assert matchers[1].tokens == tokens[:5]
    assert ids(matchers[2], 4100) == ids(demo.start(SCHEMA), 4100)


def test_a_text_goes_on_after_masks_of_drafts_where_its_grammar_names_tokens(
    demo: GrammarCompiler,
) -> None:
    matcher = demo.start(Grammar("lark", "start: <[28]> <[398]> <[50]>"))
    bits = mask_texts(demo, [(matcher, (28, 398))]).bits
    rows = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")
    assert [np.flatnonzero(row).tolist() for row in rows] == [[28], [398], [50]]
    matcher.write(0, (28, 398))
    assert ids(matcher.fork(2), 4100) == [50]
    mask_texts(demo, [(other := matcher.fork(1), (398,))])
    other.write(1, (398, 50))
    assert other.error is None
    assert not matcher.is_terminated


def test_a_slow_grammar_takes_the_time_of_no_other(demo: GrammarCompiler) -> None:
    matchers = [demo.start(SCHEMA) for _ in range(3)]
    matchers[0].mask_s = 1.0  # in the pass before
    ticks = itertools.count()
    masks = mask_texts(
        demo, [(matcher, ()) for matcher in matchers], budget_s=1.5, clock=lambda: next(ticks)
    )
    assert masks.late == {0}
    expected = demo.start(SCHEMA).bits().tolist()
    assert [row.tolist() == expected for row in masks.bits] == [False, True, True]
    assert (masks.bits[0] == -1).all()
    assert matchers[1].mask_s == matchers[2].mask_s == 0.5, "a tick for both"


def test_a_text_without_its_masks_fails_and_the_others_go_on(
    demo: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = GrammarStates(demo)
    for seq_id, grammar in enumerate((SCHEMA, Grammar("regex", "a+b"))):
        states.set_grammar(seq_id, SequenceGrammar(grammar, 0))
    updates = [(seq_id, TextUpdate(seq_id, 0, ())) for seq_id in range(2)]
    assert states._masks(updates).errors == {}
    matcher = states.get(0)
    assert matcher is not None
    matcher.mask_s = 1.0
    ticks = itertools.count()
    monkeypatch.setattr(
        sequences, "mask_texts", partial(mask_texts, clock=lambda: 10.0 * next(ticks))
    )
    monkeypatch.setattr(sequences, "PASS_MASKS_S", 15.0)
    assert states._masks(updates).errors == {0: sequences.TOO_SLOW}


def test_a_branch_that_replaces_a_dropped_sequence_brings_its_grammar(
    demo: GrammarCompiler,
) -> None:
    """A cascade's stage may have dropped the sequence, and have prefilled the branch."""
    states = GrammarStates(demo)
    states.set_grammar(9, SequenceGrammar(SCHEMA, 0))
    assert states._masks([(0, TextUpdate(9, 0, ()))]).errors == {}
    states.promote_branch(0, 9)
    states.fork(0, 10, 0)
    for seq_id in (0, 10):
        assert states.get(seq_id) is not None
        assert states._masks([(0, TextUpdate(seq_id, 0, ()))]).errors == {}
    assert states.get(9) is None


def test_equal_texts_share_one_mask(demo: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """`n: 64` continues one text 64 times."""
    asked: list[int] = []

    def count(compiler: GrammarCompiler, texts: Any, **options: Any) -> Any:
        asked.append(len(texts))
        return mask_texts(compiler, texts, **options)

    monkeypatch.setattr(sequences, "mask_texts", count)
    states, tokens = GrammarStates(demo), tuple(demo.tokenizer.tokenize_str('{"name": "'))
    for seq_id in range(5):
        states.set_grammar(seq_id, SequenceGrammar(SCHEMA, 0))
    drafts = [(), tokens, (), tokens, tokens[:2]]
    rows = np.cumsum([0, *(len(some) + 1 for some in drafts)])
    updates = [
        (int(first), TextUpdate(seq_id, 0, (), some))
        for seq_id, (first, some) in enumerate(zip(rows, drafts, strict=False))
    ]
    shared = states._masks(updates)
    assert asked == [3]
    alone = [states._masks([(0, update)]) for _, update in updates]
    expected = np.concatenate([one.token_mask.bits for one in alone])
    assert shared.errors == {}
    assert np.array_equal(shared.token_mask.bits, expected)
    assert shared.token_mask.rows.tolist() == list(range(len(expected)))


def demo_forbids(demo: GrammarCompiler, text: list[int], token: int) -> bool:
    matcher = demo.start(SCHEMA)
    matcher.write(0, [*text, token])
    return matcher.is_terminated


def test_a_text_ends_where_the_grammar_can_and_with_any_end_token() -> None:
    grammar_compiler = GrammarCompiler(
        lambda: LLTokenizer(tiny_wrapper(), eos_token=[END, 7]), end_ids=frozenset({END, 7})
    )
    matcher = grammar_compiler.start(Grammar("regex", "ab"))
    assert not {END, 7} & set(ids(matcher, 8))
    matcher.write(0, (3,))
    assert ids(matcher, 8) == [END, 7]
    matcher.write(1, (7,))
    assert matcher.is_terminated
    assert matcher.error is None
    assert ids(matcher, 8) == [END, 7]
    matcher.write(0, (0,))
    assert ids(matcher, 8) == [1]


def tiny_wrapper() -> TokenizerWrapper:
    return TokenizerWrapper(TinyTokenizer())


def test_a_forbidden_token_terminates_the_matcher_until_it_is_rolled_back() -> None:
    matcher = tiny_grammars().start(GRAMMAR)
    matcher.write(0, (3, 7, 0, 4))
    assert matcher.is_terminated
    assert matcher.forced_tokens(4) == []
    matcher.write(2, ())
    assert not matcher.is_terminated
    assert matcher.forced_tokens(4)[:1] == [7]


def test_the_only_allowed_token_is_forced_even_the_end() -> None:
    matcher = tiny_grammars().start(Grammar("regex", "abcd"))
    found: list[int] = []
    while tokens := matcher.forced_tokens(8):
        matcher.write(len(matcher.tokens), tokens)
        found += tokens
    assert b"".join(TOKENS[token] for token in found[:-1]) == b"abcd"
    assert found[-1] == END


def test_drafts_are_counted_up_to_the_first_forbidden_one() -> None:
    matcher = tiny_grammars().start(GRAMMAR)
    assert [
        matcher.num_valid(tokens)
        for tokens in ((3, 4, 7, 0), (7, 7, 1, END, 4), (3, 0, END), (), (END, 3))
    ] == [3, 4, 3, 0, 1]
    assert matcher.tokens == []


def test_compiled_grammars_are_kept_up_to_a_number() -> None:
    grammar_compiler = tiny_grammars()
    for i in range(MAX_COMPILED + 5):
        grammar_compiler.start(Grammar("regex", "a" * (i + 1)))
    assert len(grammar_compiler._compiled) == MAX_COMPILED
    assert Grammar("regex", "a") not in grammar_compiler._compiled


def test_a_model_without_an_end_token_says_so() -> None:
    assert "no token to end" in (
        GrammarCompiler(tiny_tokenizer, end_ids=frozenset()).start(GRAMMAR).error or ""
    )


def test_ids_that_no_tokenizer_knows_are_never_allowed(demo: GrammarCompiler) -> None:
    matcher = demo.start(Grammar("regex", "(?s:.*)"))
    assert max(ids(matcher, 4100)) < 4096


@pytest.mark.parametrize("rows", [[0, 2], [0, 1, 2]])
def test_token_mask_forbids_exactly_the_tokens_without_a_bit(rows: list[int]) -> None:
    rng = np.random.default_rng(0)
    is_allowed = rng.random((3, 70)) < 0.3
    packed = np.packbits(np.pad(is_allowed, ((0, 0), (0, 26))), axis=1, bitorder="little").view(
        np.int32
    )[rows]
    logits = torch.randn(3, 75)
    masked = TokenMask(np.array(rows), packed).apply(logits)
    expected = np.pad(is_allowed, ((0, 0), (0, 5)))
    expected[[row for row in range(3) if row not in rows]] = True
    assert torch.equal(torch.isfinite(masked), torch.from_numpy(expected))
    assert torch.equal(masked[torch.isfinite(masked)], logits[torch.isfinite(masked)])
    assert torch.isfinite(logits).all()


@pytest.mark.parametrize("kind", ["byte", "sentencepiece"])
def test_checkpoint_tokenizers_follow_a_grammar(tmp_path: Path, kind: str) -> None:
    if kind == "byte":
        checkpoints.add_tokenizer(tmp_path)
        size, end = checkpoints.VOCAB, checkpoints.EOS
    else:
        size, end = sentencepiece(tmp_path), 2
    grammar_compiler = GrammarCompiler.from_tokenizer(
        lambda: load_tokenizer(tmp_path), vocab_size=size, end_ids=frozenset({end})
    )
    matcher = grammar_compiler.start(Grammar("regex", "[a-c]{2}é"))
    while not matcher.is_terminated:
        matcher.write(len(matcher.tokens), (ids(matcher, size)[-1],))
    text = grammar_compiler.tokenizer.decode_bytes(matcher.tokens[:-1]).decode()
    assert re.fullmatch("[a-c]{2}é", text)


def sentencepiece(directory: Path) -> int:
    """Write a tokenizer as Llama's: `▁` stands for a space, and single bytes are the fallback."""
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
    tokenizer_class: Any = PreTrainedTokenizerFast
    tokenizer_class(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(directory)
    return len(pieces)


@pytest.mark.timeout(120)  # what breaks it does not return, and takes 10 MB a second
@pytest.mark.parametrize(
    "text",
    [
        'start: A "a"\nA: /a+/',
        "start: A A\nA: /a+/",
        '%llguidance {"no_forcing": false}\nstart: A A\nA: /a+/',
        "start: A A\nA: /a+/ // a remark",
    ],
)
def test_a_clients_grammar_that_forces_bytes_for_ever_has_a_check_and_masks(text: str) -> None:
    grammar = parse_guided({"grammar": text})
    assert grammar is not None
    validate_grammar(grammar)
    matcher = GrammarCompiler(lambda: LLTokenizer("byte"), end_ids=frozenset({256})).start(grammar)
    for position in range(8):
        assert allowed_ids(matcher.bits()) == [ord("a")]
        matcher.write(position, [ord("a")])


def allowed_ids(bits: Bits) -> list[int]:
    return [
        32 * word + bit
        for word, row in enumerate(bits.tolist())
        for bit in range(32)
        if row >> bit & 1
    ]
