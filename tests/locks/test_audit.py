"""The audit's words and exit status, from what pip-audit prints."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping

import pytest

from deploy.locks import audit
from deploy.locks.audit import FAILED, FOUND, AuditResult, read_result

WELL = {"name": "well", "version": "1.0", "vulns": []}
VULNERABLE = {
    "name": "bad",
    "version": "1.0",
    "vulns": [{"id": "PYSEC-1", "fix_versions": ["1.1", "2.0"]}, {"id": "X-2", "fix_versions": []}],
}
UNKNOWN = {"name": "lost", "skip_reason": "Dependency not found: lost (1.0)"}
AWAY = (
    "Traceback (most recent call last):\n  File ...\n"
    "requests.exceptions.ConnectionError: HTTPSConnectionPool: Max retries exceeded\n"
)
FORGED = "requests.exceptions.SSLError: certificate verify failed\n"


def result(
    *packages: Mapping[str, object], stdout: str = "", stderr: str = "", code: int = 0
) -> AuditResult:
    if packages:
        stdout = json.dumps({"dependencies": packages, "fixes": []})
    return read_result(subprocess.CompletedProcess([], code, stdout, stderr))


def test_findings_fail_it_and_say_what_mends_them() -> None:
    found = result(WELL, VULNERABLE, code=1)
    assert found.status == FOUND
    assert found.lines == (
        "bad 1.0: PYSEC-1, mended in 1.1, 2.0",
        "bad 1.0: X-2, mended in no version yet",
        "2 known vulnerabilities in 2 of 2 packages",
    )


def test_no_finding_passes_and_names_what_was_not_audited() -> None:
    assert result(WELL, UNKNOWN) == AuditResult(
        ("not on the list: lost", "0 known vulnerabilities in 1 of 2 packages")
    )


def test_a_list_that_knows_nothing_is_no_clean_result() -> None:
    """Pip-audit skips each package where there is no list, and says that it found nothing."""
    found = result(UNKNOWN, UNKNOWN)
    assert (found.status, found.skipped) == (0, True)
    assert found.lines[-1].startswith("SKIPPED: ")


def test_it_is_skipped_without_network() -> None:
    found = result(stderr=AWAY, code=1)
    assert (found.status, found.skipped) == (0, True)
    assert found.lines[-1].startswith("SKIPPED: ")


@pytest.mark.parametrize("stderr", ["ERROR: invalid requirements input", FORGED, ""])
def test_a_failure_of_its_own_is_neither_clean_nor_skipped(stderr: str) -> None:
    found = result(stderr=stderr, code=1)
    assert (found.status, found.skipped) == (FAILED, False)
    assert found.lines[-1].startswith("FAILED: ")


@pytest.mark.parametrize(("options", "status"), [([], 0), (["--required"], FAILED)])
def test_a_skipped_audit_fails_where_it_is_required(
    options: list[str],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    handed_on: list[str] = []

    def run(given: list[str]) -> subprocess.CompletedProcess[str]:
        handed_on.extend(given)
        return subprocess.CompletedProcess([], 1, "", AWAY)

    monkeypatch.setattr(audit, "run_pip_audit", run)
    monkeypatch.setattr("sys.argv", ["audit", *options, "--ignore-vuln", "X-2"])
    with pytest.raises(SystemExit) as ended:
        audit.main()
    assert ended.value.code == status
    assert handed_on == ["--ignore-vuln", "X-2"]
    assert "SKIPPED" in capsys.readouterr().out
