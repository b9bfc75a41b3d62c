"""Continuations under a grammar: sampled through whole engines, and their exact distribution.

The engines run the tiny pairs. The allowed tokens come from a fresh matcher that has consumed the
text from its beginning and was never rolled back.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from specserve.drafters.neural.drafter import NeuralDrafter
from specserve.grammar.matcher import GrammarCompiler
from specserve.types import VERIFIERS, FinishReason, Grammar, Request, Speculation
from tests.support.chi_square import Fit
from tests.support.continuations import COUNTED, MAX_GAMMA, PROMPTS, VOCAB, WARPS, Group, Pairs
from tests.support.engines import Engine, RandomPacer, Run
from tests.support.exact_distribution import Conditionals, Ints, all_continuations, warp_logits

TOKENS = (b"a", b"b", b"<end>", b"ab", b"c", b"ca", b"bc", b"d")
END = 2
# `ab` and `abc` may be tokenized in several ways; after a `d`, another is forced
GRAMMAR = Grammar("regex", "(ab|c)*(dd(b|c))?")
LONG = Grammar("regex", "(a|b|c){30}d*")


class TinyTokenizer:
    """Tokenizer of the tiny models: always the longest token that fits."""

    eos_token_id, bos_token_id, tokens, special_token_ids = END, None, TOKENS, [END]

    def __call__(self, text: str | bytes) -> list[int]:
        found: list[int] = []
        left = text if isinstance(text, bytes) else text.encode()
        while left:
            found.append(
                max(
                    (i for i, token in enumerate(TOKENS) if left.startswith(token)),
                    key=lambda i: len(TOKENS[i]),
                )
            )
            left = left[len(TOKENS[found[-1]]) :]
        return found


def tiny_tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(TinyTokenizer()), eos_token=[END])


def tiny_grammars() -> GrammarCompiler:
    return GrammarCompiler(tiny_tokenizer, end_ids=frozenset({END}))


@cache
def _tokenizer() -> LLTokenizer:
    return tiny_tokenizer()


@cache
def allowed(text: tuple[int, ...], grammar: Grammar = GRAMMAR) -> NDArray[np.bool_]:  # [VOCAB]
    """Return which tokens may follow.

    After an end, or after a text that the grammar excludes, only an end may: missing tokens are
    counted as ends.
    """
    matcher = LLMatcher(_tokenizer(), LLMatcher.grammar_from_regex(grammar.text))
    is_open = END not in text and all(_may_follow(matcher, token) for token in text)
    bits = (
        np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if is_open
        else np.array([1 << END], np.uint8)
    )
    return np.unpackbits(bits, count=VOCAB, bitorder="little").astype(bool)


def _may_follow(matcher: Any, token: int) -> bool:
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    return bool(bits[token]) and bool(matcher.consume_token(token))


def constrain_engine(engine: Engine, grammar_compiler: GrammarCompiler | None) -> Engine:
    """Give target and drafter a grammar compiler; with None, only the target has one."""
    engine.target.grammar_states.grammar_compiler = grammar_compiler or tiny_grammars()
    for states in _grammar_states_of(engine):
        if states is not engine.target.grammar_states:
            states.grammar_compiler = grammar_compiler
    return engine


def _grammar_states_of(engine: Engine) -> list[Any]:
    cascade = getattr(engine, "cascade", None)
    stages = (
        cascade._stages
        if cascade is not None
        else []
        if engine.drafter is None
        else [getattr(engine.drafter, "_drafter", engine.drafter)]
    )
    return [
        stage.grammar_states if isinstance(stage, NeuralDrafter) else stage._grammar_states
        for stage in stages
        if hasattr(stage, "grammar_states") or hasattr(stage, "_grammar_states")
    ]


class ConstrainedDistribution:
    """Distribution of texts under the grammar, with the library's own model as the target."""

    def __init__(self, pairs: Pairs, grammar: Grammar = GRAMMAR) -> None:
        self._pairs, self._grammar = pairs, grammar
        self.joint = cache(self._joint)

    def _joint(self, group: Group) -> NDArray[np.float64]:
        texts = all_continuations(group.prompt, COUNTED - 1, VOCAB)
        logits, prompt_length, rows = (
            self._pairs._target._logits(texts, last=COUNTED),
            len(group.prompt),
            [],
        )
        for depth in range(COUNTED):
            repeats = VOCAB ** (COUNTED - 1 - depth)
            prefixes = texts[::repeats, : prompt_length + depth]
            masks = np.array(
                [
                    allowed(tuple(prefix[prompt_length:].tolist()), self._grammar)
                    for prefix in prefixes
                ]
            )
            rows.append(
                warp_logits(
                    np.where(masks, logits[::repeats, depth], -np.inf),
                    prefixes,
                    prompt_length,
                    group.warp,
                )
            )
        return Conditionals(tuple(rows)).joint()

    def fit(self, requests: Sequence[Request], run: Run) -> Fit:
        """Compare the answers with the exact distribution.

        A text that ends early is counted as if ends followed it.
        """
        fit, counts = Fit(), dict[Group, Ints]()
        for request, answer in zip(requests, run.answers, strict=True):
            assert answer.finish in (FinishReason.STOP, FinishReason.LENGTH), answer.error
            text = (*answer.tokens, *[END] * COUNTED)[:COUNTED]
            own = counts.setdefault(
                Group(request.prompt, request.warp), np.zeros(VOCAB**COUNTED, np.int64)
            )
            own[int(np.ravel_multi_index(text, (VOCAB,) * COUNTED))] += 1
        for group, own in counts.items():
            fit.add(own, self.joint(group))
        return fit


def requests(
    verifier: str,
    samples: int,
    *,
    first_seed: int,
    warps: str = "T = 1",
    max_tokens: int = COUNTED + 4,
) -> list[Request]:
    """Return requests with mixed prompts and warps; with "each", verifiers are mixed too."""
    groups = [Group(prompt, warp) for warp in WARPS[warps] for prompt in PROMPTS]
    found = []
    for i in range(samples):
        group = groups[i % len(groups)]
        name = VERIFIERS[i // len(groups) % len(VERIFIERS)] if verifier == "each" else verifier
        found.append(
            Request(
                group.prompt,
                max_tokens,
                group.warp,
                first_seed + i,
                speculation=Speculation(verifier=name),
                grammar=GRAMMAR,
            )
        )
    return found


def run_requests(
    engine: Engine, asked: Sequence[Request], gamma: int | None, **options: Any
) -> Run:
    """Run all requests; gamma None is another gamma for each sequence in each round."""
    pacer = RandomPacer(max_gamma=MAX_GAMMA, seed=len(asked)) if gamma is None else None
    limits = {
        "max_running": 256,
        "max_queued": len(asked),
        "max_batch_tokens": 4096,
        "max_gamma": MAX_GAMMA,
    }
    return engine.run(asked, pacer=pacer, gamma=gamma, **limits | options)


def tiny_pairs(directory: Path) -> Pairs:
    pairs, grammar_compiler = Pairs(directory), tiny_grammars()
    for engine in pairs.engines.values():
        constrain_engine(engine, grammar_compiler)
    return pairs
