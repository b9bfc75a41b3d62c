"""Open a drafter from a config."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from specserve.config.features import part
from specserve.config.kinds import CASCADE_KINDS, NGRAM_KINDS
from specserve.config.sections import DraftConfig
from specserve.config.tree import Config
from specserve.drafters.after_verify import AfterVerify
from specserve.drafters.anticipation import Anticipation
from specserve.drafters.base import ForkableDrafter
from specserve.drafters.branches import Fanout
from specserve.drafters.neural.draft_runner import DraftRunner, Translate
from specserve.drafters.neural.drafter import NeuralDrafter
from specserve.drafters.ngram.build import open_ngram_drafter
from specserve.grammar.matcher import GrammarCompiler
from specserve.grammar.sequences import GrammarStates
from specserve.hidden_states import HiddenStates
from specserve.models.checkpoints.find import find_checkpoint
from specserve.models.hidden_taps import HiddenRows, unpack_hidden
from specserve.models.model import Model, ModelOptions, open_model
from specserve.models.target import TargetModel
from specserve.types import DraftStep, ModelInfo, PreparedProposal, Proposal


@dataclass(frozen=True, slots=True)
class DrafterParts:
    """A drafter of some kind, the models that it runs, and how long its sequences may be."""

    drafter: ForkableDrafter
    context: int
    runners: Sequence[DraftRunner] = ()
    passes: Callable[[], tuple[int, ...]] | None = None


class OpenDrafter:
    """A drafter with its models, if it has any, and with anticipation if it has a fan-out."""

    def __init__(
        self,
        drafter: ForkableDrafter,
        *,
        context: int,
        runners: Sequence[DraftRunner] = (),
        fanout: Fanout | None,
        passes: Callable[[], tuple[int, ...]] | None = None,
        receive_hidden: Callable[[Sequence[HiddenRows]], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Create it; `passes` counts each stage's passes, if it has several.

        `receive_hidden` keeps hidden states of the target, if the drafter reads them.
        """
        self.drafter, self._runners, self.context, self.fanout = drafter, runners, context, fanout
        self._passes, self._receive_hidden, self._clock = passes, receive_hidden, clock
        self._anticipation = None if fanout is None else Anticipation(drafter, fanout, clock=clock)

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
        """Number of passes of each stage, the largest first; None if there is only one."""
        return None if self._passes is None else self._passes()

    def receive_hidden(self, hidden: Sequence[HiddenStates]) -> None:
        """Keep hidden states of the target, if the drafter reads them."""
        if self._receive_hidden is not None:
            self._receive_hidden(unpack_hidden(hidden))

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]:
        """Return one proposal for each step; the deadline is a time of the clock."""
        if self._anticipation is None:
            return self.drafter.draft(steps, lambda: self._clock() > deadline)
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
    translation: Translate | None = None
    """From a draft model of another tokenizer; None: the draft has the target's."""


Opener = Callable[[DraftConfig, Config, TargetVocabulary], DrafterParts]


class DrafterTogether(AfterVerify, Protocol):
    """A drafter in the target's process, and how long its sequences may be."""

    @property
    def context(self) -> int: ...


def open_drafter(
    config: Config,
    *,
    target_vocab_size: int,
    grammar_compiler: GrammarCompiler | None = None,
    translation: Translate | None = None,
    has_own_device: bool = False,
) -> OpenDrafter:
    """Return the drafter of the config, by a `translation` if it has another tokenizer.

    It can anticipate only if it has its device for itself. Raises whatever is wrong with its files,
    or TooLittleMemory.
    """
    fanout = fanout_from_config(config) if has_own_device else None
    opener = OPENERS[config.draft.kind]
    open_parts: Opener = part(opener) if isinstance(opener, str) else opener
    vocabulary = TargetVocabulary(target_vocab_size, grammar_compiler, translation)
    parts = open_parts(config.draft, config, vocabulary)
    return OpenDrafter(
        parts.drafter,
        context=parts.context,
        runners=parts.runners,
        fanout=fanout,
        passes=parts.passes,
    )


def open_apart_drafter(
    config: Config,
    target: ModelInfo,
    *,
    grammar_compiler: GrammarCompiler | None,
    translation: Translate | None,
) -> OpenDrafter:
    """Return the drafter that has a device of its own. Raises as `open_drafter` does."""
    if config.draft.kind in APART:
        drafter: OpenDrafter = part(APART[config.draft.kind])(config, target, grammar_compiler)
        return drafter
    return open_drafter(
        config,
        target_vocab_size=target.vocab_size,
        grammar_compiler=grammar_compiler,
        translation=translation,
        has_own_device=True,
    )


def open_local_drafter(
    config: Config, target: TargetModel, translation: Translate | None = None
) -> DrafterTogether:
    """Return the drafter that runs in the target's own process. Raises as `open_drafter` does."""
    if config.draft.kind in TOGETHER:
        drafter: DrafterTogether = part(TOGETHER[config.draft.kind])(config, target)
        return drafter
    return open_drafter(
        config,
        target_vocab_size=target.info.vocab_size,
        grammar_compiler=target.grammar_states.grammar_compiler,
        translation=translation,
    )


def fanout_from_config(config: Config) -> Fanout | None:
    """Return how many branches a drafter prepares; None: it does not anticipate."""
    anticipation = config.speculation.anticipation
    return Fanout(per_position=anticipation.fanout) if anticipation.enabled else None


def _open_neural(draft: DraftConfig, config: Config, vocabulary: TargetVocabulary) -> DrafterParts:
    neural = open_model_drafter(draft, config, vocabulary)
    return DrafterParts(neural, neural.context, (neural.runner,))


def _open_ngram(draft: DraftConfig, config: Config, vocabulary: TargetVocabulary) -> DrafterParts:
    drafter = open_ngram_drafter(
        draft.kind,
        path=table_path(draft),
        learn=draft.learn,
        support=draft.support,
        vocab_size=vocabulary.vocab_size,
        grammar_compiler=vocabulary.grammar_compiler,
    )
    return DrafterParts(drafter, drafter.context)


OPENERS: Mapping[str, Opener | str] = {
    "neural": _open_neural,
    **dict.fromkeys(NGRAM_KINDS, _open_ngram),
    **dict.fromkeys(CASCADE_KINDS, "cascade.opening:open_cascade"),
    "layer_skip": "layer_skip.opening:open_apart",
}
"""Functions that open a drafter for any target with a vocabulary, or parts that do."""
APART: Mapping[str, str] = {
    "eagle": "eagle.opening:open_eagle_apart",
    "dflash": "eagle.opening:open_dflash_apart",
}
"""Parts that open a drafter on a device of its own, and must know more of the target."""
TOGETHER: Mapping[str, str] = {
    "layer_skip": "layer_skip.opening:open_together",
    "heads": "eagle.opening:open_heads",
    "eagle": "eagle.opening:open_eagle_together",
    "dflash": "eagle.opening:open_dflash_together",
}
"""Parts that open a drafter which uses what a target in the same process has."""


def open_model_drafter(
    draft: DraftConfig, config: Config, vocabulary: TargetVocabulary
) -> NeuralDrafter:
    """Return a drafter that runs the model of a draft section."""
    assert draft.path is not None, "the config has been checked"
    checkpoint = find_checkpoint(draft.path, revision=draft.revision)
    model = open_model(checkpoint, ModelOptions.from_config(draft, config))
    return neural_drafter(model, draft, vocabulary)


def neural_drafter(model: Model, draft: DraftConfig, vocabulary: TargetVocabulary) -> NeuralDrafter:
    """Return a drafter that runs a model, in the target's tokens."""
    runner: DraftRunner = model.runner
    vocab_size = model.spec.vocab_size
    if vocabulary.translation is not None:
        runner = vocabulary.translation(model.runner, vocab_size, vocabulary.vocab_size)
        vocab_size = vocabulary.vocab_size
    return NeuralDrafter(
        runner,
        vocab_size=vocab_size,
        target_vocab_size=vocabulary.vocab_size,
        context=model.max_context,
        support=draft.support,
        grammar_states=GrammarStates(vocabulary.grammar_compiler),
    )


def table_path(draft: DraftConfig) -> Path | None:
    """Return where the tables of a draft section are, if it has any."""
    return None if draft.path is None else Path(draft.path)
