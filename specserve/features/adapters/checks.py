"""Checks of the keys of adapters."""

from __future__ import annotations

from specserve.config.fields import NAME
from specserve.config.tree import Config
from specserve.errors import ConfigError


def check_config(config: Config) -> None:
    """Raise ConfigError for names that no adapter can have, and for several that load them."""
    for adapter in config.adapters.paths:
        if not NAME.fullmatch(adapter):
            raise ConfigError(
                f"adapters.paths names the adapter {adapter!r}; a name begins with a letter or a "
                "digit and has nothing but letters, digits, '-', '_' and '.'"
            )
    if config.adapters.load_from is not None and config.replicas.gateways > 1:
        raise ConfigError(
            "adapters.load_from lets clients load adapters into the gateway that they reach, and "
            f"replicas.gateways is {config.replicas.gateways}; set it to 1, or name them in "
            "adapters.paths"
        )
