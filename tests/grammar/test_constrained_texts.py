"""Texts under a grammar, through whole engines.

They have the target's distribution, constrained and renormalised, with any drafter.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from torch import Tensor

from specserve.drafters.ngram.build import open_ngram_drafter
from specserve.errors import BadValue
from specserve.grammar.matcher import GrammarCompiler
from specserve.types import (
    VERIFIERS,
    FinishReason,
    Grammar,
    Request,
    Speculation,
    Step,
    Verdict,
    VerifyStep,
    Warp,
)
from tests.support.cascade_engines import Cascades
from tests.support.constrained_texts import (
    END,
    GRAMMAR,
    LONG,
    TOKENS,
    ConstrainedDistribution,
    allowed,
    constrain_engine,
    requests,
    run_requests,
    tiny_grammars,
    tiny_pairs,
)
from tests.support.continuations import PROMPTS, WARPS, Pairs
from tests.support.engines import GREEDY, Engine, Run
from tests.support.self_speculative_engines import SelfSpeculativePairs

SAMPLES = 600  # of each case
SEED = 1 << 45
FAIL_BELOW = 1e-4  # p-value


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    return tiny_pairs(tmp_path_factory.mktemp("constrained"))


@pytest.fixture(scope="module")
def exact(pairs: Pairs) -> ConstrainedDistribution:
    return ConstrainedDistribution(pairs)


def text_of(tokens: tuple[int, ...]) -> str:
    return b"".join(TOKENS[token] for token in tokens if token != END).decode()


def check_finished(run: Run) -> int:
    """Check that texts which ended by themselves follow the grammar, and count them."""
    done = [answer.tokens for answer in run.answers if answer.finish is FinishReason.STOP]
    assert all(tokens[-1] == END and tokens.count(END) == 1 for tokens in done)
    assert all(re.fullmatch(GRAMMAR.text, text_of(tokens)) for tokens in done)
    return len(done)


CASES = [
    *[
        (verifier, drafter, gamma)
        for verifier in VERIFIERS
        for drafter, gamma in (("full", 1), ("full", 4), ("top 3", None))
    ],
    ("each", "none", 0),
    ("each", "7 of 8 ids", 4),
    ("each", "ahead", None),
]


@pytest.mark.parametrize(("verifier", "drafter", "gamma"), CASES)
def test_sampled_texts_have_the_distribution_of_the_constrained_target(
    pairs: Pairs, exact: ConstrainedDistribution, verifier: str, drafter: str, gamma: int | None
) -> None:
    number = CASES.index((verifier, drafter, gamma))
    asked = requests(verifier, SAMPLES, first_seed=SEED + number * SAMPLES)
    run = run_requests(pairs.engines[drafter], asked, gamma)
    assert check_finished(run) > SAMPLES // 2
    assert run.accepted > 0 or drafter == "none"
    assert exact.fit(asked, run).p_value > FAIL_BELOW


def test_warps_apply_after_the_grammar_mask(pairs: Pairs, exact: ConstrainedDistribution) -> None:
    asked = requests("each", 2 * SAMPLES, first_seed=SEED * 2, warps="mixed")
    assert exact.fit(asked, run_requests(pairs.engines["full"], asked, None)).p_value > FAIL_BELOW


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_drafts_that_know_no_grammar_are_rejected_and_change_nothing(
    pairs: Pairs, exact: ConstrainedDistribution, verifier: str
) -> None:
    asked = requests(verifier, SAMPLES, first_seed=SEED * 3 + VERIFIERS.index(verifier) * SAMPLES)
    compiler = pairs.engines["full"].target.grammar_states.grammar_compiler
    constrained = run_requests(pairs.engines["full"], asked, 3)
    try:
        blind = run_requests(constrain_engine(pairs.engines["full"], None), asked, 3)
    finally:
        constrain_engine(pairs.engines["full"], compiler)
    assert blind.accepted / blind.drafted < constrained.accepted / constrained.drafted
    assert exact.fit(asked, blind).p_value > FAIL_BELOW


def test_preempted_sequences_continue_under_their_grammar(pairs: Pairs) -> None:
    asked = [
        replace(request, grammar=LONG)
        for request in requests("each", SAMPLES, first_seed=SEED * 4, max_tokens=24)
    ]
    run = run_requests(pairs.engines["full"], asked, 4)
    assert run.num_preempted > 0
    assert all(re.fullmatch("[abc]{24,30}d*", text_of(tokens)) for tokens in run.texts)
    assert ConstrainedDistribution(pairs, LONG).fit(asked, run).p_value > FAIL_BELOW


@pytest.mark.parametrize("kind", ["vertical", "cascade", "cascade ahead"])
def test_cascades_stay_exact(tmp_path_factory: pytest.TempPathFactory, kind: str) -> None:
    cascades = Cascades(tmp_path_factory.mktemp("cascades"))
    engine = constrain_engine(cascades.engines[kind], tiny_grammars())
    asked = requests("each", SAMPLES, first_seed=SEED * 5)
    run = run_requests(engine, asked, None)
    assert run.accepted > 0
    assert ConstrainedDistribution(cascades).fit(asked, run).p_value > FAIL_BELOW


@pytest.mark.parametrize("kind", ["layer_skip", "top 3 heads"])
def test_self_speculative_drafters_stay_exact(
    tmp_path_factory: pytest.TempPathFactory, kind: str
) -> None:
    tied = SelfSpeculativePairs(tmp_path_factory.mktemp("tied"))
    asked = requests("each", SAMPLES, first_seed=SEED * 6)
    run = run_requests(constrain_engine(tied.engines[kind], tiny_grammars()), asked, 3)
    assert run.accepted > 0
    assert ConstrainedDistribution(tied).fit(asked, run).p_value > FAIL_BELOW


@pytest.mark.parametrize("kind", ["max_gram", "random"])
def test_statistical_drafters_stay_exact(
    pairs: Pairs, exact: ConstrainedDistribution, kind: str
) -> None:
    engine = pairs.engines["none"]
    drafter = open_ngram_drafter(
        kind,
        path=None,
        learn=None,
        support=4,
        vocab_size=8,
        grammar_compiler=engine.target.grammar_states.grammar_compiler,
    )
    asked = requests("each", SAMPLES, first_seed=SEED * 7)
    run = run_requests(engine, asked, 3, with_drafter=drafter)
    assert run.accepted > 0
    assert exact.fit(asked, run).p_value > FAIL_BELOW


def plain_greedy(
    exact: ConstrainedDistribution, prompt: tuple[int, ...], max_tokens: int
) -> tuple[int, ...]:
    """Decode token by token, with the library's model and a fresh matcher."""
    text: tuple[int, ...] = ()
    while len(text) < max_tokens and END not in text:
        logits = exact._pairs._target._logits(np.array([[*prompt, *text]]), last=1)[0, 0]
        text += (int(np.where(allowed(text), logits, -np.inf).argmax()),)
    return text


@pytest.mark.parametrize("drafter", ["full", "top 3", "ahead", "none"])
@pytest.mark.parametrize("gamma", [0, 1, 4])
def test_greedy_texts_are_those_of_plain_constrained_decoding(
    pairs: Pairs, exact: ConstrainedDistribution, drafter: str, gamma: int
) -> None:
    asked = [
        Request(prompt, 20, GREEDY, seed, grammar=GRAMMAR) for seed, prompt in enumerate(PROMPTS)
    ]
    assert run_requests(pairs.engines[drafter], asked, gamma).texts == [
        plain_greedy(exact, prompt, 20) for prompt in PROMPTS
    ]


@pytest.mark.parametrize("drafter", ["full", "top 3", "7 of 8 ids", "ahead"])
def test_a_seed_gives_the_same_text_with_any_drafter_and_gamma(pairs: Pairs, drafter: str) -> None:
    asked = [
        replace(request, seeded=True)
        for request in requests("coupled", 60, first_seed=SEED * 8, max_tokens=20)
    ]
    plain = run_requests(pairs.engines["none"], asked, 0)
    assert len({answer.tokens for answer in plain.answers}) > 5
    assert run_requests(pairs.engines[drafter], asked, None).texts == plain.texts


def test_a_text_resumes_where_another_engine_left_it(pairs: Pairs) -> None:
    asked = [
        replace(request, seeded=True)
        for request in requests("coupled", 60, first_seed=SEED * 9, max_tokens=20)
    ]
    whole = run_requests(pairs.engines["full"], asked, 3)
    rest = [
        replace(request, generated=text[: len(text) // 2])
        for request, text in zip(asked, whole.texts, strict=True)
    ]
    again = run_requests(pairs.engines["full"], rest, 3)
    assert [
        (*request.generated, *text) for request, text in zip(rest, again.texts, strict=True)
    ] == whole.texts


@pytest.mark.parametrize("drafter", ["full", "ahead"])
def test_chunked_prompts_keep_their_grammar(
    pairs: Pairs, exact: ConstrainedDistribution, drafter: str
) -> None:
    asked = [
        Request(prompt, 20, GREEDY, seed, grammar=GRAMMAR) for seed, prompt in enumerate(PROMPTS)
    ]
    run = run_requests(pairs.engines[drafter], asked, 3, max_batch_tokens=8)
    assert run.texts == [plain_greedy(exact, prompt, 20) for prompt in PROMPTS]


@pytest.mark.parametrize("lost", ["target", "drafter", "both"])
def test_restarted_workers_receive_the_grammar_again(pairs: Pairs, lost: str) -> None:
    """The workers drop all cached sequences, the target in the middle of a pass."""
    engine = pairs.engines["full"]
    assert engine.drafter is not None
    drafter = engine.drafter
    asked = [
        replace(request, seeded=True, grammar=LONG)
        for request in requests("coupled", 12, first_seed=SEED * 12, max_tokens=24)
    ]
    whole = run_requests(engine, asked, 3)
    calls, verify = itertools.count(), engine.target.verify

    def failing(steps: Sequence[VerifyStep]) -> Sequence[Verdict]:
        if next(calls) in (3, 7):
            if lost != "target":
                drafter.release(range(12))
            if lost != "drafter":
                engine.target.release(range(12))
                raise RuntimeError("the target died")
        return verify(steps)

    with patch.object(engine.target, "verify", failing):
        assert run_requests(engine, asked, 3).texts == whole.texts


@pytest.mark.parametrize("refused", [{"ignore_eos": True}])
def test_parameters_that_exclude_a_grammar_are_refused_before_queueing(
    pairs: Pairs, refused: dict[str, Any]
) -> None:
    with pytest.raises(BadValue, match="ignore_eos does not go with a grammar"):
        run_requests(
            pairs.engines["none"],
            [Request(PROMPTS[0], 9, Warp(), 5, grammar=GRAMMAR, **refused)],
            0,
        )


FORCED = Grammar("regex", "abcdcabdcaab(c|d)")


def test_forced_tokens_are_drafted_without_a_pass_and_accepted(pairs: Pairs) -> None:
    engine = pairs.engines["full"]
    assert engine.drafter is not None
    passes, run = list[int](), engine.drafter.runner.run

    def recorded(steps: Sequence[Step], num_logits: Sequence[int]) -> Tensor:
        passes.append(sum(num_logits))
        return run(steps, num_logits)

    speculation = Speculation(verifier="speculative")
    request = Request(PROMPTS[0], 20, Warp(), 3, speculation=speculation, grammar=FORCED)
    with patch.object(engine.drafter.runner, "run", recorded):
        done = run_requests(engine, [request], 4)
    (answer,) = done.answers
    assert text_of(answer.tokens)[:-1] == "abcdcabdcaab"
    assert done.accepted >= done.drafted - 1  # only the last token is a free choice
    assert sum(passes) <= 2  # rows that a draft token was drawn from


def test_unconstrained_neighbours_generate_what_they_generate_alone(pairs: Pairs) -> None:
    free = [
        Request(prompt, 12, warp, 7 + i, seeded=True)
        for i, warp in enumerate(WARPS["mixed"])
        for prompt in PROMPTS
    ]
    bound = requests("each", len(free), first_seed=SEED * 10)
    alone = run_requests(pairs.engines["full"], free, 3)
    together = run_requests(
        pairs.engines["full"], [one for both in zip(free, bound, strict=True) for one in both], 3
    )
    assert together.texts[::2] == alone.texts
    check_finished(Run(together.answers[1::2]))


@pytest.mark.parametrize("drafter", ["full", "ahead", "none"])
def test_a_grammar_that_cannot_be_followed_fails_its_request_alone(
    pairs: Pairs, drafter: str
) -> None:
    broken = [
        Grammar("lark", "start: <|nothing|>"),
        Grammar("json_schema", '{"$ref": "#"}'),
        Grammar("regex", "é"),
        Grammar("regex", "a("),
    ]
    asked = [Request(PROMPTS[0], 9, Warp(), 5, grammar=grammar) for grammar in broken] + requests(
        "block", 6, first_seed=SEED * 11
    )
    run = run_requests(pairs.engines[drafter], asked, 3)
    assert [answer.finish for answer in run.answers[:4]] == [FinishReason.ERROR] * 4
    assert all(answer.error and not answer.tokens for answer in run.answers[:4])
    check_finished(Run(run.answers[4:]))
    assert all(answer.error is None for answer in run.answers[4:])


@pytest.mark.parametrize("drafter", ["full", "ahead", "none"])
def test_texts_are_the_same_if_their_grammars_are_compiled_late(
    pairs: Pairs, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seeded texts: each grammar is found to be compiled when it has been requested four times."""
    asked = [
        replace(request, seeded=True)
        for request in requests("coupled", 12, first_seed=SEED * 14, max_tokens=9)
    ]
    asked = [replace(one, grammar=LONG) if i % 3 == 0 else one for i, one in enumerate(asked)]
    engine = pairs.engines[drafter]
    expected = run_requests(engine, asked, 3)
    num_asked, is_ready = Counter[Grammar](), GrammarCompiler.is_ready

    def is_ready_late(
        compiler: GrammarCompiler, grammar: Grammar, *, until: float = -math.inf
    ) -> bool:
        num_asked[grammar] += 1
        return num_asked[grammar] > 3 and is_ready(compiler, grammar, until=math.inf)

    monkeypatch.setattr(GrammarCompiler, "is_ready", is_ready_late)
    late = run_requests(engine, asked, 3)
    assert late.texts == expected.texts
    assert num_asked[LONG] > 3


def test_logprobs_are_those_of_the_model_without_its_grammar(pairs: Pairs) -> None:
    request = Request(PROMPTS[0], 6, GREEDY, 5, grammar=FORCED, logprobs=8)
    found: list[Verdict] = []
    engine: Engine = pairs.engines["none"]
    verify = engine.target.verify

    def recorded(steps: Sequence[VerifyStep]) -> Sequence[Verdict]:
        verdicts = verify(steps)
        found.extend(verdicts)
        return verdicts

    with patch.object(engine.target, "verify", recorded):
        run_requests(engine, [request], 0)
    assert found
    assert all(verdict.logprobs is not None for verdict in found)
    assert all(
        np.isfinite(row.top).all() and abs(np.exp(row.top).sum() - 1) < 1e-4
        for verdict in found
        for row in verdict.logprobs or ()
    )
