"""The files that a config names: found, and checked against one another.

Reads no weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from specserve.api.tokenizer import Tokenizer
from specserve.config.cascade import NGRAM_KINDS
from specserve.config.features import part
from specserve.config.pool import pool_sharers
from specserve.config.tree import Config, DraftConfig, TargetConfig
from specserve.drafters.neural.draft_runner import Translate
from specserve.drafters.ngram.tables import load_tables
from specserve.errors import TokenizerMismatch, UnsupportedModel
from specserve.features.adapters.files import AdapterFiles, read_adapter
from specserve.features.adapters.layers import adaptable_layers
from specserve.features.adapters.store import adapter_bytes, require_room_for
from specserve.models.checkpoints.find import TOKENIZER_FILES, find_checkpoint, find_config
from specserve.models.checkpoints.load import (
    check_can_round,
    is_encoder_decoder,
    read_config,
)
from specserve.models.checkpoints.widened_copy import target_checkpoint
from specserve.models.device_formats import resolve_device, resolve_dtype
from specserve.models.model import require_context
from specserve.progress import ReportProgress, no_progress

FILE_CHECKS: Mapping[str, str] = {
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
    tokenizer = Tokenizer.load(target)
    context = require_context(target, config.limits)
    if config.draft.kind in FILE_CHECKS:
        _require_decoder_only(target, config.draft)
        part(FILE_CHECKS[config.draft.kind])(target, tokenizer, config.draft)
    else:
        for drafter in config.draft.drafter_configs:
            _require_known_tokens(target, tokenizer, drafter, is_stage=bool(config.draft.stages))
    if config.adapters.num_bytes:
        _require_adapters_fit(target, config)
    return Checkpoints(target, tokenizer, context, is_encoder_decoder(read_config(target)))


def require_shared_tokenizers(config: Config) -> None:
    """Raise TokenizerMismatch if models that share a draft pool have different tokenizers."""
    for name, sharers in pool_sharers(config).items():
        require_one_tokenizer(name, [part.target for part in sharers])


def require_one_tokenizer(pool: str, targets: Sequence[TargetConfig]) -> None:
    """Raise TokenizerMismatch unless all targets of a draft pool give an id one meaning."""
    named = list({(target.path, target.revision): target for target in targets}.values())
    if len(named) < 2:
        return
    first, *others = (_tokenizer_of(target) for target in named)
    for target, other in zip(named[1:], others, strict=True):
        if first.has_other_meanings(other):
            raise TokenizerMismatch(
                f"draft.pool {pool} drafts tokens of one tokenizer, and the targets "
                f"{named[0].path} and {target.path} have different ones; give each model a "
                "draft.pool.name of its own"
            )


def _tokenizer_of(target: TargetConfig) -> Tokenizer:
    files = find_config(target.path, revision=target.revision, patterns=TOKENIZER_FILES)
    return Tokenizer.load(files)


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


def _require_adapters_fit(target: Path, config: Config) -> None:
    """Raise AdapterError unless every adapter of the config is one of the target."""
    layers = adaptable_layers(target)
    dtype = resolve_dtype(config.target.dtype, resolve_device(config.target.device))
    for name, path in config.adapters.paths.items():
        adapter = read_adapter(name, path)
        files = AdapterFiles.open(Path(adapter.path))
        files.require_fits(layers)
        require_room_for(adapter, adapter_bytes(files, dtype), config.adapters.num_bytes)


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
