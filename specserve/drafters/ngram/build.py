"""Build the drafters that need no model, by their names in a config."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specserve.drafters.ngram.drafter import NgramDrafter
from specserve.drafters.ngram.online_counts import OnlineTable
from specserve.drafters.ngram.tables import (
    BigramTable,
    Table,
    TrainableTable,
    UniformTable,
    UnigramTable,
    load_tables,
)
from specserve.errors import ConfigError, TokenizerMismatch
from specserve.grammar.matcher import GrammarCompiler


@dataclass(frozen=True, slots=True)
class NgramKind:
    """A kind of drafter: whether it copies, its table, and whether it requires counts."""

    copies: bool = False
    table: type[UnigramTable] | type[BigramTable] | None = None
    needs_table: bool = False


KINDS = {
    "unigram": NgramKind(table=UnigramTable, needs_table=True),
    "bigram": NgramKind(table=BigramTable, needs_table=True),
    "prompt_copy": NgramKind(copies=True),
    "max_gram": NgramKind(copies=True, table=BigramTable),
    "random": NgramKind(),
}


@dataclass(frozen=True, slots=True)
class NgramParts:
    """The parts of an n-gram drafter; `learner` is the table if it learns from served texts."""

    copies: bool
    table: Table | None
    learner: TrainableTable | None = None


def open_ngram_drafter(
    kind: str,
    *,
    path: Path | None,
    learn: bool | None,
    support: int,
    vocab_size: int,
    grammar_compiler: GrammarCompiler | None = None,
) -> NgramDrafter:
    """Return the drafter of a kind, with parts as `open_ngram_parts` opens them."""
    parts = open_ngram_parts(kind, path=path, learn=learn, support=support, vocab_size=vocab_size)
    return NgramDrafter(
        copies=parts.copies,
        table=parts.table,
        learner=parts.learner,
        grammar_compiler=grammar_compiler,
    )


def open_ngram_parts(
    kind: str, *, path: Path | None, learn: bool | None, support: int, vocab_size: int
) -> NgramParts:
    """Return the parts of a drafter.

    `path` is a file of tables or a directory with one. With `learn`, and by default without tables,
    counts follow the served texts. Raises ConfigError, TokenizerMismatch, or what `load_tables`
    raises.
    """
    ngram_kind, width = KINDS[kind], min(support, vocab_size)
    copies = ngram_kind.copies
    if ngram_kind.table is None:
        if path is not None or learn:
            raise ConfigError(
                f"draft.kind {kind} has nothing to count; leave draft.path and draft.learn out"
            )
        return NgramParts(
            copies, None if copies else UniformTable(vocab_size=vocab_size, width=width)
        )
    counts = None if path is None else load_tables(path)
    if counts is not None and counts.vocab_size > vocab_size:
        raise TokenizerMismatch(
            f"the tables at {path} are of {counts.vocab_size} tokens, "
            f"and the target knows {vocab_size}"
        )
    if learn or (learn is None and counts is None):
        online = OnlineTable(counts, width=width, pairs=ngram_kind.table is BigramTable)
        return NgramParts(copies, online, online)
    if counts is None and ngram_kind.needs_table:
        raise ConfigError(
            f"draft.kind {kind} needs draft.path, a file of tables "
            "(`specserve tables` makes one), or draft.learn true"
        )
    return NgramParts(copies, None if counts is None else ngram_kind.table(counts, width=width))
