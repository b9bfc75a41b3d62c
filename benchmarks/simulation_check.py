"""The simulation beside the devices that it simulates.

Passes, acceptance and overheads are fitted to some runs, and the rates of others are predicted.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

import numpy as np

from benchmarks.rig import LoopRun, Rig, trace_of
from specserve.config.tree import config_from_keys
from specserve.engine.trace import Round
from specserve.tools.simulate.acceptance_model import AcceptanceConfig
from specserve.tools.simulate.devices import HostConfig
from specserve.tools.simulate.fit import pass_time_from_trace
from specserve.tools.simulate.load import Arrival
from specserve.tools.simulate.run import simulate
from specserve.tools.simulate.scenario import DeviceGroup, Mode, Scenario
from specserve.types import Curve, Request

LOCKSTEP_STREAMS = (1, 4, 8, 32)
OTHER_STREAMS = (1, 8, 32)
PROMPT = 24
"""Tokens of a prompt, so few that all streams begin within some rounds and run together."""


@dataclass(frozen=True, slots=True)
class CurvePassTime:
    """Passes of a target by rows, as its warm-up measured them for one sequence.

    `scale` is how much slower it runs beside the others, and each row of a further sequence takes
    `per_row` more. A pass is no longer than one of more rows, whatever a warm-up measures.
    """

    curve: Curve
    scale: float = 1.0
    per_row: float = 0.0

    def seconds(self, rows: int, sequences: int, positions: int) -> float:
        known, measured = zip(*self.curve, strict=True)
        taken = np.minimum.accumulate(measured[::-1])[::-1]
        beyond: float = max(1.0, rows / known[-1])
        of_rows: float = float(np.interp(rows, known, taken)) * beyond
        further = rows * (1 - 1 / max(1, sequences))
        return self.scale * of_rows + self.per_row * further

    def fitted_to(self, one: LoopRun, many: LoopRun, *, rows: int) -> CurvePassTime:
        """Return it with the seconds of runs whose passes have so many rows a sequence."""
        count = len(many.output_ids)
        of_one, of_many = (median(pass_seconds(run)) for run in (one, many))
        scaled = replace(self, scale=of_one / self.seconds(rows, 1, 0))
        further = of_many - scaled.seconds(count * rows, 1, 0)
        return replace(scaled, per_row=max(0.0, further) / (rows * (count - 1)))


@dataclass(frozen=True, slots=True)
class FittedDevices:
    """Parameters of the simulation, fitted to runs in lockstep."""

    target: DeviceGroup
    draft: DeviceGroup
    host: HostConfig
    acceptance: AcceptanceConfig = field(default_factory=AcceptanceConfig)


async def check_simulation(
    lockstep: Rig, anticipating: Rig, requests: Sequence[Request], *, gamma: int, turns: int
) -> list[str]:
    """Return a table of measured and simulated rates.

    Passes are those of the warm-up, by rows. What they lose beside others, and overheads, are
    fitted to lockstep with one stream and eight; other numbers of streams, plain decoding and
    anticipation are predicted. Each turn is fitted and predicted by itself,
    since machines drift. Acceptance and hit rate are each run's own: texts differ, and the
    simulation does not claim to know them.
    """
    rates: dict[str, list[tuple[float, float]]] = {}
    requests = [replace(request, prompt=request.prompt[-PROMPT:]) for request in requests]
    for turn in range(-1, turns):
        cases = await _run_turn(
            lockstep, anticipating, [*requests[turn:], *requests[:turn]], gamma=gamma
        )
        for name, (run, scenario) in cases.items() if turn >= 0 else ():
            # In a thread, since the simulation has an event loop of its own.
            predicted = await asyncio.to_thread(simulate, scenario)
            rates.setdefault(name, []).append((decode_rate(run), predicted.tokens_per_second))
    lines = [
        "| | measured, tokens/s | simulated | simulated / measured, turn by turn |",
        "|---|---|---|---|",
    ]
    for name, pairs in rates.items():
        measured, simulated = zip(*pairs, strict=True)
        ratios = [predicted / real for real, predicted in pairs]
        spread = f"{median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})"
        lines.append(f"| {name} | {median(measured):.1f} | {median(simulated):.1f} | {spread} |")
    return lines


async def _run_turn(
    lockstep: Rig, anticipating: Rig, requests: Sequence[Request], *, gamma: int
) -> dict[str, tuple[LoopRun, Scenario]]:
    lockstep_runs = {
        batch: await lockstep.run_closed_loop(requests[:batch], gamma=gamma)
        for batch in LOCKSTEP_STREAMS
    }
    fitted = fit_devices(
        lockstep_runs[1], lockstep_runs[8], curve=lockstep.group.info.curve, rows=gamma + 1
    )
    runs = {(Mode.LOCKSTEP, batch): run for batch, run in lockstep_runs.items()}
    for batch in OTHER_STREAMS:
        for mode in (Mode.PLAIN, Mode.ANTICIPATED):
            runs[mode, batch] = await anticipating.run_closed_loop(
                requests[:batch], gamma=0 if mode is Mode.PLAIN else gamma
            )
    return {
        f"{mode.value}, {batch} stream{'s' if batch > 1 else ''}": (
            run,
            make_scenario(
                with_measured_acceptance(fitted, run),
                mode,
                0 if mode is Mode.PLAIN else gamma,
                batch,
            ),
        )
        for (mode, batch), run in runs.items()
    }


def fit_devices(one: LoopRun, many: LoopRun, *, curve: Curve, rows: int) -> FittedDevices:
    """Fit devices to a run of one stream and a run of many, with so many rows a sequence.

    Passes of the target are its curve, stretched to both runs; those of the draft are fitted by
    least squares. The time of an exchange outside its work is the link's; the rest of a round is
    the host's.
    """
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "trace.json"
        events = [event for run in (one, many) for event in trace_of(run)["traceEvents"]]
        file.write_text(json.dumps({"traceEvents": events}))
        draft_passes = pass_time_from_trace(file, "draft")
    target = DeviceGroup(
        CurvePassTime(curve).fitted_to(one, many, rows=rows), link_s=link_seconds(one, "target")
    )
    draft = DeviceGroup(draft_passes, link_s=link_seconds(one, "draft"))
    links = 2 * (target.link_s + draft.link_s)
    host_one, host_many = idle_seconds(one) - links, idle_seconds(many) - links
    per_sequence = max(0.0, (host_many - host_one) / (len(many.output_ids) - 1))
    host = HostConfig(per_round=max(0.0, host_one - per_sequence), per_sequence=per_sequence)
    return FittedDevices(target, draft, host)


def link_seconds(run: LoopRun, role: str) -> float:
    """Return the seconds of one way of an exchange during the decode rounds."""
    since, until = run.decode_rounds[0].start, run.decode_rounds[-1].end
    exchanges = [
        exchange
        for exchange in run.exchanges
        if exchange.role == role and since <= exchange.sent_at < until
    ]
    return max(
        0.0,
        median(
            exchange.answered_at
            - exchange.sent_at
            - sum(span.end - span.start for span in exchange.spans)
            for exchange in exchanges
        )
        / 2,
    )


def idle_seconds(run: LoopRun) -> float:
    """Return the seconds of a round of all streams in which neither device works."""
    waited = [
        later.start - earlier.start - sum(_spans(run, earlier, later, "verify", "draft"))
        for earlier, later in _pairs(run)
    ]
    return max(0.0, median(waited))


def pass_seconds(run: LoopRun) -> list[float]:
    """Return the seconds of the target's passes over all streams."""
    return [
        seconds
        for earlier, later in _pairs(run)
        for seconds in _spans(run, earlier, later, "verify")
    ]


def _pairs(run: LoopRun) -> list[tuple[Round, Round]]:
    """Return each round of all streams with the one behind it, if that is one, too."""
    return [
        (earlier, later)
        for earlier, later in pairwise(full_rounds(run))
        if later.number == earlier.number + 1
    ]


def _spans(run: LoopRun, earlier: Round, later: Round, *names: str) -> list[float]:
    """Return the seconds of the spans with these names in the earlier of two rounds."""
    return [
        span.end - span.start
        for exchange in run.exchanges
        if earlier.start <= exchange.sent_at < later.start
        for span in exchange.spans
        if span.name in names
    ]


def measured_acceptance(runs: Sequence[LoopRun], *, hit_rate: float = 1.0) -> AcceptanceConfig:
    """Return the acceptance of the runs by position in the proposal."""
    outcomes = [
        outcome for run in runs for round_ in full_rounds(run) for outcome in round_.outcomes
    ]
    longest = max(outcome.proposed for outcome in outcomes)
    verified = [
        sum(outcome.accepted >= position and outcome.proposed > position for outcome in outcomes)
        for position in range(longest)
    ]
    accepted = [
        sum(outcome.accepted > position for outcome in outcomes) for position in range(longest)
    ]
    by_position = tuple(
        hits / tries for hits, tries in zip(accepted, verified, strict=True) if tries
    )
    return AcceptanceConfig(by_position=by_position, ranks=(hit_rate,))


def with_measured_acceptance(fitted: FittedDevices, run: LoopRun) -> FittedDevices:
    """Return the devices with the acceptance of a run, and with its anticipation hit rate."""
    if not any(round_.outcomes for round_ in run.decode_rounds):
        return fitted
    return replace(
        fitted, acceptance=measured_acceptance([run], hit_rate=mean(run.hits) if run.hits else 1.0)
    )


def make_scenario(fitted: FittedDevices, mode: Mode, gamma: int, streams: int) -> Scenario:
    """Return a load of long texts, so that chance evens out.

    Prompts have one token, since only decoding is compared.
    """
    return Scenario(
        target=fitted.target,
        draft=fitted.draft,
        arrivals=(Arrival(0.0, 1, 4000),) * streams,
        concurrency=streams,
        mode=mode,
        config=config_from_keys({"speculation.gamma": gamma}),
        acceptance=fitted.acceptance,
        host=fitted.host,
    )


def decode_rate(run: LoopRun) -> float:
    """Return the tokens per second of the rounds in which all streams ran."""
    seconds = mean(later.start - earlier.start for earlier, later in _pairs(run))
    return mean(round_.num_committed for round_ in full_rounds(run)) / seconds


def full_rounds(run: LoopRun) -> list[Round]:
    """Return the rounds in which all streams ran.

    In the end the streams with most rejections run alone, and do not represent the others.
    """
    most = max(round_.num_sequences for round_ in run.decode_rounds)
    return [round_ for round_ in run.decode_rounds if round_.num_sequences == most]
