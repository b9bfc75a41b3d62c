"""Run the checks of `specserve doctor`; each runs whatever the others found.

Neither parses the command line nor prints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from specserve.config.tree import Config
from specserve.errors import ConfigError
from specserve.models.checkpoints.find import find_config
from specserve.progress import ReportProgress, no_progress
from specserve.tools.doctor import cluster, machine, models, ports, room, secrets
from specserve.tools.doctor.findings import Finding, bad, guarded, ok
from specserve.tools.doctor.report import DoctorReport


def examine(
    read_config: Callable[[], Config],
    report_progress: ReportProgress = no_progress,
    *,
    join: str | None = None,
) -> DoctorReport:
    """Return the findings. Checks that need no config run even if `read_config` raises.

    `join` is the address of the Ray cluster that would be joined.
    """
    return DoctorReport(tuple(_findings(read_config, report_progress, join)))


def _findings(
    read_config: Callable[[], Config], report_progress: ReportProgress, join: str | None
) -> Iterator[Finding]:
    report_progress("looking at the machine")
    yield from guarded("python", machine.python)
    yield from guarded("specserve", machine.install)
    yield from guarded("machine", machine.system)
    try:
        config = read_config()
    except ConfigError as error:
        yield bad(
            "config", str(error), "mend the key, and run the doctor again for what depends on it"
        )
        return
    for part in config.each_model:
        yield ok("config", f"model {part.model}, draft.kind {part.draft.kind}")
    report_progress("looking at the models")
    yield from guarded("revisions", lambda: models.revisions(config))
    for part in config.each_model:
        yield from guarded("models", partial(models.pair, part))
        yield from guarded("adapters", partial(models.adapters, part))
        yield from guarded("reproducible", partial(models.reproducible, part))
        yield from guarded("memory", partial(_room, part))
    yield from guarded("API keys", lambda: secrets.keys(config.http))
    yield from guarded("TLS", lambda: secrets.tls(config.http))
    report_progress("looking for a Ray cluster")
    yield from guarded("ray", lambda: _ray(config, join))
    if join is None:
        yield from guarded("disk, Ray", _disk_for_ray)


def _room(config: Config) -> Iterator[Finding]:
    target = find_config(config.target.path, revision=config.target.revision, key="target.path")
    draft = config.draft
    if draft.kind != "neural" or draft.path is None:
        return room.room(config, target, None)
    found = find_config(draft.path, revision=draft.revision, key="draft.path")
    return room.room(config, target, found)


def _disk_for_ray() -> Iterator[Finding]:
    # Late, as below.
    from specserve.cluster.preflight import ray_directory, require_disk_for_ray

    require_disk_for_ray()
    yield from machine.disk([("Ray's sessions", ray_directory())])


def _ray(config: Config, join: str | None) -> Iterator[Finding]:
    # Imported late: Ray takes a second to import.
    from specserve.cluster.checkup import check

    found = check(config, num_gpus=torch.cuda.device_count(), join=join)
    yield from cluster.ray(found)
    yield from cluster.proxy(found)
    if not found.serves:  # otherwise the ports belong to the Serve that would be joined
        yield from ports.http(config.http)
        yield from ports.proxy(found.proxy_ports if found.joins is None else {})
