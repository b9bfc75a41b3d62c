"""Norms of bf16 rows."""

from __future__ import annotations

from functools import partial

from llvmlite import ir

from specserve.models.compiled.teams import Record, Team, taking
from specserve.models.compiled.vectors import (
    FLOAT,
    FP32,
    INT,
    LANES,
    LONG,
    POINTER,
    at,
    counting,
    first_lanes,
    intrinsic,
    lane_sum,
    load_bf16,
    new_function,
    new_memory,
    smaller,
    splat,
    store_bf16,
)

STEP = 8
"""Rows that a thread takes at a time."""
ARGUMENTS = ("x", "weight", "out", "rows", "width", "eps")
"""A team's size follows."""
NORM = Record(
    dict.fromkeys(ARGUMENTS[:3], POINTER)
    | dict.fromkeys(ARGUMENTS[3:5], LONG)
    | {"eps": FLOAT, "next": LONG}
)


def add_norm(module: ir.Module, team: Team) -> None:
    """Build `rms_norm`: x / sqrt(mean(x^2) + eps) * weight of rows [rows, width]."""
    kinds = [*(NORM.kind_of(name) for name in ARGUMENTS), INT]
    function, code = new_function(module, "rms_norm", kinds, linkage="external")
    *given, threads = function.args
    memory = NORM.new(code, dict(zip(ARGUMENTS, given, strict=True)) | {"next": LONG(0)})
    team.run(code, _work(module), memory, threads)
    code.ret_void()


def _work(module: ir.Module) -> ir.Function:
    function, code = new_function(module, "work_on_norm", [POINTER])
    memory = function.args[0]
    field = NORM.load(code, memory)
    width, row_bytes = field["width"], code.mul(field["width"], LONG(2))
    load = partial(load_bf16, module, code)
    root = intrinsic(module, "llvm.sqrt.v16f32", FP32, [FP32])
    total = new_memory(code, FP32)
    number = splat(code, code.sitofp(width, FLOAT))
    with taking(code, NORM.place(code, memory, "next"), LONG(STEP), field["rows"]) as first:
        stop = smaller(code, code.add(first, LONG(STEP)), field["rows"])
        with counting(code, first, stop, LONG(1)) as row:
            x, out = (at(code, field[name], code.mul(row, row_bytes)) for name in ("x", "out"))
            code.store(FP32([0.0] * LANES), total)
            with counting(code, LONG(0), width, LONG(LANES)) as start:
                mask, place = first_lanes(code, code.sub(width, start)), code.mul(start, LONG(2))
                own = load(at(code, x, place), mask)
                code.store(code.fadd(code.load(total, typ=FP32), code.fmul(own, own)), total)
            mean = code.fdiv(lane_sum(code, code.load(total, typ=FP32)), number)
            size = code.call(root, [code.fadd(mean, splat(code, field["eps"]))])
            with counting(code, LONG(0), width, LONG(LANES)) as start:
                mask, place = first_lanes(code, code.sub(width, start)), code.mul(start, LONG(2))
                own = load(at(code, x, place), mask)
                weight = load(at(code, field["weight"], place), mask)
                value = code.fmul(code.fdiv(own, size), weight)
                store_bf16(module, code, value, at(code, out, place), mask)
    code.ret_void()
    return function
