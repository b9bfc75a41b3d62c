"""The contest with other engines: how systems are asked in their own processes, who takes part, and what the page says."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks.peers.__main__ import commands, why_not_installed
from benchmarks.peers.comparison import ENTRIES, GAMMAS, MANY, ONE, OURS, Contest, Entry, Plan, Row
from benchmarks.peers.process import PeerFailed, Process
from benchmarks.peers.report import About, as_json, best_peer, page
from benchmarks.peers.turn import Ask

PROMPTS = ((1, 2), (3, 4), (5, 6))
ASK = Ask("plain", None, PROMPTS, max_tokens=4, together=True)
ABOUT = About(
    "2026-01-01, x86_64, 2 cores",
    "some work.",
    0.01,
    {OURS: {"version": "1", "threads": "2", "precision": "bf16"}},
    {},
)

FAKE = """
import sys, time
from contextlib import contextmanager
from benchmarks.peers.turn import answer_turns

class Fake:
    def about(self):
        print("a library that prints")
        return {"version": "7"}
    def run(self, ask):
        if ask.mode == "refused":
            raise ValueError("no such mode\\nand more of it")
        if ask.mode == "stuck":
            time.sleep(60)
        if ask.mode == "dying":
            sys.stderr.write("out of luck\\n")
            sys.exit(3)
        time.sleep(0.02 if ask.gamma == 5 else 0.1)
        return len(ask.prompts) * ask.max_tokens - (ask.mode == "short")
    def texts(self, ask):
        return [f"{len(batch)} {list(prompt)} {ask.gamma}" for batch in ask.batches for prompt in batch]

@contextmanager
def opened():
    if "closed" in sys.argv:
        raise RuntimeError("there is no model")
    yield Fake()
    print("gone", file=open(sys.argv[1], "w"))

answer_turns(opened)
"""


@pytest.fixture
def fake(tmp_path: Path) -> list[str]:
    """A system that prints, refuses, dies, and is fast with gamma 5. It leaves a file when it has been ended as it should."""
    program = tmp_path / "fake.py"
    program.write_text(textwrap.dedent(FAKE))
    return [sys.executable, str(program), str(tmp_path / "gone")]


@pytest.fixture
def process(fake: Sequence[str]) -> Iterator[Process]:
    with Process(fake) as process:
        yield process


def ask(mode: str, gamma: int | None = None, *, together: bool = True) -> Ask:
    return Ask(mode, gamma, PROMPTS, max_tokens=4, together=together)


def test_what_a_library_prints_does_not_disturb_the_answers(process: Process) -> None:
    assert process.about() == {"version": "7"}
    assert 12 / 2 < process.rate(ask("plain", 5)) < 12 / 0.02


def test_prompts_go_together_or_one_after_the_other(process: Process) -> None:
    assert process.texts(ask("plain", 3)) == ("3 [1, 2] 3", "3 [3, 4] 3", "3 [5, 6] 3")
    assert process.texts(ask("plain", together=False)) == (
        "1 [1, 2] None",
        "1 [3, 4] None",
        "1 [5, 6] None",
    )


def test_a_refused_turn_and_one_that_wrote_too_little_leave_the_system_up(process: Process) -> None:
    for mode, why in (("refused", "ValueError: no such mode"), ("short", "11 tokens came of 12")):
        with pytest.raises(PeerFailed, match=why):
            process.rate(ask(mode))
    assert process.rate(ask("plain")) > 0


def test_a_dead_system_says_its_last_words_now_and_afterwards(process: Process) -> None:
    for _ in range(2):
        with pytest.raises(PeerFailed, match="ended with 3: out of luck"):
            process.rate(ask("dying"))


def test_a_stuck_system_is_given_up(fake: Sequence[str]) -> None:
    with Process(fake, timeout_s=2.0) as process, pytest.raises(PeerFailed, match="ended with -9"):
        process.rate(ask("stuck"))


def test_a_system_that_does_not_open_says_why(fake: Sequence[str]) -> None:
    with (
        Process([*fake, "closed"]) as process,
        pytest.raises(PeerFailed, match="RuntimeError: there is no model"),
    ):
        process.about()
    with pytest.raises(PeerFailed, match="No such file"):
        Process(["/nowhere/python"])


def test_a_system_ends_by_itself_when_nothing_more_is_asked(fake: Sequence[str]) -> None:
    with Process(fake) as process:
        process.about()
    assert Path(fake[-1]).read_text() == "gone\n"


def test_each_entry_takes_its_best_gamma_and_what_fails_leaves_the_others_be(
    process: Process,
) -> None:
    entries = [
        Entry(OURS, "fixed", "draft", (2, 5, 7)),
        Entry("fake", "broken", "refused"),
        Entry("fake", "alone", "plain", (5,), (ONE,)),
        Entry("lost", "any", "plain"),
    ]
    plan = Plan(PROMPTS, alone=2, max_tokens=4, turns=3, sweeps=1)
    rows = Contest({OURS: process, "fake": process}, {"lost": "not installed"}, plan).run(entries)
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


def test_a_system_that_dies_in_its_turn_takes_only_its_own_rows_along(
    fake: Sequence[str], process: Process
) -> None:
    with Process(fake) as other:
        entries = [
            Entry("mortal", "a", "dying", streams=(ONE,)),
            Entry("mortal", "b", "plain", streams=(ONE,)),
            Entry(OURS, "c", "plain", streams=(ONE,)),
        ]
        rows = Contest(
            {"mortal": other, OURS: process}, {}, Plan(PROMPTS, 3, 4, turns=1, sweeps=1)
        ).run(entries)
    assert [row.error is None for row in rows] == [False, False, True]


def row(
    system: str, name: str, *rates: float, mode: str = "draft", streams: int = ONE, **more: object
) -> Row:
    return Row(Entry(system, name, mode), streams, rates=list(rates), **more)  # type: ignore[arg-type]


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
    text = page(rows, ABOUT)
    assert "| 1 stream, gamma auto, against peer, good | 1.20 | 1.2 | reached |" in text
    assert "| 8 streams, gamma auto, against peer, good | 0.90 | 1.0 | not reached |" in text
    assert "| peer, good | 5 | 100.0 | 50.0 to 200.0 | ours did not run |" in text
    assert "| peer, failed | | could not be run: too fast to be true | | |" in text
    assert "1 stream, plain" not in text, "the ratio is of what speculates"


def test_without_a_peer_no_goal_is_said_to_be_reached() -> None:
    text = page(
        [row(OURS, "gamma auto", 9.0, mode="auto"), row("peer", "good", error="gone")], ABOUT
    )
    assert "| 1 stream, gamma auto | nothing to compare | 1.2 | not measured |" in text


def test_texts_are_held_against_ours_and_a_cut_character_is_no_difference() -> None:
    rows = [
        row(OURS, "plain", 1.0, mode="plain", texts=("ab", "cd")),
        row("peer", "good", 1.0, gamma=3, texts=("ab\ufffd", "ce")),
    ]
    text = page(rows, ABOUT)
    assert "| 1.0 to 1.0 | 2 of 2 |" in text
    assert "| peer, good | 3 | 1.0 | 1.0 to 1.0 | 1 of 2 |" in text


def test_an_absent_system_is_named_with_why_and_the_figures_are_kept_as_json() -> None:
    about = About(
        ABOUT.machine, ABOUT.work, 0.25, ABOUT.systems, {"peer": "no wheel | for this machine"}
    )
    rows = [
        row(OURS, "plain", 1.0, 2.0, mode="plain"),
        row("peer", "good", error="no wheel | for this machine"),
    ]
    text = page(rows, about)
    assert "| peer | could not be run: no wheel / for this machine | | |" in text
    assert "25.0% busy" in text
    kept = json.loads(as_json(rows, about))
    assert kept["rows"][0]["rates"] == [1.0, 2.0]
    assert kept["rows"][1]["error"] == kept["absent"]["peer"]


def test_every_system_that_has_entries_is_started() -> None:
    started = commands(Path("t"), Path("w"), python=Path("p"), keys=("target.threads=2",))
    assert set(started) == {entry.system for entry in ENTRIES}
    assert started[OURS][-2:] == ["--set", "target.threads=2"]
    assert all(
        set(GAMMAS) <= set(entry.gammas) for entry in ENTRIES if entry.mode in ("draft", "lookup")
    ), "each has the same choice"


def test_an_installation_that_failed_is_told_by_its_last_error(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    assert why_not_installed(python) is None
    (tmp_path / "install.log").write_text(
        "2026-01-01T00:00:00,000 ERROR: a\n2026-01-01T00:00:01,000 ERROR: no matching distribution\n"
    )
    assert why_not_installed(python) == "no matching distribution"
    (tmp_path / "installed").touch()
    assert why_not_installed(python) is None
