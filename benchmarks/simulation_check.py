"""The simulation against what it simulates: passes, acceptance and overheads are taken from some runs, and others are foretold."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

from benchmarks.rig import Rig, Run, trace_of
from specserve.config.tree import parse
from specserve.engine.trace import Round
from specserve.tools.simulate.acceptance_model import Acceptance
from specserve.tools.simulate.devices import Host
from specserve.tools.simulate.fit import from_trace
from specserve.tools.simulate.load import Arrival
from specserve.tools.simulate.run import simulate
from specserve.tools.simulate.scenario import Mode, Scenario, Worker
from specserve.types import Request


@dataclass(frozen=True, slots=True)
class Fitted:
    """What was learnt from runs in lockstep."""

    target: Worker
    draft: Worker
    host: Host
    acceptance: Acceptance = field(default_factory=Acceptance)


async def check(
    lockstep: Rig, ahead: Rig, asked: Sequence[Request], *, gamma: int, turns: int
) -> list[str]:
    """Passes and overheads are fitted to lockstep with one stream and eight; four streams, plain decoding and anticipation are foretold.

    Each turn is fitted and foretold by itself, since machines drift. Acceptance and hit rate are each run's own: texts differ, and the
    simulation does not claim to know them.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for turn in range(-1, turns):
        cases = await _turn(lockstep, ahead, [*asked[turn:], *asked[:turn]], gamma=gamma)
        for name, (run, what) in cases.items() if turn >= 0 else ():
            foretold = await asyncio.to_thread(simulate, what)  # which has a loop of its own
            found.setdefault(name, []).append((decoding_rate(run), foretold.tokens_per_second))
    lines = [
        "| | measured, tokens/s | simulated | simulated / measured, turn by turn |",
        "|---|---|---|---|",
    ]
    for name, pairs in found.items():
        measured, simulated = zip(*pairs, strict=True)
        ratios = [mine / real for real, mine in pairs]
        spread = f"{median(ratios):.3f} ({min(ratios):.2f} to {max(ratios):.2f})"
        lines.append(f"| {name} | {median(measured):.1f} | {median(simulated):.1f} | {spread} |")
    return lines


async def _turn(
    lockstep: Rig, ahead: Rig, asked: Sequence[Request], *, gamma: int
) -> dict[str, tuple[Run, Scenario]]:
    runs = {batch: await lockstep.complete(asked[:batch], gamma=gamma) for batch in (1, 8, 4)}
    fitted = fit(runs[1], runs[8])
    plain, anticipated = (
        await ahead.complete(asked[:1], gamma=0),
        await ahead.complete(asked[:1], gamma=gamma),
    )
    cases = {
        f"lockstep, {batch} stream{'s' if batch > 1 else ''}": (
            run,
            scenario(known(fitted, run), Mode.LOCKSTEP, gamma, batch),
        )
        for batch, run in sorted(runs.items())
    }
    cases["plain, 1 stream"] = plain, scenario(fitted, Mode.PLAIN, 0, 1)
    cases["anticipation, 1 stream"] = (
        anticipated,
        scenario(known(fitted, anticipated), Mode.ANTICIPATED, gamma, 1),
    )
    return cases


def fit(one: Run, many: Run) -> Fitted:
    """Passes by least squares over both runs; what an exchange takes beside its work is the link's, and what is left of a round the host's."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "trace.json"
        events = [event for run in (one, many) for event in trace_of(run)["traceEvents"]]
        file.write_text(json.dumps({"traceEvents": events}))
        target, draft = (
            Worker(from_trace(file, role), link_s=link(one, role)) for role in ("target", "draft")
        )
    links = 2 * (target.link_s + draft.link_s)
    alone, together = overhead(one) - links, overhead(many) - links
    each = max(0.0, (together - alone) / (len(many.texts) - 1))
    return Fitted(target, draft, Host(per_round=max(0.0, alone - each), per_sequence=each))


def link(run: Run, role: str) -> float:
    """Seconds of one way, of the exchanges while it decoded."""
    since, until = run.decoding[0].begun, run.decoding[-1].ended
    exchanges = [done for done in run.exchanges if done.role == role and since <= done.sent < until]
    return max(
        0.0,
        median(
            done.answered - done.sent - sum(span.ended - span.begun for span in done.spans)
            for done in exchanges
        )
        / 2,
    )


def overhead(run: Run) -> float:
    """Seconds of a round that neither device works."""
    rounds = [
        later.begun - earlier.begun
        for earlier, later in zip(run.decoding, run.decoding[1:], strict=False)
    ]
    return max(
        0.0, mean(rounds) - mean(run.spans("target", "verify")) - mean(run.spans("draft", "draft"))
    )


def acceptance(runs: Sequence[Run], *, hit_rate: float = 1.0) -> Acceptance:
    """By place in the proposal."""
    outcomes = [outcome for run in runs for done in full(run) for outcome in done.outcomes]
    deepest = max(outcome.proposed for outcome in outcomes)
    reached = [
        sum(outcome.accepted >= place and outcome.proposed > place for outcome in outcomes)
        for place in range(deepest)
    ]
    passed = [sum(outcome.accepted > place for outcome in outcomes) for place in range(deepest)]
    places = tuple(
        passing / reaching for passing, reaching in zip(passed, reached, strict=True) if reaching
    )
    return Acceptance(by_position=places, ranks=(hit_rate,))


def known(fitted: Fitted, run: Run) -> Fitted:
    """With the run's own acceptance, and the share of verdicts that it had prepared for."""
    hits = [
        outcome.anticipated
        for done in run.decoding
        for outcome in done.outcomes
        if outcome.anticipated is not None
    ]
    if not any(done.outcomes for done in run.decoding):
        return fitted
    return replace(fitted, acceptance=acceptance([run], hit_rate=mean(hits) if hits else 1.0))


def scenario(fitted: Fitted, mode: Mode, gamma: int, streams: int) -> Scenario:
    """Long texts, so that chance evens out; prompts of a token, since only decoding is compared."""
    return Scenario(
        target=fitted.target,
        draft=fitted.draft,
        arrivals=(Arrival(0.0, 1, 4000),) * streams,
        concurrency=streams,
        mode=mode,
        config=parse({"speculation.gamma": gamma}),
        acceptance=fitted.acceptance,
        host=fitted.host,
    )


def decoding_rate(run: Run) -> float:
    """Tokens a second over the rounds in which all streams were running."""
    rounds = full(run)
    seconds = mean(
        later.begun - earlier.begun
        for earlier, later in pairwise(rounds)
        if later.number == earlier.number + 1
    )
    return mean(done.num_committed for done in rounds) / seconds


def full(run: Run) -> list[Round]:
    """The rounds in which all streams were running. Those whose drafts are refused most run on alone, and say nothing about the others."""
    most = max(done.num_sequences for done in run.decoding)
    return [done for done in run.decoding if done.num_sequences == most]
