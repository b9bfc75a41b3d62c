"""Tiles over integers of 8 or 4 bits, which become bf16 numbers in registers.

A panel of 32 outputs is cut into spans of inputs. A span has the scale of each output, in fp32, and
then the integers [pairs, 32, 2]. Both kinds of integers are bf16 numbers, so that only sums are
rounded: a span's sums are multiplied by the scales and added to the sums of the spans before it. A
row's bits do not depend on the rows beside it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import partial
from typing import Any

from llvmlite import ir

from specserve.models.cpu.compiled.tiles import (
    PANEL,
    Tiles,
    add_assembler,
    row_products,
    starts_of_rows,
)
from specserve.models.cpu.compiled.vectors import BYTE, LONG, POINTER, new_function

CODED_ROWS = 12
"""Rows of a tile: 24 registers hold sums, and those that are left widen integers."""
SCALE_BYTES = 4 * PANEL
"""Bytes of a span's scales."""
BITS = (8, 4)
ZERO_CODE = 8
"""What is stored of a zero in 4 bits, which have no sign."""
INPUT, TABLE = 24, 25
"""Registers of a pair of inputs, and of the bf16 numbers that 4 bits stand for."""
WEIGHTS = (30, 31)


def coded_tiles(module: ir.Module, bits: int) -> Tiles:
    """Build the tiles over integers of 8 or 4 bits."""
    return Tiles([_tile(module, bits, rows) for rows in range(1, CODED_ROWS + 1)])


def _tile(module: ir.Module, bits: int, rows: int) -> ir.Function:
    """Build a function that adds a span's products, scaled, to the sums.

    Its arguments are as for a tile over bf16 numbers.
    """
    kinds = [POINTER, LONG, POINTER, LONG, POINTER, LONG]
    function, code = new_function(module, f"tile{rows}of{bits}", kinds)
    function.attributes.add("noinline")
    x, stride, panel, pairs, sums, distance = function.args
    changed = [pairs, panel, *starts_of_rows(code, x, stride, rows)]
    unchanged = [sums, stride, distance, panel, *([_numbers(module)] if bits == 4 else [])]
    add_assembler(code, changed, unchanged, partial(_tile_assembler, bits, rows))
    code.ret_void()
    return function


def _tile_assembler(bits: int, rows: int, operands: Sequence[str]) -> list[str]:
    starts = -(-rows // 3)
    pairs, panel, *pointers = operands[: 2 + starts]
    sums, stride, distance, span, *table = operands[2 + starts :]
    own = [f"%zmm{i}" for i in range(2 * rows)]
    return [
        *(f"vpxord {register}, {register}, {register}" for register in own),
        *(f"vmovups ({numbers}), %zmm{TABLE}" for numbers in table),
        f"addq $${SCALE_BYTES}, {panel}",
        *(".p2align 5", "1:"),
        *(_widen_bytes(panel) if bits == 8 else _widen_halves(panel)),
        f"prefetcht0 ({panel},{distance})",
        *row_products(rows, pointers, stride, weights=WEIGHTS, inputs=(INPUT,)),
        f"addq $${8 * bits}, {panel}",
        *(f"addq $$4, {pointer}" for pointer in pointers),
        *(f"decq {pairs}", "jne 1b"),
        *(f"vmovups {64 * i}({span}), %zmm{weight}" for i, weight in enumerate(WEIGHTS)),
        *(
            f"vfmadd213ps {64 * i}({sums}), %zmm{WEIGHTS[i % 2]}, {register}"
            for i, register in enumerate(own)
        ),
        *(f"vmovups {register}, {64 * i}({sums})" for i, register in enumerate(own)),
    ]


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


def _numbers(module: ir.Module) -> Any:
    """Return the address of the bf16 numbers that codes of 4 bits stand for, twice."""
    name = "numbers_of_4_bits"
    found = module.globals.get(name)
    if found is None:
        numbers = b"".join(struct.pack("<f", code - ZERO_CODE)[2:] for code in range(16)) * 2
        kind = ir.ArrayType(BYTE, len(numbers))
        found = ir.GlobalVariable(module, kind, name)
        found.initializer = ir.Constant(kind, bytearray(numbers))
        found.global_constant, found.linkage = True, "internal"
    return ir.FormattedConstant(POINTER, found.get_reference())
