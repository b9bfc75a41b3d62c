"""A short session of an agent is the same in each protocol, over a real engine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.conformance.agent import Session, Turn, check, hold_all, rows
from tests.conformance.agent_engine import DROPPED, KEPT, agent_tokenizer


@pytest.mark.parametrize("reasoning", [KEPT, DROPPED])
def test_each_protocol_has_the_same_session_and_more_cached_in_each_turn(reasoning: str) -> None:
    sessions = hold_all(reasoning, 6)
    check(sessions)
    turns, prompt = sessions[0].turns, sessions[0].prompts[-1]
    assert [len(turn.calls) for turn in turns] == [2, 0, 2, 0, 2, 0]
    assert [turn.text for turn in turns[2:4]] == ["", "Both files of turn 2 are equal."]
    assert turns[4].reasoning.strip() == "Turn 4 comes after 4 others."
    text = agent_tokenizer(reasoning)._tokenizer.decode(prompt)
    assert ("Turn 4 comes after" in text) == (reasoning == KEPT)
    assert text.index("/4/old has 3 lines") < text.index("/4/new has 3 lines")


TURNS = tuple(Turn("", "a", (), 32 + 16 * i, 16 * i) for i in range(3))
SESSION = Session("/v1/messages", TURNS, ((1,), (1, 2), (1, 2, 3)))


def test_a_session_has_a_row_with_its_share_of_cached_tokens() -> None:
    check([SESSION, replace(SESSION, protocol="/v1/responses")])
    assert rows(KEPT, [SESSION]) == ["| kept | /v1/messages | 3 | 64 | 32 | 33.3% |"]


@pytest.mark.parametrize(
    "other",
    [
        replace(SESSION, prompts=((1,), (1, 2), (1, 2, 4))),
        replace(SESSION, turns=(*TURNS[:2], replace(TURNS[2], text="b"))),
        replace(SESSION, turns=(*TURNS[:2], replace(TURNS[2], cached_tokens=16))),
    ],
)
def test_sessions_that_differ_are_an_error(other: Session) -> None:
    with pytest.raises(AssertionError):
        check([SESSION, other])
