"""`open_ray_llm`: an `LLM` whose workers are processes on Ray, for several ranks or a draft apart.

It puts llm.py and the cluster together, which do not know each other.
"""

from __future__ import annotations

import os

from specserve.config.tree import config_from_keys
from specserve.llm.llm import LLM
from specserve.llm.ray_parts import open_parts_on_ray
from specserve.progress import ReportProgress, no_progress


def open_ray_llm(
    target: str | os.PathLike[str] | None = None,
    draft: str | os.PathLike[str] | None = None,
    *,
    join: str | None = None,
    report_progress: ReportProgress = no_progress,
    **overrides: object,
) -> LLM:
    """Open models as `LLM` does, in workers on Ray: `target.tensor_parallel` may be above 1.

    Ray is the one that this program has joined, else the cluster at `join`, else one that is
    started and ends with the `LLM`, which must be closed.
    """
    paths = {"target.path": target, "draft.path": draft}
    config = config_from_keys(
        overrides, {key: os.fspath(path) for key, path in paths.items() if path is not None}
    )
    parts = open_parts_on_ray(config, join=join, report_progress=report_progress)
    return LLM.from_parts(parts, config)
