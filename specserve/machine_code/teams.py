"""Records of arguments, and teams of threads that share the work which a record describes."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llvmlite import binding, ir

from specserve.machine_code.vectors import (
    FLOAT,
    INT,
    LONG,
    NOTHING,
    POINTER,
    new_function,
    new_memory,
)

C_KINDS: Mapping[Any, Any] = {
    POINTER: ctypes.c_void_p,
    LONG: ctypes.c_int64,
    INT: ctypes.c_int32,
    FLOAT: ctypes.c_float,
}


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
    """Torch's own team of threads."""

    def __init__(self, module: ir.Module) -> None:
        library = _openmp()
        for name in ("GOMP_parallel", "GOMP_barrier"):
            address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
            assert address is not None
            binding.add_symbol(name, address)
        kind = ir.FunctionType(NOTHING, [POINTER, POINTER, INT, INT])
        self._parallel = ir.Function(module, kind, "GOMP_parallel")
        self._barrier = ir.Function(module, ir.FunctionType(NOTHING, []), "GOMP_barrier")

    def wait(self, code: Any, threads: Any) -> None:
        """Build the wait of each thread until all have come as far."""
        with code.if_then(code.icmp_signed("!=", threads, INT(1))):
            code.call(self._barrier, [])

    def run(self, code: Any, work: ir.Function, memory: Any, threads: Any) -> None:
        """Build a call of `work` by each of that many threads."""
        with code.if_else(code.icmp_signed("==", threads, INT(1))) as (alone, together):
            with alone:
                code.call(work, [memory])
            with together:
                pointer = ir.FormattedConstant(POINTER, work.get_reference())
                code.call(self._parallel, [pointer, memory, threads, INT(0)])


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


def _openmp() -> ctypes.CDLL:
    """Return the library that torch's team is from."""
    maps = Path("/proc/self/maps").read_text()
    library = re.search(r"/\S*/lib(?:gomp|iomp5|omp)[^/\s]*\.so\S*", maps)
    if library is None:
        raise OSError("torch has no OpenMP")
    return ctypes.CDLL(library[0])
