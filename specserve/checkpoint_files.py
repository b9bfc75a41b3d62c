"""The files that a config names, found and checked against one another before any weights are read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specserve.api.tokenizer import Text
from specserve.config.cascade import STATISTICAL
from specserve.config.tree import TIED, Config, Draft
from specserve.drafters.ngram.tables import load as load_tables
from specserve.errors import TokenizerMismatch, UnsupportedModel
from specserve.models.checkpoints.find import find_checkpoint
from specserve.models.checkpoints.load import is_encoder_decoder, read_config
from specserve.models.heads import require_heads_of
from specserve.models.skip import skipped


@dataclass(frozen=True, slots=True)
class Checkpoints:
    target: Path
    text: Text


def find_checkpoints(config: Config) -> Checkpoints:
    """Raises ModelNotFound, ModelError, or TokenizerMismatch: for the target, and for whatever the draft is read from."""
    target = find_checkpoint(config.target.path, revision=config.target.revision, key="target.path")
    text = Text.load(target)
    if config.draft.kind in TIED:
        _require_tied(target, config.draft)
    else:
        for part in config.draft.parts:
            _require_same_tokens(target, text, part)
    return Checkpoints(target, text)


def require_same_kind(target: Path, draft: Path, *, key: str) -> None:
    """A draft must read what the target reads: a prompt that goes on, or a source. `key` of the config names the draft."""
    ours, theirs = (
        "an encoder-decoder" if is_encoder_decoder(read_config(path)) else "a decoder-only model"
        for path in (target, draft)
    )
    if ours != theirs:
        raise UnsupportedModel(
            f"{key} {draft} is {theirs}, and the target {target} is {ours}; both must be of one kind",
            param=key,
        )


def _require_same_tokens(target: Path, text: Text, draft: Draft) -> None:
    if draft.path is not None and draft.kind in STATISTICAL:
        _require_counted_in(text, Path(draft.path))
    elif draft.path is not None and draft.kind != "none":
        found = find_checkpoint(draft.path, key="draft.path")
        require_same_kind(target, found, key="draft.path")
        text.require_same(Text.load(found))


def _require_counted_in(text: Text, tables: Path) -> None:
    """Tables name tokens by their ids; those of another tokenizer would be nonsense, if exact nonsense."""
    if load_tables(tables).fingerprint not in ("", text.fingerprint):
        raise TokenizerMismatch(
            f"the tables at {tables} were counted with another tokenizer than the target's"
        )


def _require_tied(target: Path, draft: Draft) -> None:
    """Layers that the target has, or heads that were fitted to it."""
    if is_encoder_decoder(read_config(target)):
        raise UnsupportedModel(
            f"draft.kind {draft.kind} is for decoder-only targets, and {target} is an encoder-decoder",
            param="draft.kind",
        )
    if draft.path is None:
        skipped(read_config(target).num_hidden_layers, draft.skip)
    else:
        require_heads_of(target, Path(draft.path))
