"""`specserve bench`: warm a server up, load it, and report.

The server's counters are read before and after the load.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TextIO

from specserve.errors import BadValue, SpecserveError
from specserve.progress import ProgressBar, ReportProgress
from specserve.tools.bench.address import ServerAddress
from specserve.tools.bench.counters import Counters, ServerSide
from specserve.tools.bench.html_report import render_html
from specserve.tools.bench.load import (
    ClosedLoop,
    LoadClient,
    LoadPattern,
    OpenLoop,
    RequestTemplate,
)
from specserve.tools.bench.measurement import Measurement
from specserve.tools.bench.options import DEFAULT_WARM_UP, BenchOptions, read_key
from specserve.tools.bench.prompts import CODE_PROMPTS, QUESTIONS, read_prompts
from specserve.tools.bench.report import BenchReport
from specserve.tools.bench.streams import Stream

# A server's parts report to /metrics once a second, so counters that have not changed for this
# long are final.
STABLE_S = 1.6
# The limit is for a server that other clients keep busy.
_POLL_S, _STABLE_WITHIN_S = 0.2, 6.0
_PROBE_S = 15.0
_PROGRESS_S = 0.2


def bench(
    options: BenchOptions,
    say: Callable[[str], None],
    progress: TextIO,
    *,
    stable_s: float = STABLE_S,
) -> None:
    """Load a server and print or write the report.

    Raises SpecserveError if a request failed and KeyboardInterrupt if the load was interrupted,
    after the report.
    """
    address = ServerAddress.from_url(options.url, read_key(options.api_key_file))
    own_prompts = None if options.prompts is None else read_prompts(options.prompts)
    with ProgressBar(progress, keeps=True) as bar:
        report = asyncio.run(measure(options, address, own_prompts, bar, stable_s=stable_s))
    for line in report.lines():
        say(line)
    if options.json is not None:
        options.json.write_text(report.json() + "\n", encoding="utf-8")
    if options.html is not None:
        options.html.write_text(render_html(report), encoding="utf-8")
    if report.interrupted:
        raise KeyboardInterrupt
    if report.num_failed:
        raise SpecserveError(f"{report.num_failed} of {len(report.records)} requests failed")


async def measure(
    options: BenchOptions,
    address: ServerAddress,
    own_prompts: Sequence[str] | None,
    report_progress: ReportProgress,
    *,
    stable_s: float,
) -> BenchReport:
    """Load a server and return the report. Cancelled during the load, report what came so far."""
    model = await find_model(address, options.model)
    template = _request_template(options, own_prompts, has_chat_template=model.has_chat_template)
    client = LoadClient(address, template, model=model.name, timeout_s=options.timeout)
    warm_up = range(options.requests, options.requests + options.num_warm_up)
    report_progress("warming up")
    await ClosedLoop(options.clients or DEFAULT_WARM_UP).drive(client.send, warm_up)
    before = await _stable_counters(address, model, stable_s)
    started = datetime.now().astimezone()
    client.start()
    interrupted = await _drive(_load(options), client, range(options.requests), report_progress)
    after = await _stable_counters(address, model, stable_s)
    server = (
        None if before is None or after is None else ServerSide.from_counters(after.since(before))
    )
    records = sorted(client.records, key=lambda record: record.number)
    measurement = Measurement.from_records(records, server)
    return BenchReport(options, client.model, started, interrupted, records, measurement)


def _load(options: BenchOptions) -> LoadPattern:
    if options.rate is not None:
        return OpenLoop(options.rate, options.seed or 0)
    assert options.clients is not None
    return ClosedLoop(options.clients)


def _request_template(
    options: BenchOptions, own_prompts: Sequence[str] | None, *, has_chat_template: bool
) -> RequestTemplate:
    is_chat = has_chat_template if options.chat is None else options.chat
    return RequestTemplate(
        prompts=own_prompts or (QUESTIONS if is_chat else CODE_PROMPTS),
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        seed=options.seed,
        gamma=options.gamma,
        ignore_eos=options.ignore_eos,
        numbered=own_prompts is None,
        is_chat=is_chat,
    )


async def _drive(
    load: LoadPattern, client: LoadClient, numbers: range, report_progress: ReportProgress
) -> bool:
    """Drive the load and return whether it was interrupted.

    Ctrl-C cancels this task, and the requests under way with it.
    """
    progress = asyncio.create_task(_keep_reporting(client, len(numbers), report_progress))
    try:
        await load.drive(client.send, numbers)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        assert task is not None
        task.uncancel()  # the counters are still to be read
        return True
    finally:
        progress.cancel()
        await asyncio.gather(progress, return_exceptions=True)
    return False


async def _keep_reporting(client: LoadClient, total: int, report_progress: ReportProgress) -> None:
    """Report progress until cancelled, and a last time then."""
    try:
        while True:
            _report(client, total, report_progress)
            await asyncio.sleep(_PROGRESS_S)
    finally:
        _report(client, total, report_progress)


def _report(client: LoadClient, total: int, report_progress: ReportProgress) -> None:
    done, seconds = len(client.records), time.monotonic() - client.started
    report_progress(
        "requests",
        done / max(1, total),
        f"{done} of {total}, {client.num_tokens / max(seconds, 1e-9):.0f} tokens/s",
    )


@dataclass(frozen=True, slots=True)
class ModelUnderLoad:
    """The model that is loaded: its name in requests, and in the labels of metrics."""

    name: str
    label: str  # an adapter counts as its base
    has_chat_template: bool = False  # as far as the server says


async def find_model(address: ServerAddress, name: str | None) -> ModelUnderLoad:
    """Find a model of the server by name; by default the first.

    Raises SpecserveError if no OpenAI-compatible server answers, or it wants an API key, and
    BadValue for a model that it does not serve.
    """
    answer = await _get(address, "/v1/models")
    if answer.status == 401:
        raise SpecserveError("the server wants an API key: give --api-key-file")
    try:
        served = {
            str(entry["id"]): ModelUnderLoad(
                str(entry["id"]),
                str(entry.get("parent") or entry["id"]),
                bool(entry.get("chat_template")),
            )
            for entry in json.loads(answer.body)["data"]
        }
        chosen = next(iter(served)) if name is None else name
    except (ValueError, KeyError, StopIteration, TypeError, AttributeError):
        raise SpecserveError(
            f"what answers at {address} with status {answer.status} is no OpenAI-compatible server"
        ) from None
    if chosen not in served:
        raise BadValue(
            f"--model {chosen} is not served at {address}; there are {', '.join(served)}",
            param="model",
        )
    return served[chosen]


async def _stable_counters(
    address: ServerAddress, model: ModelUnderLoad, stable_s: float
) -> Counters | None:
    """Return the counters once they stop changing, or None if the server shows none."""
    started = changed = time.monotonic()
    counters = await _counters(address, model)
    while (
        counters is not None
        and (now := time.monotonic()) - changed < stable_s
        and now - started < _STABLE_WITHIN_S
    ):
        await asyncio.sleep(_POLL_S)
        earlier, counters = counters, await _counters(address, model)
        if counters is not None and counters.work != earlier.work:
            changed = time.monotonic()
    return counters


async def _counters(address: ServerAddress, model: ModelUnderLoad) -> Counters | None:
    try:
        answer = await _get(address, "/metrics")
    except SpecserveError:  # a server that died under the load is still reported
        return None
    counters = (
        Counters.parse(answer.body.decode(errors="replace"), model.label)
        if answer.status == 200
        else Counters({})
    )
    return counters if counters.samples else None


async def _get(address: ServerAddress, path: str) -> Stream:
    try:
        async with asyncio.timeout(_PROBE_S):
            return await address.get(path)
    except TimeoutError:
        raise SpecserveError(f"{address} did not answer within {_PROBE_S:g} s") from None
    except (OSError, EOFError, ValueError) as error:
        raise SpecserveError(f"no server answers at {address}: {error}") from None
