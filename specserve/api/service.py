"""What the HTTP server needs of whatever generates: one small protocol. Knows neither Ray nor HTTP."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Protocol

from specserve.metrics import Snapshot
from specserve.types import Chunk, Request


@dataclass(frozen=True, slots=True)
class Served:
    """What clients may know of the model."""

    name: str
    vocab_size: int  # ids below it are valid
    max_context: int  # prompt and continuation together; of an encoder-decoder each
    max_gamma: int
    created: int  # seconds since 1970
    encodes: bool = (
        False  # an encoder-decoder: a prompt is a source, which the text does not continue
    )

    @property
    def longest_prompt(self) -> int:
        return self.max_context if self.encodes else self.max_context - 1

    def room(self, prompt_length: int) -> int:
        """New tokens that fit behind a prompt, or behind the one that every text of an encoder-decoder begins with."""
        return self.max_context - (1 if self.encodes else prompt_length)


@dataclass(frozen=True, slots=True)
class Status:
    """How the engine is. `ready`: takes requests. `healthy`: its workers make progress. `why` says what is wrong."""

    ready: bool
    healthy: bool
    why: str = ""
    replicas: int = 0
    troubles: tuple[str, ...] = ()  # of single replicas, also while others are well
    metrics: tuple[Snapshot, ...] = ()  # one of each replica


class Service(Protocol):
    """Generates. Raises from errors.py before the first chunk; `aclose()` cancels the request and frees what it held.

    The last chunk has `finish` and `stats`; an earlier one may have the stats until then, which count when a stop string ends the text there.
    """

    def generate(self, request: Request) -> AsyncGenerator[Chunk, None]: ...
    async def status(self) -> Status: ...
    async def trace(
        self, last: int | None = None
    ) -> Mapping[
        str, object
    ]: ...  # Chrome trace format; of so many rounds, or of all that are kept
