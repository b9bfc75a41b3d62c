"""Durations of a forward pass: given, or from a device's data sheet. Knows counts, no models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from specserve.config.fields import integer, number, setting

MAX = 1e9


class PassTime(Protocol):
    """A rule for the duration of a pass."""

    def seconds(self, rows: int, sequences: int, positions: int) -> float:
        """Return the seconds for `rows` new tokens of `sequences`.

        Together they attend to `positions` cached tokens.
        """
        ...


@dataclass(frozen=True, slots=True)
class LinearPassTime:
    """A linear rule, in seconds.

    max(floor, fixed + per_row * rows + per_sequence * sequences + per_position * positions)
    """

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
class RooflinePassTime:
    """A roofline of a dense model that is split over equal devices.

    A pass takes the longer of memory traffic and arithmetic, plus two all-reduces per layer. The
    shares say how much of the data sheet's figures is assumed to be reached.
    """

    devices: int = setting(1, integer(1, 4096))
    params_b: float = setting(1.0, number(0, MAX, above=True))  # 10^9 parameters
    bytes_per_param: float = setting(2.0, number(0, 16, above=True))
    layers: int = setting(1, integer(1, 4096))
    kv_kb: float = setting(0.0, number(0, MAX))  # 10^3 bytes per cached position, over all layers
    bandwidth_gb_s: float = setting(1.0, number(0, MAX, above=True))  # per device, as all below
    bandwidth_share: float = setting(1.0, number(0, 1, above=True))
    tflops: float = setting(1.0, number(0, MAX, above=True))
    flops_share: float = setting(1.0, number(0, 1, above=True))
    memory_gb: float = setting(MAX, number(0, MAX, above=True))
    # The rest of the memory is for a pass's own tensors.
    memory_share: float = setting(0.9, number(0, 1, above=True))
    allreduce_us: float = setting(0.0, number(0, MAX))
    allreduce_us_per_row: float = setting(0.0, number(0, MAX))
    overhead_us: float = setting(0.0, number(0, MAX))  # launching a pass, sampling, copying
    overhead_us_per_row: float = setting(0.0, number(0, MAX))

    @property
    def weight_bytes(self) -> float:
        return self.params_b * 1e9 * self.bytes_per_param

    def seconds(self, rows: int, sequences: int, positions: int) -> float:
        traffic = (self.weight_bytes + self.kv_kb * 1e3 * positions) / (
            self.bandwidth_gb_s * 1e9 * self.bandwidth_share
        )
        arithmetic = 2 * self.params_b * 1e9 * rows / (self.tflops * 1e12 * self.flops_share)
        allreduce_us = self.allreduce_us + self.allreduce_us_per_row * rows
        reductions_us = 2 * self.layers * allreduce_us if self.devices > 1 else 0.0
        overhead_us = self.overhead_us + self.overhead_us_per_row * rows
        return max(traffic, arithmetic) / self.devices + (reductions_us + overhead_us) * 1e-6

    def positions(self, *, beside: RooflinePassTime | None = None) -> int:
        """Return the cached positions that fit beside the weights, or at most 0 if those do not.

        `beside` is another model in the same memory that caches the same positions. Counted on
        the fullest device, which has a share of both models.
        """
        models = [self] if beside is None else [self, beside]
        weights = sum(model.weight_bytes / model.devices for model in models)
        free = self.memory_gb * 1e9 * self.memory_share - weights
        per_position = sum(model.kv_kb * 1e3 / model.devices for model in models)
        return int(free / per_position) if per_position else int(free)
