"""Check that the targets of a draft pool have one tokenizer. Reads no weights."""

from __future__ import annotations

from collections.abc import Sequence

from specserve.api.tokenizer import Tokenizer
from specserve.config.sections import TargetConfig
from specserve.config.tree import Config
from specserve.errors import TokenizerMismatch
from specserve.features.draft_pools.sharers import pool_sharers
from specserve.models.checkpoints.find import TOKENIZER_FILES, find_config


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
