"""Continuations under a grammar, sampled through whole engines over the tiny pairs, and their exact distribution by enumeration.

What the grammar allows is asked here of a matcher that has read the text from its beginning, and has never gone back.
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
from specserve.grammar.matcher import Grammars
from specserve.types import VERIFIERS, Finish, Grammar, Request, Speculation
from tests.support.chi_square import Fit
from tests.support.continuations import COUNTED, MAX_GAMMA, PROMPTS, VOCAB, WARPS, Group, Pairs
from tests.support.engines import Engine, RandomPacer, Run
from tests.support.exact_distribution import Conditionals, Ints, texts_of, warped

TOKENS = (b"a", b"b", b"<end>", b"ab", b"c", b"ca", b"bc", b"d")
END = 2
GRAMMAR = Grammar(
    "regex", "(ab|c)*(dd(b|c))?"
)  # `ab` and `abc` may be spelt in several ways; behind a `d`, another is forced
LONG = Grammar("regex", "(a|b|c){30}d*")


class Spelling:
    """The tokens of the tiny models, spelt by the longest that fits."""

    eos_token_id, bos_token_id, tokens, special_token_ids = END, None, TOKENS, [END]

    def __call__(self, text: str | bytes) -> list[int]:
        left, found = text if isinstance(text, bytes) else text.encode(), []
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
    return LLTokenizer(TokenizerWrapper(Spelling()), eos_token=[END])


def tiny_grammars() -> Grammars:
    return Grammars(tiny_tokenizer, end_ids=frozenset({END}))


@cache
def _tokenizer() -> LLTokenizer:
    return tiny_tokenizer()


@cache
def allowed(text: tuple[int, ...], grammar: Grammar = GRAMMAR) -> NDArray[np.bool_]:  # [VOCAB]
    """Behind an end, or what is no such text, only an end: what is not written is counted so."""
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


def obey(engine: Engine, grammars: Grammars | None) -> Engine:
    """Target and drafter know the tokenizer of the tiny models; with None, the drafter's guesses look at no grammar."""
    engine.target.parses.grammars = grammars or tiny_grammars()
    for parses in _parses_of(engine):
        if parses is not engine.target.parses:
            parses.grammars = grammars
    return engine


def _parses_of(engine: Engine) -> list[Any]:
    cascade = getattr(engine, "cascade", None)
    stages = (
        cascade._stages
        if cascade is not None
        else []
        if engine.drafter is None
        else [engine.drafter]
    )
    return [
        stage.parses if isinstance(stage, NeuralDrafter) else stage._parses
        for stage in stages
        if hasattr(stage, "parses") or hasattr(stage, "_parses")
    ]


class Exact:
    """The distribution of texts under the grammar, the library's own model being the target."""

    def __init__(self, pairs: Pairs, grammar: Grammar = GRAMMAR) -> None:
        self._pairs, self._grammar = pairs, grammar
        self.joint = cache(self._joint)

    def _joint(self, group: Group) -> NDArray[np.float64]:
        texts = texts_of(group.prompt, COUNTED - 1, VOCAB)
        logits, begun, rows = (
            self._pairs._target._logits(texts, last=COUNTED),
            len(group.prompt),
            [],
        )
        for depth in range(COUNTED):
            repeats = VOCAB ** (COUNTED - 1 - depth)
            prefixes = texts[::repeats, : begun + depth]
            masks = np.array(
                [allowed(tuple(prefix[begun:].tolist()), self._grammar) for prefix in prefixes]
            )
            rows.append(
                warped(
                    np.where(masks, logits[::repeats, depth], -np.inf), prefixes, begun, group.warp
                )
            )
        return Conditionals(tuple(rows)).joint()

    def fit(self, requests: Sequence[Request], run: Run) -> Fit:
        """A text that ends early is counted as if ends followed it."""
        fit, counts = Fit(), dict[Group, Ints]()
        for request, answer in zip(requests, run.answers, strict=True):
            assert answer.finish in (Finish.STOP, Finish.LENGTH), answer.error
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
    """Prompts and warps side by side; with "each", verifiers too."""
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


def written(engine: Engine, asked: Sequence[Request], gamma: int | None, **options: Any) -> Run:
    """All of them; gamma None is another for each sequence in each round."""
    pacer = RandomPacer(max_gamma=MAX_GAMMA, seed=len(asked)) if gamma is None else None
    limits = {
        "max_running": 256,
        "max_queued": len(asked),
        "max_batch_tokens": 4096,
        "max_gamma": MAX_GAMMA,
    }
    return engine.run(asked, pacer=pacer, gamma=gamma, **limits | options)


def tiny_pairs(directory: Path) -> Pairs:
    pairs, grammars = Pairs(directory), tiny_grammars()
    for engine in pairs.engines.values():
        obey(engine, grammars)
    return pairs
