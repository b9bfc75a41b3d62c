"""Tiles for processors that multiply small matrices (Intel's AMX), in assembler.

A tile multiplies up to 32 rows of bf16 numbers with a panel of 32 outputs, in steps of 32 inputs:
the panel's order, [pairs, 32, 2], is that of the processor's matrices. It adds up the even inputs
of a step and the odd ones, each in order, and then both to the sums, for each row alone: a row's
bits depend neither on the rows beside it nor on how many there are.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

from llvmlite import binding, ir

from specserve.machine_code.vectors import (
    BYTE,
    FLOAT,
    FP32,
    LANES,
    LINE,
    LONG,
    NOTHING,
    POINTER,
    at,
    counting,
    intrinsic,
    larger,
    memset_zero,
    new_function,
    new_memory,
    smaller,
    splat,
)
from specserve.models.cpu.compiled.coded_tiles import INPUT_SUMS_BYTES
from specserve.models.cpu.compiled.tiles import (
    PAIR_BYTES,
    SUMS_BYTES,
    Tiles,
    add_assembler,
    places_of_sums,
    row_sums,
)

AMX_ROWS = 32
STEP_PAIRS = 16
"""Pairs of inputs of a step. Weights whose inputs are no whole steps have other tiles."""
MATRIX_ROWS = 16
SUMS, INPUTS, WEIGHTS = ((0, 1), (2, 3)), (4, 5), (6, 7)
"""Registers: sums of two halves of the rows with two halves of the panel; inputs; weights."""
ARGUMENTS = [POINTER, LONG, POINTER, LONG, POINTER, LONG, POINTER]
"""What other tiles take, and the place of the number of rows that the registers are set up for."""

ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18
"""Of Linux on x86-64: a call, what it is asked for, and the number of the registers."""


@cache
def may_use_amx() -> bool:
    """Ask the system for AMX, once a process; those that are forked from it have it, too."""
    features = binding.get_host_cpu_features()
    if not (features.get("amx-tile") and features.get("amx-bf16")) or platform.system() != "Linux":
        return False
    refused: int = ctypes.CDLL(None).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA)
    return not refused


def begin_amx(code: Any) -> Any:
    """Build the place of the number of rows that the registers are set up for."""
    rows = new_memory(code, LONG)
    code.store(LONG(0), rows)
    return rows


def end_amx(code: Any) -> None:
    """Build the return of the registers, which would slow down changes of threads."""
    code.asm(ir.FunctionType(NOTHING, []), "tilerelease", "~{memory}", [], True)


class AmxTiles(Tiles):
    """The tiles over weights in bf16: one function for all numbers of rows."""

    def __init__(self, module: ir.Module) -> None:
        function, code = new_function(module, "amx_tile", [*ARGUMENTS, LONG])
        x, stride, panel, pairs, sums, distance, set_up, rows = function.args
        _set_up(module, code, rows, set_up)
        with _each_height(code, rows) as heights:
            for block, halves in heights:
                with block:
                    _multiply(code, halves, (x, stride, panel, pairs, sums, distance))
        code.ret_void()
        self._function = function

    def call(self, code: Any, num_rows: Any, given: Sequence[Any]) -> None:
        code.call(self._function, [*given, num_rows])


class ScaledAmxTiles(AmxTiles):
    """The tiles over integers that became bf16 numbers, a span at a time, whose sums are scaled.

    They are given the number of spans, their scales and, with minima, the sums of the rows' inputs
    over each, too.
    """

    def __init__(self, module: ir.Module, *, has_minima: bool) -> None:
        kinds = [*ARGUMENTS, LONG, POINTER, *[POINTER] * has_minima, LONG]
        function, code = new_function(module, f"scaled_amx_tile{has_minima:d}", kinds)
        x, stride, panel, pairs, sums, _, set_up, spans, scales, *input_sums, rows = function.args
        _set_up(module, code, rows, set_up)
        own = new_memory(code, ir.ArrayType(BYTE, AMX_ROWS * SUMS_BYTES), align=LINE)
        num_bytes = LONG(4 * LANES * (4 if has_minima else 2))
        with _each_height(code, rows) as heights:
            for block, halves in heights:
                with block, counting(code, LONG(0), spans, LONG(1)) as span:
                    done = code.mul(span, pairs)
                    inputs = at(code, x, code.mul(done, LONG(4)))
                    weights = at(code, panel, code.mul(done, LONG(PAIR_BYTES)))
                    _multiply(code, halves, (inputs, stride, weights, pairs, own))
                    numbers = at(code, scales, code.mul(span, num_bytes))
                    of_span = code.mul(span, LONG(INPUT_SUMS_BYTES))
                    more = [at(code, place, of_span) for place in input_sums]
                    _scale(module, code, rows, own, sums, numbers, more)
        code.ret_void()
        self._function = function


def _scale(
    module: ir.Module,
    code: Any,
    rows: Any,
    own: Any,
    sums: Any,
    numbers: Any,
    input_sums: Sequence[Any],
) -> None:
    """Build the addition of a span's own sums, scaled, and of its minima to the sums."""
    fused = intrinsic(module, "llvm.fma.v16f32", FP32, [FP32, FP32, FP32])
    scales, minima = (
        [
            code.load(at(code, numbers, LONG(4 * LANES * i)), typ=FP32, align=4)
            for i in (first, first + 1)
        ]
        for first in (0, 2 if input_sums else 0)
    )
    with counting(code, LONG(0), rows, LONG(1)) as row:
        of_row = [code.load(at(code, one, code.mul(row, LONG(4))), typ=FLOAT) for one in input_sums]
        places = places_of_sums(code, sums, row)
        for i, more in enumerate(row_sums(code, own, row)):
            total = code.call(fused, [more, scales[i], code.load(places[i], typ=FP32, align=4)])
            for one in of_row:
                total = code.call(fused, [minima[i], splat(code, one), total])
            code.store(total, places[i], align=4)


def _set_up(module: ir.Module, code: Any, rows: Any, set_up: Any) -> None:
    """Build the description of the registers' rows and bytes, if there are other rows."""
    with code.if_then(code.icmp_signed("!=", rows, code.load(set_up, typ=LONG))):
        code.store(rows, set_up)
        first = smaller(code, rows, LONG(MATRIX_ROWS))
        second = larger(code, LONG(1), code.sub(rows, first))
        rows_of = dict.fromkeys(WEIGHTS, LONG(STEP_PAIRS))
        for half, count in enumerate((first, second)):
            rows_of |= dict.fromkeys((*SUMS[half], INPUTS[half]), count)
        description = new_memory(code, ir.ArrayType(BYTE, LINE), align=LINE)
        memset_zero(module, code, description, LONG(LINE))
        code.store(BYTE(1), description)  # its version
        for register, count in rows_of.items():
            code.store(BYTE(LINE), at(code, description, LONG(16 + 2 * register)))
            code.store(code.trunc(count, BYTE), at(code, description, LONG(48 + register)))
        kind = ir.FunctionType(NOTHING, [POINTER])
        code.asm(kind, "ldtilecfg ($0)", "r,~{memory}", [description], True)


@contextmanager
def _each_height(code: Any, rows: Any) -> Iterator[Sequence[tuple[Any, int]]]:
    """Build a branch to tiles with rows in both halves, and one to those with rows in the first."""
    with code.if_else(code.icmp_signed(">", rows, LONG(MATRIX_ROWS))) as (both, first):
        yield (both, 2), (first, 1)


def _multiply(code: Any, halves: int, given: Sequence[Any]) -> None:
    """Build the products of a tile with rows in one half or in both.

    They are added to the sums if it is given how far ahead to fetch weights, else replace them.
    """
    x, stride, panel, pairs, sums, *distance = given
    steps = code.sdiv(pairs, LONG(STEP_PAIRS))
    inputs = [at(code, x, code.mul(stride, LONG(MATRIX_ROWS * half))) for half in range(halves)]
    unchanged = [stride, LONG(PAIR_BYTES), sums, *distance]
    lines_of = partial(_assembler, halves)
    add_assembler(code, [steps, panel, *inputs], unchanged, lines_of)


def _assembler(halves: int, operands: Sequence[str]) -> list[str]:
    steps, panel, *inputs = operands[: 2 + halves]
    stride, pair_bytes, sums, *distances = operands[2 + halves :]
    places = {
        register: f"{MATRIX_ROWS * SUMS_BYTES * half + LINE * i}({sums},{pair_bytes})"
        for half in range(halves)
        for i, register in enumerate(SUMS[half])
    }
    begin = "tileloadd {place}, %tmm{register}" if distances else "tilezero %tmm{register}"
    num_bytes = STEP_PAIRS * PAIR_BYTES
    return [
        *(begin.format(place=place, register=register) for register, place in places.items()),
        *(".p2align 5", "1:"),
        *(f"tileloadd ({inputs[half]},{stride}), %tmm{INPUTS[half]}" for half in range(halves)),
        *(line for i in range(2) for line in _products(halves, i, f"({panel},{pair_bytes})")),
        *(
            f"prefetcht0 {offset}({panel},{distance})"
            for distance in distances
            for offset in range(0, num_bytes, LINE)
        ),
        f"addq $${num_bytes}, {panel}",
        *(f"addq $${LINE}, {pointer}" for pointer in inputs),
        *(f"decq {steps}", "jne 1b"),
        *(f"tilestored %tmm{register}, {place}" for register, place in places.items()),
    ]


def _products(halves: int, i: int, panel: str) -> list[str]:
    """Return assembler for a half of the panel, with each half of the rows."""
    weights = f"%tmm{WEIGHTS[i]}"
    return [
        f"tileloadd {LINE * i}{panel}, {weights}",
        *(
            f"tdpbf16ps {weights}, %tmm{INPUTS[half]}, %tmm{SUMS[half][i]}"
            for half in range(halves)
        ),
    ]
