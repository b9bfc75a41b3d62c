"""Status board: engines and gateways report to it once a second, and gateways read the sum.

It is a Serve deployment of one replica.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from specserve.api.rates import ClientUse, UseByGateway
from specserve.api.service import ModelStatus, PoolStatus, Status
from specserve.cluster.board.placement_watch import PlacementWatch
from specserve.errors import VersionMismatch
from specserve.metrics import Snapshot, merge
from specserve.types import ModelInfo
from specserve.wire.version import Versioned

log = logging.getLogger(__name__)

ENGINE, GATEWAY, POOL = "engine", "gateway", "pool"
SILENT_AFTER_S = 5.0
"""Time without a report after which a replica counts as gone."""
YOUNG_S = 2.0
"""Time in which a new board may not have heard of all gateways that run."""
MAX_SILENT = 100
"""Replicas that fell silent and may come back; of older ones only the sum is kept."""
CHECK_PLACEMENT_EVERY_S = 2.0
NO_ENGINE = "no engine replica reports"


@dataclass(frozen=True, slots=True)
class EngineInfo(Versioned):
    """Description of the model that an engine has opened, for gateways."""

    model: ModelInfo


@dataclass(frozen=True, slots=True)
class ReplicaReport(Versioned):
    """Report of one replica about itself."""

    replica: str
    role: str
    trouble: str | None  # why an engine makes no progress
    metrics: Snapshot
    draft_placement: str | None = None  # of an engine that drafts, and why
    device_troubles: tuple[str, ...] = ()  # of an engine: devices that it avoids
    losses: tuple[str, ...] = ()  # of an engine: why workers were last lost, by role
    uses: tuple[ClientUse, ...] = ()  # of a gateway by its clients
    engine_key: bytes | None = None  # public key with which an engine sends its chunks
    model: str = ""  # of an engine of one of several models
    pool: PoolStatus | None = None  # of a device of a draft pool
    info: EngineInfo | None = None  # of an engine


@dataclass(frozen=True, slots=True)
class EngineKeys:
    """Public keys of the engines, by which gateways admit their chunks."""

    keys: frozenset[bytes]
    is_complete: bool  # False while engines that run may not have reported yet


@dataclass(frozen=True, slots=True)
class GatewayAnswer(Versioned):
    """The board's answer to the report of a gateway."""

    engines: EngineKeys
    uses: UseByGateway  # the last reports of the other gateways about their clients


@dataclass(frozen=True, slots=True)
class PoolAnswer(Versioned):
    """The board's answer to the report of a device of a draft pool."""

    engines: Mapping[str, int]  # of each device of the pool, by its replica


Answer = GatewayAnswer | PoolAnswer


class Board:
    """Reports of all replicas, with the counters of those that are gone, so that sums never fall.

    If `may_sleep`, having no engine is healthy, since the next request starts one; `models` says
    so of each of several models. `watch` finds engines that wait for a node. An update ends with
    `min_gateways` at least.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        may_sleep: bool = False,
        models: Mapping[str, bool] | None = None,
        min_gateways: int = 1,
        watch: PlacementWatch | None = None,
    ) -> None:
        self._clock, self._may_sleep, self._watch = clock, may_sleep, watch
        self._models, self._min_gateways = models or {}, min_gateways
        self._began = clock()
        self._waits: str | None = None  # why an engine waits for a node
        self._watched_at = clock()
        self._reports: dict[str, tuple[float, ReplicaReport]] = {}
        self._other_releases: dict[str, float] = {}  # when each reported last
        self._departed: Snapshot | None = None
        # Lasting metrics of replicas that fell silent, the oldest first: some come back.
        self._silent: dict[str, Snapshot] = {}

    def report(self, report: ReplicaReport) -> Answer | None:
        """Keep a replica's report, and answer that of a gateway or of a draft pool.

        One of another release gets no answer, and does not count: its report has another shape.
        """
        try:
            report.require_same_version()
        except VersionMismatch as error:
            if str(error) not in self._other_releases:
                log.warning("a replica's report is not counted: %s", error)
            self._other_releases[str(error)] = self._clock()
            return None
        self._silent.pop(report.replica, None)  # its own counters go on
        self._reports[report.replica] = (self._clock(), report)
        if report.role not in (GATEWAY, POOL):
            return None
        self._drop_silent()
        if report.pool is not None:
            return PoolAnswer(self._engines_of_pool(report.pool.name))
        reports = [each for _, each in self._reports.values()]
        keys = frozenset(each.engine_key for each in reports if each.engine_key is not None)
        others = [each for each in reports if each.role == GATEWAY and each is not report]
        return GatewayAnswer(
            EngineKeys(keys, is_complete=self._clock() - self._began >= SILENT_AFTER_S),
            {other.replica: other.uses for other in others},
        )

    def engine_info(self, model: str = "") -> EngineInfo | None:
        """Return what an engine says of its model; None while none has reported."""
        self._drop_silent()
        for _, report in self._reports.values():
            if report.role == ENGINE and report.model == model and report.info is not None:
                return report.info
        return None

    def awaits_gateways(self) -> bool | None:
        """Return whether an update is to replace gateways of another release, and has not yet.

        None while it is too early to know.
        """
        self._drop_silent()
        gateways = [one for _, one in self._reports.values() if one.role == GATEWAY]
        if len(gateways) >= self._min_gateways:
            return False
        now = self._clock()
        if any(now - when <= SILENT_AFTER_S for when in self._other_releases.values()):
            return True
        return None if now - self._began < YOUNG_S else False

    def status(self, excluded_replica: str = "") -> Status:
        """Return the status of all replicas, with the metrics of all but the excluded one.

        A gateway excludes itself, since it has newer metrics of its own.
        """
        self._drop_silent()
        reports = [report for _, report in self._reports.values()]
        engines = [report for report in reports if report.role == ENGINE]
        models = tuple(
            _model_status(name, [one for one in engines if one.model == name], may_sleep=may_sleep)
            for name, may_sleep in self._models.items()
        )
        # One model in trouble takes no gateway away from the others.
        healthy = (
            any(model.healthy for model in models)
            if models
            else _are_healthy(engines, may_sleep=self._may_sleep)
        )
        device_troubles = sorted({one for report in engines for one in report.device_troubles})
        troubles = self._troubles(engines, models, device_troubles)
        return Status(
            ready=healthy,
            healthy=healthy,
            why="" if healthy else "; ".join(troubles) or NO_ENGINE,
            metrics=self._metrics(excluded_replica),
            models=models,
            pools=_sum_pools([report.pool for report in reports if report.pool is not None]),
            replicas=len(engines),
            troubles=tuple(troubles),
            device_troubles=tuple(device_troubles),
            losses=tuple(sorted({loss for report in engines for loss in report.losses})),
            draft_placements=tuple(
                sorted({report.draft_placement for report in engines if report.draft_placement})
            ),
            irreproducible=_reasons(engines),
        )

    def _troubles(
        self,
        engines: Sequence[ReplicaReport],
        models: Sequence[ModelStatus],
        device_troubles: Sequence[str],
    ) -> list[str]:
        """Return all that is wrong: with engines, models, nodes, devices and releases."""
        waits = self._why_engine_waits()
        return [
            *(_named(one.model, one.trouble) for one in engines if one.trouble is not None),
            *(
                f"{one.name}: {one.why}"
                for one in models
                if not one.healthy and one.why == NO_ENGINE
            ),
            *(() if waits is None else (waits,)),
            *device_troubles,
            *(
                f"a replica is not counted: {why}"
                for why, when in self._other_releases.items()
                if self._clock() - when <= SILENT_AFTER_S
            ),
        ]

    def _metrics(self, excluded_replica: str) -> tuple[Snapshot, ...]:
        """Return the metrics of replicas that run, of silent ones, and of those that are gone."""
        running = [report for _, report in self._reports.values()]
        metrics = [report.metrics for report in running if report.replica != excluded_replica]
        metrics += [left for name, left in self._silent.items() if name != excluded_replica]
        if self._departed is not None:
            metrics.append(self._departed)
        return tuple(metrics)

    def _engines_of_pool(self, name: str) -> dict[str, int]:
        """Return the number of engines of each device of a pool, by its replica."""
        return {
            report.replica: report.pool.engines
            for _, report in self._reports.values()
            if report.pool is not None and report.pool.name == name
        }

    def _why_engine_waits(self) -> str | None:
        """Return why an engine has no node, as it was found a moment ago."""
        now = self._clock()
        if self._watch is not None and now - self._watched_at >= CHECK_PLACEMENT_EVERY_S:
            self._watched_at, self._waits = now, None
            with contextlib.suppress(Exception):  # the reason only improves the message
                why = self._watch.check(gateway_runs=True)
                self._waits = None if why is None else f"an engine waits for a node: {why}"
        return self._waits

    def _drop_silent(self) -> None:
        for replica, (when, report) in list(self._reports.items()):
            if self._clock() - when > SILENT_AFTER_S:
                del self._reports[replica]
                self._silent[replica] = report.metrics.lasting()
        while len(self._silent) > MAX_SILENT:
            left = self._silent.pop(next(iter(self._silent)))
            self._departed = left if self._departed is None else merge([self._departed, left])


def _are_healthy(engines: Sequence[ReplicaReport], *, may_sleep: bool) -> bool:
    """Return whether an engine makes progress, or none runs that need not."""
    return any(one.trouble is None for one in engines) or (may_sleep and not engines)


def _sum_pools(devices: Sequence[PoolStatus]) -> tuple[PoolStatus, ...]:
    """Return the state of each pool, given that of its devices."""
    pools: dict[str, list[PoolStatus]] = {}
    for device in devices:
        pools.setdefault(device.name, []).append(device)
    return tuple(
        PoolStatus(
            name,
            sum(one.devices for one in each),
            sum(one.engines for one in each),
            sum(one.busy for one in each) / len(each),
        )
        for name, each in sorted(pools.items())
    )


def _model_status(name: str, engines: Sequence[ReplicaReport], *, may_sleep: bool) -> ModelStatus:
    healthy = _are_healthy(engines, may_sleep=may_sleep)
    troubles = [one.trouble for one in engines if one.trouble is not None]
    why = "" if healthy else "; ".join(troubles) or NO_ENGINE
    return ModelStatus(name, healthy, why, len(engines))


def _reasons(engines: Sequence[ReplicaReport]) -> tuple[str, ...]:
    """Return why texts of the engines may depend on what else is served."""
    found = ((one.model, one.info.model.irreproducible) for one in engines if one.info is not None)
    return tuple(sorted({_named(model, reason) for model, reason in found if reason is not None}))


def _named(model: str, trouble: str) -> str:
    return f"{model}: {trouble}" if model else trouble
