"""Building blocks of machine code: functions, loops, vectors of bf16 numbers, e to a power.

`module` is where code goes, `code` a builder of llvmlite at the place where it goes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from llvmlite import ir

LANES = 16  # fp32 numbers in a register of AVX-512
LINE = 64  # bytes that come from memory at once
LN2_HIGH = 355 / 512
SMALLEST, LARGEST = -87.0, 88.0
"""Powers of e between which the results are normal numbers; below, they are 0."""

BYTE, INT, LONG = ir.IntType(8), ir.IntType(32), ir.IntType(64)
FLOAT = ir.FloatType()
BF16 = ir.VectorType(ir.IntType(16), LANES)  # as bits
WORDS = ir.VectorType(ir.IntType(16), 2 * LANES)  # a register of them
FP32 = ir.VectorType(FLOAT, LANES)
HALF = ir.VectorType(ir.HalfType(), LANES)
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

    nearest = intrinsic(module, "llvm.rint.v16f32", FP32, [FP32])
    fused = intrinsic(module, "llvm.fma.v16f32", FP32, [FP32, FP32, FP32])
    n = code.call(nearest, [code.fmul(value, constant(1 / math.log(2)))])
    # ln 2 in two parts, of which the first has few bits, so that its product with n is exact.
    r = code.call(fused, [n, constant(-LN2_HIGH), value])
    r = code.call(fused, [n, constant(LN2_HIGH - math.log(2)), r])
    series = constant(1 / math.factorial(7))
    for power in range(6, -1, -1):
        series = code.call(fused, [series, r, constant(1 / math.factorial(power))])
    exponent = code.shl(code.fptosi(n, BITS), BITS([23] * LANES))
    power_of_e = code.bitcast(code.add(code.bitcast(series, BITS), exponent), FP32)
    overflows = code.fcmp_ordered(">", value, constant(LARGEST))
    vanishes = code.fcmp_ordered("<", value, constant(SMALLEST))
    undefined = code.fcmp_unordered("uno", value, value)
    for applies, result in ((overflows, math.inf), (vanishes, 0.0), (undefined, math.nan)):
        power_of_e = code.select(applies, constant(result), power_of_e)
    return power_of_e


def lane_sum(code: Any, value: Any) -> Any:
    """Build the sum of a vector's lanes, in all lanes, always in the same order."""
    return _over_lanes(code, value, code.fadd)


def lane_max(module: ir.Module, code: Any, value: Any) -> Any:
    """Build the largest of a vector's lanes, in all lanes. Undefined ones do not count."""
    return _over_lanes(code, value, partial(largest, module, code))


def largest(module: ir.Module, code: Any, a: Any, b: Any) -> Any:
    return code.call(intrinsic(module, "llvm.maxnum.v16f32", FP32, [FP32, FP32]), [a, b])


def _over_lanes(code: Any, value: Any, combine: Callable[[Any, Any], Any]) -> Any:
    for distance in (8, 4, 2, 1):
        order = BITS([lane ^ distance for lane in range(LANES)])
        value = combine(value, code.shuffle_vector(value, FP32(ir.Undefined), order))
    return value


def transposed(code: Any, rows: Sequence[Any]) -> list[Any]:
    """Build the columns of 16 vectors of 32 bits."""
    for distance in (8, 4, 2, 1):
        own = [lane if not lane & distance else lane ^ distance | LANES for lane in range(LANES)]
        other = [lane ^ distance if not lane & distance else lane | LANES for lane in range(LANES)]
        rows = [
            code.shuffle_vector(rows[i & ~distance], rows[i | distance], BITS(order))
            for i in range(LANES)
            for order in (other if i & distance else own,)
        ]
    return list(rows)


def splat(code: Any, value: Any, lanes: int = LANES) -> Any:
    """Build a vector of equal numbers."""
    kind = ir.VectorType(value.type, lanes)
    one = code.insert_element(kind(ir.Undefined), value, INT(0))
    return code.shuffle_vector(one, kind(ir.Undefined), ir.VectorType(INT, lanes)(None))


def load_long(code: Any, array: Any, index: Any) -> Any:
    return code.load(at(code, array, code.mul(index, LONG(8))), typ=LONG)


def load_bf16(module: ir.Module, code: Any, pointer: Any, mask: Any) -> Any:
    """Build the load of a vector as fp32; zeros if there is none, or where it is masked out.

    Processors take very long over masked loads from null.
    """
    present = code.icmp_unsigned("!=", pointer, POINTER(None))
    source = code.select(present, pointer, _zeros(module))
    bits = load_masked(module, code, BF16, source, mask)
    return _from_bf16(code, bits)


def load_masked(module: ir.Module, code: Any, kind: Any, pointer: Any, mask: Any) -> Any:
    """Build the load of a vector of whole numbers; zeros where it is masked out."""
    width = kind.element.width
    kinds = [POINTER, INT, ir.VectorType(ir.IntType(1), kind.count), kind]
    name = f"llvm.masked.load.v{kind.count}i{width}.p0"
    function = intrinsic(module, name, kind, kinds)
    return code.call(function, [pointer, INT(width // 8), mask, kind(None)])


def _zeros(module: ir.Module) -> Any:
    zeros = module.globals.get("zeros") or ir.GlobalVariable(module, BF16, "zeros")
    zeros.initializer, zeros.global_constant, zeros.linkage = BF16(None), True, "internal"
    return ir.FormattedConstant(POINTER, zeros.get_reference())


def store_bf16(module: ir.Module, code: Any, value: Any, pointer: Any, mask: Any) -> None:
    kinds = [BF16, POINTER, INT, MASK]
    masked_store = intrinsic(module, "llvm.masked.store.v16i16.p0", NOTHING, kinds)
    code.call(masked_store, [_to_bf16(code, value), pointer, INT(2), mask])


def store_fp32(module: ir.Module, code: Any, value: Any, pointer: Any, mask: Any) -> None:
    kinds = [FP32, POINTER, INT, MASK]
    masked_store = intrinsic(module, "llvm.masked.store.v16f32.p0", NOTHING, kinds)
    code.call(masked_store, [value, pointer, INT(4), mask])


def rounded(code: Any, value: Any) -> Any:
    """Build the rounding of fp32 to a bf16 number, kept as fp32."""
    return _from_bf16(code, _to_bf16(code, value))


def _to_bf16(code: Any, value: Any) -> Any:
    """Build bits of the nearest bf16 number, the even one of two as near."""
    kind = ir.FunctionType(BF16, [FP32])
    return code.asm(kind, "vcvtneps2bf16 $1, $0", "=v,v", [value], False)


def _from_bf16(code: Any, bits: Any) -> Any:
    return code.bitcast(code.shl(code.zext(bits, BITS), BITS([16] * LANES)), FP32)


def first_lanes(code: Any, count: Any, lanes: int = LANES) -> Any:
    """Build the mask of the first `count` lanes of a vector; there may be any number."""
    within = larger(code, LONG(0), smaller(code, count, LONG(lanes)))
    counts = splat(code, code.trunc(within, INT), lanes)
    kind = ir.VectorType(INT, lanes)
    return code.icmp_signed(">", counts, kind(list(range(lanes))))


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


def prefetch(module: ir.Module, code: Any, pointer: Any) -> None:
    """Build a hint that this memory is read soon."""
    function = intrinsic(module, "llvm.prefetch.p0", NOTHING, [POINTER, INT, INT, INT])
    code.call(function, [pointer, INT(0), INT(3), INT(1)])


def memset_zero(module: ir.Module, code: Any, memory: Any, num_bytes: Any) -> None:
    kinds = [POINTER, BYTE, LONG, ir.IntType(1)]
    memset = intrinsic(module, "llvm.memset.p0.i64", NOTHING, kinds)
    code.call(memset, [memory, BYTE(0), num_bytes, ir.IntType(1)(0)])


def new_memory(code: Any, kind: Any, *, count: Any = None, align: int | None = None) -> Any:
    memory = code.alloca(kind, size=count)
    memory.align = align
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
