"""Comparison with other engines: systems in their own processes, the entries, and the page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lab.bench.peers import summary
from lab.bench.peers.__main__ import installation_error, main
from lab.bench.peers.comparison import (
    GAMMAS,
    OURS,
    ComparisonPlan,
    ComparisonRow,
    Entry,
    Load,
    PeerComparison,
)
from lab.bench.peers.entries import (
    EIGHT,
    HTTP,
    IN_PROCESS,
    ONE,
    PREFILL,
    WIDE,
    ComparedPair,
    chat_texts,
    text_windows,
)
from lab.bench.peers.plot import plot
from lab.bench.peers.process import SystemProcess
from lab.bench.peers.report import RunDescription, as_json, page
from lab.bench.peers.section import ComparisonSection, SystemState
from lab.bench.peers.turn import TurnRequest
from lab.bench.tasks import read_tasks
from specserve.api.tokenizer import Tokenizer
from specserve.config.tree import DEMO
from tests.support.peer_systems import PROMPTS, fake, process

__all__ = ("fake", "process")

DESCRIPTION = RunDescription("2026-01-01, x86_64, 2 cores", "Some work.")
STATES = {OURS: SystemState({"version": "1", "threads": "2", "precision": "bf16"}, 2**20, 0.25)}


def loads(*, serial: int, max_tokens: int = 4) -> tuple[Load, ...]:
    return (
        Load(ONE, PROMPTS[:serial], max_tokens, together=False),
        Load(EIGHT, PROMPTS, max_tokens, together=True),
    )


def test_prompts_that_get_one_token_each_are_counted_by_their_own_tokens() -> None:
    assert Load(PREFILL, PROMPTS, 1, together=False).request("plain", None).num_counted == 6
    assert Load(ONE, PROMPTS, 4, together=False).request("plain", None).num_counted == 12


def test_each_entry_uses_its_best_gamma_and_a_failed_entry_affects_no_other(
    process: SystemProcess,
) -> None:
    entries = [
        Entry(OURS, "fixed", "draft", (2, 5, 7), (ONE, EIGHT)),
        Entry("fake", "broken", "refused", loads=(ONE, EIGHT)),
        Entry("fake", "alone", "plain", (5,), (ONE,)),
        Entry("lost", "any", "plain", loads=(ONE, EIGHT)),
    ]
    plan = ComparisonPlan(loads(serial=2), turns=3, sweeps=1)
    rows = PeerComparison({OURS: process, "fake": process}, {"lost": "not installed"}, plan).run(
        entries
    )
    assert [(row.entry.name, row.load) for row in rows] == [
        ("fixed", ONE),
        ("broken", ONE),
        ("alone", ONE),
        ("any", ONE),
        ("fixed", EIGHT),
        ("broken", EIGHT),
        ("any", EIGHT),
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
            Entry("mortal", "a", "dying", loads=(ONE,)),
            Entry("mortal", "b", "plain", loads=(ONE,)),
            Entry(OURS, "c", "plain", loads=(ONE,)),
        ]
        plan = ComparisonPlan(loads(serial=3), turns=1, sweeps=1)
        rows = PeerComparison({"mortal": other, OURS: process}, {}, plan).run(entries)
    assert [row.error is None for row in rows] == [False, False, True]


def test_only_one_system_is_awake_at_a_time_and_a_new_one_is_warmed_up(tmp_path: Path) -> None:
    calls: list[str] = []
    processes = {name: RecordingProcess(name, calls) for name in ("a", "b")}
    entries = [Entry(name, "plain", "plain", loads=(ONE, EIGHT, WIDE)) for name in processes]
    plan = ComparisonPlan((*loads(serial=1), Load(WIDE, PROMPTS, 4, True)), turns=2, sweeps=1)
    PeerComparison(processes, {}, plan, lambda name: calls.append(f"{name} observed")).run(entries)
    block = ["wake", *["run"] * 5, "rest"]
    whole = [f"{name} {call}" for name in processes for call in block]
    first = [call for name in processes for call in (f"{name} wake", *[f"{name} run"] * 3)]
    first.insert(4, "a rest")
    assert calls[:10] == [*first, "b rest"]
    assert calls[10 : 10 + 2 * len(whole)] == whole * 2
    assert calls[-3:] == ["b wake", "b observed", "b rest"]


class RecordingProcess(SystemProcess):
    """Process that records what is done with it, and restarts at each awakening."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self._name, self._calls = name, calls

    def wake(self) -> bool:
        self._calls.append(f"{self._name} wake")
        return True

    def rest(self) -> None:
        self._calls.append(f"{self._name} rest")

    def rate(self, request: TurnRequest) -> float:
        self._calls.append(f"{self._name} run")
        return 1.0

    def texts(self, request: TurnRequest) -> tuple[str, ...]:
        return ()


def row(
    system: str,
    name: str,
    *rates: float,
    mode: str = "draft",
    load: str = ONE,
    gamma: int | None = None,
    texts: tuple[str, ...] = (),
    error: str | None = None,
) -> ComparisonRow:
    return ComparisonRow(
        Entry(system, name, mode), load, gamma, list(rates), texts=texts, error=error
    )


def section(
    *rows: ComparisonRow, interface: str = IN_PROCESS, absent: dict[str, str] | None = None
) -> ComparisonSection:
    return ComparisonSection("the pair", interface, rows, STATES, absent or {}, 2**20)


def written(*rows: ComparisonRow, interface: str = IN_PROCESS) -> str:
    return page([section(*rows, interface=interface)], DESCRIPTION)


def test_the_ratio_is_taken_turn_by_turn_against_the_best_of_the_others() -> None:
    rows = [
        row(OURS, "plain", 50, 50, 50, mode="plain"),
        row(OURS, "gamma auto", 120, 60, 240, mode="auto"),
        row("peer", "good", 100, 50, 200, gamma=5),
        row("peer", "worse", 90, 45, 900 / 10, gamma=7),
        row("peer", "failed", error="too fast to be true"),
        row(OURS, "gamma auto", 90, 90, 90, mode="auto", load=EIGHT),
        row("peer", "good", 100, 100, 100, gamma=2, load=EIGHT),
    ]
    best = section(*rows).best_peer(ONE)
    assert best is not None
    assert best.entry.name == "good"
    text, where = written(*rows), "the pair, in process"
    assert (
        f"| {where}: 1 stream, specserve, gamma auto, against peer, good | 1.20 | 1.20 to 1.20 | "
        "1.0 | reached |"
    ) in text
    assert (
        f"| {where}: 8 streams, specserve, gamma auto, against peer, good | 0.90 | 0.90 to 0.90 | "
        "1.2 | not reached |"
    ) in text
    assert "| peer, good | 5 | 100.0 | 50.0 to 200.0 | ours did not run |" in text
    assert "| peer, failed | | could not be run: too fast to be true | | |" in text
    assert "1 stream, specserve, plain" not in text, "the ratio is of what speculates"


def test_without_a_peer_no_goal_counts_as_reached() -> None:
    text = written(row(OURS, "gamma auto", 9.0, mode="auto"), row("peer", "good", error="gone"))
    assert "1 stream, specserve, gamma auto | nothing to compare | | 1.0 | not measured |" in text


def test_plain_decoding_is_compared_where_nothing_speculates_with_a_draft_of_all() -> None:
    rows = [
        row(OURS, "plain", 20.0, mode="plain", load=PREFILL),
        row("peer", "plain", 10.0, mode="plain", load=PREFILL),
        row(OURS, "plain", 10.0, mode="plain"),
        row(OURS, "80% accepted", 30.0, mode="forced"),
        row("peer", "plain", 20.0, mode="plain"),
    ]
    text = written(*rows, interface=HTTP)
    assert "over HTTP: prefill, specserve, plain, against peer, plain | 2.00 |" in text
    assert "over HTTP: 1 stream, specserve, plain, against peer, plain | 0.50 |" in text
    assert "80% accepted, against" not in text, "peers have no such draft"
    assert "| 1 stream, 80% accepted | 3.00 | 3.00 to 3.00 |" in text, "over our own plain one"
    assert "| prefill: prompt tokens a second |" in text


def test_each_interface_is_compared_by_itself_and_both_placements_are_ours() -> None:
    rows = [row("specserve apart", "gamma auto", 5.0), row("peer", "good", 10.0)]
    there = section(*rows, interface=HTTP)
    here = section(row(OURS, "gamma auto", 6.0), row("other", "good", 3.0))
    text = page([here, there], DESCRIPTION)
    assert "in process: 1 stream, specserve, gamma auto, against other, good | 2.00 |" in text
    assert "over HTTP: 1 stream, specserve apart, gamma auto, against peer, good | 0.50 |" in text


def test_texts_are_compared_with_ours_and_a_cut_character_is_no_difference() -> None:
    text = written(
        row(OURS, "plain", 1.0, mode="plain", texts=("ab", "cd")),
        row("peer", "good", 1.0, gamma=3, texts=("ab\ufffd", "ce")),
    )
    assert "| 1.0 to 1.0 | 2 of 2 |" in text
    assert "| peer, good | 3 | 1.0 | 1.0 to 1.0 | 1 of 2 |" in text


def test_an_absent_system_is_listed_with_its_reason_and_the_figures_are_kept_as_json() -> None:
    reason = "no wheel | for this machine"
    absent = section(
        row(OURS, "plain", 1.0, 2.0, mode="plain"),
        row("peer", "good", error=reason),
        absent={"peer": reason},
    )
    text = page([absent], DESCRIPTION)
    assert "| peer | could not be run: no wheel / for this machine | | | | |" in text
    assert "| specserve | 1 | 2 | bf16 | 1 MiB | 25.0% |" in text
    kept = json.loads(as_json([absent], DESCRIPTION))["sections"][0]
    assert kept["rows"][0]["rates"] == [1.0, 2.0]
    assert kept["rows"][1]["error"] == kept["absent"]["peer"] == reason


def test_a_plot_has_a_bar_for_each_system_that_ran() -> None:
    svg = plot(
        section(
            row(OURS, "plain", 1.0, 2.0, mode="plain"),
            row("peer", "<good>", 4.0),
            row("peer", "gone", error="absent"),
            row("peer", "wide", 4.0, load=WIDE),
        )
    )
    bars = [
        element
        for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}rect")
        if element.get("fill") != "white"
    ]
    assert len(bars) == 3
    widths = [float(bar.get("width", "nan")) for bar in bars]
    assert widths[0] / widths[1] == pytest.approx(1.5 / 4, rel=0.01)


def test_the_overview_has_ours_and_the_best_of_each_other_with_the_numbers_of_the_table(
    tmp_path: Path,
) -> None:
    kept = section(
        row(OURS, "plain", 1.0, 2.0, mode="plain"),
        row(OURS, "gamma auto", 3.04),
        row(OURS, "fixed gamma", 3.5),
        row("peer", "slow", 1.5),
        row("peer", "good", 2.5),
        row("gone", "plain", error="absent"),
    )
    (figures := tmp_path / "figures.json").write_text(as_json([kept], DESCRIPTION))
    summary.main([str(figures), "--out", str(tmp_path / "out.svg")])
    svg = ElementTree.parse(tmp_path / "out.svg")
    words = [text.text for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    names = [word for word in words if word is not None and ", " in word][1:]
    assert names == ["specserve, plain", "specserve, gamma auto", "peer, good"]
    assert {"1.5", "3.0", "2.5"} <= set(words)
    with pytest.raises(SystemExit):
        summary.main([str(figures), "--out", str(tmp_path / "out.svg"), "--section", "2"])


@pytest.mark.parametrize("interface", [IN_PROCESS, HTTP])
@pytest.mark.parametrize("is_trained", [True, False])
def test_every_system_that_has_entries_is_started(interface: str, is_trained: bool) -> None:
    pair = ComparedPair("pair", Path("t"), Path("d"), is_trained)
    started = pair.commands(
        interface, Path("w"), environments=Path("e"), keys=("target.threads=2",)
    )
    entries = pair.entries(interface)
    assert set(started) == {entry.system for entry in entries}
    for name, command in started.items():
        assert ("target.threads=2" in command) == name.startswith(OURS)
    swept = [entry for entry in entries if entry.mode in ("draft", "lookup")]
    assert bool(swept) == is_trained, "drafts of random weights are always wrong"
    assert all(set(GAMMAS) <= set(entry.gammas) for entry in swept), "each has the same choice"


def test_a_gguf_file_is_read_by_both_as_it_is_and_the_head_drafts_for_ours() -> None:
    pair = ComparedPair("file", Path("m.gguf"), Path("head"), is_trained=True)
    started = pair.commands(HTTP, Path("w"), environments=Path("e"), keys=())
    assert set(started) == {entry.system for entry in pair.entries(HTTP)} == {OURS, "llama.cpp"}
    assert all("m.gguf" in command for command in started.values())
    assert {"head", "draft.kind=eagle"} <= set(started[OURS])
    assert "head" not in started["llama.cpp"]


def test_prompts_of_a_gguf_file_are_tasks_of_all_kinds_in_its_template() -> None:
    prompts, long = chat_texts(DEMO / "target")
    assert len(set(prompts)) == 32
    assert [len(prompt) for prompt in long] == [1000] * 4
    kinds = read_tasks(per_kind=1).values()
    tokenizer = Tokenizer.load(DEMO / "target")
    assert list(prompts[:8]) == [tokenizer.apply_chat_template(task.chat) for (task,) in kinds]


def test_prompts_are_windows_of_texts_that_differ() -> None:
    windows = text_windows(count=32, length=128)
    assert len(set(windows)) == 32
    assert {len(window) for window in windows} == {128}


def test_the_command_runs_in_its_tiny_form_and_says_why_peers_are_absent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report.md"
    main(
        [
            *("--quick", "--shapes", "proportional", "--environments", str(tmp_path)),
            *("--systems", OURS, "openvino", "--interfaces", "process", "--out", str(out)),
        ]
    )
    main(["--quick", "--systems", "vllm", "llama", "--environments", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "| vllm | could not be run: .venv-vllm is not installed | | | | |" in printed
    assert "| llama.cpp | could not be run: .venv-llama is not installed | | | | |" in printed
    report = out.read_text(encoding="utf-8")
    assert "| openvino-genai | could not be run: .venv-peers is not installed" in report
    assert "![Medians by load" in report
    assert (tmp_path / "report-1.svg").exists()
    figures = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
    ours = [row for row in figures["sections"][0]["rows"] if row["system"] == OURS]
    assert [row["error"] for row in ours if row["error"]] == []
    assert {row["load"] for row in ours} == {ONE, EIGHT, WIDE, PREFILL}
    assert "accepted" in report


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
