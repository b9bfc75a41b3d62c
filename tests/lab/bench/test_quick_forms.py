"""Every command that a page quotes a figure from runs in its tiny form, `--quick`."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
MEASURED = ROOT / "docs" / "measurements"

IN_PROCESS = {
    "lab.bench.adapters": (),
    "lab.bench.acceptance_by_position": (),
    "lab.bench.autoscaling": (),
    "lab.bench.company": (),
    "lab.bench.drafters": ("--only", "alpha", "heads", "eagle"),
    "lab.bench.engine": (),
    "lab.bench.first_token": (),
    "lab.bench.fleet": (),
    "lab.bench.host": (),
    "lab.bench.linears": (),
    "lab.bench.link": (),
    "lab.bench.long_talk": (),
    "lab.bench.masks": (),
    "lab.bench.neighbours": (),
    "lab.bench.pacer": ("--texts", "json"),
    "lab.bench.pools": (),
    "lab.bench.prompts": (),
    "lab.bench.quantized": (),
    "lab.bench.sampling": (),
    "lab.bench.split_drafts": (),
    "lab.bench.structured": (),
    "lab.bench.tasks": (),
    "tests.chaos.fuzz": ("--only", "frames", "key_files"),  # all kinds: tests/chaos/test_fuzz.py
    "tests.families": (),
    "tests.conformance": (),
    "tests.support.card.noise": (),
    "tests.support.card.roofline": (),
    "tests.support.card.rounds": (),
    "tests.proofs.distribution": (),
}
"""Commands that need neither Ray nor other engines, with further arguments."""
WITH_RAY = {
    "lab.bench.constrained": (),
    "lab.bench.demo_race": (),
    "lab.bench.first_minutes": (),
    "lab.bench.pipeline": ("--only", "sweep", "weighs", "simulation"),
    "lab.bench.placements": (),
    "lab.bench.routing": (),
    "lab.bench.start": (),
    "tests.chaos.ends": (),
    "tests.chaos.gateways": (),
    "tests.chaos.loop_pauses": (),
    "tests.chaos.misuse": (),
}
ELSEWHERE = {
    "lab.bench.peers": "tests/lab/bench/test_peers.py: the other engines have their own Python",
    "lab.bench.peers.summary": "tests/lab/bench/test_peers.py",
    "lab.bench.ranks": "tests/lab/bench/test_ranks.py",
    "lab.bench.ray_llm": "tests/ray_llm/test_behind_ray_llm.py: vLLM has its own Python",
    "lab.bench.ray_llm_scaling": "tests/ray_llm/test_behind_ray_llm.py, too",
    "lab.chaos": "tests/lab/chaos/test_chaos.py: its faults and checks, on one server",
    "lab.papers": "tests/lab/papers/test_papers.py",
    "lab.simulate": "tests/lab/simulate/test_study.py: a smaller study",
    "lab.bench.shared_weights": "tests/lab/bench/test_shared_weights.py",
    "tests.gpu": "tests/gpu/test_rehearsal.py: each of its steps on an emulated card",
    "tests.chaos.link_pauses": "tests/chaos/test_link_pauses.py",
    "tests.chaos.network": "tests/chaos/test_network.py",
    "tests.conformance.agent": "tests/conformance/test_agent.py",
    "tests.conformance.suites": "tests/conformance/test_suites.py: three tests of each suite",
}
"""Commands whose tiny form another test runs."""
NO_TINY_FORM = {
    "lab.bench.serving": "needs a server of its own, and its parts are the server's tests",
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
    """Compare with what the pages say; `specserve` has tests of its own."""
    known = {*IN_PROCESS, *WITH_RAY, *ELSEWHERE, *NO_TINY_FORM}
    pages = "\n".join(path.read_text(encoding="utf-8") for path in MEASURED.glob("*.md"))
    quoted = set(re.findall(r"python -m ((?:lab|tests)\.[a-z_.]+)", pages))
    assert quoted
    assert quoted <= known
