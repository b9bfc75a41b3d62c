"""Tiles over integers of 8 or 4 bits, which become bf16 numbers in registers.

A panel of 32 outputs is cut into spans of inputs. A span has the scale of each output, in fp32, its
minimum, if there are any, and then the integers [pairs, 32, 2]. Both kinds of integers are bf16
numbers, so that only sums are rounded: a span's sums are multiplied by the scales and added to the
sums of the spans before it, and so are the minima, times the sum of the row's inputs, which is
computed once for many panels. A row's bits do not depend on the rows beside it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import partial
from typing import Any

from llvmlite import ir

from specserve.machine_code.vectors import (
    BYTE,
    FP32,
    INT,
    LANES,
    LONG,
    POINTER,
    at,
    counting,
    first_lanes,
    lane_sum,
    load_bf16,
    new_function,
    new_memory,
)
from specserve.models.cpu.compiled.tiles import (
    PANEL,
    Tiles,
    add_assembler,
    row_products,
    starts_of_rows,
)

CODED_ROWS = 12
"""Rows of a tile: 24 registers hold sums, and those that are left widen integers."""
SCALE_BYTES = 4 * PANEL
"""Bytes of a span's scales."""
MINIMA = 32
"""What a kind of weight has more than its bits if it has minima."""
KINDS = (8, 4, 8 + MINIMA, 4 + MINIMA)
ZERO_CODE = 8
"""What is stored of a zero in 4 bits, which have no sign, unless minima are added."""
INPUT, TABLE = 24, 25
"""Registers of a pair of inputs, and of the bf16 numbers that 4 bits stand for."""
WEIGHTS = (30, 31)


def coded_tiles(module: ir.Module, kind: int) -> Tiles:
    """Build the tiles over integers of 8 or 4 bits, with or without minima."""
    return Tiles([_tile(module, kind, rows) for rows in range(1, CODED_ROWS + 1)])


def _tile(module: ir.Module, kind: int, rows: int) -> ir.Function:
    """Build a function that adds a span's products, scaled, to the sums.

    Its arguments are as for a tile over bf16 numbers. With minima the sums of the rows' inputs over
    the span follow.
    """
    kinds = [POINTER, LONG, POINTER, LONG, POINTER, LONG]
    kinds += [POINTER] if kind > MINIMA else []
    function, code = new_function(module, f"tile{rows}of{kind}", kinds)
    function.attributes.add("noinline")
    x, stride, panel, pairs, sums, distance, *input_sums = function.args
    changed = [pairs, panel, *starts_of_rows(code, x, stride, rows)]
    unchanged = [sums, stride, distance, panel, _numbers(module, kind), *input_sums]
    add_assembler(code, changed, unchanged, partial(_tile_assembler, kind, rows))
    code.ret_void()
    return function


def _tile_assembler(kind: int, rows: int, operands: Sequence[str]) -> list[str]:
    starts, bits, has_minima = -(-rows // 3), kind % MINIMA, kind > MINIMA
    pairs, panel, *pointers = operands[: 2 + starts]
    sums, stride, distance, span, numbers, *input_sums = operands[2 + starts :]
    own = range(2 * rows)
    return [
        *(f"vpxord %zmm{i}, %zmm{i}, %zmm{i}" for i in own),
        *([f"vmovups ({numbers}), %zmm{TABLE}"] if bits == 4 else []),
        f"addq $${SCALE_BYTES * (1 + has_minima)}, {panel}",
        *(".p2align 5", "1:"),
        *(_widen_bytes(panel) if bits == 8 else _widen_halves(panel)),
        f"prefetcht0 ({panel},{distance})",
        *row_products(rows, pointers, stride, weights=WEIGHTS, inputs=(INPUT,)),
        f"addq $${8 * bits}, {panel}",
        *(f"addq $$4, {pointer}" for pointer in pointers),
        *(f"decq {pairs}", "jne 1b"),
        *(f"vmovups {64 * i}({span}), %zmm{weight}" for i, weight in enumerate(WEIGHTS)),
        *(f"vfmadd213ps {64 * i}({sums}), %zmm{WEIGHTS[i % 2]}, %zmm{i}" for i in own),
        *(line for place in input_sums for line in _add_minima(rows, span, place)),
        *(f"vmovups %zmm{i}, {64 * i}({sums})" for i in own),
    ]


def _add_minima(rows: int, span: str, input_sums: str) -> list[str]:
    """Add a span's minima, times the sum of each row's inputs, to its sums."""
    return [
        *(
            f"vmovups {SCALE_BYTES + 64 * i}({span}), %zmm{weight}"
            for i, weight in enumerate(WEIGHTS)
        ),
        *(
            f"vfmadd231ps {4 * row}({input_sums}){{1to16}}, %zmm{weight}, %zmm{2 * row + i}"
            for row in range(rows)
            for i, weight in enumerate(WEIGHTS)
        ),
    ]


def sum_inputs(module: ir.Module) -> ir.Function:
    """Build a function that sums each row's inputs over each span, [spans, rows].

    Its arguments are x, bytes of a row, rows, spans, pairs of a span, and where the sums go.
    """
    function, code = new_function(module, "sum_inputs", [POINTER, *[LONG] * 4, POINTER])
    x, stride, rows, spans, pairs, sums = function.args
    inputs = code.mul(pairs, LONG(2))
    total = new_memory(code, FP32)
    with (
        counting(code, LONG(0), rows, LONG(1)) as row,
        counting(code, LONG(0), spans, LONG(1)) as span,
    ):
        start = code.add(code.mul(row, stride), code.mul(span, code.mul(inputs, LONG(2))))
        code.store(FP32([0.0] * LANES), total)
        with counting(code, LONG(0), inputs, LONG(LANES)) as done:
            place = at(code, x, code.add(start, code.mul(done, LONG(2))))
            mask = first_lanes(code, code.sub(inputs, done))
            more = load_bf16(module, code, place, mask)
            code.store(code.fadd(code.load(total, typ=FP32), more), total)
        own = code.extract_element(lane_sum(code, code.load(total, typ=FP32)), INT(0))
        number = code.add(code.mul(span, rows), row)
        code.store(own, at(code, sums, code.mul(number, LONG(4))))
    code.ret_void()
    return function


def _widen_bytes(panel: str) -> list[str]:
    lines = [f"vpmovsxbd {16 * i}({panel}), %zmm{26 + i}" for i in range(4)]
    lines += [f"vcvtdq2ps %zmm{26 + i}, %zmm{26 + i}" for i in range(4)]
    return [
        *lines,
        # The second first: it leaves a register that the first one's result goes to.
        f"vcvtne2ps2bf16 %zmm28, %zmm29, %zmm{WEIGHTS[1]}",
        f"vcvtne2ps2bf16 %zmm26, %zmm27, %zmm{WEIGHTS[0]}",
    ]


def _widen_halves(panel: str) -> list[str]:
    """Widen the lower half of each byte for the first vector, the upper one for the second.

    The table has all its numbers twice, so that the bits above the lower half do not matter.
    """
    first, second = WEIGHTS
    return [
        f"vpmovzxbw ({panel}), %zmm{first}",
        f"vpsrlw $$4, %zmm{first}, %zmm{second}",
        f"vpermw %zmm{TABLE}, %zmm{first}, %zmm{first}",
        f"vpermw %zmm{TABLE}, %zmm{second}, %zmm{second}",
    ]


def _numbers(module: ir.Module, kind: int) -> Any:
    """Return the address of the bf16 numbers that codes of 4 bits stand for, twice."""
    zero = 0 if kind > MINIMA else ZERO_CODE
    name = f"numbers_from_{-zero}"
    found = module.globals.get(name)
    if found is None:
        numbers = b"".join(struct.pack("<f", code - zero)[2:] for code in range(16)) * 2
        array = ir.ArrayType(BYTE, len(numbers))
        found = ir.GlobalVariable(module, array, name)
        found.initializer = ir.Constant(array, bytearray(numbers))
        found.global_constant, found.linkage = True, "internal"
    return ir.FormattedConstant(POINTER, found.get_reference())
