"""Workers on Ray for a program that is no deployment: their rounds run in a thread with a loop.

Knows neither prompts nor HTTP.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import ExitStack
from types import TracebackType
from typing import Any, TypeVar

from specserve.checkpoint_files import find_checkpoints
from specserve.cluster.engine.group import WorkerGroup
from specserve.cluster.node_resources import cluster_resources
from specserve.cluster.placement import Bundle, bundles, with_drafts_that_fit
from specserve.cluster.ray_session import (
    default_resources,
    join_cluster,
    local_ray,
    require_room,
)
from specserve.config.checks import require_no_pool
from specserve.config.tree import Config
from specserve.llm.inprocess import EngineParts
from specserve.progress import ReportProgress

T = TypeVar("T")

NO_GATEWAY = Bundle("gateway", {}, {})


class LoopThread:
    """A thread that runs an event loop, on which links and supervisors live."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="specserve-links", daemon=True
        )

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there and return its result.

        If the caller is interrupted meanwhile, the coroutine still ends: a round that is broken
        off would leave sequences in the workers that no coordinator knows.
        """
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.exception()
            raise

    def __enter__(self) -> LoopThread:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def open_parts_on_ray(
    config: Config, *, join: str | None, report_progress: ReportProgress
) -> EngineParts:
    """Start the workers of one engine on Ray, and return them as the parts of an engine.

    They run on the Ray that this program has joined already, else on the one at `join`, else on
    one that is started for them. Raises ConfigError if they do not fit there. Closing the parts
    ends the workers, and the Ray that was started or joined for them.
    """
    config.require_one_model()
    require_no_pool(config, "a program has one engine")
    report_progress("finding the models")
    tokenizer = find_checkpoints(config, report_progress).tokenizer
    with ExitStack() as opening:
        _enter_ray(config, join, report_progress, opening)
        require_room(config, gateway=NO_GATEWAY)
        num_gpus = cluster_resources().num_gpus
        fitted = with_drafts_that_fit(config, num_gpus=num_gpus)
        loop = opening.enter_context(LoopThread())
        report_progress("starting the workers")
        group = loop.run(WorkerGroup.start(config, bundles(fitted, has_gpus=num_gpus > 0)))
        opening.callback(lambda: loop.run(group.close()))
        is_remote = bool(group.remote_drafters)
        return EngineParts(
            tokenizer,
            group.target,
            group.info,
            group.drafter,
            draft_context=group.draft_context,
            remote_workers=is_remote,
            drafts_prompts=is_remote and group.drafts_prompts,
            run_round=loop.run,
            close=opening.pop_all().close,
        )


def _enter_ray(
    config: Config, join: str | None, report_progress: ReportProgress, opening: ExitStack
) -> None:
    """Start or join Ray, unless this program has; closing `opening` leaves it again."""
    import ray

    if ray.is_initialized():
        return
    report_progress("starting Ray" if join is None else f"joining Ray at {join}")
    if join is None:
        count = default_resources(config, num_gpus=0)["CPU"]
        opening.enter_context(local_ray(num_cpus=int(count)))
    else:
        join_cluster(join)
        opening.callback(ray.shutdown)
