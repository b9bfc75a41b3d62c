"""Records of arguments, and teams of threads that share the work which a record describes."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from llvmlite import binding, ir

from specserve.machine_code.vectors import (
    FLOAT,
    INT,
    LONG,
    NOTHING,
    POINTER,
    at,
    counting,
    new_function,
    new_memory,
)

C_KINDS: Mapping[Any, Any] = {
    POINTER: ctypes.c_void_p,
    LONG: ctypes.c_int64,
    INT: ctypes.c_int32,
    FLOAT: ctypes.c_float,
}


FEW_LOOKS = 100
"""Looks at who has arrived, with a pause after each, in any case: some 5 microseconds."""
LOOKS = 40_000
"""Looks before a thread sleeps where no other of the team was last seen on its core: some 2 ms."""
FUTEX, FUTEX_WAIT, FUTEX_WAKE = LONG(202), INT(128), INT(129)
"""The call of the system by its number on x86-64, and what it is to do, for this process only."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A function that every thread of a team calls, and what makes the record that it is given."""

    work: ir.Function
    new_record: Callable[[Any, Mapping[str, Any]], Any]

    def run_alone(self, code: Any, team: Team, values: Mapping[str, Any], threads: Any) -> None:
        """Build the work of a team that does nothing else."""
        counter = new_memory(code, LONG)
        code.store(LONG(0), counter)
        team.run(code, self.work, self.new_record(code, {**values, "next": counter}), threads)


class Record:
    """A structure in memory whose fields have names."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._names = list(fields)
        self._kind = ir.LiteralStructType(list(fields.values()))

    def kind_of(self, name: str) -> Any:
        return self._kind.elements[self._names.index(name)]

    @property
    def num_bytes(self) -> int:
        return ctypes.sizeof(self.structure())

    def structure(self) -> type[ctypes.Structure]:
        """Return the record as Python fills it in."""
        fields = [(name, C_KINDS[self.kind_of(name)]) for name in self._names]
        return type("Filled", (ctypes.Structure,), {"_fields_": fields})

    def new(self, code: Any, values: Mapping[str, Any]) -> Any:
        """Build a record on the stack with these values; those without a value are undefined."""
        with code.goto_entry_block():
            memory = new_memory(code, self._kind)
        for name, value in values.items():
            code.store(value, self.place(code, memory, name))
        return memory

    def place(self, code: Any, memory: Any, name: str) -> Any:
        index = INT(self._names.index(name))
        return code.gep(memory, [INT(0), index], source_etype=self._kind)

    def load(self, code: Any, memory: Any) -> dict[str, Any]:
        return {
            name: code.load(self.place(code, memory, name), typ=self.kind_of(name))
            for name in self._names
        }


def new_entry(
    module: ir.Module, name: str, record: Record, arguments: Sequence[str]
) -> tuple[Any, dict[str, Any], Any]:
    """Build the head of a function that Python calls with these fields and the size of a team.

    Returns where its code goes, its arguments by name, and the size.
    """
    kinds = [*(record.kind_of(argument) for argument in arguments), INT]
    function, code = new_function(module, name, kinds, linkage="external")
    *given, threads = function.args
    return code, dict(zip(arguments, given, strict=True)), threads


class Team:
    """Torch's own team of threads, which waits in a way of our own."""

    def __init__(self, module: ir.Module) -> None:
        self._module, self._openmp = module, _openmp()
        kind = ir.FunctionType(NOTHING, [POINTER, POINTER, INT, INT])
        self._parallel = _imported(module, self._openmp, "GOMP_parallel", kind)

    @cached_property
    def _size(self) -> ir.Function:
        kind = ir.FunctionType(INT, [])
        return _imported(self._module, self._openmp, "omp_get_num_threads", kind)

    @cached_property
    def _wait(self) -> ir.Function:
        """The wait, for Linux on x86-64: teams that never wait run elsewhere, too."""
        kind = ir.FunctionType(INT, [])
        number = _imported(self._module, self._openmp, "omp_get_thread_num", kind)
        return _new_wait(self._module, number)

    def size(self, code: Any) -> Any:
        """Build the number of threads that have begun, which can be fewer than were wanted."""
        return code.call(self._size, [])

    def wait(self, code: Any, arrived: Any, places: Any, size: Any) -> None:
        """Build the wait of each thread until all have come as far.

        `arrived` is a LONG of this wait only, and `places` has an INT for each thread. All are 0
        before.
        """
        with code.if_then(code.icmp_signed("!=", size, INT(1))):
            code.call(self._wait, [arrived, places, size])

    def run(self, code: Any, work: ir.Function, memory: Any, threads: Any) -> None:
        """Build a call of `work` by each of that many threads."""
        with code.if_else(code.icmp_signed("==", threads, INT(1))) as (alone, together):
            with alone:
                code.call(work, [memory])
            with together:
                pointer = ir.FormattedConstant(POINTER, work.get_reference())
                code.call(self._parallel, [pointer, memory, threads, INT(0)])


def _new_wait(module: ir.Module, thread_number: ir.Function) -> ir.Function:
    """Build a wait that keeps its core, unless a thread of the team is known to need that one.

    OpenMP's own either sleeps soon, and waking up takes as long as a stage does, or keeps a core
    that the thread it waits for needs, where the system has put both on one.
    """
    libc = ctypes.CDLL(None)
    find_core = _imported(module, libc, "sched_getcpu", ir.FunctionType(INT, []))
    call_system = _imported(module, libc, "syscall", ir.FunctionType(LONG, [LONG], var_arg=True))
    function, code = new_function(module, "wait_for_team", [POINTER, POINTER, INT])
    arrived, places, size = function.args
    looks, sleepers = new_memory(code, INT), at(code, arrived, LONG(4))
    code.store(INT(0), looks)
    core = code.add(code.call(find_core, []), INT(1))
    own = _place(code, places, code.call(thread_number, []))
    with code.if_then(code.icmp_signed("!=", code.load(own, typ=INT), core)):
        code.store(core, own)
    before = code.atomic_rmw("add", arrived, INT(1), "seq_cst")
    with code.if_then(code.icmp_signed("==", code.add(before, INT(1)), size)):
        some = code.icmp_signed(">", code.load_atomic(sleepers, "seq_cst", 4, typ=INT), INT(0))
        with code.if_then(some):
            code.call(call_system, [FUTEX, arrived, FUTEX_WAKE, size])
        code.ret_void()
    with _looking(code, arrived, size) as count:
        past = code.load(looks, typ=INT)
        code.store(code.add(past, INT(1)), looks)
        with code.if_then(code.icmp_signed("==", past, INT(FEW_LOOKS))):
            _sleep_if_needed(code, looks, places, own, size)
        with code.if_else(code.icmp_signed("<", past, INT(_most_looks()))) as (keeps, sleeps):
            with keeps:
                code.asm(ir.FunctionType(NOTHING, []), "pause", "", [], side_effect=True)
            with sleeps:
                code.atomic_rmw("add", sleepers, INT(1), "seq_cst")
                code.call(call_system, [FUTEX, arrived, FUTEX_WAIT, count, POINTER(None)])
    code.ret_void()
    return function


@contextmanager
def _looking(code: Any, arrived: Any, size: Any) -> Iterator[Any]:
    """Build a loop until all have arrived; yield how many have."""
    look, wait, end = (code.append_basic_block(name) for name in ("look", "wait", "end"))
    code.branch(look)
    code.position_at_end(look)
    count = code.load_atomic(arrived, "acquire", 4, typ=INT)
    code.cbranch(code.icmp_signed(">=", count, size), end, wait)
    code.position_at_end(wait)
    yield count
    code.branch(look)
    code.position_at_end(end)


def _sleep_if_needed(code: Any, looks: Any, places: Any, own: Any, size: Any) -> None:
    """Build the end of the looks where another thread was last seen on this core."""
    core = code.load(own, typ=INT)
    with counting(code, LONG(0), code.zext(size, LONG), LONG(1)) as thread:
        place = _place(code, places, code.trunc(thread, INT))
        is_other = code.icmp_unsigned("!=", place, own)
        is_here = code.icmp_signed("==", code.load(place, typ=INT), core)
        with code.if_then(code.and_(is_other, is_here)):
            code.store(INT(LOOKS), looks)


def _most_looks() -> int:
    """Return LOOKS, unless the user wants waiting threads to sleep."""
    is_passive = os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE"
    return FEW_LOOKS if is_passive else LOOKS


def _place(code: Any, places: Any, thread: Any) -> Any:
    return code.gep(places, [thread], source_etype=INT)


@contextmanager
def taking(code: Any, counter: Any, step: Any, total: Any) -> Iterator[Any]:
    """Build a loop that takes the next `step` of `total` things as long as there are any.

    Yields the first of them. A thread that is held up takes fewer than others.
    """
    take, taken, end = (code.append_basic_block(name) for name in ("take", "taken", "end"))
    code.branch(take)
    code.position_at_end(take)
    first = code.atomic_rmw("add", counter, step, "monotonic")
    code.cbranch(code.icmp_signed("<", first, total), taken, end)
    code.position_at_end(taken)
    yield first
    code.branch(take)
    code.position_at_end(end)


def _imported(module: ir.Module, library: ctypes.CDLL, name: str, kind: Any) -> ir.Function:
    """Declare a function of a library."""
    address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert address is not None
    binding.add_symbol(name, address)
    return ir.Function(module, kind, name)


def _openmp() -> ctypes.CDLL:
    """Return the library that torch's team is from."""
    maps = Path("/proc/self/maps").read_text()
    library = re.search(r"/\S*/lib(?:gomp|iomp5|omp)[^/\s]*\.so\S*", maps)
    if library is None:
        raise OSError("torch has no OpenMP")
    return ctypes.CDLL(library[0])
