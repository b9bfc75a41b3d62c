"""Devices that a server's config asks of Ray, by model and in all. Starts no Ray."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import starmap

from specserve.cluster.placement import Bundle, bundles, bundles_beside, gateway_bundle
from specserve.config.tree import Config

KINDS = ("CPU", "GPU")
GATEWAYS = "gateways"


@dataclass(frozen=True, slots=True)
class DeviceDemand:
    """Devices of the engines of one model, of a draft pool, or of the gateways."""

    name: str
    min_replicas: int
    max_replicas: int
    cpus: float  # of each replica
    gpus: float

    @property
    def each(self) -> tuple[float, float]:
        return self.cpus, self.gpus


def device_demands(config: Config, *, has_gpus: bool) -> tuple[DeviceDemand, ...]:
    """Return what each model's engines ask for, then what draft pools and gateways do.

    `has_gpus` says whether a device `auto` is a GPU.
    """
    engines = (
        DeviceDemand(part.model, part.replicas.min, part.replicas.max, *_sums(part, has_gpus))
        for part in config.each_model
    )
    pools = (
        DeviceDemand(bundle.name, fewest, most, *_amounts((bundle,)))
        for bundle, fewest, most in _pools(config, has_gpus)
    )
    cpus = gateway_bundle(config).resources["CPU"]
    replicas = config.replicas
    gateways = DeviceDemand(GATEWAYS, replicas.min_gateways, replicas.gateways, cpus, 0.0)
    return (*engines, *pools, gateways)


def device_rows(demands: Sequence[DeviceDemand]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each demand and one for all: replicas, devices of each, and in all."""
    for one in demands:
        totals = (span(one.min_replicas * amount, one.max_replicas * amount) for amount in one.each)
        yield one.name, span(one.min_replicas, one.max_replicas), *map(span, one.each), *totals
    yield "all", "", "", "", *starmap(span, device_totals(demands))


def device_totals(demands: Sequence[DeviceDemand]) -> tuple[tuple[float, float], ...]:
    """Return the fewest and the most CPUs, and GPUs, of all demands together."""
    return tuple(
        (
            sum(one.min_replicas * one.each[kind] for one in demands),
            sum(one.max_replicas * one.each[kind] for one in demands),
        )
        for kind in range(len(KINDS))
    )


def span(low: float, high: float | None = None) -> str:
    """Return a number, or the two between which it lies."""
    return f"{low:g}" if high is None or low == high else f"{low:g} to {high:g}"


def _sums(config: Config, has_gpus: bool) -> tuple[float, float]:
    return _amounts(bundles(config, has_gpus=has_gpus))


def _amounts(wanted: Sequence[Bundle]) -> tuple[float, float]:
    cpus, gpus = (sum(bundle.resources.get(kind, 0.0) for bundle in wanted) for kind in KINDS)
    return cpus, gpus


def _pools(config: Config, has_gpus: bool) -> Iterator[tuple[Bundle, int, int]]:
    """Yield what a device of each pool asks for, and how many there are at least and at most."""
    fewest, most = (
        Counter(
            bundle.name for bundle in bundles_beside(config, has_gpus=has_gpus, at_most=at_most)
        )
        for at_most in (False, True)
    )
    bundles_by_name = {each.name: each for each in bundles_beside(config, has_gpus=has_gpus)}
    for name, bundle in bundles_by_name.items():
        yield bundle, fewest[name], most[name]
