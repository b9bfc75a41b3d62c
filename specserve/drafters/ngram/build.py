"""The drafters that need no model, by their names in a config."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specserve.drafters.ngram.drafter import Learns, StatisticalDrafter
from specserve.drafters.ngram.online_counts import Learnt
from specserve.drafters.ngram.tables import Bigram, Counts, Table, Uniform, Unigram, load
from specserve.errors import ConfigError, TokenizerMismatch
from specserve.grammar.matcher import Grammars


@dataclass(frozen=True, slots=True)
class Kind:
    """Whether it copies, what it counts, and whether it is nothing without counts."""

    copies: bool = False
    table: type[Unigram] | type[Bigram] | None = None
    needs_table: bool = False


KINDS = {
    "unigram": Kind(table=Unigram, needs_table=True),
    "bigram": Kind(table=Bigram, needs_table=True),
    "prompt_copy": Kind(copies=True),
    "max_gram": Kind(copies=True, table=Bigram),
    "random": Kind(),
}


@dataclass(frozen=True, slots=True)
class Source:
    """What a statistical drafter draws from, and what follows the served texts."""

    copies: bool
    table: Table | None
    learner: Learns | None = None


def open_statistical(
    kind: str,
    *,
    path: Path | None,
    learn: bool | None,
    support: int,
    vocab_size: int,
    grammars: Grammars | None = None,
) -> StatisticalDrafter:
    """`path` is a file of tables or a directory with one. With `learn`, and by default without tables, counts follow the served texts."""
    source = open_source(kind, path=path, learn=learn, support=support, vocab_size=vocab_size)
    return StatisticalDrafter(
        copies=source.copies, table=source.table, learner=source.learner, grammars=grammars
    )


def open_source(
    kind: str, *, path: Path | None, learn: bool | None, support: int, vocab_size: int
) -> Source:
    what, width = KINDS[kind], min(support, vocab_size)
    if what.table is None:
        if path is not None or learn:
            raise ConfigError(
                f"draft.kind {kind} has nothing to count; leave draft.path and draft.learn out"
            )
        return Source(
            what.copies, None if what.copies else Uniform(vocab_size=vocab_size, width=width)
        )
    counts = None if path is None else _fitting(load(path), path, vocab_size)
    if learn or (learn is None and counts is None):
        learnt = Learnt(counts, width=width, pairs=what.table is Bigram)
        return Source(what.copies, learnt, learnt)
    if counts is None and what.needs_table:
        raise ConfigError(
            f"draft.kind {kind} needs draft.path, a file of tables (`specserve tables` makes one), or draft.learn true"
        )
    return Source(what.copies, None if counts is None else what.table(counts, width=width))


def _fitting(counts: Counts, path: Path, vocab_size: int) -> Counts:
    if counts.vocab_size > vocab_size:
        raise TokenizerMismatch(
            f"the tables at {path} are of {counts.vocab_size} tokens, and the target knows {vocab_size}"
        )
    return counts
