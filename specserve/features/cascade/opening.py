"""Open the stages of a cascade from a config, and build their tree."""

from __future__ import annotations

from specserve.config.kinds import NGRAM_KINDS
from specserve.config.sections import DraftConfig
from specserve.config.tree import Config
from specserve.drafters.ngram.build import open_ngram_parts
from specserve.drafters.ngram.drafter import NgramDrafter
from specserve.drafters.ngram.tables import TrainableTable
from specserve.drafters.registry import (
    DrafterParts,
    TargetVocabulary,
    open_model_drafter,
    table_path,
)
from specserve.features.cascade.build import build_stages, stage_token_matrix
from specserve.features.cascade.drafter import CascadeDrafter
from specserve.features.cascade.stages import PassCounter, StageDrafter


def open_cascade(draft: DraftConfig, config: Config, vocabulary: TargetVocabulary) -> DrafterParts:
    """Open all stages and build their tree.

    Tables learn from committed tokens only, so the cascade teaches them: a stage is prefilled with
    draft tokens, too.
    """
    *larger, last = draft.drafter_configs
    neural = [open_model_drafter(stage, config, vocabulary) for stage in larger]
    smallest: StageDrafter
    learner: TrainableTable | None = None
    if last.kind in NGRAM_KINDS:
        parts = open_ngram_parts(
            last.kind,
            path=table_path(last),
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
        smallest = open_model_drafter(last, config, vocabulary)
        neural.append(smallest)
    counter = PassCounter(len(draft.stages))
    k = stage_token_matrix(draft.kind, len(draft.stages), draft.k)
    stages: list[StageDrafter] = [*neural[: len(larger)], smallest]
    node = build_stages(draft.kind, stages, k=k, lenience=draft.lenience, counter=counter)
    cascade = CascadeDrafter(stages, node, counter, learner=learner)
    return DrafterParts(
        cascade,
        min(stage.context for stage in neural),
        [stage.runner for stage in neural],
        passes=lambda: cascade.passes,
    )
