"""How long the loop of a gateway stands still while it encodes as many logprobs as it takes.

Over a service that writes as fast as it is read, and without a socket: `python -m
tests.chaos.loop_pauses` on a machine without other work, since a process that has to wait for a
core stands still as well.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.types import ASGIApp

from specserve.cluster.engine.long_lived import freeze_objects
from tests.support import asgi
from tests.support.http_server import TEXT, FakeService, app_over

N, TOKENS, LOGPROBS = 128, 1000, 20
GOAL_S = 0.05
HEAD = f"""\
| answer | logprobs | seconds | pauses: median | p99 | most (goal {GOAL_S} s) |
|---|---|---|---|---|---|"""


@dataclass(frozen=True, slots=True)
class Pauses:
    """Times between two turns of a loop that served one answer."""

    seconds: float
    turns: Sequence[float]  # rising

    def row(self, name: str, num_logprobs: int) -> str:
        middle, late = (self.turns[int(share * (len(self.turns) - 1))] for share in (0.5, 0.99))
        return (
            f"| {name} | {num_logprobs:,} | {self.seconds:.1f} "
            f"| {middle:.4f} s | {late:.4f} s | {self.turns[-1]:.4f} s |"
        )


async def pauses(app: ASGIApp, body: dict[str, object]) -> Pauses:
    """Serve the answer while another task notes each turn of the loop."""
    turns: list[float] = []

    async def watch() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0)
            now = time.perf_counter()
            turns.append(now - last)
            last = now

    watching = asyncio.create_task(watch())
    started = time.perf_counter()
    reply = await asgi.answer(app, "/v1/completions", body)
    seconds = time.perf_counter() - started
    watching.cancel()
    assert reply.status == 200, reply.body
    return Pauses(seconds, sorted(turns))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a tiny form, to see that it works")
    options = parser.parse_args()
    tokens = 10 if options.quick else TOKENS
    service = FakeService()
    ids = service.tokenizer.encode(TEXT * (1 + TOKENS // 4))
    service.tokens = (*ids[: tokens - 1], 0)  # not encoded in the loop
    app = app_over(service)
    freeze_objects()  # as a gateway does
    print(HEAD)
    try:
        for name in ("whole", "streamed"):
            body = {"prompt": "x", "n": N, "max_tokens": tokens, "logprobs": LOGPROBS}
            found = asyncio.run(pauses(app, {**body, "stream": name == "streamed"}))
            print(found.row(name, N * tokens * LOGPROBS), flush=True)
    finally:
        gc.unfreeze()


if __name__ == "__main__":
    main()
