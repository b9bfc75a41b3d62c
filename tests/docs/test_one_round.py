"""The algorithm of docs/design/one-round.md: it runs, it is exact, and the files it names exist."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.chi_square import Fit
from tests.support.pages import ROOT, blocks_of

PAGE = ROOT / "docs/design/one-round.md"
VOCAB, LENGTH, SAMPLES = 3, 3, 6_000
NEVER = VOCAB  # an end token that no model writes

Floats = NDArray[np.float64]
Model = Callable[[Sequence[int]], Floats]


def source() -> str:
    (block,) = (
        block
        for block in blocks_of(PAGE, PAGE.read_text(encoding="utf-8"))
        if block.language == "python"
    )
    return block.text


def algorithm(text: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(text, PAGE.name, "exec"), names)
    return names


def model(seed: int) -> Model:
    """Return a model whose next token depends on the two tokens before it."""
    rows = np.random.default_rng(seed).dirichlet(np.ones(VOCAB), size=(VOCAB, VOCAB))
    return lambda text: np.asarray(rows[text[-2], text[-1]], dtype=np.float64)


def exact(target: Model, prompt: Sequence[int]) -> Floats:
    """Return the probability of every continuation of LENGTH tokens, in lexicographic order."""

    def probability(tokens: Sequence[int]) -> float:
        factors = (target([*prompt, *tokens[:i]])[token] for i, token in enumerate(tokens))
        return float(np.prod([*factors]))

    return np.array([probability(t) for t in itertools.product(range(VOCAB), repeat=LENGTH)])


def p_value(names: dict[str, Any], gamma: int) -> float:
    """Return how well sampled continuations fit the target's exact distribution."""
    target, draft, prompt = model(1), model(2), [0, 1]
    rng, counts = np.random.default_rng(gamma), np.zeros(VOCAB**LENGTH, dtype=np.int64)
    for _ in range(SAMPLES):
        written = names["generate"](prompt, target, draft, gamma, LENGTH, NEVER, rng)
        counts[np.ravel_multi_index(written, (VOCAB,) * LENGTH)] += 1
    fit = Fit()
    fit.add(counts, exact(target, prompt))
    return fit.p_value


@pytest.mark.parametrize("gamma", [0, 1, 3])
def test_texts_have_the_target_s_distribution(gamma: int) -> None:
    assert p_value(algorithm(source()), gamma) > 0.001


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("np.maximum(0, p[i] - q[i])", "p[i]"),
        ("u * q[i][x] < p[i][x]", "u < p[i][x]"),
        ("text + tokens[:accepted] + [own]", "text + tokens"),
    ],
)
def test_a_wrong_rule_is_noticed(right: str, wrong: str) -> None:
    assert right in source()
    assert p_value(algorithm(source().replace(right, wrong)), gamma=2) < 1e-6


def test_greedy_decoding_is_the_target_s_argmax() -> None:
    names, logits = algorithm(source()), np.random.default_rng(3).normal(size=(VOCAB, VOCAB))

    def greedy(text: Sequence[int]) -> Floats:
        return np.asarray(names["warp"](logits[text[-1]], 0), dtype=np.float64)

    expected = [1]
    for _ in range(8):
        expected.append(int(logits[expected[-1]].argmax()))
    rng = np.random.default_rng(4)
    assert names["generate"]([0, 1], greedy, model(2), 3, 8, NEVER, rng) == expected[1:]


def test_a_text_ends_with_its_first_end_token() -> None:
    names, rng = algorithm(source()), np.random.default_rng(5)
    for _ in range(200):
        written = names["generate"]([0, 1], model(1), model(2), 3, 6, 2, rng)
        assert written.index(2) == len(written) - 1 if 2 in written else len(written) == 6


def test_every_file_that_the_code_names_exists() -> None:
    named = re.findall(r"\b([a-z_0-9/]+\.py)\b", source())
    assert len(named) > 8
    for name in named:
        assert (ROOT / "specserve" / name).is_file(), name


def test_it_fits_one_screen() -> None:
    lines = [line for line in source().splitlines() if line.strip()]
    assert len(lines) <= 45
    assert max(map(len, source().splitlines())) <= 100
    assert all(isinstance(node, ast.Import | ast.FunctionDef) for node in ast.parse(source()).body)
