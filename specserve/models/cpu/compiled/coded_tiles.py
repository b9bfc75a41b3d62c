"""Tiles over integers of 8 or 4 bits, which become bf16 numbers in registers.

A panel of 32 outputs is cut into spans of inputs. A span has the scale of each output, its minimum,
if there are any, both in fp32 or in fp16, and then the integers [pairs, 32, 2]. Both kinds of
integers are bf16 numbers, so that only sums are rounded: a span's sums are multiplied by the scales
and added to the sums of the spans before it, and so are the minima, times the sum of the row's
inputs, which is computed once for many panels. A row's bits do not depend on the rows beside it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import partial
from typing import Any

from llvmlite import ir

from specserve.machine_code.vectors import (
    FP32,
    HALF,
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
    PAIR_BYTES,
    PANEL,
    Tiles,
    add_assembler,
    row_products,
    starts_of_rows,
)

CODED_ROWS = 12
"""Rows of a tile: 24 registers hold sums, and those that are left widen integers."""
SUMS_ROWS = 32
"""Rows of a tile for whose sums of inputs there is room: AMX has taller tiles."""
INPUT_SUMS_BYTES = 4 * SUMS_ROWS
"""Bytes of the sums of a tile's inputs over a span."""
MINIMA, HALVES = 32, 64
"""What a kind of weight has more than its bits if it has minima, and numbers in fp16."""
KINDS = tuple(
    bits + minima + halves for bits in (8, 4) for minima in (0, MINIMA) for halves in (0, HALVES)
)
ZERO_CODE = 8
"""What is stored of a zero in 4 bits, which have no sign, unless minima are added."""
TABLE = 24
"""Register of the bf16 numbers that 4 bits stand for, or of where those of 8 bits lie in fp32."""
WEIGHTS = {8: (27, 29), 4: (30, 31)}
"""Registers of widened weights, by the bits that they have in memory."""


def header_bytes(kind: int) -> int:
    """Return the bytes of a span before its integers."""
    return _scale_bytes(kind) * (2 if kind & MINIMA else 1)


def coded_tiles(module: ir.Module, kind: int) -> Tiles:
    """Build the tiles over integers of 8 or 4 bits, with or without minima."""
    return Tiles([_tile(module, kind, rows) for rows in range(1, CODED_ROWS + 1)])


def _tile(module: ir.Module, kind: int, rows: int) -> ir.Function:
    """Build a function that adds the products of spans, scaled, to the sums.

    Its arguments are as for a tile over bf16 numbers, with the pairs of a span. The number of spans
    follows, and with minima the sums of the rows' inputs over each.
    """
    kinds = [POINTER, LONG, POINTER, LONG, POINTER, LONG, LONG]
    kinds += [POINTER] if kind & MINIMA else []
    function, code = new_function(module, f"tile{rows}of{kind}", kinds)
    function.attributes.add("noinline")
    x, stride, panel, pairs, sums, distance, spans, *input_sums = function.args
    # Pairs that are left, and the span, which begins at the panel, are two of their own.
    changed = [spans, pairs, panel, panel, *input_sums, *starts_of_rows(code, x, stride, rows)]
    unchanged = [pairs, sums, stride, distance, _table(module, kind)]
    add_assembler(code, changed, unchanged, partial(_tile_assembler, kind, rows))
    code.ret_void()
    return function


def _tile_assembler(kind: int, rows: int, operands: Sequence[str]) -> list[str]:
    bits, num_minima = kind % MINIMA, 1 if kind & MINIMA else 0
    weights = WEIGHTS[bits]
    spans, left, panel, span, *pointers = operands[:-5]
    pairs, sums, stride, distance, table = operands[-5:]
    input_sums, pointers = pointers[:num_minima], pointers[num_minima:]
    own = range(2 * rows)
    return [
        f"vmovups ({table}), %zmm{TABLE}",
        "2:",
        *(f"vpxord %zmm{i}, %zmm{i}, %zmm{i}" for i in own),
        *(f"movq {panel}, {span}", f"movq {pairs}, {left}"),
        f"addq $${header_bytes(kind)}, {panel}",
        *(".p2align 5", "1:"),
        *(_widen_bytes(panel) if bits == 8 else _widen_halves(panel)),
        f"prefetcht0 ({panel},{distance})",
        *row_products(rows, pointers, stride, weights),
        f"addq $${8 * bits}, {panel}",
        *(f"addq $$4, {pointer}" for pointer in pointers),
        *(f"decq {left}", "jne 1b"),
        *_load_numbers(kind, span, 0),
        *(f"vfmadd213ps {64 * i}({sums}), %zmm{weights[i % 2]}, %zmm{i}" for i in own),
        *(line for place in input_sums for line in _add_minima(kind, rows, span, place)),
        *(f"vmovups %zmm{i}, {64 * i}({sums})" for i in own),
        *(f"decq {spans}", "jne 2b"),
    ]


def _add_minima(kind: int, rows: int, span: str, input_sums: str) -> list[str]:
    """Add a span's minima, times the sum of each row's inputs, to its sums."""
    return [
        *_load_numbers(kind, span, _scale_bytes(kind)),
        *(
            f"vfmadd231ps {4 * row}({input_sums}){{1to16}}, %zmm{weight}, %zmm{2 * row + i}"
            for row in range(rows)
            for i, weight in enumerate(WEIGHTS[kind % MINIMA])
        ),
        f"addq $${INPUT_SUMS_BYTES}, {input_sums}",
    ]


def _load_numbers(kind: int, span: str, offset: int) -> list[str]:
    """Load a number for each output in place of the weights."""
    load, step = ("vcvtph2ps", 32) if kind & HALVES else ("vmovups", 64)
    return [
        f"{load} {offset + step * i}({span}), %zmm{weight}"
        for i, weight in enumerate(WEIGHTS[kind % MINIMA])
    ]


def _scale_bytes(kind: int) -> int:
    return PANEL * (2 if kind & HALVES else 4)


def sum_inputs(module: ir.Module) -> ir.Function:
    """Build a function that sums each row's inputs over each span, [tiles, spans, SUMS_ROWS].

    Its arguments are x, bytes of a row, rows, rows of a tile, spans, pairs of a span, and where the
    sums go.
    """
    function, code = new_function(module, "sum_inputs", [POINTER, *[LONG] * 5, POINTER])
    x, stride, rows, height, spans, pairs, sums = function.args
    inputs = code.mul(pairs, LONG(2))
    total = new_memory(code, FP32)
    with counting(code, LONG(0), rows, LONG(1)) as row:
        of_row = code.add(
            code.mul(code.mul(code.sdiv(row, height), spans), LONG(INPUT_SUMS_BYTES)),
            code.mul(code.srem(row, height), LONG(4)),
        )
        with counting(code, LONG(0), spans, LONG(1)) as span:
            start = code.add(code.mul(row, stride), code.mul(span, code.mul(inputs, LONG(2))))
            code.store(FP32([0.0] * LANES), total)
            with counting(code, LONG(0), inputs, LONG(LANES)) as done:
                place = at(code, x, code.add(start, code.mul(done, LONG(2))))
                mask = first_lanes(code, code.sub(inputs, done))
                more = load_bf16(module, code, place, mask)
                code.store(code.fadd(code.load(total, typ=FP32), more), total)
            own = code.extract_element(lane_sum(code, code.load(total, typ=FP32)), INT(0))
            place = code.add(of_row, code.mul(span, LONG(INPUT_SUMS_BYTES)))
            code.store(own, at(code, sums, place))
    code.ret_void()
    return function


def widening(module: ir.Module, kind: int) -> ir.Function:
    """Build a function that widens a panel's integers to bf16, and scales and minima to fp32.

    Its arguments are the panel, spans, pairs of a span, how far ahead to fetch, and where weights
    [spans, pairs, 32, 2] and scales [spans, 32], with minima [spans, 2, 32], go.
    """
    kinds = [POINTER, LONG, LONG, LONG, POINTER, POINTER]
    function, code = new_function(module, f"widen{kind}", kinds)
    panel, spans, pairs, distance, weights, scales = function.args
    bits, num_bytes = kind % MINIMA, header_bytes(kind)
    count = 4 if kind & MINIMA else 2
    span_bytes = code.add(LONG(num_bytes), code.mul(pairs, LONG(8 * bits)))
    own_kind = HALF if kind & HALVES else FP32
    with counting(code, LONG(0), spans, LONG(1)) as span:
        start = at(code, panel, code.mul(span, span_bytes))
        to = at(code, scales, code.mul(span, LONG(4 * LANES * count)))
        for i in range(count):
            place = at(code, start, LONG(num_bytes // count * i))
            numbers = code.load(place, typ=own_kind, align=2)
            numbers = code.fpext(numbers, FP32) if kind & HALVES else numbers
            code.store(numbers, at(code, to, LONG(4 * LANES * i)), align=4)
        integers = at(code, start, LONG(num_bytes))
        widened = at(code, weights, code.mul(code.mul(span, pairs), LONG(PAIR_BYTES)))
        changed, unchanged = [pairs, integers, widened], [distance, _table(module, kind)]
        add_assembler(code, changed, unchanged, partial(_widening_assembler, bits))
    code.ret_void()
    return function


def _widening_assembler(bits: int, operands: Sequence[str]) -> list[str]:
    left, panel, out, distance, table = operands
    return [
        f"vmovups ({table}), %zmm{TABLE}",
        *(".p2align 5", "1:"),
        *(_widen_bytes(panel) if bits == 8 else _widen_halves(panel)),
        f"prefetcht0 ({panel},{distance})",
        *(f"vmovups %zmm{weight}, {64 * i}({out})" for i, weight in enumerate(WEIGHTS[bits])),
        f"addq $${8 * bits}, {panel}",
        f"addq $${PAIR_BYTES}, {out}",
        *(f"decq {left}", "jne 1b"),
    ]


def _widen_bytes(panel: str) -> list[str]:
    """Widen each byte to fp32, of which the upper half is the bf16 number."""
    registers = range(26, 30)
    return [
        *(f"vpmovsxbd {16 * i}({panel}), %zmm{own}" for i, own in enumerate(registers)),
        *(f"vcvtdq2ps %zmm{own}, %zmm{own}" for own in registers),
        *(f"vpermt2w %zmm{weight - 1}, %zmm{TABLE}, %zmm{weight}" for weight in WEIGHTS[8]),
    ]


def _widen_halves(panel: str) -> list[str]:
    """Widen the lower half of each byte for the first vector, the upper one for the second.

    The table has all its numbers twice, so that the bits above the lower half do not matter.
    """
    first, second = WEIGHTS[4]
    return [
        f"vpmovzxbw ({panel}), %zmm{first}",
        f"vpsrlw $$4, %zmm{first}, %zmm{second}",
        f"vpermw %zmm{TABLE}, %zmm{first}, %zmm{first}",
        f"vpermw %zmm{TABLE}, %zmm{second}, %zmm{second}",
    ]


def _table(module: ir.Module, kind: int) -> Any:
    """Return the address of the 32 words that widening looks up."""
    if kind % MINIMA == 8:  # where the upper halves lie in two registers, the second one's first
        name, words = "upper_halves", [*range(33, 64, 2), *range(1, 32, 2)]
    else:  # bf16 numbers of each code, twice
        zero = 0 if kind & MINIMA else ZERO_CODE
        floats = struct.pack("<16f", *(code - zero for code in range(16)))
        name, words = f"numbers_from_{-zero}", 2 * list(struct.unpack("<32H", floats)[1::2])
    found = module.globals.get(name)
    if found is None:
        kind_of_words = ir.ArrayType(ir.IntType(16), len(words))
        found = ir.GlobalVariable(module, kind_of_words, name)
        found.initializer = ir.Constant(kind_of_words, words)
        found.global_constant, found.linkage = True, "internal"
    return ir.FormattedConstant(POINTER, found.get_reference())
