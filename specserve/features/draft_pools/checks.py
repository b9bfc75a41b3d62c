"""Checks of the keys of draft pools: in one model, and in models that share a pool.

Knows sections by name, and no devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace

from specserve.config.fields import NAME
from specserve.config.pool import PoolConfig
from specserve.config.tree import Config
from specserve.errors import ConfigError
from specserve.features.draft_pools.sharers import pool_sharers

SHARED_KEYS = (
    "draft",
    "speculation.anticipation",
    "cache.page_size",
    "cache.memory_fraction",
    "cache.prefix_caching",
    "weights",
)
"""Keys of a pool's draft that are the same for all its models. Of limits the largest holds."""


def check_config(config: Config) -> None:
    """Raise ConfigError for a draft that no pool can have."""
    draft, pool = config.draft, config.draft.pool
    if pool.name is None:
        if pool != PoolConfig():
            raise ConfigError(
                "the keys of draft.pool are of a pool with a name; give it a draft.pool.name, "
                "such as shared"
            )
        return
    if not NAME.fullmatch(pool.name):
        raise ConfigError(
            f"draft.pool.name {pool.name!r} must begin with a letter or a digit and have nothing "
            "but letters, digits, '-', '_' and '.', such as shared"
        )
    if draft.kind != "neural":
        raise ConfigError(
            f"draft.pool shares a draft model, and draft.kind is {draft.kind}; name a model with "
            "draft.path, or leave draft.pool out"
        )
    if draft.placement == "together":
        raise ConfigError(
            "draft.pool puts drafts on devices of their own, and draft.placement is together; "
            "leave one out"
        )


def check_pool_size(pool: PoolConfig, most_engines: int, *, of: str = "replicas.max") -> None:
    """Raise ConfigError if a pool cannot have that many engines, or has too many devices."""
    num_engines = pool.targets or most_engines
    if num_engines < most_engines:
        raise ConfigError(
            f"draft.pool.targets {num_engines} is below {of} {most_engines}; "
            "leave it out, or raise it"
        )
    if pool.most_devices < pool.devices:
        raise ConfigError(
            f"draft.pool.max_devices {pool.max_devices} is below draft.pool.devices "
            f"{pool.devices}; leave it out, or raise it"
        )
    if pool.devices_per_engine > pool.devices:
        raise ConfigError(
            f"draft.pool.devices_per_engine {pool.devices_per_engine} is above draft.pool.devices "
            f"{pool.devices}; lower it, or raise that"
        )
    if pool.most_devices > num_engines * pool.devices_per_engine:
        key = "devices" if pool.max_devices is None else "max_devices"
        raise ConfigError(
            f"draft.pool.{key} {pool.most_devices} is above the number of engines, {num_engines}, "
            f"and each drafts on {pool.devices_per_engine}; lower it, raise "
            "draft.pool.devices_per_engine, or leave draft.pool out for a draft each"
        )


def with_shared_pools(config: Config) -> Config:
    """Return the config with the number of all engines of each pool that several models name.

    Raises ConfigError if they differ in what its draft is opened by, or are too many or too few.
    """
    targets: dict[str, int] = {}
    for name, parts in pool_sharers(config).items():
        most = sum(part.replicas.max for part in parts)
        for part in parts[1:]:
            _require_same_draft(name, parts[0], part)
        is_shared = len(parts) > 1
        of = f"replicas.max of {', '.join(part.model for part in parts)} together"
        check_pool_size(parts[0].draft.pool, most, of=of if is_shared else "replicas.max")
        if is_shared:
            targets[name] = parts[0].draft.pool.targets or most
    models = tuple(
        part if part.draft.pool.name not in targets else _with_targets(part, targets)
        for part in config.models
    )
    return replace(config, models=models)


def _with_targets(part: Config, targets: dict[str, int]) -> Config:
    pool = part.draft.pool
    pool = replace(pool, targets=targets[str(pool.name)])
    return replace(part, draft=replace(part.draft, pool=pool))


def _require_same_draft(name: str, first: Config, other: Config) -> None:
    for key in SHARED_KEYS:
        ours, theirs = (_at(part, key) for part in (first, other))
        for inner, our, their in _differences(key, ours, theirs):
            raise ConfigError(
                f"the models {first.model} and {other.model} share the draft.pool {name}, and "
                f"differ in {inner}: {_shown(our)} and {_shown(their)}; give them the same, or "
                "each a draft.pool.name of its own"
            )


def _at(part: object, key: str) -> object:
    for name in key.split("."):
        part = getattr(part, name)
    return part


def _differences(key: str, ours: object, theirs: object) -> Iterator[tuple[str, object, object]]:
    """Yield the keys below `key` in which two sections differ, with both values."""
    if ours == theirs:
        return
    if not is_dataclass(ours) or type(ours) is not type(theirs):
        yield key, ours, theirs
        return
    for each in fields(ours):
        inner = f"{key}.{each.name}"
        yield from _differences(inner, getattr(ours, each.name), getattr(theirs, each.name))


def _shown(value: object) -> str:
    return "none" if value is None else str(value)
