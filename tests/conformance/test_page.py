"""The page counts every outcome, and only failures that a reason is known for are no failure."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.conformance import clients
from tests.conformance.checks import (
    FAILED,
    PASSED,
    SCRIPTED,
    SKIPPED,
    CheckList,
    CheckResult,
    Endpoint,
    Reporter,
    SkipError,
)
from tests.conformance.clients import CLIENTS, Client, ClientRun, install, read_report, run_client
from tests.conformance.page import KNOWN, SUITES, page, suites_section, unknown_failures

RUN = ClientRun(
    "some",
    SCRIPTED,
    ("some 1.2",),
    (
        CheckResult("good", PASSED),
        CheckResult("bad", FAILED, "a|b <c>"),
        CheckResult("odd", SKIPPED, "no pictures"),
    ),
)


def test_a_new_page_keeps_the_section_of_the_suites() -> None:
    section = f"\n{SUITES}\n\n| suite | tests |\n"
    assert suites_section(page([RUN]) + section) == section
    assert suites_section(page([RUN])) == ""


def test_the_page_counts_outcomes_and_gives_every_reason() -> None:
    text = page([RUN])
    assert "| some 1.2 | scripted | 3 | 1 | 1 | 1 |" in text
    assert "| some | bad | failed | a\\|b &lt;c> |" in text
    assert "| some | odd | skipped | no pictures |" in text
    assert "good" not in text


def test_the_page_has_the_sessions_of_agents_if_they_were_held() -> None:
    assert "Sessions of agents" not in page([RUN])
    text = page([RUN], ["| a |", "|---|"])
    assert "## Sessions of agents" in text
    assert text.endswith("\n\n| a |\n|---|\n")


def test_a_page_without_failures_says_so() -> None:
    assert page([ClientRun("some", SCRIPTED, (), ())]).endswith("No check failed or was skipped.\n")


def test_a_failure_counts_unless_its_reason_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unknown_failures([RUN]) == ["some: bad: a|b <c>"]
    monkeypatch.setattr("tests.conformance.page.KNOWN", {("some", "bad"): "of the client's own"})
    assert not unknown_failures([RUN])
    assert "| some | bad | failed | of the client's own |" in page([RUN])


def test_known_failures_name_clients_that_are_run() -> None:
    assert {client for client, _ in KNOWN} <= {client.name for client in CLIENTS}


def test_every_client_has_a_program_and_pins() -> None:
    for client in CLIENTS:
        assert (clients.ROOT / f"{client.module.replace('.', '/')}.py").is_file()
        assert all("==" in pin for pin in client.pins)
        assert len(client.pins) == len(client.requirements) + len(client.alone) + len(
            client.constrained
        )


def test_an_environment_is_reused_until_its_pins_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clients, "ENVIRONMENTS", tmp_path)
    commands: list[list[str]] = []

    def run(command: list[str], *, check: bool) -> None:
        assert check
        commands.append(command)
        (tmp_path / "some").mkdir(exist_ok=True)

    monkeypatch.setattr("tests.conformance.clients.subprocess.run", run)
    install(Client("some", ("some==1",)))
    install(Client("some", ("some==1",)))
    assert len(commands) == 2, "venv and pip, once"
    install(Client("some", ("some==2",)))
    assert commands[-1][-1] == "some==2"
    assert len(commands) == 4


def test_each_outcome_of_a_check_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = CheckList(("pytest",))

    @check
    def it_passes(endpoint: Endpoint) -> None:
        assert endpoint.url == "http://127.0.0.1:1/v1"

    @check
    async def it_fails_later(endpoint: Endpoint) -> None:
        raise ValueError("two\nlines")

    @check
    def it_fails_without_words(endpoint: Endpoint) -> None:
        raise AssertionError

    @check
    def it_is_skipped(endpoint: Endpoint) -> None:
        raise SkipError("no pictures")

    @check.scripted
    def it_needs_a_script(endpoint: Endpoint) -> None: ...

    report = tmp_path / "report"
    arguments = ["--root", "http://127.0.0.1:1", "--engine", "demo", "--report", str(report)]
    monkeypatch.setattr(sys, "argv", ["program", *arguments])
    check.main()
    versions, results = read_report(report)
    assert versions == (f"pytest {pytest.__version__}",)
    assert results == (
        CheckResult("it passes", PASSED),
        CheckResult("it fails later", FAILED, "ValueError: two lines"),
        CheckResult("it fails without words", FAILED, "AssertionError: raise AssertionError"),
        CheckResult("it is skipped", SKIPPED, "no pictures"),
    )


def test_a_program_that_breaks_is_a_failure() -> None:
    missing = Client("missing", ("missing==1",))
    run = run_client(missing, "http://127.0.0.1:1", SCRIPTED, python=Path(sys.executable))
    (failed,) = run.results
    assert failed.outcome == FAILED
    assert "missing_client" in failed.reason


def test_a_program_without_results_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "_run", lambda command, home, output: "")
    (failed,) = run_client(CLIENTS[0], "http://127.0.0.1:1", SCRIPTED).results
    assert (failed.outcome, failed.reason) == (FAILED, "it ran no check")


def test_a_program_that_does_not_end_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clients, "PROGRAM_TIMEOUT_S", 0.01)
    run = run_client(CLIENTS[0], "http://127.0.0.1:1", SCRIPTED, python=Path(sys.executable))
    assert run.results[-1].reason.startswith("still ran after 0.01 s")


def test_a_report_that_was_never_written_is_empty(tmp_path: Path) -> None:
    assert read_report(tmp_path / "none") == ((), ())
    Reporter(tmp_path / "one").add(CheckResult("a", PASSED))
    assert read_report(tmp_path / "one") == ((), (CheckResult("a", PASSED),))
