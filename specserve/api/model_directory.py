"""The models that a server has, and which of them a request chooses by its `model`.

Knows names, and nothing of what generates behind them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NoReturn

from specserve.api.adapter_registry import MAX_LISTED, SEPARATOR, AdapterRegistry
from specserve.api.metering import RequestMetrics
from specserve.api.parse import RequestParser
from specserve.api.service import ServedModel, Service
from specserve.api.tokenizer import Tokenizer
from specserve.config.tree import Config
from specserve.errors import BadValue, NotServed, Overloaded, Unavailable
from specserve.metrics import Registry, Snapshot, merge
from specserve.types import Adapter


@dataclass(frozen=True, slots=True)
class ModelBackend:
    """All that answers the requests for one model."""

    served: ServedModel
    service: Service
    tokenizer: Tokenizer
    adapters: AdapterRegistry
    parser: RequestParser
    registry: Registry
    metrics: RequestMetrics
    config: Config

    @classmethod
    def from_config(
        cls,
        config: Config,
        service: Service,
        tokenizer: Tokenizer,
        served: ServedModel,
        registry: Registry,
    ) -> ModelBackend:
        """Return the backend of a model's config. Raises AdapterError."""
        adapters = AdapterRegistry.from_config(served.name, config.adapters)
        return cls(
            served,
            service,
            tokenizer,
            adapters,
            RequestParser(tokenizer, served, adapters),
            registry,
            RequestMetrics(registry, time.perf_counter),
            config,
        )

    def entries(self) -> Iterator[dict[str, object]]:
        """Yield what `/v1/models` says of the model and of its adapters."""
        yield self.entry(None)
        yield from (self.entry(self.adapters.find(name)) for name in self.adapters.names)

    def entry(self, adapter: Adapter | None) -> dict[str, object]:
        """Return what `/v1/models` says of the model, or of an adapter of it."""
        served = self.served
        parent = {} if adapter is None else {"parent": served.name}
        return {
            "id": self.adapters.model_name(adapter),
            "object": "model",
            "created": served.created,
            "owned_by": "specserve",
            "max_model_len": served.max_context,
            "chat_template": self.tokenizer.has_chat_template,
        } | (parent if served.note is None else {**parent, "note": served.note})


class ModelDirectory:
    """The models of a server by name: one, or several that may open one after the other."""

    def __init__(self, names: Sequence[str], backends: Sequence[ModelBackend] = ()) -> None:
        """Expect models of these names, of which the backends are open."""
        self._names = tuple(names)
        self._backends = {backend.served.name: backend for backend in backends}

    @property
    def has_several(self) -> bool:
        return len(self._names) > 1

    @property
    def backends(self) -> tuple[ModelBackend, ...]:
        """The models that are open, in the order of the config."""
        return tuple(self._backends[name] for name in self._names if name in self._backends)

    def add(self, backend: ModelBackend) -> None:
        """Let requests choose a model from now on."""
        self._backends[backend.served.name] = backend

    def find(self, model: str | None) -> ModelBackend:
        """Return the backend of the model, or of the model whose adapter it names.

        A single model answers for every name: its parser refuses other names. Raises NotServed,
        BadValue where a request leaves open which of several it means, and Unavailable for a model
        that is not open yet.
        """
        if not self.has_several:
            return self.backends[0]
        if model is None:
            raise BadValue(f"model must say which: {self._listed()}", param="model")
        base = model if model in self._names else model.rpartition(SEPARATOR)[0]
        if base not in self._names:
            self._refuse(model)
        if base not in self._backends:
            raise Unavailable(f"the model {base!r} is starting; try again later")
        return self._backends[base]

    def require_room(self) -> None:
        """Raise Overloaded if the engines of no model would take a request just now."""
        refusals: list[Overloaded] = []
        for backend in self.backends:
            try:
                backend.service.require_room()
            except Overloaded as error:
                refusals.append(error)
        if refusals and len(refusals) == len(self._names):
            raise refusals[0]

    def snapshot(self, common: Registry) -> Snapshot:
        """Return the metrics of this process, each model's with its name if there are several."""
        if not self.has_several:
            return common.snapshot()
        each = (one.registry.snapshot().of_model(one.served.name) for one in self.backends)
        return merge([common.snapshot().counted(), *each])

    def _refuse(self, model: str) -> NoReturn:
        raise NotServed(
            f"the model {model[:200]!r} is not served here; there are {self._listed()}",
            param="model",
        )

    def _listed(self) -> str:
        """Return the names of models and adapters, as far as a message has room for them."""
        names = [
            name
            for model in self._names
            for name in (
                [str(entry["id"]) for entry in self._backends[model].entries()]
                if model in self._backends
                else [model]
            )
        ]
        return ", ".join(names[:MAX_LISTED]) + (", ..." if len(names) > MAX_LISTED else "")
