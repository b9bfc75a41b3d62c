"""A drafter opened from a config."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from specserve.config.cascade import CASCADES, STATISTICAL, asked_of
from specserve.config.tree import Config, Draft
from specserve.drafters.anticipation import Anticipation
from specserve.drafters.base import Forks
from specserve.drafters.branches import Fanout
from specserve.drafters.cascade.build import writer_of
from specserve.drafters.cascade.drafter import Cascade
from specserve.drafters.cascade.stages import Stage, Tally
from specserve.drafters.heads import HeadsDrafter, SkippingDrafter
from specserve.drafters.neural.drafter import NeuralDrafter
from specserve.drafters.ngram.build import open_source, open_statistical
from specserve.drafters.ngram.drafter import Learns, StatisticalDrafter
from specserve.grammar.matcher import Grammars
from specserve.grammar.sequences import Parses
from specserve.models.checkpoints.find import find_checkpoint
from specserve.models.checkpoints.load import read_config
from specserve.models.model import Opened as OpenedModel
from specserve.models.model import Placement, open_model
from specserve.models.runner import Runner
from specserve.models.skip import skipped
from specserve.models.target import TargetModel
from specserve.types import DraftStep, Foreseen, Proposal

TIED: Mapping[str, Callable[[Config, TargetModel], SkippingDrafter | HeadsDrafter]] = {
    "layer_skip": SkippingDrafter.of,
    "heads": HeadsDrafter.of,
}  # to a target in the same process


@dataclass(frozen=True, slots=True)
class Opened:
    """What a kind comes to: a drafter, the models that it runs, and how long its sequences may be."""

    drafter: Forks
    context: int
    runners: Sequence[Runner] = ()


class OpenDrafter:
    """A drafter and the devices that are its own, if it needs any. With anticipation it has use for the time between two answers."""

    def __init__(
        self, drafter: Forks, *, context: int, runners: Sequence[Runner] = (), fanout: Fanout | None
    ) -> None:
        self._drafter, self._runners, self.context = drafter, runners, context
        self._anticipation = (
            None if fanout is None else Anticipation(drafter, fanout, clock=time.perf_counter)
        )

    @property
    def device(self) -> torch.device:
        """Of the largest model, if there are several."""
        return self._runners[0].device if self._runners else torch.device("cpu")

    @property
    def num_pages(self) -> int:
        """Of its caches; 0 where it has none."""
        return sum(runner.cache.num_pages for runner in self._runners)

    @property
    def num_pages_used(self) -> int:
        return sum(runner.cache.num_used for runner in self._runners)

    @property
    def passes(self) -> tuple[int, ...] | None:
        """Of each stage of a cascade until now, the largest first."""
        return self._drafter.passes if isinstance(self._drafter, Cascade) else None

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]:
        """The deadline is a time of `time.perf_counter`."""
        if self._anticipation is not None:
            return self._anticipation.propose(steps, deadline)
        return self._drafter.draft(steps, lambda: time.perf_counter() > deadline)

    def prepare(self, waiting: Callable[[], bool]) -> None:
        if self._anticipation is not None:
            self._anticipation.prepare(waiting)

    def foreseen(self) -> tuple[Foreseen, ...]:
        return () if self._anticipation is None else self._anticipation.foreseen()

    def release(self, seq_ids: Sequence[int]) -> None:
        (self._anticipation or self._drafter).release(seq_ids)


@dataclass(frozen=True, slots=True)
class Aim:
    """What a drafter must know of its target: how many ids there are, and what grammars mean to its tokenizer."""

    vocab_size: int
    grammars: Grammars | None = None  # None: drafts follow none, and are refused more often


def open_drafter(
    config: Config, *, target_vocab_size: int, grammars: Grammars | None = None, alone: bool = False
) -> OpenDrafter:
    """Raises whatever is wrong with its files, or TooLittleMemory. Only one that is `alone` on its device can work ahead."""
    anticipation = config.speculation.anticipation
    fanout = Fanout(per_stop=anticipation.fanout) if alone and anticipation.enabled else None
    opened = OPENERS[config.draft.kind](config.draft, config, Aim(target_vocab_size, grammars))
    return OpenDrafter(
        opened.drafter, context=opened.context, runners=opened.runners, fanout=fanout
    )


def _open_neural(draft: Draft, config: Config, aim: Aim) -> Opened:
    neural = _neural(draft, config, aim)
    return Opened(neural, neural.context, (neural.runner,))


def _open_skipping(draft: Draft, config: Config, aim: Aim) -> Opened:
    """The target's own layers, some of them, on a device of their own."""
    own = config.target
    checkpoint = find_checkpoint(own.path, revision=own.revision)
    opened = open_model(
        checkpoint,
        Placement.of(draft, config),
        skip=skipped(read_config(checkpoint).num_hidden_layers, draft.skip),
    )
    neural = _drafting(opened, draft, aim)
    return Opened(neural, neural.context, (neural.runner,))


def _open_statistical(draft: Draft, config: Config, aim: Aim) -> Opened:
    drafter = open_statistical(
        draft.kind,
        path=_path(draft),
        learn=draft.learn,
        support=draft.support,
        vocab_size=aim.vocab_size,
        grammars=aim.grammars,
    )
    return Opened(drafter, drafter.context)


def _open_cascade(draft: Draft, config: Config, aim: Aim) -> Opened:
    """Tables learn from what is committed, so the cascade teaches them: a stage reads guesses, too."""
    *larger, last = draft.parts
    neural = [_neural(part, config, aim) for part in larger]
    smallest: Stage
    learner: Learns | None = None
    if last.kind in STATISTICAL:
        source = open_source(
            last.kind,
            path=_path(last),
            learn=last.learn,
            support=last.support,
            vocab_size=aim.vocab_size,
        )
        smallest, learner = (
            StatisticalDrafter(copies=source.copies, table=source.table, grammars=aim.grammars),
            source.learner,
        )
    else:
        smallest = _neural(last, config, aim)
        neural.append(smallest)
    tally = Tally(len(draft.stages))
    asked = asked_of(draft.kind, len(draft.stages), draft.k)
    stages: list[Stage] = [*neural[: len(larger)], smallest]
    writer = writer_of(draft.kind, stages, asked=asked, lenience=draft.lenience, tally=tally)
    cascade = Cascade(stages, writer, tally, learner=learner)
    return Opened(
        cascade, min(stage.context for stage in neural), [stage.runner for stage in neural]
    )


OPENERS: Mapping[str, Callable[[Draft, Config, Aim], Opened]] = {
    "neural": _open_neural,
    "layer_skip": _open_skipping,
    **dict.fromkeys(STATISTICAL, _open_statistical),
    **dict.fromkeys(CASCADES, _open_cascade),
}


def _neural(draft: Draft, config: Config, aim: Aim) -> NeuralDrafter:
    assert draft.path is not None, "the config has been checked"
    return _drafting(
        open_model(find_checkpoint(draft.path), Placement.of(draft, config)), draft, aim
    )


def _drafting(opened: OpenedModel, draft: Draft, aim: Aim) -> NeuralDrafter:
    return NeuralDrafter(
        opened.runner,
        vocab_size=opened.spec.vocab_size,
        target_vocab_size=aim.vocab_size,
        context=opened.max_context,
        support=draft.support,
        parses=Parses(aim.grammars),
    )


def _path(draft: Draft) -> Path | None:
    return None if draft.path is None else Path(draft.path)


def open_beside(
    config: Config, target: TargetModel
) -> OpenDrafter | SkippingDrafter | HeadsDrafter:
    """What drafts in the target's own process. Raises likewise."""
    if config.draft.kind in TIED:
        return TIED[config.draft.kind](config, target)
    return open_drafter(
        config, target_vocab_size=target.info.vocab_size, grammars=target.parses.grammars
    )
