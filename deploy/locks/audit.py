"""Look the locked packages up in a list of known vulnerabilities, by pip-audit.

`.venv-build/bin/python -m deploy.locks.audit` runs in the environment of deploy/locks/tools.txt,
which `make lock` and `make dist` create. It ends with 1 if a package has a known vulnerability, 2
if pip-audit failed, and 0 if there is none or the list cannot be reached; the last line says
which. Other options are handed on, such as `--ignore-vuln ID`.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deploy.locks.lock_file import FLASHINFER, NVCC, RUNTIME, TORCH_CUDA

# torch's builds share their version, and its CPU wheels are on no list.
AUDITED = (RUNTIME, TORCH_CUDA, FLASHINFER, NVCC)
# Certificates that do not hold are among the failures, since someone may be in between.
UNREACHABLE = re.compile(
    r"^requests\.exceptions\.(ConnectionError|ProxyError|ConnectTimeout|ReadTimeout)\b"
    r"|Could not connect to|not redirecting properly",
    re.MULTILINE,
)
FOUND = 1
FAILED = 2


@dataclass(frozen=True, slots=True)
class AuditResult:
    """The lines to print, and the exit status. An audit that was skipped has audited nothing."""

    lines: tuple[str, ...]
    status: int = 0
    skipped: bool = False


def run_pip_audit(options: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    files = [word for file in AUDITED for word in ("-r", str(file))]
    quiet = ("--format", "json", "--progress-spinner", "off")
    command = [sys.executable, "-m", "pip_audit", "--require-hashes", "--disable-pip", *files]
    return subprocess.run([*command, *quiet, *options], capture_output=True, text=True, check=False)


def read_result(done: subprocess.CompletedProcess[str]) -> AuditResult:
    """Return what pip-audit found.

    It ends with 0 if the list knows none of the packages, and with 1 if a package is vulnerable or
    the network is away; only its output separates them.
    """
    try:
        packages: list[dict[str, Any]] = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        if UNREACHABLE.search(done.stderr):
            return AuditResult(("SKIPPED: the list of vulnerabilities cannot be reached",), 0, True)
        return AuditResult((done.stderr.strip(), "FAILED: pip-audit did not finish"), FAILED)
    unknown = [package["name"] for package in packages if "skip_reason" in package]
    if len(unknown) == len(packages):
        return AuditResult(
            (f"SKIPPED: the list knows none of the {len(packages)} packages",), 0, True
        )
    lines = [f"not on the list: {name}" for name in unknown]
    found = [line for package in packages for line in _describe(package)]
    audited = len(packages) - len(unknown)
    lines += [
        *found,
        f"{len(found)} known vulnerabilities in {audited} of {len(packages)} packages",
    ]
    return AuditResult(tuple(lines), FOUND if found else 0)


def _describe(package: Mapping[str, Any]) -> list[str]:
    """Return a line for each vulnerability of a package."""
    return [
        f"{package['name']} {package['version']}: {each['id']}, "
        f"mended in {', '.join(each['fix_versions']) or 'no version yet'}"
        for each in package.get("vulns", ())
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--required", action="store_true", help="fail where the list cannot be reached"
    )
    options, handed_on = parser.parse_known_args()
    result = read_result(run_pip_audit(handed_on))
    print("\n".join(result.lines))
    sys.exit(FAILED if result.skipped and options.required else result.status)


if __name__ == "__main__":
    main()
