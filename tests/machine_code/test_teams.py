"""Waits of a team: no thread goes on too early, or keeps a core that another needs."""

from __future__ import annotations

import ctypes
import os
import platform
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

pytest.importorskip("llvmlite")

from specserve.machine_code import teams
from specserve.machine_code.compiler import Function, compile_module, function_of, new_module
from specserve.machine_code.teams import Record, Team
from specserve.machine_code.vectors import INT, LONG, POINTER, at, counting, new_function

waits = pytest.mark.skipif(
    platform.machine() != "x86_64" or platform.system() != "Linux",
    reason="waits are compiled for Linux on x86-64",
)
ROUNDS = 3000
NEVER_SLEEPS = 1 << 30  # looks
FIELDS = Record(dict.fromkeys(("arrived", "begun", "places", "early"), POINTER))


def gatherings() -> Function:
    """Compile `gather`: a thread past a wait counts rounds that others have not begun."""
    module = new_module("gatherings")
    team = Team(module)
    work, code = new_function(module, "work", [POINTER])
    field, size = FIELDS.load(code, work.args[0]), team.size(code)
    with counting(code, LONG(0), LONG(ROUNDS), LONG(1)) as index:
        offset = code.mul(index, LONG(8))
        begun = at(code, field["begun"], offset)
        code.atomic_rmw("add", begun, INT(1), "monotonic")
        team.wait(code, at(code, field["arrived"], offset), field["places"], size)
        with code.if_then(code.icmp_signed("<", code.load(begun, typ=INT), size)):
            code.atomic_rmw("add", field["early"], INT(1), "monotonic")
    code.ret_void()
    function, code = new_function(module, "gather", [POINTER, INT], linkage="external")
    team.run(code, work, *function.args)
    code.ret_void()
    return function_of(compile_module(module), "gather", [POINTER])


def gather(function: Function, threads: int) -> tuple[int, int]:
    """Return how many threads were early, and the fewest that came to a round."""
    arrived, begun = (torch.zeros(ROUNDS, 2, dtype=torch.int32) for _ in range(2))
    places, early = (torch.zeros(count, dtype=torch.int32) for count in (threads, 1))
    tensors = (arrived, begun, places, early)
    given = FIELDS.structure()(*(tensor.data_ptr() for tensor in tensors))
    function(ctypes.addressof(given), threads)
    return int(early), int(begun[:, 0].min())


@contextmanager
def one_core() -> Iterator[None]:
    """Give all threads of this process the same core."""
    before = {}
    for task in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # threads of larger teams end at this moment
            before[int(task.name)] = os.sched_getaffinity(int(task.name))
    first = min(os.sched_getaffinity(0))
    give({thread: {first} for thread in before})
    try:
        yield
    finally:
        give(before)


def give(cores: Mapping[int, set[int]]) -> None:
    """Let each of these threads run on these cores."""
    for thread, own in cores.items():
        with suppress(ProcessLookupError):
            os.sched_setaffinity(thread, own)


@waits
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("looks", [teams.LOOKS, teams.FEW_LOOKS, 1])
def test_no_thread_goes_on_before_all_have_come(
    monkeypatch: pytest.MonkeyPatch, threads: int, looks: int
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setattr(teams, "LOOKS", looks)
    assert gather(gatherings(), threads) == (0, threads)


@waits
def test_a_thread_sleeps_where_another_needs_its_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    monkeypatch.setattr(teams, "LOOKS", NEVER_SLEEPS)
    function = gatherings()
    gather(function, 2)  # the team is there now
    with one_core():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        assert gather(function, 2) == (0, 2)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before > ROUNDS // 10


def test_a_team_that_never_waits_is_compiled_for_other_processors_too() -> None:
    module = new_module("quiet")
    work, code = new_function(module, "work", [POINTER])
    code.ret_void()
    function, code = new_function(module, "run", [POINTER, INT], linkage="external")
    Team(module).run(code, work, *function.args)
    code.ret_void()
    assert "pause" not in str(module)
