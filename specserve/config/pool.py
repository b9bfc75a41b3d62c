"""The keys of draft pools. Knows no other section."""

from __future__ import annotations

from dataclasses import dataclass

from specserve.config.fields import integer, number, setting, text


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """Draft devices that the engines of an application share, instead of one draft each."""

    name: str | None = setting(None, text())  # None: there is no pool
    devices: int = setting(1, integer(1, 1024))  # each with a draft of its own; at least that many
    # at most; None: devices. Between the two, the measured load decides
    max_devices: int | None = setting(None, integer(1, 1024))
    # that draft for one engine, each for some of its sequences
    devices_per_engine: int = setting(1, integer(1, 64))
    target_busy: float = setting(0.7, number(0, 1, above=True))  # share of a device's time
    # engines; None: replicas.max, of all models that name the pool together
    targets: int | None = setting(None, integer(1, 4096))

    @property
    def most_devices(self) -> int:
        """Number of devices beyond which the pool does not grow."""
        return self.max_devices or self.devices
