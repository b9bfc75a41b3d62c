"""Guesses that were made without a look at the grammar, cut to what it allows. Knows no drafter."""

from __future__ import annotations

from specserve.grammar.matcher import Parse
from specserve.types import DraftStep, SparseRows

Guesses = tuple[tuple[int, ...], SparseRows | None]


def lawful(parse: Parse, step: DraftStep, drafts: tuple[int, ...], q: SparseRows | None) -> Guesses:
    """What may stand behind the step, and what it was drawn from.

    Certain guesses give way to what the grammar forces, where it does. Of drawn ones the first that is forbidden stays, and is refused by
    the target: to drop it, as if nothing had been drawn there, would be to choose by what was drawn, and q would be another.
    """
    stand = parse.lawful(drafts)
    if q is None or step.policy.verifier == "coupled":
        kept = drafts[:stand]
        parse.write(len(parse.tokens), kept)
        return (*kept, *_forced(parse, step.gamma - stand)), None
    return drafts[: stand + 1], SparseRows(q.ids[: stand + 1], q.probs[: stand + 1])


def _forced(parse: Parse, limit: int) -> tuple[int, ...]:
    """All that follows by force, read as it is found."""
    found: list[int] = []
    while tokens := parse.forced(limit - len(found)):
        parse.write(len(parse.tokens), tokens)
        found += tokens
    return tuple(found)
