"""Records of arguments, and teams of threads that share the work which a record describes."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llvmlite import binding, ir

from specserve.models.compiled.vectors import INT, NOTHING, POINTER, new_memory


class Record:
    """A structure in memory whose fields have names."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._names = list(fields)
        self._kind = ir.LiteralStructType(list(fields.values()))

    def kind_of(self, name: str) -> Any:
        return self._kind.elements[self._names.index(name)]

    def new(self, code: Any, values: Mapping[str, Any]) -> Any:
        """Build a record on the stack with these values."""
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


class Team:
    """Torch's own team of threads."""

    def __init__(self, module: ir.Module) -> None:
        binding.add_symbol("GOMP_parallel", _address_of_gomp_parallel())
        kind = ir.FunctionType(NOTHING, [POINTER, POINTER, INT, INT])
        self._parallel = ir.Function(module, kind, "GOMP_parallel")

    def run(self, code: Any, work: ir.Function, memory: Any, threads: Any) -> None:
        """Build a call of `work` by each of so many threads."""
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


def _address_of_gomp_parallel() -> int:
    """Return the function that starts the team, from the library in use."""
    maps = Path("/proc/self/maps").read_text()
    library = re.search(r"/\S*/lib(?:gomp|iomp5|omp)[^/\s]*\.so\S*", maps)
    if library is None:
        raise OSError("torch has no OpenMP")
    function = ctypes.CDLL(library[0]).GOMP_parallel
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address
