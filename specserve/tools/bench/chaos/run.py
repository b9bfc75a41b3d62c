"""A siege: clients that ask without a break, and blows that fall at random times until there have been enough, or its time is over."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from specserve.errors import SpecserveError
from specserve.tools.bench.address import Address
from specserve.tools.bench.chaos.check import Asked, Tally, pauses, usual_pause, verdict
from specserve.tools.bench.chaos.faults import KILLED, STOPPED, Blow, strike
from specserve.tools.bench.prompts import CODE
from specserve.tools.bench.streams import Stream

LEAST_REST_S, MOST_REST_S = 0.3, 2.0  # between a server that is whole again and the next blow
WHOLE_WITHIN_S = 300.0
REQUEST_S = 600.0

Strike = Callable[[random.Random], Awaitable[Blow | None]]


@dataclass(frozen=True, slots=True)
class Outcome:
    blows: tuple[Blow, ...]
    tally: Tally
    pauses: tuple[float, ...]  # of each stream at each blow
    usual: tuple[float, ...]
    seconds: float
    first_wrong: str | None = None


def processes_of(roles: Sequence[str], *, stopping: float) -> Strike:
    """A process of a random one of these roles; a share of them is stopped instead of killed."""

    async def strike_one(chance: random.Random) -> Blow | None:
        role = chance.choice(list(roles))
        stops = role in ("draft", "target") and chance.random() < stopping
        return strike(role, STOPPED if stops else KILLED, chance)

    return strike_one


@dataclass(slots=True)
class Siege:
    """Half of the questions are greedy, the others seeded at temperature 1: both have one right text, whatever happens."""

    address: Address
    model: str
    num_clients: int
    max_tokens: int
    seconds: float = math.inf  # after which nothing more is struck
    _over: bool = False

    async def run(
        self, strike: Strike, *, num_blows: int, seed: int, say: Callable[[str], None]
    ) -> Outcome:
        texts = {question: await self._text(question) for question in range(self.num_clients)}
        self._over, asked, begun = False, list[Asked](), time.monotonic()
        clients = [
            asyncio.create_task(self._client(question, asked))
            for question in range(self.num_clients)
        ]
        blows = await self._blows(strike, num_blows, random.Random(seed), say)
        await asyncio.sleep(1.0)
        self._over = True
        await asyncio.gather(*clients)
        wrong = next(
            (one for one in asked if verdict(one, texts[one.question]) != "complete"), None
        )
        return Outcome(
            tuple(blows),
            Tally.of(asked, texts),
            tuple(pause for blow in blows for pause in pauses(blow, asked)),
            tuple(usual_pause(asked)),
            time.monotonic() - begun,
            None
            if wrong is None
            else f"{verdict(wrong, texts[wrong.question])}: {wrong.trouble or wrong.stream.error or wrong.stream.body[:200]!r}",
        )

    async def _blows(
        self, strike: Strike, num_blows: int, chance: random.Random, say: Callable[[str], None]
    ) -> list[Blow]:
        blows: list[Blow] = []
        begun = time.monotonic()
        while len(blows) < num_blows and time.monotonic() - begun < self.seconds:
            await self._whole()
            await asyncio.sleep(chance.uniform(LEAST_REST_S, MOST_REST_S))
            if (blow := await strike(chance)) is not None:
                blows.append(blow)
                say(f"{len(blows)}/{num_blows} {blow.role} {blow.how}")
                await asyncio.sleep(0.2)
        await self._whole()
        return blows

    async def _whole(self) -> None:
        """Waits until the server says that its workers make progress."""
        begun = time.monotonic()
        while not await self._is_healthy():
            if time.monotonic() - begun > WHOLE_WITHIN_S:
                raise SpecserveError(
                    f"the server was not healthy again within {WHOLE_WITHIN_S:g} s"
                )
            await asyncio.sleep(0.1)

    async def _is_healthy(self) -> bool:
        try:
            async with asyncio.timeout(10):
                return (await self.address.get("/health")).status == 200
        except (OSError, EOFError, ValueError, TimeoutError):
            return False

    async def _client(self, question: int, asked: list[Asked]) -> None:
        while not self._over:
            asked.append(await self._ask(question))

    async def _text(self, question: int) -> str:
        one = await self._ask(question)
        text = "".join(one.stream.texts)
        if verdict(one, text) != "complete":
            raise SpecserveError(
                f"a request fails before anything was struck: {one.trouble or one.stream.error}"
            )
        return text

    async def _ask(self, question: int) -> Asked:
        stream = Stream()
        try:
            async with asyncio.timeout(REQUEST_S):
                await self.address.post(
                    "/v1/completions", {"model": self.model, **self._body(question)}, into=stream
                )
        except (OSError, EOFError, ValueError, TimeoutError) as error:
            return Asked(question, stream, f"{type(error).__name__}: {error}")
        return Asked(question, stream)

    def _body(self, question: int) -> dict[str, object]:
        prompt = f"# {question}\n{CODE[question % len(CODE)]}"
        manner = {"temperature": 0} if question % 2 == 0 else {"temperature": 1, "seed": question}
        return {"prompt": prompt, "max_tokens": self.max_tokens, "ignore_eos": True, **manner}
