"""The simulation beside the devices that it simulates.

Passes, acceptance and overheads are fitted to some runs, and the rates of others are predicted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import mean, median

import numpy as np

from lab.bench.rig import LoopRun, Rig
from lab.simulate.acceptance_model import AcceptanceConfig
from lab.simulate.devices import HostConfig
from lab.simulate.fit import MeasuredPass, fit_pass_time
from lab.simulate.load import Arrival
from lab.simulate.run import simulate
from lab.simulate.scenario import DeviceGroup, Mode, Scenario
from specserve.config.tree import config_from_keys
from specserve.engine.budget import TokenBudget
from specserve.engine.trace import Round
from specserve.types import Curve, Request

STREAMS = (1, 4, 8, 32)
FITTED_STREAMS = 8
MODES = (Mode.LOCKSTEP, Mode.PLAIN, Mode.ANTICIPATED, Mode.TOGETHER)
LEAST_REQUESTS = 4
"""Requests of a run, also where fewer run at the same time: one alone would be too short."""
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
        """Return it with the seconds of runs whose passes have `rows` rows a sequence."""
        count = num_streams(many)
        of_one, of_many = (median(one.seconds for one in target_passes(run)) for run in (one, many))
        scaled = replace(self, scale=of_one / self.seconds(rows, 1, 0))
        further = of_many - scaled.seconds(count * rows, 1, 0)
        return replace(scaled, per_row=max(0.0, further) / (rows * (count - 1)))


@dataclass(frozen=True, slots=True)
class FittedDevices:
    """Parameters of the simulation, fitted to runs of one process."""

    target: DeviceGroup
    draft: DeviceGroup
    host: HostConfig
    acceptance: AcceptanceConfig = field(default_factory=AcceptanceConfig)


@dataclass(frozen=True, slots=True)
class CheckedRates:
    """Tokens a second of a run, and of two simulations of it.

    One simulation has passes that were fitted to other runs, the other the run's own passes.
    """

    measured: float
    predicted: float
    composed: float


@dataclass(frozen=True, slots=True)
class CheckedRigs:
    """The same target in three processes: with each of the ways to draft."""

    lockstep: Rig
    anticipating: Rig
    together: Rig

    def rig(self, mode: Mode) -> Rig:
        return {Mode.ANTICIPATED: self.anticipating, Mode.TOGETHER: self.together}.get(
            mode, self.lockstep
        )


async def check_simulation(
    rigs: CheckedRigs,
    requests: Sequence[Request],
    *,
    gamma: int,
    turns: int,
    streams: Sequence[int] = STREAMS,
) -> list[str]:
    """Return a table of measured and simulated rates.

    Passes are the warm-up's, by rows. What they lose beside others is fitted to lockstep
    with one stream and eight, and where both models are together to those runs. Overheads are
    fitted to one stream and eight of each way to draft but anticipation, which has lockstep's.
    Other numbers of streams, the passes of plain decoding, and anticipation are predicted. Since
    machines drift from one run to the next, each run is also simulated with its own passes: how
    far that is off is the simulation's own error. Each turn is fitted and predicted by itself.
    Acceptance and hit rate are each run's own: texts differ, and the simulation does not claim to
    know them.
    """
    compared: dict[str, list[CheckedRates]] = {}
    requests = [replace(request, prompt=request.prompt[-PROMPT:]) for request in requests]
    for turn in range(-1, turns):
        runs = await _run_turn(
            rigs, [*requests[turn:], *requests[:turn]], gamma=gamma, numbers=streams
        )
        if turn < 0:
            continue
        # In a thread, since the simulation has an event loop of its own.
        for name, one in (await asyncio.to_thread(_compare, rigs, runs, gamma)).items():
            compared.setdefault(name, []).append(one)
    lines = [
        "| | measured, tokens/s | simulated | simulated / measured, turn by turn "
        "| the same with the run's own passes |",
        "|---|---|---|---|---|",
    ]
    for name, turns_of in compared.items():
        lines.append(
            f"| {name} | {median(one.measured for one in turns_of):.1f} "
            f"| {median(one.predicted for one in turns_of):.1f} "
            f"| {_spread([one.predicted / one.measured for one in turns_of])} "
            f"| {_spread([one.composed / one.measured for one in turns_of])} |"
        )
    return lines


Runs = dict[tuple[Mode, int], LoopRun]
"""Runs of a turn by mode and number of streams."""


async def _run_turn(
    rigs: CheckedRigs, requests: Sequence[Request], *, gamma: int, numbers: Sequence[int]
) -> Runs:
    """Run all modes at each number of streams, those with as many streams one after the other."""
    return {
        (mode, streams): await rigs.rig(mode).run_closed_loop(
            requests[: max(streams, LEAST_REQUESTS)],
            gamma=0 if mode is Mode.PLAIN else gamma,
            concurrency=streams,
        )
        for streams in numbers
        for mode in MODES
    }


def _compare(rigs: CheckedRigs, runs: Runs, gamma: int) -> dict[str, CheckedRates]:
    compared = {}
    for (mode, streams), run in runs.items():
        fitted = _fitted_to(mode, rigs, runs, gamma=gamma)
        curve, drafted = rigs.rig(mode).group.info.curve, 0 if mode is Mode.PLAIN else gamma
        keys = {
            "speculation.gamma": drafted,
            "limits.max_batch_tokens": TokenBudget.from_curve(None, curve).tokens,
        }
        predicted, composed = (
            simulate(make_scenario(devices, mode, keys, streams)).tokens_per_second
            for devices in (
                with_measured_acceptance(fitted, run),
                with_measured_acceptance(with_own_passes(fitted, run, mode, gamma), run),
            )
        )
        name = f"{mode.value}, {streams} stream{'s' if streams > 1 else ''}"
        compared[name] = CheckedRates(decode_rate(run), predicted, composed)
    return compared


def _fitted_to(mode: Mode, rigs: CheckedRigs, runs: Runs, *, gamma: int) -> FittedDevices:
    together = mode is Mode.TOGETHER
    asked = Mode.TOGETHER if together else Mode.LOCKSTEP
    fitted = fit_devices(
        runs[asked, 1],
        runs[asked, FITTED_STREAMS],
        curve=rigs.rig(asked).group.info.curve,
        gamma=gamma,
        is_apart=not together,
    )
    if mode is not Mode.PLAIN:
        return fitted
    links = 2 * fitted.target.link_s
    return replace(fitted, host=fit_host(runs[mode, 1], runs[mode, FITTED_STREAMS], links))


def _spread(ratios: Sequence[float]) -> str:
    return f"{median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})"


def fit_devices(
    one: LoopRun, many: LoopRun, *, curve: Curve, gamma: int, is_apart: bool = True
) -> FittedDevices:
    """Fit devices to a run of one stream and a run of many, with a draft that is apart or not.

    Passes of the target are its curve, stretched to both runs; the draft's are fitted by
    least squares. The time of an exchange outside its work is the link's; the rest of a round is
    the host's.
    """
    target_link = link_seconds(one, "target")
    draft_link = link_seconds(one, "draft") if is_apart else 0.0
    draft_pass = fit_pass_time([*draft_passes(one, gamma), *draft_passes(many, gamma)])
    return FittedDevices(
        DeviceGroup(CurvePassTime(curve).fitted_to(one, many, rows=gamma + 1), link_s=target_link),
        DeviceGroup(draft_pass, link_s=draft_link),
        fit_host(one, many, 2 * (target_link + draft_link)),
    )


def fit_host(one: LoopRun, many: LoopRun, link_seconds: float) -> HostConfig:
    """Return what of a round is neither work nor, for `link_seconds`, on its way."""
    host_one, host_many = (idle_seconds(run) - link_seconds for run in (one, many))
    per_sequence = max(0.0, (host_many - host_one) / (num_streams(many) - 1))
    return HostConfig(max(0.0, host_one - per_sequence), per_sequence)


def with_own_passes(fitted: FittedDevices, run: LoopRun, mode: Mode, gamma: int) -> FittedDevices:
    """Return the devices with the passes of a run, its drafts' where an engine waited for all."""
    target = replace(fitted.target, pass_time=fit_pass_time(target_passes(run)))
    if mode not in (Mode.LOCKSTEP, Mode.TOGETHER):
        return replace(fitted, target=target)
    draft = replace(fitted.draft, pass_time=fit_pass_time(draft_passes(run, gamma)))
    return replace(fitted, target=target, draft=draft)


def target_passes(run: LoopRun) -> list[MeasuredPass]:
    """Return the target's passes over all streams."""
    return [
        MeasuredPass(earlier.num_positions, earlier.num_sequences, seconds)
        for earlier, later in _pairs(run)
        for seconds in _spans(run, earlier, later, "verify")
    ]


def draft_passes(run: LoopRun, gamma: int) -> list[MeasuredPass]:
    """Return the draft's passes over all streams, a `gamma`th of each proposal."""
    return [
        MeasuredPass(earlier.num_sequences, earlier.num_sequences, seconds / gamma)
        for earlier, later in _pairs(run)
        for seconds in _spans(run, earlier, later, "draft")
    ]


def num_streams(run: LoopRun) -> int:
    """Return the number of sequences that ran at the same time."""
    return max(round_.num_sequences for round_ in run.decode_rounds)


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
            - sum(
                span.end - span.start for span in exchange.spans if span.start >= exchange.sent_at
            )
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


def _pairs(run: LoopRun) -> list[tuple[Round, Round]]:
    """Return each round of all streams with the one after it, if that is one, too."""
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


def make_scenario(
    fitted: FittedDevices, mode: Mode, keys: Mapping[str, object], streams: int
) -> Scenario:
    """Return a load of long texts, so that chance evens out.

    Prompts have one token, since only decoding is compared.
    """
    return Scenario(
        target=fitted.target,
        draft=fitted.draft,
        arrivals=(Arrival(0.0, 1, 4000),) * streams,
        concurrency=streams,
        mode=mode,
        config=config_from_keys(keys),
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
    most = num_streams(run)
    return [round_ for round_ in run.decode_rounds if round_.num_sequences == most]
