"""The load: which requests are sent, when, and what came back. Knows nothing of what is made of it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from specserve.tools.bench.address import Address
from specserve.tools.bench.record import BROKEN, INTERRUPTED, Record
from specserve.tools.bench.streams import Stream

Ask = Callable[
    [int], Awaitable[None]
]  # sends the request of that number and returns once it is over


class Load(Protocol):
    """When requests are sent."""

    async def drive(self, ask: Ask, numbers: Iterable[int]) -> None: ...


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """So many clients, each of which asks again once it has its answer: throughput at a given concurrency."""

    clients: int

    async def drive(self, ask: Ask, numbers: Iterable[int]) -> None:
        waiting = iter(numbers)

        async def client() -> None:
            for number in waiting:
                await ask(number)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(self.clients):
                tasks.create_task(client())


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests arrive independently of one another and of the answers: a slow server gets no rest. A Poisson process."""

    rate: float  # a second
    seed: int

    def gaps(self) -> Iterator[float]:
        chance = random.Random(self.seed)
        while True:
            yield chance.expovariate(self.rate)

    async def drive(self, ask: Ask, numbers: Iterable[int]) -> None:
        due = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for number, gap in zip(numbers, self.gaps(), strict=False):
                due += gap
                await asyncio.sleep(due - time.monotonic())
                tasks.create_task(_asked(ask, number))


async def _asked(ask: Ask, number: int) -> None:
    await ask(number)


@dataclass(frozen=True, slots=True)
class Question:
    """What every request asks for; only prompt and seed differ."""

    prompts: Sequence[str]
    max_tokens: int
    temperature: float
    seed: int | None
    gamma: int | str | None
    ignore_eos: bool
    numbered: bool  # a comment before each prompt, so that no two begin alike and the prefix cache does not answer

    def body(self, number: int) -> dict[str, object]:
        prompt = self.prompts[number % len(self.prompts)]
        body: dict[str, object] = {
            "prompt": f"# {number}\n{prompt}" if self.numbered else prompt,
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


class Asking:
    """Asks one server one kind of question and keeps a record of every request, whatever becomes of it."""

    def __init__(
        self, address: Address, question: Question, *, model: str, timeout_s: float
    ) -> None:
        self._address, self._question, self._timeout_s = address, question, timeout_s
        self.model = model
        self._live: dict[int, Stream] = {}
        self.begun = time.monotonic()
        self.records: list[Record] = []

    def begin(self) -> None:
        """From now on it counts."""
        self.begun, self.records = time.monotonic(), []

    @property
    def num_tokens(self) -> int:
        """Until now, those of requests under way included."""
        return sum(record.tokens for record in self.records) + sum(
            len(origins) for live in self._live.values() for origins in live.origins
        )

    async def ask(self, number: int) -> None:
        stream, trouble = Stream(), None
        self._live[number] = stream
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._address.post(
                    "/v1/completions",
                    {"model": self.model, **self._question.body(number)},
                    into=stream,
                )
        except TimeoutError:
            trouble = f"no answer in time: it took longer than {self._timeout_s:g} s"
        except OSError as error:
            trouble = f"{BROKEN if stream.status else 'no connection'}: {error}"
        except (EOFError, ValueError) as error:
            trouble = f"{BROKEN}: {error}"
        except asyncio.CancelledError:
            trouble = INTERRUPTED
            raise
        finally:
            del self._live[number]
            self.records.append(
                Record.of(number, stream, begun=self.begun, now=time.monotonic(), trouble=trouble)
            )
