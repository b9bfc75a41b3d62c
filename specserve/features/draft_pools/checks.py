"""Checks of the keys of a draft pool, of one model."""

from __future__ import annotations

from specserve.config.pool import check_pool
from specserve.config.tree import Config


def check_config(config: Config) -> None:
    """Raise ConfigError for a draft that no pool can have."""
    check_pool(config.draft)
