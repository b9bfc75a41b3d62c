"""Open the drafter of a draft pool, in the thread that will run it."""

from __future__ import annotations

import os
from collections.abc import Sequence

from specserve.checkpoint_files import draft_translation
from specserve.cluster.engine.long_lived import freeze_objects
from specserve.cluster.engine.worker_host import WorkerSite
from specserve.cluster.engine.worker_setup import (
    NICENESS,
    check_device,
    set_num_threads,
    target_tokenizer,
    warm_up_alone,
)
from specserve.config.sections import TargetConfig
from specserve.config.tree import Config
from specserve.drafters.base import never
from specserve.drafters.registry import OpenDrafter, open_drafter
from specserve.features.draft_pools.tokenizers import require_one_tokenizer
from specserve.grammar.matcher import GrammarCompiler
from specserve.types import ModelInfo


def open_pooled_drafter(
    config: Config,
    site: WorkerSite,
    target: ModelInfo,
    other_targets: Sequence[TargetConfig] = (),
) -> OpenDrafter:
    """Load a drafter that several engines share, in the thread that will run it, and warm up.

    Raises TokenizerMismatch if one of the `other_targets` has another tokenizer than the config's.
    """
    draft = config.draft
    require_one_tokenizer(str(draft.pool.name), (config.target, *other_targets))
    check_device(site, draft.device)
    set_num_threads(draft.threads, sharers=config.target.tensor_parallel + 1)
    drafter = open_drafter(
        config,
        target_vocab_size=target.vocab_size,
        grammar_compiler=GrammarCompiler.from_tokenizer(
            lambda: target_tokenizer(config), vocab_size=target.vocab_size, end_ids=target.end_ids
        ),
        translation=draft_translation(config),
        has_own_device=True,
    )
    warm_up_alone(drafter, target)
    drafter.prepare(never)  # which releases the branches of the last pass
    freeze_objects()
    if drafter.device.type == "cpu":
        os.nice(NICENESS)  # of this thread, and of those that it starts
    return drafter
