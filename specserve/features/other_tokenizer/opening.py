"""Translate a draft model of another tokenizer, from the tokenizers of a config's models."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from specserve.api.tokenizer import Tokenizer
from specserve.errors import TokenizerMismatch
from specserve.features.other_tokenizer.runner import TranslatedRunner
from specserve.features.other_tokenizer.shared_vocabulary import SharedVocabulary, make_translation
from specserve.features.other_tokenizer.translation import TokenTranslation
from specserve.models.checkpoints.library import is_encoder_decoder, read_config
from specserve.models.runner import Runner

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunnerTranslation:
    """A `draft_runner.Translate` by the tokens that target and draft share."""

    tokens: TokenTranslation

    def __call__(self, runner: Runner, draft_vocab: int, target_vocab: int) -> TranslatedRunner:
        limited = self.tokens.limited_to(target_vocab=target_vocab, draft_vocab=draft_vocab)
        return TranslatedRunner(runner, limited, target_vocab=target_vocab)


def make_translate(target: Tokenizer, draft: Tokenizer, path: str) -> RunnerTranslation:
    """Return how to translate for the draft model at `path`, and log what is shared."""
    shared = SharedVocabulary.from_tokenizers(target, draft)
    log.warning(
        "The draft %s has another tokenizer: %s. It drafts from the shared ones "
        "(token-level intersection).",
        path,
        shared,
    )
    return RunnerTranslation(make_translation(shared, target, draft))


def require_translatable(target: Path, tokenizer: Tokenizer, draft: Tokenizer, path: str) -> None:
    """Raise unless a draft of another tokenizer shares enough tokens, and both are decoders."""
    if is_encoder_decoder(read_config(target)):
        raise TokenizerMismatch(
            f"draft.path {path} has another tokenizer than the target {target}, and that of "
            "an encoder-decoder is not translated; choose a draft with the target's tokenizer"
        )
    SharedVocabulary.from_tokenizers(tokenizer, draft).require_overlap(f"draft.path {path}")


def describe_overlap(target: Tokenizer, draft: Tokenizer, key: str) -> str:
    """Return how many tokens are shared; raise TokenizerMismatch if they are too few.

    `key` names the draft.
    """
    shared = SharedVocabulary.from_tokenizers(target, draft)
    shared.require_overlap(key)
    return str(shared)
