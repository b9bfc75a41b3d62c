"""The load: which requests are sent, when, and the record of each. Draws no conclusions."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from specserve.tools.bench.address import ServerAddress
from specserve.tools.bench.record import BROKEN, INTERRUPTED, RequestRecord
from specserve.tools.bench.streams import Stream

SendRequest = Callable[[int], Awaitable[None]]
"""Sends the request of that number and returns once it is over."""


class LoadPattern(Protocol):
    """A rule for when requests are sent."""

    async def drive(self, send: SendRequest, numbers: Iterable[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """A number of clients, each sending its next request once it has its answer.

    Measures the throughput at a given concurrency.
    """

    clients: int

    async def drive(self, send: SendRequest, numbers: Iterable[int]) -> None:
        waiting = iter(numbers)

        async def client() -> None:
            for number in waiting:
                await send(number)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(self.clients):
                tasks.create_task(client())


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """A Poisson process: requests arrive independently of one another and of the answers.

    A slow server thus gets no less load.
    """

    rate: float  # requests per second
    seed: int

    def gaps(self) -> Iterator[float]:
        """Yield the seconds between one arrival and the next."""
        rng = random.Random(self.seed)
        while True:
            yield rng.expovariate(self.rate)

    async def drive(self, send: SendRequest, numbers: Iterable[int]) -> None:
        due = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for number, gap in zip(numbers, self.gaps(), strict=False):
                due += gap
                await asyncio.sleep(due - time.monotonic())
                tasks.create_task(_sent(send, number))


async def _sent(send: SendRequest, number: int) -> None:
    await send(number)


@dataclass(frozen=True, slots=True)
class RequestTemplate:
    """Parameters that all requests share. Only prompt and seed differ."""

    prompts: Sequence[str]
    max_tokens: int
    temperature: float
    seed: int | None
    gamma: int | str | None
    ignore_eos: bool
    # Put a comment with the number before each prompt, so that no two prompts share a prefix and
    # the prefix cache does not help.
    numbered: bool
    is_chat: bool = False

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    def body(self, number: int) -> dict[str, object]:
        """Return the JSON body of the request with that number."""
        prompt = self.prompts[number % len(self.prompts)]
        if self.numbered:
            prompt = f"# {number}\n{prompt}"
        body: dict[str, object] = {
            **(
                {"messages": [{"role": "user", "content": prompt}]}
                if self.is_chat
                else {"prompt": prompt}
            ),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.seed is not None and self.temperature > 0:
            body["seed"] = self.seed + number
        if self.gamma is not None:
            body["speculation"] = {"gamma": self.gamma}
        return body


class LoadClient:
    """Sends requests to one server and keeps a record of each, whatever its outcome."""

    def __init__(
        self, address: ServerAddress, template: RequestTemplate, *, model: str, timeout_s: float
    ) -> None:
        self._address, self._template, self._timeout_s = address, template, timeout_s
        self.model = model
        self._live: dict[int, Stream] = {}
        self.started = time.monotonic()
        self.records: list[RequestRecord] = []

    def start(self) -> None:
        """Drop the records of the warm-up and start the clock."""
        self.started, self.records = time.monotonic(), []

    @property
    def num_tokens(self) -> int:
        """Number of tokens so far, including the tokens of requests under way."""
        return sum(record.tokens for record in self.records) + sum(
            len(origins) for live in self._live.values() for origins in live.origins
        )

    async def send(self, number: int) -> None:
        """Send the request of that number and record it."""
        stream, failure = Stream(), None
        self._live[number] = stream
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._address.post(
                    self._template.path,
                    {"model": self.model, **self._template.body(number)},
                    into=stream,
                )
        except TimeoutError:
            failure = f"no answer in time: it took longer than {self._timeout_s:g} s"
        except OSError as error:
            failure = f"{BROKEN if stream.status else 'no connection'}: {error}"
        except (EOFError, ValueError) as error:
            failure = f"{BROKEN}: {error}"
        except asyncio.CancelledError:
            failure = INTERRUPTED
            raise
        finally:
            del self._live[number]
            self.records.append(
                RequestRecord.from_stream(
                    number, stream, started=self.started, now=time.monotonic(), failure=failure
                )
            )
