"""Texts under a grammar, through whole engines: the distribution is the target's, constrained and renormalised, whatever drafts."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest

from specserve.drafters.ngram.build import open_statistical
from specserve.errors import BadValue
from specserve.types import VERIFIERS, Finish, Grammar, Request, Speculation, Warp
from tests.support.cascade_engines import Cascades
from tests.support.constrained_texts import (
    END,
    GRAMMAR,
    LONG,
    TOKENS,
    Exact,
    allowed,
    obey,
    requests,
    tiny_grammars,
    tiny_pairs,
    written,
)
from tests.support.continuations import PROMPTS, WARPS, Pairs
from tests.support.engines import GREEDY, Engine, Run
from tests.support.self_speculative_engines import TiedPairs

SAMPLES, SEED, ALARM = 600, 1 << 45, 1e-4


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    return tiny_pairs(tmp_path_factory.mktemp("constrained"))


@pytest.fixture(scope="module")
def exact(pairs: Pairs) -> Exact:
    return Exact(pairs)


def text_of(tokens: tuple[int, ...]) -> str:
    return b"".join(TOKENS[token] for token in tokens if token != END).decode()


def check_finished(run: Run) -> int:
    """What ended by itself is of the grammar; how many did."""
    done = [answer.tokens for answer in run.answers if answer.finish is Finish.STOP]
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
    pairs: Pairs, exact: Exact, verifier, drafter, gamma
):
    number = CASES.index((verifier, drafter, gamma))
    asked = requests(verifier, SAMPLES, first_seed=SEED + number * SAMPLES)
    run = written(pairs.engines[drafter], asked, gamma)
    assert check_finished(run) > SAMPLES // 2
    assert run.accepted > 0 or drafter == "none"
    assert exact.fit(asked, run).p_value > ALARM


def test_warps_of_all_kinds_apply_to_what_the_grammar_leaves(pairs: Pairs, exact: Exact):
    asked = requests("each", 2 * SAMPLES, first_seed=SEED * 2, warps="mixed")
    assert exact.fit(asked, written(pairs.engines["full"], asked, None)).p_value > ALARM


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_drafts_that_know_no_grammar_are_refused_and_change_nothing(
    pairs: Pairs, exact: Exact, verifier
):
    asked = requests(verifier, SAMPLES, first_seed=SEED * 3 + VERIFIERS.index(verifier) * SAMPLES)
    known = pairs.engines["full"].target.parses.grammars
    lawful = written(pairs.engines["full"], asked, 3)
    try:
        blind = written(obey(pairs.engines["full"], None), asked, 3)
    finally:
        obey(pairs.engines["full"], known)
    assert blind.accepted / blind.drafted < lawful.accepted / lawful.drafted
    assert exact.fit(asked, blind).p_value > ALARM


def test_sequences_that_lose_their_pages_in_mid_text_go_on_under_their_grammar(pairs: Pairs):
    asked = [
        replace(request, grammar=LONG)
        for request in requests("each", SAMPLES, first_seed=SEED * 4, max_tokens=24)
    ]
    run = written(pairs.engines["full"], asked, 4)
    assert run.num_preempted > 0
    assert all(re.fullmatch("[abc]{24,30}d*", text_of(tokens)) for tokens in run.texts)
    assert Exact(pairs, LONG).fit(asked, run).p_value > ALARM


@pytest.mark.parametrize("kind", ["vertical", "cascade", "cascade ahead"])
def test_cascades_stay_exact(tmp_path_factory: pytest.TempPathFactory, kind):
    cascades = Cascades(tmp_path_factory.mktemp("cascades"))
    engine = obey(cascades.engines[kind], tiny_grammars())
    asked = requests("each", SAMPLES, first_seed=SEED * 5)
    run = written(engine, asked, None)
    assert run.accepted > 0
    assert Exact(cascades).fit(asked, run).p_value > ALARM


@pytest.mark.parametrize("kind", ["layer_skip", "top 3 heads"])
def test_drafters_tied_to_the_target_stay_exact(tmp_path_factory: pytest.TempPathFactory, kind):
    tied = TiedPairs(tmp_path_factory.mktemp("tied"))
    asked = requests("each", SAMPLES, first_seed=SEED * 6)
    run = written(obey(tied.engines[kind], tiny_grammars()), asked, 3)
    assert run.accepted > 0
    assert Exact(tied).fit(asked, run).p_value > ALARM


@pytest.mark.parametrize("kind", ["max_gram", "random"])
def test_copies_and_tables_stay_exact(pairs: Pairs, exact: Exact, kind):
    engine = pairs.engines["none"]
    drafter = open_statistical(
        kind, path=None, learn=None, support=4, vocab_size=8, grammars=engine.target.parses.grammars
    )
    asked = requests("each", SAMPLES, first_seed=SEED * 7)
    run = written(engine, asked, 3, with_drafter=drafter)
    assert run.accepted > 0
    assert exact.fit(asked, run).p_value > ALARM


def plain_greedy(exact: Exact, prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    """Token by token, by the library's model and a fresh matcher."""
    text: tuple[int, ...] = ()
    while len(text) < max_tokens and END not in text:
        logits = exact._pairs._target._logits(np.array([[*prompt, *text]]), last=1)[0, 0]
        text += (int(np.where(allowed(text), logits, -np.inf).argmax()),)
    return text


@pytest.mark.parametrize("drafter", ["full", "top 3", "ahead", "none"])
@pytest.mark.parametrize("gamma", [0, 1, 4])
def test_greedy_texts_are_those_of_plain_constrained_decoding(
    pairs: Pairs, exact: Exact, drafter, gamma
):
    asked = [
        Request(prompt, 20, GREEDY, seed, grammar=GRAMMAR) for seed, prompt in enumerate(PROMPTS)
    ]
    assert written(pairs.engines[drafter], asked, gamma).texts == [
        plain_greedy(exact, prompt, 20) for prompt in PROMPTS
    ]


@pytest.mark.parametrize("drafter", ["full", "top 3", "7 of 8 ids", "ahead"])
def test_a_seed_gives_the_same_text_with_any_drafter_and_gamma(pairs: Pairs, drafter):
    asked = [
        replace(request, seeded=True)
        for request in requests("coupled", 60, first_seed=SEED * 8, max_tokens=20)
    ]
    plain = written(pairs.engines["none"], asked, 0)
    assert len({answer.tokens for answer in plain.answers}) > 5
    assert written(pairs.engines[drafter], asked, None).texts == plain.texts


def test_a_text_goes_on_where_another_engine_left_it(pairs: Pairs):
    asked = [
        replace(request, seeded=True)
        for request in requests("coupled", 60, first_seed=SEED * 9, max_tokens=20)
    ]
    whole = written(pairs.engines["full"], asked, 3)
    rest = [
        replace(request, written=text[: len(text) // 2])
        for request, text in zip(asked, whole.texts, strict=True)
    ]
    again = written(pairs.engines["full"], rest, 3)
    assert [
        (*request.written, *text) for request, text in zip(rest, again.texts, strict=True)
    ] == whole.texts


@pytest.mark.parametrize("drafter", ["full", "ahead"])
def test_long_prompts_come_in_chunks_and_the_grammar_with_the_first(
    pairs: Pairs, exact: Exact, drafter
):
    asked = [
        Request(prompt, 20, GREEDY, seed, grammar=GRAMMAR) for seed, prompt in enumerate(PROMPTS)
    ]
    run = written(pairs.engines[drafter], asked, 3, max_batch_tokens=8)
    assert run.texts == [plain_greedy(exact, prompt, 20) for prompt in PROMPTS]


@pytest.mark.parametrize("lost", ["target", "drafter", "both"])
def test_workers_that_start_anew_are_told_the_grammar_again(pairs: Pairs, lost):
    """They forget all that they held, the target in the middle of a pass."""
    engine = pairs.engines["full"]
    asked = [
        replace(request, seeded=True, grammar=LONG)
        for request in requests("coupled", 12, first_seed=SEED * 12, max_tokens=24)
    ]
    whole = written(engine, asked, 3)
    calls, verify = itertools.count(), engine.target.verify

    def failing(steps):
        if next(calls) in (3, 7):
            if lost != "target":
                engine.drafter.release(range(12))
            if lost != "drafter":
                engine.target.release(range(12))
                raise RuntimeError("struck")
        return verify(steps)

    engine.target.verify = failing
    try:
        assert written(engine, asked, 3).texts == whole.texts
    finally:
        del engine.target.verify


@pytest.mark.parametrize("refused", [{"ignore_eos": True}])
def test_what_does_not_go_with_a_grammar_is_refused_before_it_is_queued(pairs: Pairs, refused):
    with pytest.raises(BadValue, match="ignore_eos does not go with a grammar"):
        written(
            pairs.engines["none"],
            [Request(PROMPTS[0], 9, Warp(), 5, grammar=GRAMMAR, **refused)],
            0,
        )


FORCED = Grammar("regex", "abcdcabdcaab(c|d)")


def test_what_is_forced_is_drafted_without_a_pass_and_accepted(pairs: Pairs):
    engine = pairs.engines["full"]
    passes, run = [], engine.drafter.runner.run
    engine.drafter.runner.run = lambda steps, wanted: (
        passes.append(sum(wanted)),
        run(steps, wanted),
    )[1]
    try:
        done = written(
            engine,
            [
                Request(
                    PROMPTS[0],
                    20,
                    Warp(),
                    3,
                    speculation=Speculation(verifier="speculative"),
                    grammar=FORCED,
                )
            ],
            4,
        )
    finally:
        del engine.drafter.runner.run
    (answer,) = done.answers
    assert text_of(answer.tokens)[:-1] == "abcdcabdcaab"
    assert done.accepted >= done.drafted - 1  # only the last choice is anyone's guess
    assert sum(passes) <= 2  # of those that draw


def test_neighbours_without_a_grammar_write_what_they_write_alone(pairs: Pairs):
    free = [
        Request(prompt, 12, warp, 7 + i, seeded=True)
        for i, warp in enumerate(WARPS["mixed"])
        for prompt in PROMPTS
    ]
    bound = requests("each", len(free), first_seed=SEED * 10)
    alone = written(pairs.engines["full"], free, 3)
    together = written(
        pairs.engines["full"], [one for both in zip(free, bound, strict=True) for one in both], 3
    )
    assert together.texts[::2] == alone.texts
    check_finished(Run(together.answers[1::2]))


@pytest.mark.parametrize("drafter", ["full", "ahead", "none"])
def test_a_grammar_that_cannot_be_followed_fails_its_request_alone(pairs: Pairs, drafter):
    broken = [
        Grammar("lark", "start: <|nothing|>"),
        Grammar("json_schema", '{"$ref": "#"}'),
        Grammar("regex", "é"),
        Grammar("regex", "a("),
    ]
    asked = [Request(PROMPTS[0], 9, Warp(), 5, grammar=grammar) for grammar in broken] + requests(
        "block", 6, first_seed=SEED * 11
    )
    run = written(pairs.engines[drafter], asked, 3)
    assert [answer.finish for answer in run.answers[:4]] == [Finish.ERROR] * 4
    assert all(answer.error and not answer.tokens for answer in run.answers[:4])
    check_finished(Run(run.answers[4:]))
    assert all(answer.error is None for answer in run.answers[4:])


def test_logprobs_are_those_of_the_model_without_its_grammar(pairs: Pairs):
    request = Request(PROMPTS[0], 6, GREEDY, 5, grammar=FORCED, logprobs=8)
    found = []
    engine: Engine = pairs.engines["none"]
    judge = engine.target.verify
    engine.target.verify = lambda steps: (verdicts := judge(steps), found.extend(verdicts))[0]
    try:
        written(engine, [request], 0)
    finally:
        del engine.target.verify
    assert found
    assert all(
        np.isfinite(row.top).all() and abs(np.exp(row.top).sum() - 1) < 1e-4
        for verdict in found
        for row in verdict.logprobs
    )
