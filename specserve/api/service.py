"""The interface between the HTTP server and what generates text. Knows neither Ray nor HTTP."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from specserve.config.tree import Config
from specserve.metrics import Snapshot
from specserve.types import Chunk, ModelInfo, Request
from specserve.wire.version import Versioned


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Properties of the model that clients may know."""

    name: str
    vocab_size: int  # ids below it are valid
    max_context: int  # prompt and continuation together; of an encoder-decoder each
    max_gamma: int
    created: int  # seconds since 1970
    is_encoder_decoder: bool = (
        False  # if so, a prompt is encoder input and the text does not continue it
    )
    note: str | None = None  # what must be known of it
    # of requests that say nothing else, by name
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Config, info: ModelInfo, *, created: int) -> ServedModel:
        """Return the model that an engine has opened under a config."""
        return cls(
            name=config.model,
            vocab_size=info.vocab_size,
            max_context=min(info.max_context, info.num_pages * info.page_size),
            created=created,
            max_gamma=config.speculation.max_gamma,
            is_encoder_decoder=info.decoder_start is not None,
            note=config.demo.note,
            sampling_defaults=info.sampling_defaults,
        )

    @property
    def max_prompt_length(self) -> int:
        return self.max_context if self.is_encoder_decoder else self.max_context - 1

    def max_new_tokens(self, prompt_length: int) -> int:
        """Return how many new tokens fit in the context after a prompt.

        Every text of an encoder-decoder follows its start token instead.
        """
        return self.max_context - (1 if self.is_encoder_decoder else prompt_length)


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """Health of the engines of one of several models."""

    name: str
    healthy: bool
    why: str = ""  # what is wrong
    replicas: int = 0


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """State of a draft pool, or of one of its devices."""

    name: str
    devices: int
    engines: int
    busy: float  # share of a device's time that it would draft, had it prepared nothing


@dataclass(frozen=True, slots=True)
class Status(Versioned):
    """Health of the engines, as the gateway sees it."""

    ready: bool  # takes requests
    healthy: bool  # its workers make progress
    why: str = ""  # what is wrong
    replicas: int = 0
    troubles: tuple[str, ...] = ()  # of single replicas, also while others are well
    device_troubles: tuple[str, ...] = ()  # devices that are avoided
    losses: tuple[str, ...] = ()  # why workers were last lost, by role
    draft_placements: tuple[str, ...] = ()  # where the drafts live, and why
    irreproducible: tuple[str, ...] = ()  # why texts may depend on what else is served
    metrics: tuple[Snapshot, ...] = ()  # one of each replica
    pools: tuple[PoolStatus, ...] = ()  # draft pools of which a device reports
    models: tuple[ModelStatus, ...] = ()  # each of several models; () if there is one


class Service(Protocol):
    """An engine or a group of them, which generates text for requests."""

    def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of a continuation.

        Raises from errors.py before the first chunk. `aclose()` cancels the request and frees what
        it held. The last chunk has `finish` and `stats`. An earlier chunk may have the stats until
        then, which count when a stop string ends the text there.
        """
        ...

    def require_room(self) -> None:
        """Raise Overloaded if no engine would take a request just now, as far as is known."""
        ...

    async def status(self) -> Status: ...

    async def trace(self, last: int | None = None) -> Mapping[str, object]:
        """Return the last rounds, or all that are kept, in Chrome trace format."""
        ...
