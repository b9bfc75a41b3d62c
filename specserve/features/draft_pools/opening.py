"""Open the drafter of a draft pool, in the thread that will run it."""

from __future__ import annotations

from collections.abc import Sequence

from specserve.cluster.engine.worker_host import WorkerSite
from specserve.cluster.engine.worker_setup import set_drafter_up
from specserve.config.sections import TargetConfig
from specserve.config.tree import Config
from specserve.drafters.base import never
from specserve.drafters.registry import OpenDrafter
from specserve.features.draft_pools.tokenizers import require_one_tokenizer
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
    require_one_tokenizer(str(config.draft.pool.name), (config.target, *other_targets))
    drafter = set_drafter_up(config, site, target)
    drafter.prepare(never)  # which releases the branches of the last pass
    return drafter
