"""Building blocks of machine code: functions, loops, vectors of bf16 numbers, e to a power.

`module` is where code goes, `code` a builder of llvmlite at the place where it goes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

LANES = 16  # fp32 numbers in a register of AVX-512
LN2_HIGH = 355 / 512
SMALLEST, LARGEST = -87.0, 88.0
"""Powers of e between which the results are normal numbers; below, they are as small as can be."""

BYTE, INT, LONG = ir.IntType(8), ir.IntType(32), ir.IntType(64)
BF16 = ir.VectorType(ir.IntType(16), LANES)  # as bits
FP32 = ir.VectorType(ir.FloatType(), LANES)
BITS = ir.VectorType(INT, LANES)
MASK = ir.VectorType(ir.IntType(1), LANES)
POINTER, NOTHING = ir.PointerType(), ir.VoidType()


def exp(module: ir.Module, code: Any, value: Any) -> Any:
    """Build e to the power of a vector, to about the last bit of fp32.

    With n the nearest whole number to x / ln 2 and r = x - n ln 2, it is 2^n e^r, and e^r the
    beginning of its power series: |r| is at most 0.35.
    """

    def constant(number: float) -> Any:
        return FP32([number] * LANES)

    low = intrinsic(module, "llvm.maxnum.v16f32", FP32, [FP32, FP32])
    high = intrinsic(module, "llvm.minnum.v16f32", FP32, [FP32, FP32])
    nearest = intrinsic(module, "llvm.rint.v16f32", FP32, [FP32])
    fused = intrinsic(module, "llvm.fma.v16f32", FP32, [FP32, FP32, FP32])
    x = code.call(high, [code.call(low, [value, constant(SMALLEST)]), constant(LARGEST)])
    n = code.call(nearest, [code.fmul(x, constant(1 / math.log(2)))])
    # ln 2 in two parts, of which the first has few bits, so that its product with n is exact.
    r = code.call(fused, [n, constant(-LN2_HIGH), x])
    r = code.call(fused, [n, constant(LN2_HIGH - math.log(2)), r])
    series = constant(1 / math.factorial(7))
    for power in range(6, -1, -1):
        series = code.call(fused, [series, r, constant(1 / math.factorial(power))])
    exponent = code.shl(code.fptosi(n, BITS), BITS([23] * LANES))
    power_of_e = code.bitcast(code.add(code.bitcast(series, BITS), exponent), FP32)
    overflows = code.fcmp_ordered(">", value, constant(LARGEST))
    return code.select(overflows, constant(math.inf), power_of_e)


def load_bf16(module: ir.Module, code: Any, pointer: Any, mask: Any) -> Any:
    """Build the load of a vector as fp32; zeros if there is none, or where it is masked out.

    Processors take very long over masked loads from null.
    """
    kinds = [POINTER, INT, MASK, BF16]
    masked_load = intrinsic(module, "llvm.masked.load.v16i16.p0", BF16, kinds)
    present = code.icmp_unsigned("!=", pointer, POINTER(None))
    source = code.select(present, pointer, _zeros(module))
    bits = code.call(masked_load, [source, INT(2), mask, BF16(None)])
    return code.bitcast(code.shl(code.zext(bits, BITS), BITS([16] * LANES)), FP32)


def _zeros(module: ir.Module) -> Any:
    zeros = module.globals.get("zeros") or ir.GlobalVariable(module, BF16, "zeros")
    zeros.initializer, zeros.global_constant, zeros.linkage = BF16(None), True, "internal"
    return ir.FormattedConstant(POINTER, zeros.get_reference())


def store_bf16(module: ir.Module, code: Any, value: Any, pointer: Any, mask: Any) -> None:
    kinds = [BF16, POINTER, INT, MASK]
    masked_store = intrinsic(module, "llvm.masked.store.v16i16.p0", NOTHING, kinds)
    bits = code.trunc(code.lshr(_rounded_bits(code, value), BITS([16] * LANES)), BF16)
    code.call(masked_store, [bits, pointer, INT(2), mask])


def rounded(code: Any, value: Any) -> Any:
    """Build the rounding of fp32 to a bf16 number, kept as fp32."""
    return code.bitcast(code.and_(_rounded_bits(code, value), BITS([-(1 << 16)] * LANES)), FP32)


def _rounded_bits(code: Any, value: Any) -> Any:
    """Build bits of which the upper half is the nearest bf16, the even one of two as near."""
    bits = code.bitcast(value, BITS)
    even = code.and_(code.lshr(bits, BITS([16] * LANES)), BITS([1] * LANES))
    return code.add(bits, code.add(even, BITS([0x7FFF] * LANES)))


def first_lanes(code: Any, count: Any) -> Any:
    """Build the mask of the first lanes of a vector."""
    longs = ir.VectorType(LONG, LANES)
    one = code.insert_element(longs(ir.Undefined), count, INT(0))
    counts = code.shuffle_vector(one, longs(ir.Undefined), BITS(None))
    return code.icmp_signed(">", counts, longs(list(range(LANES))))


def new_function(
    module: ir.Module, name: str, kinds: Sequence[Any], linkage: str = "internal"
) -> tuple[ir.Function, Any]:
    function = ir.Function(module, ir.FunctionType(NOTHING, kinds), name)
    function.linkage = linkage
    return function, ir.IRBuilder(function.append_basic_block("entry"))


def intrinsic(module: ir.Module, name: str, result: Any, kinds: Sequence[Any]) -> Any:
    known = module.globals.get(name)
    return known or ir.Function(module, ir.FunctionType(result, kinds), name)


@contextmanager
def counting(code: Any, start: Any, stop: Any, step: Any) -> Iterator[Any]:
    """Build a loop around what is built meanwhile; yield its counter."""
    with code.goto_entry_block():
        counter = new_memory(code, LONG)
    code.store(start, counter)
    head, body, end = (code.append_basic_block(name) for name in ("head", "body", "end"))
    code.branch(head)
    code.position_at_end(head)
    number = code.load(counter, typ=LONG)
    code.cbranch(code.icmp_signed("<", number, stop), body, end)
    code.position_at_end(body)
    yield number
    code.store(code.add(number, step), counter)
    code.branch(head)
    code.position_at_end(end)


def new_memory(code: Any, kind: Any) -> Any:
    memory = code.alloca(kind)
    memory.type = POINTER  # not one to its kind, which LLVM does not know any more
    return memory


def at(code: Any, pointer: Any, offset: Any) -> Any:
    return code.gep(pointer, [offset], source_etype=BYTE)


def at_if_any(code: Any, pointer: Any, offset: Any) -> Any:
    present = code.icmp_unsigned("!=", pointer, POINTER(None))
    return code.select(present, at(code, pointer, offset), POINTER(None))


def smaller(code: Any, a: Any, b: Any) -> Any:
    return code.select(code.icmp_signed("<", a, b), a, b)


def larger(code: Any, a: Any, b: Any) -> Any:
    return code.select(code.icmp_signed(">", a, b), a, b)
