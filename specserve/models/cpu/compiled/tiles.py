"""Tiles: the innermost loops of products, in assembler.

A tile multiplies up to 14 rows of bf16 numbers with a panel of 32 outputs, [pairs, 32, 2]. The sums
stay in registers, and each pair of inputs is added to them in order, so that a row's bits do not
depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from llvmlite import ir

from specserve.machine_code.vectors import (
    FP32,
    LANES,
    LONG,
    POINTER,
    at,
    counting,
    memset_zero,
    new_function,
    smaller,
)

PANEL = 2 * LANES
PAIR_BYTES = PANEL * 4
"""Bytes of a panel for one pair of inputs."""
SUMS_BYTES = PANEL * 4
"""Bytes of a row's sums."""
TILE_ROWS = 14
"""Rows of a tile: 28 registers hold sums, and two hold weights."""


class Tiles:
    """The tiles over weights of one kind, for each number of rows."""

    def __init__(self, functions: Sequence[ir.Function]) -> None:
        self._functions = functions

    @classmethod
    def of_bf16(cls, module: ir.Module) -> Tiles:
        return cls([_tile(module, rows) for rows in range(1, TILE_ROWS + 1)])

    def add_products(
        self,
        code: Any,
        *,
        x: Any,
        stride: Any,
        rows: Any,
        height: Any,
        panel: Any,
        pairs: Any,
        sums: Any,
        fetches: Any = None,
        add_more: Callable[[Any], Sequence[Any]] = lambda row: (),
    ) -> None:
        """Build the products of `rows` rows with a panel, `height` of them at a time.

        The rows lie `stride` bytes apart. `fetches` is how far ahead the first tile fetches.
        `add_more` builds what else the tile from a row on is given.
        """
        with counting(code, LONG(0), rows, height) as row:
            num_rows = smaller(code, height, code.sub(rows, row))
            is_first = code.icmp_signed("==", row, LONG(0))
            given = [
                at(code, x, code.mul(row, stride)),
                stride,
                panel,
                pairs,
                at(code, sums, code.mul(row, LONG(SUMS_BYTES))),
                LONG(0) if fetches is None else code.select(is_first, fetches, LONG(0)),
                *add_more(row),
            ]
            self.call(code, num_rows, given)

    def call(self, code: Any, num_rows: Any, given: Sequence[Any]) -> None:
        """Build the call of the tile for a number of rows."""
        _call_one_of(code, num_rows, self._functions, given)


def tile_height(code: Any, rows: Any, most: Any) -> Any:
    """Build the rows of a tile of at most `most`, if `rows` are divided evenly among few."""
    num_tiles = code.sdiv(code.sub(code.add(rows, most), LONG(1)), most)
    return code.sdiv(code.sub(code.add(rows, num_tiles), LONG(1)), num_tiles)


def clear_sums(module: ir.Module, code: Any, sums: Any, rows: Any) -> None:
    memset_zero(module, code, sums, code.mul(rows, LONG(SUMS_BYTES)))


def row_sums(code: Any, sums: Any, row: Any) -> list[Any]:
    """Build the loads of a row's two vectors of sums."""
    return [code.load(place, typ=FP32, align=4) for place in places_of_sums(code, sums, row)]


def places_of_sums(code: Any, sums: Any, row: Any) -> list[Any]:
    first = at(code, sums, code.mul(row, LONG(SUMS_BYTES)))
    return [at(code, first, LONG(4 * LANES * i)) for i in range(2)]


def _tile(module: ir.Module, rows: int) -> ir.Function:
    """Build a function that adds products to the sums.

    Its arguments are x, bytes of a row, panel, pairs, sums, and how far ahead to fetch. Addresses
    of x86 are a base plus 0, 1 or 2 times an index, so that a pointer serves three rows.
    """
    kinds = [POINTER, LONG, POINTER, LONG, POINTER, LONG]
    function, code = new_function(module, f"tile{rows}", kinds)
    function.attributes.add("noinline")
    x, stride, panel, pairs, sums, distance = function.args
    changed = [pairs, panel, *starts_of_rows(code, x, stride, rows)]
    add_assembler(code, changed, [sums, stride, distance], partial(_tile_assembler, rows))
    code.ret_void()
    return function


def _tile_assembler(rows: int, operands: Sequence[str]) -> list[str]:
    pairs, panel, *pointers, sums, stride, distance = operands
    stored = [(f"%zmm{i}", f"{64 * i}({sums})") for i in range(2 * rows)]
    weights = [(f"%zmm{30 + i}", 64 * i) for i in range(2)]
    return [
        *(f"vmovups {memory}, {register}" for register, memory in stored),
        *(".p2align 5", "1:"),
        *(f"vmovups {offset}({panel}), {weight}" for weight, offset in weights),
        *(f"prefetcht0 {offset}({panel},{distance})" for _, offset in weights),
        *row_products(rows, pointers, stride, (30, 31)),
        f"addq $${PAIR_BYTES}, {panel}",
        *(f"addq $$4, {pointer}" for pointer in pointers),
        *(f"decq {pairs}", "jne 1b"),
        *(f"vmovups {register}, {memory}" for register, memory in stored),
    ]


def starts_of_rows(code: Any, x: Any, stride: Any, rows: int) -> list[Any]:
    """Build pointers to every third row."""
    return [at(code, x, code.mul(stride, LONG(3 * i))) for i in range(-(-rows // 3))]


def row_products(
    rows: int, pointers: Sequence[str], stride: str, weights: Sequence[int]
) -> list[str]:
    """Return assembler that adds a pair of each row, times two vectors of weights, to its sums.

    Sums are in the registers from 0 on, as many for a row as `weights`, which are registers, too.
    A product that reads its pair from memory leaves to others the part of the processor that would
    copy the pair into a register first.
    """
    indexes = ("", f",{stride}", f",{stride},2")
    return [
        f"vdpbf16ps ({pointers[row // 3]}{indexes[row % 3]}){{1to16}}, %zmm{weight}, "
        f"%zmm{len(weights) * row + i}"
        for row in range(rows)
        for i, weight in enumerate(weights)
    ]


def add_assembler(
    code: Any,
    changed: Sequence[Any],
    unchanged: Sequence[Any],
    lines_of: Callable[[Sequence[str]], Sequence[str]],
) -> None:
    """Build assembler that may use all vectors; `lines_of` is given the names of its operands."""
    count = len(changed)
    places = [f"${i}" for i in (*range(count), *(2 * count + j for j in range(len(unchanged))))]
    constraints = [
        *["=&r"] * count,
        *map(str, range(count)),
        *["r"] * len(unchanged),
        *(f"~{{zmm{i}}}" for i in range(32)),
        *("~{memory}", "~{flags}"),
    ]
    given = [*changed, *unchanged]
    results = ir.LiteralStructType([value.type for value in changed])
    kind = ir.FunctionType(results, [value.type for value in given])
    code.asm(kind, "\\0A".join(lines_of(places)), ",".join(constraints), given, True)


def _call_one_of(code: Any, number: Any, functions: Sequence[Any], given: Sequence[Any]) -> None:
    """Build a call of the function `number`, counted from 1."""
    after = code.append_basic_block("called")
    switch = code.switch(number, after)
    for i, function in enumerate(functions, start=1):
        block = code.append_basic_block(function.name)
        switch.add_case(LONG(i), block)
        code.position_at_end(block)
        code.call(function, given)
        code.branch(after)
    code.position_at_end(after)
