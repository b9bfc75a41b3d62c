"""The files that a config names, found and checked against one another before any weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specserve.api.text import Text
from specserve.config import Config, Draft
from specserve.drafters.tables import load as load_tables
from specserve.errors import TokenizerMismatch
from specserve.models.load import find_checkpoint
from specserve.stages import STATISTICAL


@dataclass(frozen=True, slots=True)
class Checkpoints:
    target: Path
    text: Text


def find_checkpoints(config: Config) -> Checkpoints:
    """Raises ModelNotFound, ModelError, or TokenizerMismatch: for the target, and for whatever the draft is read from."""
    target = find_checkpoint(config.target.path, revision=config.target.revision)
    text = Text.load(target)
    for part in config.draft.parts:
        _require_same_tokens(text, part)
    return Checkpoints(target, text)


def _require_same_tokens(text: Text, draft: Draft) -> None:
    if draft.path is not None and draft.kind in STATISTICAL:
        _require_counted_in(text, Path(draft.path))
    elif draft.path is not None and draft.kind != "none":
        text.require_same(Text.load(find_checkpoint(draft.path)))


def _require_counted_in(text: Text, tables: Path) -> None:
    """Tables name tokens by their ids; those of another tokenizer would be nonsense, if exact nonsense."""
    if load_tables(tables).fingerprint not in ("", text.fingerprint):
        raise TokenizerMismatch(f"the tables at {tables} were counted with another tokenizer than the target's")
