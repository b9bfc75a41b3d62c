"""The adapters that requests may name, and how clients load others while the server runs.

Knows names and files; the target's ranks load an adapter with the first request that names it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from specserve.config.fields import NAME
from specserve.config.tree import AdaptersConfig
from specserve.errors import AdapterError, BadValue, NotServed
from specserve.features.adapters.files import read_adapter
from specserve.types import Adapter

SEPARATOR = ":"
"""Between the name of the target and that of an adapter."""
MAX_ADAPTERS = 10_000
MAX_LISTED = 20
"""Names that an error lists."""


class AdapterRegistry:
    """Adapters of the target by name, beginning with those of the config."""

    def __init__(
        self, base: str, adapters: Iterable[Adapter] = (), *, load_from: Path | None = None
    ) -> None:
        self._base, self._load_from = base, load_from
        self._adapters = {adapter.name: adapter for adapter in adapters}

    @classmethod
    def from_config(cls, base: str, config: AdaptersConfig) -> AdapterRegistry:
        """Return a registry of the config's adapters. Raises AdapterError."""
        return cls(
            base,
            [read_adapter(name, path) for name, path in config.paths.items()],
            load_from=None if config.load_from is None else Path(config.load_from).resolve(),
        )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._adapters)

    def model_name(self, adapter: Adapter | None) -> str:
        """Return the name by which a request asks for an adapter of the model, or for the model."""
        return self._base if adapter is None else f"{self._base}{SEPARATOR}{adapter.name}"

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

    def read(self, name: str, path: str) -> Adapter:
        """Return an adapter that a client wants to load. Raises BadValue."""
        if not NAME.fullmatch(name):
            raise BadValue(
                "lora_name begins with a letter or a digit and has nothing but letters, digits, "
                "'-', '_' and '.'",
                param="lora_name",
            )
        if len(self._adapters) >= MAX_ADAPTERS:
            raise BadValue(f"there are {MAX_ADAPTERS} adapters; unload one", param="lora_name")
        try:
            assert self._load_from is not None
            directory = (self._load_from / path).resolve()
            if not directory.is_relative_to(self._load_from):
                raise BadValue(
                    "lora_path is not below the directory that adapters.load_from allows",
                    param="lora_path",
                )
            adapter = read_adapter(name, str(directory))
        except (AdapterError, ValueError, OSError) as error:
            raise BadValue(
                str(error).replace(f"{self._load_from}/", ""), param="lora_path"
            ) from error
        if self._adapters.get(name, adapter) != adapter:
            raise BadValue(
                f"the adapter {name!r} is there with other files; unload it first",
                param="lora_name",
            )
        return adapter

    def add(self, adapter: Adapter) -> None:
        """Let requests name an adapter from now on."""
        self._adapters[adapter.name] = adapter

    def remove(self, name: str) -> Adapter:
        """Let no further request name an adapter; those under way go on. Raises NotServed."""
        self.find(name)
        return self._adapters.pop(name)
