"""`specserve doctor`: looks at one thing after the other, whatever is wrong with those before. Builds; neither parses nor prints."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from specserve.config.tree import Config
from specserve.errors import ConfigError
from specserve.models.checkpoints.find import find_config
from specserve.progress import Tell, silent
from specserve.tools.doctor import cluster, machine, models, ports, room, secrets
from specserve.tools.doctor.findings import Finding, bad, guarded, ok
from specserve.tools.doctor.report import Report


def examine(read: Callable[[], Config], tell: Tell = silent) -> Report:
    """`read` gives the config, or raises ConfigError; then what needs none is looked at all the same."""
    return Report(tuple(_findings(read, tell)))


def _findings(read: Callable[[], Config], tell: Tell) -> Iterator[Finding]:
    tell("looking at the machine")
    yield from guarded("python", machine.python)
    yield from guarded("specserve", machine.install)
    yield from guarded("machine", machine.system)
    try:
        config = read()
    except ConfigError as error:
        yield bad(
            "config", str(error), "mend the key, and run the doctor again for what depends on it"
        )
        return
    yield ok("config", f"model {config.model}, draft.kind {config.draft.kind}")
    tell("looking at the models")
    yield from guarded("models", lambda: models.pair(config))
    yield from guarded("memory", lambda: _room(config))
    yield from guarded("API keys", lambda: secrets.keys(config.http))
    yield from guarded("TLS", lambda: secrets.tls(config.http))
    tell("looking for a Ray cluster")
    yield from guarded("ray", lambda: _ray(config))


def _room(config: Config) -> Iterator[Finding]:
    target = find_config(config.target.path, revision=config.target.revision, key="target.path")
    draft = config.draft.path if config.draft.kind == "neural" else None
    return room.room(
        config, target, None if draft is None else find_config(draft, key="draft.path")
    )


def _ray(config: Config) -> Iterator[Finding]:
    """Late: Ray takes a second to import."""
    from specserve.cluster.checkup import check

    found = check(config, num_gpus=torch.cuda.device_count())
    yield from cluster.ray(found)
    yield from cluster.proxy(found)
    if not found.serves:  # what listens is the Serve that would be joined
        yield from ports.http(config.http)
        yield from ports.proxy(found.proxy_ports if not found.joins else {})
