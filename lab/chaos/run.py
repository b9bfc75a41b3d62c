"""A chaos run: clients that send requests without a break while faults are injected at random.

It ends after a number of faults, or when its time is over.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lab.chaos.check import (
    ChaosRequest,
    CheckCounts,
    all_gaps,
    check_text,
    pauses_at,
)
from lab.chaos.faults import KILLED, STOPPED, Fault, inject_fault
from lab.chaos.report import ChaosOutcome
from lab.chaos.requests import path_and_body
from specserve.errors import SpecserveError
from specserve.tools.bench.address import ServerAddress
from specserve.tools.bench.streams import Stream

# Between a server that is healthy again and the next fault.
MIN_WAIT_S, MAX_WAIT_S = 0.3, 2.0
HEALTHY_WITHIN_S = 300.0
REQUEST_S = 600.0

FaultInjector = Callable[[random.Random], Awaitable[Fault | None]]


def process_faults(roles: Sequence[str], *, stop_share: float) -> FaultInjector:
    """Return an injector that kills a process of a random one of the roles.

    A share of the workers is stopped instead.
    """

    async def inject(rng: random.Random) -> Fault | None:
        role = rng.choice(list(roles))
        stops = role in ("draft", "target") and rng.random() < stop_share
        return inject_fault(role, STOPPED if stops else KILLED, rng)

    return inject


def _first_failure(requests: Sequence[ChaosRequest], references: Mapping[int, str]) -> str | None:
    for request in requests:
        result = check_text(request, references[request.prompt_id])
        if result != "complete":
            stream = request.stream
            cause = request.connection_error or stream.error or stream.body[:200]
            return f"{result}: {cause!r}"
    return None


@dataclass(slots=True)
class ChaosRun:
    """Clients that repeat one request each, under faults.

    The requests are greedy, seeded, structured, with logprobs, and tool calls, in turns. Each has
    exactly one right answer, whatever fails.
    """

    address: ServerAddress
    model: str
    num_clients: int
    max_tokens: int
    seconds: float = math.inf  # after which no more faults are injected
    waits_for_streams: bool = True  # to go on after a fault, before the next one
    _ended: bool = False
    _open: list[Stream] = field(default_factory=list)  # under way

    async def run(
        self, inject: FaultInjector, *, num_faults: int, seed: int, say: Callable[[str], None]
    ) -> ChaosOutcome:
        """Record each client's reference text, inject the faults under load, and check all texts.

        Raises SpecserveError if a request fails without a fault, or the server does not recover.
        """
        references = {prompt_id: await self._reference(prompt_id) for prompt_id in self._prompt_ids}
        self._ended, requests, started = False, list[ChaosRequest](), time.monotonic()
        clients = [
            asyncio.create_task(self._client(prompt_id, requests)) for prompt_id in self._prompt_ids
        ]
        faults = await self._inject_all(inject, num_faults, random.Random(seed), say)
        await asyncio.sleep(1.0)
        self._ended = True
        await asyncio.gather(*clients)
        return ChaosOutcome(
            tuple(faults),
            CheckCounts.from_requests(requests, references),
            tuple(pause for fault in faults for pause in pauses_at(fault, requests)),
            tuple(all_gaps(requests)),
            time.monotonic() - started,
            _first_failure(requests, references),
        )

    @property
    def _prompt_ids(self) -> range:
        return range(self.num_clients)

    async def _inject_all(
        self, inject: FaultInjector, num_faults: int, rng: random.Random, say: Callable[[str], None]
    ) -> list[Fault]:
        faults: list[Fault] = []
        started = time.monotonic()
        while len(faults) < num_faults and time.monotonic() - started < self.seconds:
            await self._wait_until_healthy()
            await asyncio.sleep(rng.uniform(MIN_WAIT_S, MAX_WAIT_S))
            if (fault := await inject(rng)) is not None:
                faults.append(fault)
                say(f"{len(faults)}/{num_faults} {fault.role} {fault.kind}")
                await asyncio.sleep(0.2)
                if self.waits_for_streams:
                    await self._wait_until_streams_go_on(max(fault.at, fault.until))
        await self._wait_until_healthy()
        return faults

    async def _wait_until_streams_go_on(self, since: float) -> None:
        """Wait until each stream that is under way has received something since the fault."""
        started, waiting = time.monotonic(), list(self._open)
        while waiting:
            waiting = [
                stream
                for stream in waiting
                if any(stream is other for other in self._open)
                and not (stream.times and stream.times[-1] > since)
            ]
            if time.monotonic() - started > HEALTHY_WITHIN_S:
                raise SpecserveError(f"a stream did not go on within {HEALTHY_WITHIN_S:g} s")
            await asyncio.sleep(0.05)

    async def _wait_until_healthy(self) -> None:
        """Wait until /health says that the workers make progress."""
        started = time.monotonic()
        while not await self._is_healthy():
            if time.monotonic() - started > HEALTHY_WITHIN_S:
                raise SpecserveError(
                    f"the server was not healthy again within {HEALTHY_WITHIN_S:g} s"
                )
            await asyncio.sleep(0.1)

    async def _is_healthy(self) -> bool:
        try:
            async with asyncio.timeout(10):
                return (await self.address.get("/health")).status == 200
        except (OSError, EOFError, ValueError, TimeoutError):
            return False

    async def _client(self, prompt_id: int, requests: list[ChaosRequest]) -> None:
        while not self._ended:
            requests.append(await self._send(prompt_id))

    async def _reference(self, prompt_id: int) -> str:
        """Return the answer of a request before any fault."""
        request = await self._send(prompt_id)
        answer = request.stream.answer
        if check_text(request, answer) != "complete" or not answer:
            raise SpecserveError(
                "a request fails before any fault was injected: "
                f"{request.connection_error or request.stream.error or request.stream.body[:300]!r}"
            )
        return answer

    async def _send(self, prompt_id: int) -> ChaosRequest:
        stream = Stream()
        path, body = path_and_body(prompt_id, max_tokens=self.max_tokens)
        self._open.append(stream)
        try:
            async with asyncio.timeout(REQUEST_S):
                await self.address.post(path, {"model": self.model, **body}, into=stream)
        except (OSError, EOFError, ValueError, TimeoutError) as error:
            return ChaosRequest(prompt_id, stream, f"{type(error).__name__}: {error}")
        finally:
            self._open = [other for other in self._open if other is not stream]
        return ChaosRequest(prompt_id, stream)
