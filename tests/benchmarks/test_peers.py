"""Comparison with other engines: systems in their own processes, the entries, and the page."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks.peers.__main__ import commands, installation_error
from benchmarks.peers.comparison import (
    ENTRIES,
    GAMMAS,
    MANY,
    ONE,
    OURS,
    ComparisonPlan,
    ComparisonRow,
    Entry,
    PeerComparison,
)
from benchmarks.peers.process import PeerFailed, SystemProcess
from benchmarks.peers.report import RunDescription, as_json, best_peer, page
from benchmarks.peers.turn import TurnRequest

PROMPTS = ((1, 2), (3, 4), (5, 6))
DESCRIPTION = RunDescription(
    "2026-01-01, x86_64, 2 cores",
    "some work.",
    0.01,
    {OURS: {"version": "1", "threads": "2", "precision": "bf16"}},
    {},
)

FAKE = """
import sys, time
from contextlib import contextmanager
from benchmarks.peers.turn import serve_turns

class Fake:
    def about(self):
        print("a library that prints")
        return {"version": "7"}
    def run(self, request):
        if request.mode == "refused":
            raise ValueError("no such mode\\nand more of it")
        if request.mode == "stuck":
            time.sleep(60)
        if request.mode == "dying":
            sys.stderr.write("out of luck\\n")
            sys.exit(3)
        time.sleep(0.02 if request.gamma == 5 else 0.1)
        return len(request.prompts) * request.max_tokens - (request.mode == "short")
    def texts(self, request):
        return [
            f"{len(batch)} {list(prompt)} {request.gamma}"
            for batch in request.batches
            for prompt in batch
        ]

@contextmanager
def open_system():
    if "closed" in sys.argv:
        raise RuntimeError("there is no model")
    yield Fake()
    print("gone", file=open(sys.argv[1], "w"))

serve_turns(open_system)
"""


@pytest.fixture
def fake(tmp_path: Path) -> list[str]:
    """Return a system that prints, refuses, dies, and is fast with gamma 5.

    It leaves a file when it has ended in order.
    """
    program = tmp_path / "fake.py"
    program.write_text(textwrap.dedent(FAKE))
    return [sys.executable, str(program), str(tmp_path / "gone")]


@pytest.fixture
def process(fake: Sequence[str]) -> Iterator[SystemProcess]:
    with SystemProcess(fake) as process:
        yield process


def turn(mode: str, gamma: int | None = None, *, together: bool = True) -> TurnRequest:
    return TurnRequest(mode, gamma, PROMPTS, max_tokens=4, together=together)


def test_what_a_library_prints_does_not_disturb_the_answers(process: SystemProcess) -> None:
    assert process.about() == {"version": "7"}
    assert 12 / 2 < process.rate(turn("plain", 5)) < 12 / 0.02


def test_prompts_go_together_or_one_after_the_other(process: SystemProcess) -> None:
    assert process.texts(turn("plain", 3)) == ("3 [1, 2] 3", "3 [3, 4] 3", "3 [5, 6] 3")
    assert process.texts(turn("plain", together=False)) == (
        "1 [1, 2] None",
        "1 [3, 4] None",
        "1 [5, 6] None",
    )


def test_a_refused_turn_and_one_with_too_few_tokens_leave_the_system_running(
    process: SystemProcess,
) -> None:
    for mode, why in (("refused", "ValueError: no such mode"), ("short", "11 tokens came of 12")):
        with pytest.raises(PeerFailed, match=why):
            process.rate(turn(mode))
    assert process.rate(turn("plain")) > 0


def test_a_dead_system_reports_its_last_stderr_line_for_every_question(
    process: SystemProcess,
) -> None:
    for _ in range(2):
        with pytest.raises(PeerFailed, match="ended with 3: out of luck"):
            process.rate(turn("dying"))


def test_a_stuck_system_is_killed_after_the_timeout(fake: Sequence[str]) -> None:
    with (
        SystemProcess(fake, timeout_s=2.0) as process,
        pytest.raises(PeerFailed, match="ended with -9"),
    ):
        process.rate(turn("stuck"))


def test_a_system_that_does_not_open_reports_the_reason(fake: Sequence[str]) -> None:
    with (
        SystemProcess([*fake, "closed"]) as process,
        pytest.raises(PeerFailed, match="RuntimeError: there is no model"),
    ):
        process.about()
    with pytest.raises(PeerFailed, match="No such file"):
        SystemProcess(["/nowhere/python"])


def test_a_system_ends_by_itself_when_its_stdin_closes(fake: Sequence[str]) -> None:
    with SystemProcess(fake) as process:
        process.about()
    assert Path(fake[-1]).read_text() == "gone\n"


def test_each_entry_uses_its_best_gamma_and_a_failed_entry_affects_no_other(
    process: SystemProcess,
) -> None:
    entries = [
        Entry(OURS, "fixed", "draft", (2, 5, 7)),
        Entry("fake", "broken", "refused"),
        Entry("fake", "alone", "plain", (5,), (ONE,)),
        Entry("lost", "any", "plain"),
    ]
    plan = ComparisonPlan(PROMPTS, num_serial=2, max_tokens=4, turns=3, sweeps=1)
    rows = PeerComparison({OURS: process, "fake": process}, {"lost": "not installed"}, plan).run(
        entries
    )
    assert [(row.entry.name, row.streams) for row in rows] == [
        ("fixed", ONE),
        ("broken", ONE),
        ("alone", ONE),
        ("any", ONE),
        ("fixed", MANY),
        ("broken", MANY),
        ("any", MANY),
    ]
    assert [row.gamma for row in rows if row.entry.name == "fixed"] == [5, 5]
    assert [len(row.rates) for row in rows] == [3, 0, 3, 0, 3, 0, 0]
    assert [row.error for row in rows if row.error] == [
        "ValueError: no such mode",
        "not installed",
    ] * 2
    assert rows[0].texts == ("1 [1, 2] 5", "1 [3, 4] 5"), "alone, only some of the prompts"
    assert len(rows[4].texts) == len(PROMPTS)


def test_a_system_that_dies_in_its_turn_fails_only_its_own_rows(
    fake: Sequence[str], process: SystemProcess
) -> None:
    with SystemProcess(fake) as other:
        entries = [
            Entry("mortal", "a", "dying", streams=(ONE,)),
            Entry("mortal", "b", "plain", streams=(ONE,)),
            Entry(OURS, "c", "plain", streams=(ONE,)),
        ]
        rows = PeerComparison(
            {"mortal": other, OURS: process}, {}, ComparisonPlan(PROMPTS, 3, 4, turns=1, sweeps=1)
        ).run(entries)
    assert [row.error is None for row in rows] == [False, False, True]


def row(
    system: str,
    name: str,
    *rates: float,
    mode: str = "draft",
    streams: int = ONE,
    gamma: int | None = None,
    texts: tuple[str, ...] = (),
    error: str | None = None,
) -> ComparisonRow:
    return ComparisonRow(
        Entry(system, name, mode), streams, gamma, list(rates), texts=texts, error=error
    )


def test_the_ratio_is_taken_turn_by_turn_against_the_best_of_the_others() -> None:
    rows = [
        row(OURS, "plain", 50, 50, 50, mode="plain"),
        row(OURS, "gamma auto", 120, 60, 240, mode="auto"),
        row("peer", "good", 100, 50, 200, gamma=5),
        row("peer", "worse", 90, 45, 900 / 10, gamma=7),
        row("peer", "failed", error="too fast to be true", streams=ONE),
        row(OURS, "gamma auto", 90, 90, 90, mode="auto", streams=MANY),
        row("peer", "good", 100, 100, 100, gamma=2, streams=MANY),
    ]
    best = best_peer(rows, ONE)
    assert best is not None
    assert best.entry.name == "good"
    text = page(rows, DESCRIPTION)
    assert "| 1 stream, gamma auto, against peer, good | 1.20 | 1.2 | reached |" in text
    assert "| 8 streams, gamma auto, against peer, good | 0.90 | 1.0 | not reached |" in text
    assert "| peer, good | 5 | 100.0 | 50.0 to 200.0 | ours did not run |" in text
    assert "| peer, failed | | could not be run: too fast to be true | | |" in text
    assert "1 stream, plain" not in text, "the ratio is of what speculates"


def test_without_a_peer_no_goal_counts_as_reached() -> None:
    text = page(
        [row(OURS, "gamma auto", 9.0, mode="auto"), row("peer", "good", error="gone")], DESCRIPTION
    )
    assert "| 1 stream, gamma auto | nothing to compare | 1.2 | not measured |" in text


def test_texts_are_compared_with_ours_and_a_cut_character_is_no_difference() -> None:
    rows = [
        row(OURS, "plain", 1.0, mode="plain", texts=("ab", "cd")),
        row("peer", "good", 1.0, gamma=3, texts=("ab\ufffd", "ce")),
    ]
    text = page(rows, DESCRIPTION)
    assert "| 1.0 to 1.0 | 2 of 2 |" in text
    assert "| peer, good | 3 | 1.0 | 1.0 to 1.0 | 1 of 2 |" in text


def test_an_absent_system_is_listed_with_its_reason_and_the_figures_are_kept_as_json() -> None:
    description = RunDescription(
        DESCRIPTION.machine,
        DESCRIPTION.work,
        0.25,
        DESCRIPTION.systems,
        {"peer": "no wheel | for this machine"},
    )
    rows = [
        row(OURS, "plain", 1.0, 2.0, mode="plain"),
        row("peer", "good", error="no wheel | for this machine"),
    ]
    text = page(rows, description)
    assert "| peer | could not be run: no wheel / for this machine | | |" in text
    assert "25.0% busy" in text
    kept = json.loads(as_json(rows, description))
    assert kept["rows"][0]["rates"] == [1.0, 2.0]
    assert kept["rows"][1]["error"] == kept["absent"]["peer"]


def test_every_system_that_has_entries_is_started() -> None:
    started = commands(Path("t"), Path("w"), python=Path("p"), keys=("target.threads=2",))
    assert set(started) == {entry.system for entry in ENTRIES}
    assert started[OURS][-2:] == ["--set", "target.threads=2"]
    assert all(
        set(GAMMAS) <= set(entry.gammas) for entry in ENTRIES if entry.mode in ("draft", "lookup")
    ), "each has the same choice"


def test_a_failed_installation_is_reported_by_its_last_error(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    assert installation_error(python) is None
    (tmp_path / "install.log").write_text(
        "2026-01-01T00:00:00,000 ERROR: a\n"
        "2026-01-01T00:00:01,000 ERROR: no matching distribution\n"
    )
    assert installation_error(python) == "no matching distribution"
    (tmp_path / "installed").touch()
    assert installation_error(python) is None
