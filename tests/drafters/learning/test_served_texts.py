"""Windows of served texts: what they hold, and that their memory is bounded."""

from __future__ import annotations

from array import array

import pytest

from specserve.drafters.learning.served_texts import (
    CONTEXT_TOKENS,
    HELD_OUT,
    MAX_HELD_OUT,
    MAX_WINDOWS,
    NEW_TOKENS,
    ServedTexts,
)
from specserve.types import DraftStep, Policy, Warp


def policy(prompt_length: int = 0, temperature: float = 1.0) -> Policy:
    return Policy(Warp(temperature), "block", seed=0, prompt_length=prompt_length)


def serve(
    texts: ServedTexts, seq_id: int, tokens: list[int], *, prompt: int, at_once: int = 7
) -> None:
    """Commit the prompt in one step, and then a few tokens in each, with the last one again."""
    texts.add(DraftStep(seq_id, 0, tuple(tokens[:prompt]), 1, policy(prompt)))
    for stop in range(prompt, len(tokens), at_once):
        step = tuple(tokens[stop - 1 : stop + at_once])
        texts.add(DraftStep(seq_id, stop - 1, step, 1, policy(prompt)))
    texts.release([seq_id])


def test_each_generated_token_is_learned_once_and_no_prompt_is() -> None:
    texts, tokens = ServedTexts(), list(range(300))
    serve(texts, 1, tokens, prompt=90)
    learned: list[int] = []
    for window in texts.windows:
        assert window.tokens == array("i", tokens[window.start :][: len(window.tokens)])
        assert window.first_new >= 1
        assert len(window.tokens) <= CONTEXT_TOKENS + NEW_TOKENS
        learned += window.tokens[window.first_new :]
    assert learned == tokens[90:]


def test_memory_is_bounded_however_much_is_served() -> None:
    texts = ServedTexts(max_windows=20, max_held_out=5, max_texts=4)
    for seq_id in range(100):
        serve(texts, seq_id, list(range(400)), prompt=30)
    assert texts.num_windows > 200
    assert len(texts.windows) == 20
    assert len(texts.held_out) == 5
    assert texts.num_tokens <= 25 * (CONTEXT_TOKENS + NEW_TOKENS)
    # Running texts keep their ends alone, and no more than four are kept.
    for seq_id in range(9):
        texts.add(DraftStep(seq_id, 0, tuple(range(5000)), 1, policy(5000)))
    held = texts.num_tokens - 25 * (CONTEXT_TOKENS + NEW_TOKENS)
    assert held <= 4 * (2 * CONTEXT_TOKENS + NEW_TOKENS)


def test_the_default_bound_is_a_few_megabytes() -> None:
    windows = MAX_WINDOWS + MAX_HELD_OUT
    assert windows * (CONTEXT_TOKENS + NEW_TOKENS) * array("i").itemsize < 4e6


def test_some_whole_texts_of_every_kind_are_held_out() -> None:
    """Kinds take turns by four, as batches of requests may."""
    texts, num_texts = ServedTexts(), 16 * HELD_OUT
    for seq_id in range(num_texts):
        serve(texts, seq_id, [seq_id] * 100, prompt=20)
    held_out = {window.tokens[0] for window in texts.held_out}
    learned = {window.tokens[0] for window in texts.windows}
    assert 8 <= len(held_out) <= 32
    assert held_out | learned == set(range(num_texts))
    assert not held_out & learned
    for kind in range(2):
        assert sum(seq_id // 4 % 2 == kind for seq_id in held_out) >= 3


@pytest.mark.parametrize("start", [40, 2], ids=["gap", "rolled back behind what is kept"])
def test_a_text_that_does_not_continue_what_is_known_is_dropped(start: int) -> None:
    texts = ServedTexts()
    texts.add(DraftStep(1, 0, tuple(range(20)), 1, policy()))
    texts.add(DraftStep(1, 20, tuple(range(20, 39)), 1, policy()))
    if start == 2:
        texts.add(DraftStep(1, 39, tuple(range(200)), 1, policy()))
    num_windows = texts.num_windows
    texts.add(DraftStep(1, start, (7,) * 200, 1, policy()))
    texts.release([1])
    assert texts.num_windows == num_windows
