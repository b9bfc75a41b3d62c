"""The cap on oneDNN where the processor has AMX, and how threads wait: whose setting stays."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from specserve import processor
from specserve.processor import (
    CAP,
    CAP_VARIABLES,
    SPIN_VARIABLES,
    SPINS,
    cap_onednn,
    foreign_environment,
    limit_spinning,
    processor_flags,
    uses_amx,
)

AMX, PLAIN = frozenset({"avx512_bf16", "amx_bf16", "amx_tile"}), frozenset({"avx512_bf16"})
PROGRAM = """
import os, torch
numbers = torch.randn(64) + 1
{before}
from specserve import processor  # which has set the cap, where the processor has AMX
os.environ.pop("ONEDNN_MAX_CPU_ISA", None)
processor.processor_flags = lambda: {flags!r}
processor.CAP = "AVX2" if torch.cpu._is_avx512_supported() else "SSE41"
processor.cap_onednn()
weight = torch.ops.mkldnn._reorder_linear_weight(torch.randn(64, 64), 4)
torch.ops.mkldnn._linear_pointwise.default(torch.randn(4, 64), weight, None, "none", [], "")
"""


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*CAP_VARIABLES, *SPIN_VARIABLES):
        monkeypatch.setenv(name, "")  # which is restored, whatever a test sets
        monkeypatch.delenv(name)


def run_alone(program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a process without the variables that are set here."""
    return subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )


def pretend(monkeypatch: pytest.MonkeyPatch, flags: frozenset[str]) -> None:
    monkeypatch.setattr(processor, "processor_flags", lambda: flags)


def test_a_processor_with_amx_is_capped_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, PLAIN)
    cap_onednn()
    assert CAP_VARIABLES[0] not in os.environ
    assert not uses_amx()
    pretend(monkeypatch, AMX)
    assert uses_amx()
    cap_onednn()
    assert os.environ[CAP_VARIABLES[0]] == CAP
    assert not uses_amx()


@pytest.mark.parametrize("name", CAP_VARIABLES)
@pytest.mark.parametrize(("value", "lifts"), [("ALL", True), ("avx2", False)])
def test_what_a_user_has_set_stays(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, lifts: bool
) -> None:
    pretend(monkeypatch, AMX)
    monkeypatch.setenv(name, value)
    cap_onednn()
    assert [os.environ.get(variable) for variable in CAP_VARIABLES if variable != name] == [None]
    assert os.environ[name] == value
    assert uses_amx() == lifts


def test_threads_wait_as_a_user_has_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    limit_spinning()
    assert "GOMP_SPINCOUNT" not in os.environ
    monkeypatch.delenv("OMP_WAIT_POLICY")
    limit_spinning()
    assert os.environ["GOMP_SPINCOUNT"] == SPINS
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    limit_spinning()
    assert os.environ["GOMP_SPINCOUNT"] == "7"


def test_torch_s_threads_read_how_to_wait_in_a_process_that_imports_an_llm() -> None:
    shown = run_alone("from specserve import LLM\nimport torch", OMP_DISPLAY_ENV="VERBOSE").stderr
    assert re.findall(r"GOMP_SPINCOUNT = '(\d+)'", shown) == [SPINS]


def test_other_programs_get_an_environment_without_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, AMX)
    cap_onednn()
    limit_spinning()
    own = (CAP_VARIABLES[0], SPIN_VARIABLES[0])
    assert foreign_environment() == {
        name: value for name, value in os.environ.items() if name not in own
    }
    monkeypatch.setenv(CAP_VARIABLES[0], "AVX2")
    monkeypatch.setenv(SPIN_VARIABLES[0], "7")
    assert foreign_environment() == dict(os.environ)


def test_flags_are_those_of_the_first_processor(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    file.write_text("processor\t: 0\nflags\t\t: fpu amx_tile\n\nprocessor\t: 1\nflags\t\t: sse\n")
    assert processor_flags(file) == {"fpu", "amx_tile"}
    assert processor_flags(tmp_path / "absent") == frozenset()


def onednn_isa(flags: frozenset[str], *, before: str = "") -> str:
    """Return what oneDNN says that it uses, in a process that imported torch before specserve."""
    program = PROGRAM.format(flags=set(flags), before=before)
    match = re.search(r"cpu,isa:(.*)", run_alone(program, ONEDNN_VERBOSE="1").stdout)
    assert match is not None
    return match[1]


def test_the_cap_counts_after_torch_is_imported_and_before_its_first_product() -> None:
    """The cap is a lower one than AMX calls for, so that every processor shows it."""
    free = onednn_isa(PLAIN)
    assert onednn_isa(AMX) != free
    product = "numbers.view(8, 8).bfloat16() @ numbers.view(8, 8).bfloat16()"
    asked = "torch.ops.mkldnn._is_mkldnn_bf16_supported()"
    assert onednn_isa(AMX, before=f"{product}; {asked}") == free, "then it is too late"
