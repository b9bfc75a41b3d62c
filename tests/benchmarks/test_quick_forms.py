"""Every command that a page quotes a figure from runs in its tiny form, `--quick`."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

from specserve.models.linear_kernels import missing_for_compiled

ROOT = Path(__file__).parents[2]
MEASURED = ROOT / "docs" / "measurements"

IN_PROCESS = {
    "benchmarks.adapters": (),
    "benchmarks.acceptance_by_position": (),
    "benchmarks.autoscaling": (),
    "benchmarks.drafters": ("--only", "alpha", "heads", "eagle"),
    "benchmarks.engine": (),
    "benchmarks.first_token": (),
    "benchmarks.fleet": (),
    "benchmarks.linears": (),
    "benchmarks.link": (),
    "benchmarks.masks": (),
    "benchmarks.neighbours": (),
    "benchmarks.pacer": ("--texts", "json"),
    "benchmarks.pools": (),
    "benchmarks.prefill_elsewhere": (),
    "benchmarks.prompts": (),
    "benchmarks.quantized": (),
    "benchmarks.structured": (),
    "benchmarks.twelve_bits": (),
    "tests.chaos.fuzz": (),
    "tests.families": (),
    "tests.conformance": (),
    "tests.support.card.noise": (),
    "tests.support.card.roofline": (),
    "tests.support.card.rounds": (),
    "tests.proofs.distribution": (),
}
"""Commands that need neither Ray nor other engines, with further arguments."""
NEED_COMPILED = ("benchmarks.twelve_bits",)
"""Of these, commands that measure code for some processors alone, and say so elsewhere."""
WITH_RAY = {
    "benchmarks.constrained": (),
    "benchmarks.demo_race": (),
    "benchmarks.first_minutes": (),
    "benchmarks.learning": (),
    "benchmarks.pipeline": ("--only", "sweep", "weighs", "simulation"),
    "benchmarks.placements": (),
    "benchmarks.routing": (),
    "benchmarks.start": (),
    "tests.chaos.gateways": (),
    "tests.chaos.loop_pauses": (),
    "tests.chaos.misuse": (),
}
ELSEWHERE = {
    "benchmarks.peers": "tests/benchmarks/test_peers.py: the other engines have their own Python",
    "benchmarks.peers.summary": "tests/benchmarks/test_peers.py",
    "benchmarks.ranks": "tests/benchmarks/test_ranks.py",
    "benchmarks.ray_llm": "tests/ray_llm/test_behind_ray_llm.py: vLLM has its own Python",
    "benchmarks.shared_weights": "tests/benchmarks/test_shared_weights.py",
    "tests.chaos.link_pauses": "tests/chaos/test_link_pauses.py",
    "tests.chaos.network": "tests/chaos/test_network.py",
}
"""Commands whose tiny form another test runs."""
NO_TINY_FORM = {
    "benchmarks.serving": "needs a server of its own, and its parts are the server's tests",
    "tests.chaos.overload": "needs a server of its own for each part",
    "tests.chaos.releases": "builds wheels, and each update takes a minute",
    "tests.chaos.table": "needs a server of its own for each role",
}
"""Commands that only a measurement runs, and why."""


def run_quickly(name: str, arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a command in this process, as `python -m` would."""
    monkeypatch.setattr(sys, "argv", [name, "--quick", *arguments])
    module = importlib.import_module(name)
    if hasattr(module, "__path__"):
        module = importlib.import_module(f"{name}.__main__")
    assert not module.main(), f"{name} failed"


@pytest.mark.parametrize("module", IN_PROCESS)
def test_a_command_runs_in_its_tiny_form(
    module: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if module in NEED_COMPILED and missing_for_compiled() is not None:
        pytest.skip(f"it needs {missing_for_compiled()}")
    monkeypatch.chdir(tmp_path)
    run_quickly(module, IN_PROCESS[module], monkeypatch)
    assert "| " in capsys.readouterr().out, "it prints a table"


@pytest.mark.long
@pytest.mark.parametrize("module", WITH_RAY)
def test_a_command_on_ray_runs_in_its_tiny_form(
    module: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    run_quickly(module, WITH_RAY[module], monkeypatch)
    assert "| " in capsys.readouterr().out, "it prints a table"


def test_every_command_of_a_page_has_a_tiny_form_that_a_test_runs() -> None:
    """Compare with what the pages and the Makefile say; `specserve` has tests of its own."""
    known = {*IN_PROCESS, *WITH_RAY, *ELSEWHERE, *NO_TINY_FORM}
    pages = "\n".join(path.read_text(encoding="utf-8") for path in MEASURED.glob("*.md"))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    quoted = set(re.findall(r"python -m ((?:benchmarks|tests)\.[a-z_.]+)", pages))
    for target in set(re.findall(r"`make ([a-z-]+)", pages)):
        recipe = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
        quoted |= (
            set(re.findall(r"-m ((?:benchmarks|tests)\.[a-z_.]+)", recipe[1])) if recipe else set()
        )
    assert quoted
    assert quoted <= known
