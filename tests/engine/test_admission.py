"""Admission of requests whose token rule leaves no token, and the model's end tokens in rules."""

from __future__ import annotations

import pytest

from specserve.config.sections import SpeculationConfig
from specserve.engine.admission import Admission
from specserve.errors import BadValue
from specserve.types import ModelInfo, Request, Speculation, TokenRule, Warp

VOCAB, END = 8, 2
INFO = ModelInfo(VOCAB, 64, frozenset([END]), page_size=4, num_pages=100)


def request(rule: TokenRule) -> Request:
    return Request((1, 2, 3), 9, Warp(rule=rule), seed=1)


@pytest.fixture
def admission() -> Admission:
    return Admission(INFO, SpeculationConfig())


def test_the_model_s_end_tokens_are_forbidden_along_with_stop_tokens(admission: Admission) -> None:
    rule = TokenRule(min_tokens=3, end_ids=(5,), bad_words=((1,),))
    found = admission.policy(request(rule)).warp.rule
    assert found == TokenRule(3, (END, 5), ((1,),))
    other = TokenRule(allowed_ids=(END,))
    assert admission.policy(request(other)).warp.rule == other, "the text may end at once"


@pytest.mark.parametrize(
    ("rule", "param"),
    [
        (TokenRule(1, (), (), (END,)), "allowed_token_ids"),
        (TokenRule(1, (5,), (), (END, 5)), "allowed_token_ids"),
        (TokenRule(0, (), ((1,), (3,)), (1, 3)), "allowed_token_ids"),
        (TokenRule(1, (), ((1,),), (1, END)), "allowed_token_ids"),
        (TokenRule(0, (), tuple((token,) for token in range(VOCAB))), "bad_words"),
        (TokenRule(1, (), tuple((token,) for token in range(VOCAB) if token != END)), "bad_words"),
    ],
)
def test_a_rule_that_leaves_no_first_token_is_refused(
    admission: Admission, rule: TokenRule, param: str
) -> None:
    with pytest.raises(BadValue, match="leaves no token to write") as refusal:
        admission.check(request(rule))
    assert refusal.value.param == param


@pytest.mark.parametrize(
    "rule",
    [
        TokenRule(0, (), (), (END,)),
        TokenRule(1, (), (), (END, 1)),
        TokenRule(0, (), ((1, 1), (1, 3), (3,)), (1, 3)),
        TokenRule(0, (), tuple((token,) for token in range(VOCAB - 1))),
    ],
)
def test_a_rule_that_leaves_a_first_token_is_taken(admission: Admission, rule: TokenRule) -> None:
    admission.check(request(rule))


@pytest.mark.parametrize(
    ("server", "seeded", "asked", "expected"),
    [
        (None, False, None, "block"),
        (None, True, None, "coupled"),
        ("speculative", False, None, "speculative"),
        ("speculative", True, None, "coupled"),
        (None, True, "lenient", "lenient"),
    ],
)
def test_a_request_gets_its_own_verifier_or_the_one_for_its_seed_or_the_server_s(
    server: str | None, seeded: bool, asked: str | None, expected: str
) -> None:
    admission = Admission(INFO, SpeculationConfig(verifier=server))
    own = Request((1, 2), 9, Warp(), seed=1, seeded=seeded, speculation=Speculation(verifier=asked))
    assert admission.policy(own).verifier == expected
