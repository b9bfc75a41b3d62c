"""Acceptance counts, reconstructed from the origins of tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specserve.tools.bench.acceptance import AcceptanceCounts

ROUNDS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 5)).map(lambda pair: (max(pair), min(pair)))
)  # proposed, accepted


def test_every_position_counts_only_verified_draft_tokens() -> None:
    acceptance = AcceptanceCounts.from_origins(
        ["plain", "accepted", "accepted", "bonus", "correction", "accepted", "correction"]
    )
    assert (acceptance.plain, acceptance.drafting) == (1, 3)
    assert acceptance.reached == (3, 2)
    assert acceptance.accepted == (2, 1)
    assert acceptance.alpha == 3 / 5
    assert acceptance.by_position == (2 / 3, 1 / 2)
    assert acceptance.mean_accepted_length == 3 / 4


def test_a_round_cut_by_the_end_of_the_text_still_counts() -> None:
    assert AcceptanceCounts.from_origins(["accepted", "accepted"]) == AcceptanceCounts(
        0, 1, (1, 1), (1, 1)
    )


def test_without_tokens_there_is_no_rate() -> None:
    nothing = AcceptanceCounts.from_origins([])
    assert (nothing.rounds, nothing.alpha, nothing.mean_accepted_length) == (0, None, None)
    assert AcceptanceCounts.sum([]) == nothing


@given(ROUNDS)
def test_rounds_are_reconstructed_from_their_tokens(rounds: list[tuple[int, int]]) -> None:
    origins: list[str] = []
    for proposed, accepted in rounds:
        last = "plain" if not proposed else "bonus" if accepted == proposed else "correction"
        origins += ["accepted"] * accepted + [last]
    found = AcceptanceCounts.from_origins(origins)
    assert found.plain == sum(not proposed for proposed, _ in rounds)
    assert found.drafting == sum(proposed > 0 for proposed, _ in rounds)
    assert sum(found.accepted) == sum(accepted for _, accepted in rounds)
    assert sum(found.reached) == sum(min(accepted + 1, proposed) for proposed, accepted in rounds)


@given(st.lists(ROUNDS))
def test_adding_up_texts_loses_no_position(texts: list[list[tuple[int, int]]]) -> None:
    parts = [
        AcceptanceCounts.from_origins(
            [
                origin
                for _, accepted in rounds
                for origin in ["accepted"] * accepted + ["correction"]
            ]
        )
        for rounds in texts
    ]
    whole = AcceptanceCounts.sum(parts)
    assert (
        len(whole.reached)
        == len(whole.accepted)
        == max((len(part.reached) for part in parts), default=0)
    )
    for position in range(len(whole.reached)):
        assert whole.reached[position] == sum(
            part.reached[position] for part in parts if position < len(part.reached)
        )
