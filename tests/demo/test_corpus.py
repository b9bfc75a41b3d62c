from __future__ import annotations

import pytest

from specserve.demo.corpus import held_out_files, held_out_prompts


def test_there_are_as_many_prompts_as_asked_for() -> None:
    prompts = held_out_prompts(count=40, length=128)
    assert len(set(prompts)) == 40
    assert {len(prompt) for prompt in prompts} == {128}


def test_the_first_prompts_are_the_beginnings_of_the_files() -> None:
    files = held_out_files()
    beginnings = [tokens[:64] for tokens in files]
    assert list(held_out_prompts(count=len(files) + 1, length=64)[:-1]) == beginnings


def test_no_prompt_follows_another_one_at_once() -> None:
    prompts = held_out_prompts(count=40, length=100)
    files = held_out_files()
    for prompt in prompts:
        assert not any(other[:3] == _behind(prompt, files)[:3] for other in prompts)


def _behind(prompt: tuple[int, ...], files: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """Return the tokens after a prompt, which lies in one of the files."""
    for tokens in files:
        for start in range(0, len(tokens), 2 * len(prompt)):
            if tokens[start : start + len(prompt)] == prompt:
                return tokens[start + len(prompt) : start + 2 * len(prompt)]
    raise AssertionError("a prompt lies in none of the files")


def test_more_prompts_than_there_are_get_a_reason() -> None:
    with pytest.raises(ValueError, match=r"have \d+ prompts of 128 tokens, and not 100000"):
        held_out_prompts(count=100_000, length=128)
