"""The files that a config names: found, and checked against one another.

Reads no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from specserve.api.tokenizer import Tokenizer
from specserve.config.features import part, require
from specserve.config.kinds import NGRAM_KINDS
from specserve.config.sections import DraftConfig
from specserve.config.tree import Config
from specserve.drafters.neural.draft_runner import Translate
from specserve.drafters.ngram.tables import load_tables
from specserve.errors import BadValue, TokenizerMismatch, UnsupportedModel
from specserve.models.checkpoints.find import TOKENIZER_FILES, find_checkpoint, find_config
from specserve.models.checkpoints.held_bytes import check_can_round
from specserve.models.checkpoints.library import is_encoder_decoder, read_config
from specserve.models.checkpoints.widened_copy import target_checkpoint
from specserve.models.model import require_context
from specserve.progress import ReportProgress, no_progress

FILE_CHECKS: Mapping[str, str] = {
    "dflash": "eagle.opening:require_dflash_files",
    "eagle": "eagle.opening:require_eagle_files",
    "heads": "eagle.opening:require_heads_files",
    "layer_skip": "layer_skip.opening:require_files",
}
"""Parts that raise unless the target fits a drafter made for decoder-only ones, by its kind."""


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The target's directory and tokenizer, and the positions of its context."""

    target: Path
    tokenizer: Tokenizer
    context: int
    reads_prompt_apart: bool = False  # as an encoder input, which takes none of the context


def find_checkpoints(config: Config, report_progress: ReportProgress = no_progress) -> Checkpoints:
    """Find the target and check that the draft's files fit it.

    Raises ModelNotFound, ModelError, TokenizerMismatch, or ConfigError for a context beyond the
    target's.
    """
    target = target_checkpoint(config, report_progress)
    context = require_context(target, config.limits)
    tokenizer = Tokenizer.load(target)
    if config.draft.kind in FILE_CHECKS:
        _require_decoder_only(target, config.draft)
        part(FILE_CHECKS[config.draft.kind])(target, tokenizer, config.draft)
    else:
        for drafter in config.draft.drafter_configs:
            _require_known_tokens(target, tokenizer, drafter, is_stage=bool(config.draft.stages))
    if config.adapters.num_bytes:
        part("adapters.store:require_adapters_fit")(target, config)
    reads_prompt_apart = is_encoder_decoder(read_config(target))
    if reads_prompt_apart:
        require("encoder_decoder")
    return Checkpoints(target, tokenizer, context, reads_prompt_apart)


def read_text(text: Path) -> str:
    """Return the contents of a file to learn from. Raises BadValue."""
    try:
        return text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadValue(
            f"--text {text} cannot be read as UTF-8 text: {error}", param="text"
        ) from error


def require_same_kind(target: Path, draft: Path, *, key: str) -> None:
    """Raise unless target and draft are both decoder-only or both encoder-decoders.

    `key` of the config names the draft.
    """
    ours, theirs = (
        "an encoder-decoder" if is_encoder_decoder(read_config(path)) else "a decoder-only model"
        for path in (target, draft)
    )
    if ours != theirs:
        raise UnsupportedModel(
            f"{key} {draft} is {theirs}, and the target {target} is {ours}; "
            "both must be of one kind",
            param=key,
        )


def draft_translation(config: Config) -> Translate | None:
    """Return how to translate for a draft model of another tokenizer.

    None: the draft is no model of its own, or has the target's tokenizer. Tokenizers that differ
    only in ids that one of them lacks, such as added tokens, are not translated.
    """
    draft = config.draft
    if draft.kind != "neural":
        return None
    assert draft.path is not None, "the config has been checked"
    target_files, draft_files = (
        find_config(one.path or "", revision=one.revision, patterns=TOKENIZER_FILES)
        for one in (config.target, draft)
    )
    target, own = Tokenizer.load(target_files), Tokenizer.load(draft_files)
    if not target.has_other_meanings(own):
        return None
    translate: Translate = part("other_tokenizer.opening:make_translate")(target, own, draft.path)
    return translate


def _require_known_tokens(
    target: Path, tokenizer: Tokenizer, draft: DraftConfig, *, is_stage: bool
) -> None:
    """Raise unless the drafter knows the target's tokens, or can have them translated."""
    if draft.path is not None and draft.kind in NGRAM_KINDS:
        _require_counted_with(tokenizer, Path(draft.path))
    elif draft.path is not None and draft.kind != "none":
        found = find_checkpoint(draft.path, revision=draft.revision, key="draft.path")
        require_same_kind(target, found, key="draft.path")
        if draft.quantize is not None:
            check_can_round(found, read_config(found))
        own = Tokenizer.load(found)
        if draft.kind != "neural" or is_stage:
            tokenizer.require_same_vocabulary(own)
        elif tokenizer.has_other_meanings(own):
            part("other_tokenizer.opening:require_translatable")(target, tokenizer, own, draft.path)


def _require_counted_with(tokenizer: Tokenizer, tables: Path) -> None:
    """Raise if the tables were counted with another tokenizer.

    They name tokens by their ids: the text would stay exact, but the drafts would be nonsense.
    """
    if load_tables(tables).fingerprint not in ("", tokenizer.fingerprint):
        raise TokenizerMismatch(
            f"the tables at {tables} were counted with another tokenizer than the target's"
        )


def _require_decoder_only(target: Path, draft: DraftConfig) -> None:
    if is_encoder_decoder(read_config(target)):
        raise UnsupportedModel(
            f"draft.kind {draft.kind} is for decoder-only targets, "
            f"and {target} is an encoder-decoder",
            param="draft.kind",
        )
