"""Open a drafter from a config."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from specserve.config.cascade import CASCADE_KINDS, NGRAM_KINDS, stage_token_matrix
from specserve.config.tree import Config, DraftConfig
from specserve.drafters.anticipation import Anticipation
from specserve.drafters.base import ForkableDrafter
from specserve.drafters.branches import Fanout
from specserve.drafters.neural.drafter import NeuralDrafter
from specserve.drafters.ngram.build import open_ngram_drafter, open_ngram_parts
from specserve.drafters.ngram.drafter import NgramDrafter
from specserve.drafters.ngram.tables import TrainableTable
from specserve.features.cascade.build import build_stages
from specserve.features.cascade.drafter import CascadeDrafter
from specserve.features.cascade.stages import PassCounter, StageDrafter
from specserve.features.eagle.drafter import EagleDrafter
from specserve.features.eagle.heads_drafter import HeadsDrafter
from specserve.features.layer_skip.drafter import LayerSkipDrafter
from specserve.features.other_tokenizer.runner import TranslatedRunner
from specserve.features.other_tokenizer.translation import TokenTranslation
from specserve.grammar.matcher import GrammarCompiler
from specserve.grammar.sequences import GrammarStates
from specserve.hidden_states import HiddenStates
from specserve.models.checkpoints.find import find_checkpoint
from specserve.models.checkpoints.load import read_config
from specserve.models.checkpoints.widened_copy import target_checkpoint
from specserve.models.hidden_taps import unpack_hidden
from specserve.models.model import Model, ModelOptions, open_model
from specserve.models.runner import Runner
from specserve.models.skip import skipped_layers
from specserve.models.target import TargetModel
from specserve.types import DraftStep, ModelInfo, PreparedProposal, Proposal

log = logging.getLogger(__name__)

SELF_SPECULATIVE: Mapping[str, Callable[[Config, TargetModel], LayerSkipDrafter | HeadsDrafter]] = {
    "layer_skip": LayerSkipDrafter.from_config,
    "heads": HeadsDrafter.from_config,
}
"""Drafters that use the weights of a target in the same process."""


@dataclass(frozen=True, slots=True)
class DrafterParts:
    """A drafter of some kind, the models that it runs, and how long its sequences may be."""

    drafter: ForkableDrafter
    context: int
    runners: Sequence[Runner | TranslatedRunner] = ()


class OpenDrafter:
    """A drafter with its models, if it has any, and with anticipation if it has a fan-out."""

    def __init__(
        self,
        drafter: ForkableDrafter,
        *,
        context: int,
        runners: Sequence[Runner | TranslatedRunner] = (),
        fanout: Fanout | None,
    ) -> None:
        self.drafter, self._runners, self.context, self.fanout = drafter, runners, context, fanout
        self._anticipation = (
            None if fanout is None else Anticipation(drafter, fanout, clock=time.perf_counter)
        )

    @property
    def device(self) -> torch.device:
        """Device of the largest model, or the CPU without a model."""
        return self._runners[0].device if self._runners else torch.device("cpu")

    @property
    def num_pages(self) -> int:
        """Number of pages of all models; 0 without a model."""
        return sum(runner.cache.num_pages for runner in self._runners)

    @property
    def num_pages_used(self) -> int:
        return sum(runner.cache.num_used for runner in self._runners)

    @property
    def passes(self) -> tuple[int, ...] | None:
        """Number of passes of each stage of a cascade, the largest first; else None."""
        return self.drafter.passes if isinstance(self.drafter, CascadeDrafter) else None

    def receive_hidden(self, hidden: Sequence[HiddenStates]) -> None:
        """Keep hidden states of the target, if this is a head that reads them."""
        if isinstance(self.drafter, EagleDrafter):
            self.drafter.receive_hidden(unpack_hidden(hidden))

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]:
        """Return one proposal for each step; the deadline is a time of `time.perf_counter`."""
        if self._anticipation is None:
            return self.drafter.draft(steps, lambda: time.perf_counter() > deadline)
        return self._anticipation.propose(steps, deadline)

    def prepare(self, has_message: Callable[[], bool]) -> None:
        if self._anticipation is not None:
            self._anticipation.prepare(has_message)

    def prepared_proposals(self) -> tuple[PreparedProposal, ...]:
        return () if self._anticipation is None else self._anticipation.prepared_proposals()

    def release(self, seq_ids: Sequence[int]) -> None:
        (self._anticipation or self.drafter).release(seq_ids)


@dataclass(frozen=True, slots=True)
class TargetVocabulary:
    """The properties of a target that a drafter needs: its ids, and grammars of its tokenizer."""

    vocab_size: int
    grammar_compiler: GrammarCompiler | None = None
    """None: draft tokens follow no grammar and are rejected more often."""
    translation: TokenTranslation | None = None
    """To a draft model of another tokenizer; None: the draft has the target's."""


def open_drafter(
    config: Config,
    *,
    target_vocab_size: int,
    grammar_compiler: GrammarCompiler | None = None,
    translation: TokenTranslation | None = None,
    has_own_device: bool = False,
) -> OpenDrafter:
    """Return the drafter of the config, with a `translation` if it has another tokenizer.

    It can anticipate only if it has its device for itself. Raises whatever is wrong with its files,
    or TooLittleMemory.
    """
    fanout = _fanout(config) if has_own_device else None
    parts = OPENERS[config.draft.kind](
        config.draft, config, TargetVocabulary(target_vocab_size, grammar_compiler, translation)
    )
    return OpenDrafter(
        parts.drafter,
        context=parts.context,
        runners=parts.runners,
        fanout=fanout,
    )


def open_apart_drafter(
    config: Config,
    target: ModelInfo,
    *,
    grammar_compiler: GrammarCompiler | None,
    translation: TokenTranslation | None,
) -> OpenDrafter:
    """Return the drafter that has a device of its own. Raises as `open_drafter` does."""
    if config.draft.kind == "eagle":
        eagle = EagleDrafter.apart(config, target, grammar_compiler)
        fanout = _fanout(config)
        if fanout is not None and not eagle.can_anticipate:
            log.info(
                "the P-EAGLE head at %s drafts in one pass and does not anticipate; its proposals "
                "are made when they are asked for",
                config.draft.path,
            )
            fanout = None
        return _open_eagle(eagle, fanout=fanout)
    return open_drafter(
        config,
        target_vocab_size=target.vocab_size,
        grammar_compiler=grammar_compiler,
        translation=translation,
        has_own_device=True,
    )


def open_local_drafter(
    config: Config, target: TargetModel, translation: TokenTranslation | None = None
) -> OpenDrafter | LayerSkipDrafter | HeadsDrafter:
    """Return the drafter that runs in the target's own process. Raises as `open_drafter` does."""
    if config.draft.kind in SELF_SPECULATIVE:
        return SELF_SPECULATIVE[config.draft.kind](config, target)
    if config.draft.kind == "eagle":
        return _open_eagle(EagleDrafter.from_config(config, target), fanout=None)
    return open_drafter(
        config,
        target_vocab_size=target.info.vocab_size,
        grammar_compiler=target.grammar_states.grammar_compiler,
        translation=translation,
    )


def _fanout(config: Config) -> Fanout | None:
    anticipation = config.speculation.anticipation
    return Fanout(per_position=anticipation.fanout) if anticipation.enabled else None


def _open_neural(draft: DraftConfig, config: Config, vocabulary: TargetVocabulary) -> DrafterParts:
    assert draft.path is not None, "the config has been checked"
    checkpoint = find_checkpoint(draft.path, revision=draft.revision)
    model = open_model(checkpoint, ModelOptions.from_config(draft, config))
    neural = _neural_drafter(model, draft, vocabulary)
    return DrafterParts(neural, neural.context, (neural.runner,))


def _open_eagle(eagle: EagleDrafter, *, fanout: Fanout | None) -> OpenDrafter:
    return OpenDrafter(eagle, context=eagle.context, runners=(eagle.runner,), fanout=fanout)


def _open_layer_skip(
    draft: DraftConfig, config: Config, vocabulary: TargetVocabulary
) -> DrafterParts:
    """Open some of the target's own layers, on a device of their own."""
    checkpoint = target_checkpoint(config)
    model = open_model(
        checkpoint,
        ModelOptions.from_config(draft, config),
        skip=skipped_layers(read_config(checkpoint).num_hidden_layers, draft.skip),
    )
    neural = _neural_drafter(model, draft, vocabulary)
    return DrafterParts(neural, neural.context, (neural.runner,))


def _open_ngram(draft: DraftConfig, config: Config, vocabulary: TargetVocabulary) -> DrafterParts:
    drafter = open_ngram_drafter(
        draft.kind,
        path=_path(draft),
        learn=draft.learn,
        support=draft.support,
        vocab_size=vocabulary.vocab_size,
        grammar_compiler=vocabulary.grammar_compiler,
    )
    return DrafterParts(drafter, drafter.context)


def _open_cascade(draft: DraftConfig, config: Config, vocabulary: TargetVocabulary) -> DrafterParts:
    """Open all stages and build their tree.

    Tables learn from committed tokens only, so the cascade teaches them: a stage is prefilled with
    draft tokens, too.
    """
    *larger, last = draft.drafter_configs
    neural = [_open_model_drafter(part, config, vocabulary) for part in larger]
    smallest: StageDrafter
    learner: TrainableTable | None = None
    if last.kind in NGRAM_KINDS:
        parts = open_ngram_parts(
            last.kind,
            path=_path(last),
            learn=last.learn,
            support=last.support,
            vocab_size=vocabulary.vocab_size,
        )
        smallest, learner = (
            NgramDrafter(
                copies=parts.copies,
                table=parts.table,
                grammar_compiler=vocabulary.grammar_compiler,
            ),
            parts.learner,
        )
    else:
        smallest = _open_model_drafter(last, config, vocabulary)
        neural.append(smallest)
    counter = PassCounter(len(draft.stages))
    k = stage_token_matrix(draft.kind, len(draft.stages), draft.k)
    stages: list[StageDrafter] = [*neural[: len(larger)], smallest]
    node = build_stages(draft.kind, stages, k=k, lenience=draft.lenience, counter=counter)
    cascade = CascadeDrafter(stages, node, counter, learner=learner)
    return DrafterParts(
        cascade, min(stage.context for stage in neural), [stage.runner for stage in neural]
    )


OPENERS: Mapping[str, Callable[[DraftConfig, Config, TargetVocabulary], DrafterParts]] = {
    "neural": _open_neural,
    "layer_skip": _open_layer_skip,
    **dict.fromkeys(NGRAM_KINDS, _open_ngram),
    **dict.fromkeys(CASCADE_KINDS, _open_cascade),
}


def _open_model_drafter(
    draft: DraftConfig, config: Config, vocabulary: TargetVocabulary
) -> NeuralDrafter:
    assert draft.path is not None, "the config has been checked"
    checkpoint = find_checkpoint(draft.path, revision=draft.revision)
    model = open_model(checkpoint, ModelOptions.from_config(draft, config))
    return _neural_drafter(model, draft, vocabulary)


def _neural_drafter(
    model: Model, draft: DraftConfig, vocabulary: TargetVocabulary
) -> NeuralDrafter:
    runner: Runner | TranslatedRunner = model.runner
    vocab_size = model.spec.vocab_size
    if vocabulary.translation is not None:
        runner = TranslatedRunner(
            model.runner,
            vocabulary.translation.limited_to(
                target_vocab=vocabulary.vocab_size, draft_vocab=vocab_size
            ),
            target_vocab=vocabulary.vocab_size,
        )
        vocab_size = vocabulary.vocab_size
    return NeuralDrafter(
        runner,
        vocab_size=vocab_size,
        target_vocab_size=vocabulary.vocab_size,
        context=model.max_context,
        support=draft.support,
        grammar_states=GrammarStates(vocabulary.grammar_compiler),
    )


def _path(draft: DraftConfig) -> Path | None:
    return None if draft.path is None else Path(draft.path)
