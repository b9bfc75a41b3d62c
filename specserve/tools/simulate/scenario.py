"""One experiment: everything that `simulate` needs to know, and nothing of files."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from specserve.config.tree import Config, parse
from specserve.tools.simulate.acceptance_model import Acceptance
from specserve.tools.simulate.devices import Host
from specserve.tools.simulate.load import Arrival
from specserve.tools.simulate.pass_times import PassTime

PLENTY = 10**6  # pages
BATCH_TOKENS = 512  # the engine's own


class Mode(StrEnum):
    PLAIN = "plain"  # nobody drafts
    LOCKSTEP = "lockstep"  # target and drafter take turns
    ANTICIPATED = "anticipated"  # the drafter works ahead


@dataclass(frozen=True, slots=True)
class Worker:
    """A group of devices as the engine sees it."""

    pass_time: PassTime
    link_s: float = 0.0  # one way
    pages: int = PLENTY
    num_devices: int = 1


@dataclass(frozen=True, slots=True)
class Scenario:
    """Of `config` count limits, speculation, cache and replicas; `mode` stands above speculation.anticipation.enabled."""

    target: Worker
    draft: Worker | None  # needed by every mode but plain
    arrivals: tuple[Arrival, ...]
    concurrency: int | None = None  # clients of a closed loop; None: requests come at their times
    mode: Mode = Mode.ANTICIPATED
    config: Config = field(default_factory=lambda: parse({}))
    acceptance: Acceptance = field(default_factory=Acceptance)
    host: Host = field(default_factory=Host)
    context: int = 32768  # where the config has no limits.max_context
    batch_tokens: int = BATCH_TOKENS
    startup_s: float = 0.0  # of a replica; the first ones are there already
    seed: int = 0

    @property
    def num_devices(self) -> int:
        """Of one replica."""
        return self.target.num_devices + (
            0 if self.draft is None or self.mode is Mode.PLAIN else self.draft.num_devices
        )
