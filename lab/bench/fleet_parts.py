"""Parts of a simulated fleet: models on types of GPUs, where their drafts run, and their load."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from lab.simulate.acceptance_model import AcceptanceConfig
from lab.simulate.devices import HostConfig
from lab.simulate.load import Arrival, LengthsConfig, LoadConfig, arrivals
from lab.simulate.pass_times import RooflinePassTime
from lab.simulate.scenario import DeviceGroup, Mode, Scenario
from specserve.config.tree import config_from_keys

PAGE_SIZE = 16
PROMPT = LengthsConfig(kind="lognormal", tokens=512, low=64, high=2048, sigma=0.5)
OUTPUT = LengthsConfig(kind="lognormal", tokens=128, low=16, high=512, sigma=0.6)
LINK_S = 60e-6
ALPHA = 0.75
WARM_SHARE = 0.4
"""Share of the time in which requests arrive that lies before the measured part."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A type of GPU, by its data sheet, and the assumed price of an hour in USD."""

    name: str
    bandwidth_gb_s: float
    tflops: float  # dense bf16
    memory_gb: float
    price: float


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("H100", 3350, 990, 80, 2.69),
        Gpu("A100", 2039, 312, 80, 1.39),
        Gpu("L40S", 864, 362, 48, 0.79),
        Gpu("L4", 300, 121, 24, 0.44),
    )
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Shape of a model in bf16: parameters in 10^9, layers, KB of the cache for each position."""

    name: str
    params_b: float
    layers: int
    kv_kb: float


M70, M8, M1 = (
    ModelShape("70B", 70.6, 80, 327.7),
    ModelShape("8B", 8.03, 32, 131.1),
    ModelShape("1B", 1.24, 16, 32.8),
)


@dataclass(frozen=True, slots=True)
class FleetPart:
    """The engines of a model on one type of GPU, which has a share of the fleet's GPUs."""

    target: ModelShape
    ranks: int  # GPUs of a target
    gpu: Gpu
    share: float

    @property
    def name(self) -> str:
        return f"{self.target.name} on {self.ranks} x {self.gpu.name}"

    @property
    def answer_s(self) -> float:
        """Return the seconds of a mean answer without other work and without a draft."""
        mean = OUTPUT.tokens * math.exp(OUTPUT.sigma**2 / 2)
        return mean * self.roofline(self.target, self.ranks).seconds(1, 1, PROMPT.tokens)

    def group(self, model: ModelShape, ranks: int) -> DeviceGroup:
        """Return devices of this type that run a model."""
        roofline = self.roofline(model, ranks)
        return DeviceGroup(roofline, LINK_S, roofline.positions() // PAGE_SIZE, ranks)

    def roofline(self, model: ModelShape, ranks: int) -> RooflinePassTime:
        """Return pass times with the shares and overheads of `deploy/simulate-70b.yaml`."""
        is_draft = model is M1
        return RooflinePassTime(
            devices=ranks,
            params_b=model.params_b,
            layers=model.layers,
            kv_kb=model.kv_kb,
            bandwidth_gb_s=self.gpu.bandwidth_gb_s,
            bandwidth_share=0.82,
            tflops=self.gpu.tflops,
            flops_share=0.606,
            memory_gb=self.gpu.memory_gb,
            allreduce_us=18.4,
            allreduce_us_per_row=0.084,
            overhead_us=310 if is_draft else 1320 * model.layers / M70.layers,
            overhead_us_per_row=0 if is_draft else 6.4,
        )


PARTS: tuple[FleetPart, ...] = (
    FleetPart(M70, 4, GPUS["H100"], 0.48),
    FleetPart(M70, 4, GPUS["A100"], 0.32),
    FleetPart(M8, 1, GPUS["L40S"], 0.12),
    FleetPart(M8, 1, GPUS["L4"], 0.08),
)


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A place for drafts. `engines` share a draft device; 0: there is none apart."""

    name: str
    mode: Mode
    engines: int = 0

    def devices(self, part: FleetPart) -> float:
        """Return the GPUs of an engine, with its share of a draft device."""
        return part.ranks + (1 / self.engines if self.engines else 0)

    def num_engines(self, part: FleetPart, fleet: int) -> int:
        """Return how many engines the part's GPUs are enough for."""
        return math.floor(round(part.share * fleet) / self.devices(part) + 1e-9)


PLAIN = Arrangement("plain", Mode.PLAIN)
TOGETHER = Arrangement("together", Mode.TOGETHER)
PAIRS = Arrangement("pairs", Mode.ANTICIPATED, 1)
POOLS = tuple(Arrangement(f"pools of {n}", Mode.POOLED, n) for n in (2, 4, 8))
ARRANGEMENTS = (PLAIN, TOGETHER, PAIRS, POOLS[1])


def scenario_of(
    part: FleetPart,
    arrangement: Arrangement,
    rate: float,
    *,
    engines: int,
    seconds: float,
    seed: int,
) -> Scenario:
    """Return some engines of a part at some requests a second of each."""
    keys: dict[str, object] = {
        "replicas.min": engines,
        "replicas.max": engines,
        "limits.max_running": 128,
        "limits.max_queued": 4096,
    }
    if arrangement.mode is Mode.POOLED:
        keys |= {
            "draft.pool.name": "shared",
            "draft.pool.devices": -(-engines // arrangement.engines),
        }
    target, draft = part.group(part.target, part.ranks), part.group(M1, 1)
    if arrangement.mode is Mode.TOGETHER:
        both = part.roofline(part.target, part.ranks).positions(beside=part.roofline(M1, 1))
        target, draft = (replace(group, pages=both // PAGE_SIZE) for group in (target, draft))
    return Scenario(
        target=target,
        draft=None if arrangement is PLAIN else draft,
        arrivals=requests(rate * engines, seconds, seed),
        mode=arrangement.mode,
        config=config_from_keys(keys),
        acceptance=AcceptanceConfig(alpha=ALPHA),
        host=HostConfig(per_round=0.0001, per_sequence=0.00003),
        period=(WARM_SHARE * seconds, seconds),
        seed=seed,
    )


def requests(rate: float, seconds: float, seed: int) -> tuple[Arrival, ...]:
    """Return the requests of Poisson arrivals for a number of seconds."""
    count = max(1, math.ceil(rate * seconds))
    load = LoadConfig(kind="poisson", rate=rate, requests=count, prompt=PROMPT, output=OUTPUT)
    return arrivals(load, seed=seed, directory=Path())


@cache
def mean_output() -> float:
    """Return the mean tokens of an answer."""
    rng = random.Random(0)
    return sum(OUTPUT.draw(rng) for _ in range(20_000)) / 20_000


def plain_rate(part: FleetPart, streams: int) -> float:
    """Return the requests a second with which an engine without draft has that many streams."""
    mean = OUTPUT.tokens * math.exp(OUTPUT.sigma**2 / 2)
    prompt = PROMPT.tokens * math.exp(PROMPT.sigma**2 / 2)
    times = part.roofline(part.target, part.ranks)
    decode = times.seconds(streams, streams, round(streams * (prompt + mean / 2)))
    # In the seconds of a request all others are delayed by the prompts that come meanwhile.
    prefill = times.seconds(round(prompt), 1, round(prompt)) - times.seconds(1, 1, 1)
    return streams / (mean * decode + streams * max(0.0, prefill))
