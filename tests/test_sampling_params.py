"""The sampling parameters of a request: ranges, errors, and the requests made of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from specserve.errors import BadValue
from specserve.sampling_params import Sampling, random_seed
from specserve.types import Speculation, TokenRule, Warp

HALF: Any = 2.5


def test_the_defaults_are_plain_sampling_of_sixteen_tokens() -> None:
    (request,) = Sampling().requests([1, 2], lambda: 7)
    assert request.prompt == (1, 2)
    assert request.max_tokens == 16
    assert request.warp == Warp()
    assert (request.seed, request.seeded) == (7, False)
    assert request.logprobs is None
    assert request.speculation == Speculation()


def test_every_parameter_reaches_the_request() -> None:
    biases: Any = {"7": 3, 8: -2.5}
    sampling = Sampling(
        max_tokens=3,
        temperature=0.5,
        top_p=0.9,
        top_k=4,
        min_p=0.1,
        stop_token_ids=[5, 6],
        ignore_eos=True,
        seed=9,
        logprobs=2,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.5,
        logit_bias=biases,
        speculation={"gamma": 4, "verifier": "block"},
    )
    (request,) = sampling.requests([1])
    assert request.warp == Warp(0.5, 4, 0.9, 0.1, 1.0, -1.0, 1.5, ((7, 3.0), (8, -2.5)))
    assert request.stop_token_ids == {5, 6}
    assert (request.max_tokens, request.ignore_eos, request.logprobs) == (3, True, 2)
    assert (request.seed, request.seeded) == (9, True)
    assert request.speculation == Speculation(gamma=4, verifier="block")


@pytest.mark.parametrize(
    ("name", "values"),
    {
        "max_tokens": [0, -1, 1.5, True, None, "3", math.nan],
        "temperature": [-0.1, math.nan, math.inf, -math.inf, None, "hot", True, 101, 10**400],
        "top_p": [0, -0.5, 1.01, math.nan, None, "1"],
        "top_k": [-2, 1.0, True, None],
        "min_p": [-0.1, 1.1, math.nan],
        "n": [0, -1, 129, 1.0, True],
        "stop": ["", [""], ["a", ""], 5, [5], ["a"] * 17, "x" * 1025, {"a": 1}],
        "stop_token_ids": [5, "5", [-1], [1.5], [True], ["a"], [2**40], {"a": 1}],
        "ignore_eos": [1, None, "yes"],
        "min_tokens": [-1, 17, 1.5, True, "3", None],
        "bad_words": [
            5,
            "word",
            [""],
            ["  "],
            [5],
            ["a", None],
            ["x" * 65],
            ["a"] * 129,
            {"a": 1},
        ],
        "allowed_token_ids": [[], 5, "5", [-1], [1.5], [True], [2**40], {"a": 1}, [1] * 1025],
        "priority": [1.5, True, "high", None, 2**31, -(2**31)],
        "seed": [1.5, "1", True, 2**64, -(2**63) - 1],
        "logprobs": [-1, 21, 1.5, "5"],
        "top_logprobs": [-1, 21, True],
        "echo": [1, None],
        "presence_penalty": [-2.1, 2.1, math.nan, True],
        "frequency_penalty": [-2.1, 2.1, math.inf],
        "repetition_penalty": [0, -1, math.nan, math.inf, 1e-300],
        "logit_bias": [
            5,
            [1],
            {-1: 1},
            {"a": 1},
            {1.5: 1},
            {1: 101},
            {1: math.nan},
            {True: 1},
            {"9" * 5000: 1},
            dict.fromkeys(range(1025), 1),
        ],
    }.items(),
)
def test_a_value_outside_its_range_is_refused_naming_the_parameter(
    name: str, values: Sequence[Any]
) -> None:
    for value in values:
        with pytest.raises(BadValue, match=name) as refusal:
            Sampling(**{name: value})
        assert refusal.value.param == name
        assert len(str(refusal.value)) < 300


@pytest.mark.parametrize(
    ("value", "param"),
    [
        (5, "speculation"),
        ({"gama": 5}, "speculation.gama"),
        ({"gamma": -1}, "speculation.gamma"),
        ({"gamma": 1.5}, "speculation.gamma"),
        ({"gamma": True}, "speculation.gamma"),
        ({"verifier": "fast"}, "speculation.verifier"),
        ({"verifier": 3}, "speculation.verifier"),
        (Speculation(gamma=HALF), "speculation.gamma"),
    ],
)
def test_invalid_speculation_is_refused(value: Any, param: str) -> None:
    with pytest.raises(BadValue) as refusal:
        Sampling(speculation=value)
    assert refusal.value.param == param


def test_auto_leaves_speculation_to_the_server() -> None:
    assert Sampling(speculation={"gamma": "auto", "verifier": "auto"}).speculation == Speculation()


def test_the_edges_of_the_ranges_are_in() -> None:
    Sampling(
        max_tokens=1,
        temperature=0,
        top_p=1,
        top_k=0,
        min_p=1,
        n=128,
        seed=2**64 - 1,
        logprobs=20,
        presence_penalty=-2,
        frequency_penalty=2,
    )
    Sampling(
        top_p=1e-9,
        min_p=0,
        seed=-(2**63),
        logprobs=0,
        logit_bias={0: -100, 1: 100},
        stop=["a"] * 16,
    )


def test_numpy_numbers_are_accepted() -> None:
    parameters: dict[str, Any] = {
        "max_tokens": np.int64(4),
        "temperature": np.float32(0.5),
        "stop_token_ids": np.array([3, 4]),
    }
    sampling = Sampling(**parameters)
    assert (sampling.max_tokens, sampling.temperature, sampling.stop_token_ids) == (4, 0.5, (3, 4))
    assert type(sampling.max_tokens) is int
    assert type(sampling.temperature) is float


def test_stop_may_be_one_text_several_or_none() -> None:
    assert Sampling(stop="END").stops == ("END",)
    assert Sampling(stop=["a", "b"]).stops == ("a", "b")
    assert Sampling(stop=None).stops == Sampling().stops == ()


@pytest.mark.parametrize(
    ("logprobs", "top", "number"),
    [
        (None, None, None),
        (False, None, None),
        (True, None, 0),
        (True, 3, 3),
        (0, None, 0),
        (5, None, 5),
    ],
)
def test_logprobs_may_be_requested_as_a_number_or_with_top_logprobs(
    logprobs: bool | int | None, top: int | None, number: int | None
) -> None:
    assert Sampling(logprobs=logprobs, top_logprobs=top).num_logprobs == number


@pytest.mark.parametrize("logprobs", [None, False, 2])
def test_top_logprobs_without_logprobs_is_refused(logprobs: bool | int | None) -> None:
    with pytest.raises(BadValue, match="top_logprobs goes with logprobs true"):
        Sampling(logprobs=logprobs, top_logprobs=2)


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"echo": True, "logprobs": 1}, 1),
        ({"echo": True, "logprobs": 0}, 0),
        ({"echo": True, "logprobs": 2, "prompt_logprobs": 5}, 5),
        ({"prompt_logprobs": 0, "logprobs": 4}, 0),
        ({"echo": True}, None),
        ({"logprobs": 4}, None),
    ],
)
def test_a_prompt_is_scored_for_an_echo_with_logprobs_and_when_it_is_asked_for(
    options: dict[str, Any], count: int | None
) -> None:
    (request,) = Sampling(**options).requests([1])
    assert request.prompt_logprobs == count


def test_nothing_is_written_only_where_the_prompt_is_the_answer() -> None:
    with pytest.raises(BadValue, match="0 with echo or prompt_logprobs"):
        Sampling(max_tokens=0, logprobs=1)
    assert Sampling(max_tokens=0, echo=True).max_tokens == 0
    assert Sampling(max_tokens=0, prompt_logprobs=0).max_tokens == 0


def test_the_first_of_n_has_the_seed_itself_and_the_others_have_their_own() -> None:
    seeds = [request.seed for request in Sampling(n=128, seed=11).requests([1])]
    assert seeds[0] == 11
    assert len(set(seeds)) == 128
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert seeds == [request.seed for request in Sampling(n=128, seed=11).requests([1])]
    assert not set(seeds) & {request.seed for request in Sampling(n=128, seed=12).requests([1])}


def test_without_a_seed_every_call_draws_another() -> None:
    assert Sampling().requests([1])[0].seed != Sampling().requests([1])[0].seed
    assert 0 <= random_seed() < 2**64


def test_a_negative_seed_is_taken_as_its_64_bits() -> None:
    assert Sampling(seed=-1).requests([1])[0].seed == 2**64 - 1


def test_a_bias_on_an_id_that_does_not_exist_is_refused() -> None:
    Sampling(logit_bias={9: 1}).check_ids(10)
    with pytest.raises(BadValue, match="logit_bias has token id 10, but the vocabulary ends at 9"):
        Sampling(logit_bias={10: 1}).check_ids(10)


def test_a_top_k_of_minus_one_is_off() -> None:
    assert Sampling(top_k=-1) == Sampling(top_k=0)
    assert Sampling(top_k=-1).requests([1], lambda: 7) == Sampling().requests([1], lambda: 7)


def test_parameters_that_forbid_tokens_become_a_rule() -> None:
    (request,) = Sampling(
        max_tokens=9, min_tokens=9, stop_token_ids=[5], allowed_token_ids=[7, 3], priority=-2
    ).requests([1])
    assert request.warp.rule == TokenRule(min_tokens=9, end_ids=(5,), allowed_ids=(7, 3))
    assert request.priority == -2
    assert Sampling(stop_token_ids=[5], bad_words=["x"]).requests([1])[0].warp.rule is None


def test_min_tokens_beyond_max_tokens_is_refused() -> None:
    with pytest.raises(BadValue, match="min_tokens must be at most max_tokens, which is 4, not 5"):
        Sampling(max_tokens=4, min_tokens=5)


def test_an_allowed_id_that_does_not_exist_is_refused() -> None:
    Sampling(allowed_token_ids=[9]).check_ids(10)
    with pytest.raises(BadValue, match="allowed_token_ids has token id 10, but") as refusal:
        Sampling(allowed_token_ids=[9, 10]).check_ids(10)
    assert refusal.value.param == "allowed_token_ids"
