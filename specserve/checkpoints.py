"""The files that a config names, found and checked against one another before any weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specserve.api.text import Text
from specserve.config import STATISTICAL, TIED, Config, Draft
from specserve.drafters.tables import load as load_tables
from specserve.errors import TokenizerMismatch
from specserve.models.heads import require_heads_of
from specserve.models.load import find_checkpoint, read_config
from specserve.models.skip import skipped


@dataclass(frozen=True, slots=True)
class Checkpoints:
    target: Path
    text: Text


def find_checkpoints(config: Config) -> Checkpoints:
    """Raises ModelNotFound, ModelError, or TokenizerMismatch: for the target, and for whatever the draft is read from."""
    target = find_checkpoint(config.target.path, revision=config.target.revision)
    text = Text.load(target)
    if config.draft.path is not None and config.draft.kind in STATISTICAL:
        _require_counted_in(text, Path(config.draft.path))
    elif config.draft.kind in TIED:
        _require_tied(target, config.draft)
    elif config.draft.path is not None and config.draft.kind != "none":
        text.require_same(Text.load(find_checkpoint(config.draft.path)))
    return Checkpoints(target, text)


def _require_counted_in(text: Text, tables: Path) -> None:
    """Tables name tokens by their ids; those of another tokenizer would be nonsense, if exact nonsense."""
    if load_tables(tables).fingerprint not in ("", text.fingerprint):
        raise TokenizerMismatch(f"the tables at {tables} were counted with another tokenizer than the target's")


def _require_tied(target: Path, draft: Draft) -> None:
    """Layers that the target has, or heads that were fitted to it."""
    if draft.path is None:
        skipped(read_config(target).num_hidden_layers, draft.skip)
    else:
        require_heads_of(target, Path(draft.path))
