"""`specserve bench`: warms a server up, loads it, reads its counters before and after, and reports."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from datetime import datetime
from typing import TextIO

from specserve.errors import SpecserveError
from specserve.progress import Bar, Tell
from specserve.tools.bench.address import Address
from specserve.tools.bench.counters import Counters, ServerSide
from specserve.tools.bench.html_report import page
from specserve.tools.bench.load import Asking, ClosedLoop, Load, OpenLoop, Question
from specserve.tools.bench.measurement import Measured
from specserve.tools.bench.options import DEFAULT_WARM_UP, Options, read_key
from specserve.tools.bench.prompts import CODE, read_prompts
from specserve.tools.bench.report import Report
from specserve.tools.bench.streams import Stream

STILL_S = 1.6  # a server's parts report to /metrics once a second: what has not moved for so long is the last word
_LOOK_EVERY_S, _STILL_WITHIN_S = 0.2, 6.0  # others may keep it busy for ever
_PROBE_S = 15.0
_TELL_EVERY_S = 0.2


def bench(
    options: Options, say: Callable[[str], None], progress: TextIO, *, still_s: float = STILL_S
) -> None:
    """Raises when a request failed or the load was interrupted, once everything is told."""
    if options.chaos is not None:
        from specserve.tools.bench.chaos.command import chaos

        chaos(options, say)
        return
    address = Address.of(options.url, read_key(options.api_key_file))
    question = _question(options)
    with Bar(progress, keeps=True) as bar:
        report = asyncio.run(measure(options, address, question, bar, still_s=still_s))
    for line in report.lines():
        say(line)
    if options.json is not None:
        options.json.write_text(report.json() + "\n", encoding="utf-8")
    if options.html is not None:
        options.html.write_text(page(report), encoding="utf-8")
    if report.interrupted:
        raise KeyboardInterrupt
    if report.num_failed:
        raise SpecserveError(f"{report.num_failed} of {len(report.records)} requests failed")


async def measure(
    options: Options, address: Address, question: Question, tell: Tell, *, still_s: float
) -> Report:
    """Cancelled while it loads, it reports what there is until then."""
    asking = Asking(address, question, model=await served_model(address), timeout_s=options.timeout)
    warm_up = range(options.requests, options.requests + options.num_warm_up)
    tell("warming up")
    await ClosedLoop(options.clients or DEFAULT_WARM_UP).drive(asking.ask, warm_up)
    before = await _settled(address, still_s)
    begun = datetime.now().astimezone()
    asking.begin()
    interrupted = await _drive(_load(options), asking, range(options.requests), tell)
    after = await _settled(address, still_s)
    server = None if before is None or after is None else ServerSide.of(after.since(before))
    records = sorted(asking.records, key=lambda record: record.number)
    return Report(options, asking.model, begun, interrupted, records, Measured.of(records, server))


def _load(options: Options) -> Load:
    if options.rate is not None:
        return OpenLoop(options.rate, options.seed or 0)
    assert options.clients is not None
    return ClosedLoop(options.clients)


def _question(options: Options) -> Question:
    return Question(
        prompts=CODE if options.prompts is None else read_prompts(options.prompts),
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        seed=options.seed,
        gamma=options.gamma,
        ignore_eos=options.ignore_eos,
        numbered=options.prompts is None,
    )


async def _drive(load: Load, asking: Asking, numbers: range, tell: Tell) -> bool:
    """Whether it was interrupted: Ctrl-C cancels this task, and what is under way with it."""
    telling = asyncio.create_task(_tell_for_ever(asking, len(numbers), tell))
    try:
        await load.drive(asking.ask, numbers)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()  # the counters are still to be read
        return True
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
    return False


async def _tell_for_ever(asking: Asking, total: int, tell: Tell) -> None:
    """Until cancelled; then once more, for good."""
    try:
        while True:
            _tell(asking, total, tell)
            await asyncio.sleep(_TELL_EVERY_S)
    finally:
        _tell(asking, total, tell)


def _tell(asking: Asking, total: int, tell: Tell) -> None:
    done, seconds = len(asking.records), time.monotonic() - asking.begun
    tell(
        "requests",
        done / max(1, total),
        f"{done} of {total}, {asking.num_tokens / max(seconds, 1e-9):.0f} tokens/s",
    )


async def served_model(address: Address) -> str:
    """Of the first model served; also finds out whether anybody is there, and lets us in."""
    answer = await _asked(address, "/v1/models")
    if answer.status == 401:
        raise SpecserveError("the server wants an API key: give --api-key-file")
    try:
        return str(json.loads(answer.body)["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError):
        raise SpecserveError(
            f"what answers at {address} with status {answer.status} is no OpenAI-compatible server"
        ) from None


async def _settled(address: Address, still_s: float) -> Counters | None:
    """The counters, once they are at rest; None if the server shows none."""
    begun = moved = time.monotonic()
    counters = await _counters(address)
    while (
        counters is not None
        and (now := time.monotonic()) - moved < still_s
        and now - begun < _STILL_WITHIN_S
    ):
        await asyncio.sleep(_LOOK_EVERY_S)
        earlier, counters = counters, await _counters(address)
        if counters is not None and counters.work != earlier.work:
            moved = time.monotonic()
    return counters


async def _counters(address: Address) -> Counters | None:
    try:
        answer = await _asked(address, "/metrics")
    except SpecserveError:  # a server that died under the load has still been measured
        return None
    counters = (
        Counters.parse(answer.body.decode(errors="replace"))
        if answer.status == 200
        else Counters({})
    )
    return counters if counters.samples else None


async def _asked(address: Address, path: str) -> Stream:
    try:
        async with asyncio.timeout(_PROBE_S):
            return await address.get(path)
    except TimeoutError:
        raise SpecserveError(f"{address} did not answer within {_PROBE_S:g} s") from None
    except (OSError, EOFError, ValueError) as error:
        raise SpecserveError(f"no server answers at {address}: {error}") from None
