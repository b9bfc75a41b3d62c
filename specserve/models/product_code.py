"""Machine code for products of bf16 rows with a packed weight, generated for this processor.

A weight [out, in] is packed into panels of 32 outputs, [panels, in / 2, 32, 2], so that a product
reads it once and in order. The innermost loop, a *tile*, multiplies up to 14 rows with a panel. The
sums stay in registers, and each pair of inputs is added to them in order, so that a row's bits do
not depend on the rows beside it, nor on the thread that computes them.

Tiles are assembler; what is around them is LLVM's own language, built with llvmlite.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from llvmlite import binding, ir

from specserve.models.vector_code import (
    BYTE,
    FP32,
    INT,
    LANES,
    LONG,
    NOTHING,
    POINTER,
    at,
    at_if_any,
    counting,
    exp,
    first_lanes,
    intrinsic,
    larger,
    load_bf16,
    new_function,
    new_memory,
    rounded,
    smaller,
    store_bf16,
)

PANEL = 2 * LANES
PAIR_BYTES = PANEL * 4
"""Bytes of a panel for one pair of inputs."""
TILE_ROWS = 14
"""Rows of a tile: 28 registers hold sums, two hold weights, and two a pair of inputs each."""
MAX_ROWS = 36 * TILE_ROWS
"""Rows of one product; each thread has their sums over a panel on its stack."""
BLOCK_PAIRS = 1024
"""Pairs of inputs after which the next tile has its turn, so that the panel stays in the cache."""
CHUNK_BYTES = 1 << 18
"""Bytes of panels that a thread takes at a time, if that leaves each of four two turns or more.

They fit into the cache beside a core. A thread that is held up takes fewer of them.
"""
GROUP_TILES = 4
"""Tiles that all panels of such a chunk are multiplied with before the next ones have their turn.

Their results lie in so many places of memory that the processor knows the addresses of all.
"""
PREFETCH_BYTES = 4096
"""Distance of the weights that are fetched ahead."""

OUTPUTS = {"product": PANEL, "gated_product": LANES}
"""Functions of the module, and how many outputs each makes of a panel."""
FIELDS = (
    *("x", "weight", "out", "residual", "bias"),  # pointers; the last two may be null
    *("rows", "pairs", "columns", "panels", "chunk", "block", "tile", "group", "next"),
)
PRODUCT = ir.LiteralStructType([POINTER] * 5 + [LONG] * 9)

Product = Callable[[int, int, int, int, int, int, int, int, int], None]
"""(x, weight, out, residual or 0, bias or 0, rows, pairs of inputs, outputs, threads)."""


@dataclass(frozen=True, slots=True)
class Products:
    """Compiled functions: a product, and one that makes silu(gate) * up of its own result.

    Panels of the second have 16 rows of the gate's weight and the same 16 of the other; it takes
    neither bias nor residual.
    """

    plain: Product
    gated: Product
    engine: Any  # which owns the code


def compile_products() -> Products:
    """Compile for this processor, which has AVX-512 with bf16."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    binding.initialize_native_asmparser()
    binding.add_symbol("GOMP_parallel", _address_of_gomp_parallel())
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(),
        features=binding.get_host_cpu_features().flatten(),
        codemodel="jitdefault",
    )
    module = binding.parse_assembly(str(_module()))
    module.verify()
    passes = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(2))
    passes.getModulePassManager().run(module, passes)
    engine = binding.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    kinds = [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 3 + [ctypes.c_int32]
    kind = ctypes.CFUNCTYPE(None, *kinds)
    plain, gated = (kind(engine.get_function_address(name)) for name in OUTPUTS)
    return Products(plain, gated, engine)


def _address_of_gomp_parallel() -> int:
    """Return the function that starts torch's own team of threads, from the library in use."""
    maps = Path("/proc/self/maps").read_text()
    library = re.search(r"/\S*/lib(?:gomp|iomp5|omp)[^/\s]*\.so\S*", maps)
    if library is None:
        raise OSError("torch has no OpenMP")
    function = ctypes.CDLL(library[0]).GOMP_parallel
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


def _module() -> ir.Module:
    module = ir.Module("products")
    module.triple = binding.get_default_triple()
    tiles = [_tile(module, rows) for rows in range(1, TILE_ROWS + 1)]
    kind = ir.FunctionType(NOTHING, [POINTER, POINTER, INT, INT])
    parallel = ir.Function(module, kind, "GOMP_parallel")
    for name, finish in (("product", _finish(module)), ("gated_product", _finish_gated(module))):
        _product(module, name, _work(module, name, tiles, finish), parallel)
    return module


def _product(module: ir.Module, name: str, work: ir.Function, parallel: ir.Function) -> None:
    """Build a function on which all threads of torch's team work."""
    kinds = [POINTER] * 5 + [LONG] * 3 + [INT]
    function, code = new_function(module, name, kinds, linkage="external")
    *given, threads = function.args
    rows, pairs, columns = given[5:]
    panels = code.sdiv(code.add(columns, LONG(OUTPUTS[name] - 1)), LONG(OUTPUTS[name]))
    fitting = code.sdiv(LONG(CHUNK_BYTES), code.mul(pairs, LONG(PAIR_BYTES)))
    fair = code.sdiv(panels, LONG(8))
    chunk = larger(code, LONG(1), smaller(code, fitting, fair))
    num_tiles = code.sdiv(code.add(rows, LONG(TILE_ROWS - 1)), LONG(TILE_ROWS))
    tile = code.sdiv(code.sub(code.add(rows, num_tiles), LONG(1)), num_tiles)  # of equal size
    block = code.select(code.icmp_signed("==", num_tiles, LONG(1)), pairs, LONG(BLOCK_PAIRS))
    memory = new_memory(code, PRODUCT)
    fits = code.icmp_signed(">", fitting, LONG(0))
    group = code.select(fits, code.mul(tile, LONG(GROUP_TILES)), rows)
    for i, value in enumerate([*given, panels, chunk, block, tile, group, LONG(0)]):
        code.store(value, _field(code, memory, FIELDS[i]))
    with code.if_else(code.icmp_signed("==", threads, INT(1))) as (alone, together):
        with alone:
            code.call(work, [memory])
        with together:
            pointer = ir.FormattedConstant(POINTER, work.get_reference())
            code.call(parallel, [pointer, memory, threads, INT(0)])
    code.ret_void()


def _work(
    module: ir.Module, name: str, tiles: Sequence[ir.Function], finish: ir.Function
) -> ir.Function:
    """Build what a thread does: take panels as long as there are any."""
    function, code = new_function(module, f"work_on_{name}", [POINTER])
    memory = function.args[0]
    field = {
        key: code.load(_field(code, memory, key), typ=kind)
        for key, kind in zip(FIELDS, PRODUCT.elements, strict=True)
        if key != "next"
    }
    rows, pairs, columns = field["rows"], field["pairs"], field["columns"]
    in_bytes, out_bytes = code.mul(pairs, LONG(4)), code.mul(columns, LONG(2))  # of a row
    sums = new_memory(code, ir.ArrayType(FP32, MAX_ROWS * PANEL // LANES))
    take, taken, end = (code.append_basic_block(name) for name in ("take", "taken", "end"))
    code.branch(take)
    code.position_at_end(take)
    first = code.atomic_rmw("add", _field(code, memory, "next"), field["chunk"], "monotonic")
    code.cbranch(code.icmp_signed("<", first, field["panels"]), taken, end)
    code.position_at_end(taken)
    stop = smaller(code, code.add(first, field["chunk"]), field["panels"])
    with (
        counting(code, LONG(0), rows, field["group"]) as group,
        counting(code, first, stop, LONG(1)) as panel,
    ):
        weight = at(code, field["weight"], code.mul(panel, code.mul(pairs, LONG(PAIR_BYTES))))
        group_rows = smaller(code, field["group"], code.sub(rows, group))
        group_x = at(code, field["x"], code.mul(group, in_bytes))
        # The first tile brings the panel into the cache.
        is_first = code.icmp_signed("==", group, LONG(0))
        _clear(module, code, sums, code.mul(group_rows, LONG(PANEL * 4)))
        with counting(code, LONG(0), pairs, field["block"]) as pair:
            count = smaller(code, field["block"], code.sub(pairs, pair))
            part = at(code, weight, code.mul(pair, LONG(PAIR_BYTES)))
            x = at(code, group_x, code.mul(pair, LONG(4)))
            with counting(code, LONG(0), group_rows, field["tile"]) as row:
                num_rows = smaller(code, field["tile"], code.sub(group_rows, row))
                fetches = code.and_(is_first, code.icmp_signed("==", row, LONG(0)))
                of_tile = [
                    at(code, x, code.mul(row, in_bytes)),
                    in_bytes,
                    part,
                    count,
                    at(code, sums, code.mul(row, LONG(PANEL * 4))),
                    code.select(fetches, LONG(PREFETCH_BYTES), LONG(0)),
                ]
                _call_one_of(code, num_rows, tiles, of_tile)
        column = code.mul(panel, LONG(OUTPUTS[name]))
        bias = at_if_any(code, field["bias"], code.mul(column, LONG(2)))
        offset = code.add(code.mul(column, LONG(2)), code.mul(group, out_bytes))
        residual, out = at_if_any(code, field["residual"], offset), at(code, field["out"], offset)
        columns_left = code.sub(columns, column)
        code.call(finish, [sums, group_rows, out, out_bytes, residual, bias, columns_left])
    code.branch(take)
    code.position_at_end(end)
    code.ret_void()
    return function


def _tile(module: ir.Module, rows: int) -> ir.Function:
    """Build a function that adds products to the sums.

    Its arguments are x, bytes of a row, panel, pairs, sums, and how far ahead to fetch. Addresses
    of x86 are a base plus 0, 1 or 2 times an index, so that a pointer serves three rows.
    """
    kinds = [POINTER, LONG, POINTER, LONG, POINTER, LONG]
    function, code = new_function(module, f"tile{rows}", kinds)
    function.attributes.add("noinline")
    x, stride, panel, pairs, sums, distance = function.args
    num_pointers = -(-rows // 3)
    starts = [at(code, x, code.mul(stride, LONG(3 * i))) for i in range(num_pointers)]
    changed, unchanged = [pairs, panel, *starts], [sums, stride, distance]
    places = [f"${i}" for i in (*range(len(changed)), *(2 * len(changed) + j for j in range(3)))]
    assembler = _tile_assembler(rows, places)
    constraints = [
        *["=&r"] * len(changed),
        *map(str, range(len(changed))),
        *["r"] * len(unchanged),
        *(f"~{{zmm{i}}}" for i in range(32)),
        *("~{memory}", "~{flags}"),
    ]
    results = ir.LiteralStructType([value.type for value in changed])
    given = [*changed, *unchanged]
    kind = ir.FunctionType(results, [value.type for value in given])
    code.asm(kind, "\\0A".join(assembler), ",".join(constraints), given, True)
    code.ret_void()
    return function


def _tile_assembler(rows: int, operands: Sequence[str]) -> list[str]:
    pairs, panel, *pointers, sums, stride, distance = operands
    stored = [(f"%zmm{i}", f"{64 * i}({sums})") for i in range(2 * rows)]
    weights = [(f"%zmm{30 + i}", 64 * i) for i in range(2)]
    body = []
    for row in range(rows):
        index = ("", f",{stride}", f",{stride},2")[row % 3]
        pair = f"%zmm{28 + row % 2}"
        body.append(f"vbroadcastss ({pointers[row // 3]}{index}), {pair}")
        body += [
            f"vdpbf16ps {weight}, {pair}, %zmm{2 * row + i}"
            for i, (weight, _) in enumerate(weights)
        ]
    return [
        *(f"vmovups {memory}, {register}" for register, memory in stored),
        *(".p2align 5", "1:"),
        *(f"vmovups {offset}({panel}), {weight}" for weight, offset in weights),
        *(f"prefetcht0 {offset}({panel},{distance})" for _, offset in weights),
        *body,
        f"addq $${PAIR_BYTES}, {panel}",
        *(f"addq $$4, {pointer}" for pointer in pointers),
        *(f"decq {pairs}", "jne 1b"),
        *(f"vmovups {register}, {memory}" for register, memory in stored),
    ]


FINISH_ARGUMENTS = [POINTER, LONG, POINTER, LONG, POINTER, POINTER, LONG]
"""Sums, rows, out, bytes of a row of out and of residual, residual, bias, columns that are left."""


def _finish(module: ir.Module) -> ir.Function:
    """Build the function that adds bias and residual to a panel's sums, and rounds to bf16."""
    function, code = new_function(module, "finish", FINISH_ARGUMENTS)
    sums, rows, out, stride, residual, bias, columns = function.args
    load = partial(load_bf16, module, code)
    masks = [first_lanes(code, code.sub(columns, LONG(LANES * i))) for i in range(2)]
    biases = [load(at_if_any(code, bias, LONG(2 * LANES * i)), masks[i]) for i in range(2)]
    with counting(code, LONG(0), rows, LONG(1)) as row:
        offset = code.mul(row, stride)
        for i, own in enumerate(_row_sums(code, sums, row)):
            place = code.add(offset, LONG(2 * LANES * i))
            more = load(at_if_any(code, residual, place), masks[i])
            value = code.fadd(code.fadd(own, biases[i]), more)
            store_bf16(module, code, value, at(code, out, place), masks[i])
    code.ret_void()
    return function


def _finish_gated(module: ir.Module) -> ir.Function:
    """Build the function that makes silu(gate) * up of a panel's sums.

    It rounds to bf16 wherever a network of single operations does.
    """
    function, code = new_function(module, "finish_gated", FINISH_ARGUMENTS)
    sums, rows, out, stride, _, _, columns = function.args
    mask = first_lanes(code, columns)
    with counting(code, LONG(0), rows, LONG(1)) as row:
        gate, up = (rounded(code, value) for value in _row_sums(code, sums, row))
        one = FP32([1.0] * LANES)
        silu = code.fdiv(gate, code.fadd(one, exp(module, code, code.fneg(gate))))
        value = code.fmul(rounded(code, silu), up)
        store_bf16(module, code, value, at(code, out, code.mul(row, stride)), mask)
    code.ret_void()
    return function


def _row_sums(code: Any, sums: Any, row: Any) -> list[Any]:
    """Build the loads of a row's two vectors of sums."""
    first = at(code, sums, code.mul(row, LONG(PANEL * 4)))
    return [code.load(at(code, first, LONG(4 * LANES * i)), typ=FP32, align=4) for i in range(2)]


def _clear(module: ir.Module, code: Any, memory: Any, num_bytes: Any) -> None:
    kinds = [POINTER, BYTE, LONG, ir.IntType(1)]
    memset = intrinsic(module, "llvm.memset.p0.i64", NOTHING, kinds)
    code.call(memset, [memory, BYTE(0), num_bytes, ir.IntType(1)(0)])


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


def _field(code: Any, memory: Any, name: str) -> Any:
    return code.gep(memory, [INT(0), INT(FIELDS.index(name))], source_etype=PRODUCT)
