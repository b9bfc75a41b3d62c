"""The files that a config names, found and checked against one another before any weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specserve.api.text import Text
from specserve.config import Config
from specserve.models.load import find_checkpoint


@dataclass(frozen=True, slots=True)
class Checkpoints:
    target: Path
    draft: Path | None  # None: nothing drafts, or what drafts is no model
    text: Text


def find_checkpoints(config: Config) -> Checkpoints:
    """Raises ModelNotFound, ModelError, or TokenizerMismatch."""
    target = find_checkpoint(config.target.path, revision=config.target.revision)
    text = Text.load(target)
    if config.draft.path is None or config.draft.kind == "none":
        return Checkpoints(target, None, text)
    draft = find_checkpoint(config.draft.path)
    text.require_same(Text.load(draft))
    return Checkpoints(target, draft, text)
