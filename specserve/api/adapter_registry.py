"""The low-rank adapters (LoRA) that requests may name as models: `<model>:<adapter>`.

Knows names; a feature reads the files, and the target's ranks load an adapter with the first
request that names it.
"""

from __future__ import annotations

from collections.abc import Iterable

from specserve.config.features import part
from specserve.config.sections import AdaptersConfig
from specserve.errors import NotServed
from specserve.types import Adapter

SEPARATOR = ":"
"""Between the name of the target and that of an adapter."""
MAX_LISTED = 20
"""Names that an error lists."""


class AdapterRegistry:
    """Adapters of the target by name, beginning with the config's."""

    def __init__(self, base: str, adapters: Iterable[Adapter] = ()) -> None:
        self._base = base
        self._adapters = {adapter.name: adapter for adapter in adapters}

    @classmethod
    def from_config(cls, base: str, config: AdaptersConfig) -> AdapterRegistry:
        """Return a registry of the config's adapters. Raises AdapterError."""
        if not config.paths:
            return cls(base)
        read_adapter = part("adapters.files:read_adapter")
        return cls(base, [read_adapter(name, path) for name, path in config.paths.items()])

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._adapters)

    def model_name(self, adapter: Adapter | None) -> str:
        """Return the name by which a request asks for an adapter of the model, or for the model."""
        return self._base if adapter is None else f"{self._base}{SEPARATOR}{adapter.name}"

    def get(self, name: str) -> Adapter | None:
        """Return an adapter by its name; None if it is not there."""
        return self._adapters.get(name)

    def find(self, name: str) -> Adapter:
        """Return an adapter by its name. Raises NotServed, which lists those that there are."""
        if (adapter := self._adapters.get(name)) is not None:
            return adapter
        listed = [*self._adapters][:MAX_LISTED]
        more = ", ..." if len(self._adapters) > MAX_LISTED else ""
        there = f"it has {', '.join(listed)}{more}" if listed else "it has none"
        raise NotServed(f"{self._base!r} has no adapter {name[:200]!r}; {there}", param="model")

    def of_model(self, model: str | None) -> Adapter | None:
        """Return the adapter that a request's `model` names; None for the target as it is.

        Raises NotServed.
        """
        if model is None or model == self._base:
            return None
        base, separator, name = model.rpartition(SEPARATOR)
        if separator and base == self._base:
            return self.find(name)
        raise NotServed(
            f"the model {model[:200]!r} is not served here; {self._base!r} is", param="model"
        )

    def add(self, adapter: Adapter) -> None:
        """Let requests name an adapter from now on."""
        self._adapters[adapter.name] = adapter

    def remove(self, name: str) -> Adapter:
        """Let no further request name an adapter; those under way go on. Raises NotServed."""
        self.find(name)
        return self._adapters.pop(name)
