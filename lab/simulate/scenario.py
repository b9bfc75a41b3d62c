"""One simulated scenario: everything that `simulate` needs. Knows no files."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from lab.simulate.acceptance_model import AcceptanceConfig
from lab.simulate.devices import HostConfig
from lab.simulate.load import Arrival
from lab.simulate.pass_times import PassTime
from specserve.config.tree import Config, config_from_keys
from specserve.models.warmup import WARMUP_ROWS
from specserve.types import Curve

DEFAULT_PAGES = 10**6


class Mode(StrEnum):
    PLAIN = "plain"  # without drafting
    LOCKSTEP = "lockstep"  # target and drafter take turns
    ANTICIPATED = "anticipated"  # the drafter prepares proposals in advance
    POOLED = "pooled"  # the same, on devices that replicas share (config.draft.pool)
    TOGETHER = "together"  # drafting on the target's device, after each of its passes


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """A group of devices that together are one worker of the engine."""

    pass_time: PassTime
    link_s: float = 0.0  # one way
    pages: int = DEFAULT_PAGES
    num_devices: int = 1

    @property
    def curve(self) -> Curve:
        """Seconds of one sequence's pass by rows, as a real target measures in its warm-up."""
        return tuple((rows, self.pass_time.seconds(rows, 1, rows)) for rows in sorted(WARMUP_ROWS))


@dataclass(frozen=True, slots=True)
class Scenario:
    """A load on the devices of a deployment.

    Only limits, speculation, cache and replicas of `config` are used. `mode` overrides
    speculation.anticipation.enabled and draft.placement.
    """

    target: DeviceGroup
    draft: DeviceGroup | None  # required by all modes but plain; together: the target's devices
    arrivals: tuple[Arrival, ...]
    concurrency: int | None = None  # clients of a closed loop; None: an open loop
    mode: Mode = Mode.ANTICIPATED
    config: Config = field(default_factory=lambda: config_from_keys({}))
    acceptance: AcceptanceConfig = field(default_factory=AcceptanceConfig)
    host: HostConfig = field(default_factory=HostConfig)
    context: int = 32768  # used if the config has no limits.max_context
    # Numbers of replicas for each second of the load, in place of the autoscaler's; None: its own.
    schedule: tuple[int, ...] | None = None
    # Seconds between which a `PeriodResult` is measured; the replicas are fixed then.
    period: tuple[float, float] | None = None
    startup_s: float = 0.0  # of replicas that are added later; the first ones are ready at once
    seed: int = 0

    @property
    def num_devices(self) -> int:
        """Number of devices of one replica, without a pool's."""
        draft_apart = self.draft if self.mode in (Mode.LOCKSTEP, Mode.ANTICIPATED) else None
        return self.target.num_devices + (0 if draft_apart is None else draft_apart.num_devices)

    @property
    def num_pool_devices(self) -> int:
        """Number of devices that all replicas share."""
        if self.mode is not Mode.POOLED or self.draft is None:
            return 0
        return self.config.draft.pool.devices * self.draft.num_devices
