"""How long a forward pass takes: given, or from a device's data sheet. Knows counts and seconds; no models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from specserve.config.fields import number, setting, whole

MAX = 1e9


class PassTime(Protocol):
    """Seconds of one pass over `rows` new tokens of `sequences`, which together attend to `positions` cached ones."""

    def seconds(self, rows: int, sequences: int, positions: int) -> float: ...


@dataclass(frozen=True, slots=True)
class Linear:
    """max(floor, fixed + per_row * rows + per_sequence * sequences + per_position * positions), in seconds."""

    floor: float = setting(0.0, number(0, MAX))
    fixed: float = setting(0.0, number(0, MAX))
    per_row: float = setting(0.0, number(0, MAX))
    per_sequence: float = setting(0.0, number(0, MAX))
    per_position: float = setting(0.0, number(0, MAX))

    def seconds(self, rows: int, sequences: int, positions: int) -> float:
        return max(
            self.floor,
            self.fixed
            + self.per_row * rows
            + self.per_sequence * sequences
            + self.per_position * positions,
        )


@dataclass(frozen=True, slots=True)
class Roofline:
    """A dense model split over equal devices: memory traffic or arithmetic, whichever takes longer, and two all-reduces a layer.

    The shares say how much of the data sheet is assumed to be reached.
    """

    devices: int = setting(1, whole(1, 4096))
    params_b: float = setting(1.0, number(0, MAX, above=True))  # 10^9 parameters
    bytes_per_param: float = setting(2.0, number(0, 16, above=True))
    layers: int = setting(1, whole(1, 4096))
    kv_kb: float = setting(
        0.0, number(0, MAX)
    )  # 10^3 bytes that a cached position takes, all layers together
    bandwidth_gb_s: float = setting(
        1.0, number(0, MAX, above=True)
    )  # of one device, as the next ones
    bandwidth_share: float = setting(1.0, number(0, 1, above=True))
    tflops: float = setting(1.0, number(0, MAX, above=True))
    flops_share: float = setting(1.0, number(0, 1, above=True))
    memory_gb: float = setting(MAX, number(0, MAX, above=True))
    memory_share: float = setting(
        0.9, number(0, 1, above=True)
    )  # the rest is for what a pass needs
    allreduce_us: float = setting(0.0, number(0, MAX))
    overhead_us: float = setting(0.0, number(0, MAX))  # of a pass: launching it, sampling, copying

    @property
    def weight_bytes(self) -> float:
        return self.params_b * 1e9 * self.bytes_per_param

    def seconds(self, rows: int, sequences: int, positions: int) -> float:
        traffic = (self.weight_bytes + self.kv_kb * 1e3 * positions) / (
            self.bandwidth_gb_s * 1e9 * self.bandwidth_share
        )
        arithmetic = 2 * self.params_b * 1e9 * rows / (self.tflops * 1e12 * self.flops_share)
        reductions = 2 * self.layers * self.allreduce_us if self.devices > 1 else 0.0
        return max(traffic, arithmetic) / self.devices + (reductions + self.overhead_us) * 1e-6

    def positions(self) -> int:
        """What the memory holds beside the weights; 0 or less where not even those fit."""
        free = self.devices * self.memory_gb * 1e9 * self.memory_share - self.weight_bytes
        return int(free / (self.kv_kb * 1e3)) if self.kv_kb else int(free)
