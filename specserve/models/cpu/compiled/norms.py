"""Norms of bf16 rows."""

from __future__ import annotations

from functools import partial
from typing import Any

from llvmlite import ir

from specserve.machine_code.teams import Record, Stage, Team, new_entry, taking
from specserve.machine_code.vectors import (
    FLOAT,
    FP32,
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
ARGUMENTS = ("x", "weight", "out", "rows", "width", "out_stride", "eps")
"""A team's size follows."""
NORM = Record(
    dict.fromkeys(ARGUMENTS[:3], POINTER)
    | dict.fromkeys(ARGUMENTS[3:6], LONG)
    | {"eps": FLOAT}
    | {"next": POINTER}  # the number of rows that are taken
)


class Norms:
    """The norm of a module."""

    def __init__(self, module: ir.Module, team: Team) -> None:
        """Build `rms_norm`: x / sqrt(mean(x^2) + eps) * weight of rows [rows, width]."""
        self._norm = _norm(module)
        self.stage = Stage(self._work(module), NORM.new)
        code, values, threads = new_entry(module, "rms_norm", NORM, ARGUMENTS)
        self.stage.run_alone(code, team, values, threads)
        code.ret_void()

    def add_norm(self, code: Any, *, x: Any, weight: Any, out: Any, width: Any, eps: Any) -> None:
        """Build the norm of one row."""
        code.call(self._norm, [x, weight, out, width, eps])

    def _work(self, module: ir.Module) -> ir.Function:
        function, code = new_function(module, "work_on_norm", [POINTER])
        field = NORM.load(code, function.args[0])
        row_bytes = code.mul(field["width"], LONG(2))
        with taking(code, field["next"], LONG(STEP), field["rows"]) as first:
            stop = smaller(code, code.add(first, LONG(STEP)), field["rows"])
            with counting(code, first, stop, LONG(1)) as row:
                self.add_norm(
                    code,
                    x=at(code, field["x"], code.mul(row, row_bytes)),
                    weight=field["weight"],
                    out=at(code, field["out"], code.mul(row, field["out_stride"])),
                    width=field["width"],
                    eps=field["eps"],
                )
        code.ret_void()
        return function


def _norm(module: ir.Module) -> ir.Function:
    kinds = [POINTER, POINTER, POINTER, LONG, FLOAT]
    function, code = new_function(module, "norm", kinds)
    x, weight, out, width, eps = function.args
    load = partial(load_bf16, module, code)
    root = intrinsic(module, "llvm.sqrt.v16f32", FP32, [FP32])
    total = new_memory(code, FP32)
    code.store(FP32([0.0] * LANES), total)
    with counting(code, LONG(0), width, LONG(LANES)) as start:
        mask, place = first_lanes(code, code.sub(width, start)), code.mul(start, LONG(2))
        own = load(at(code, x, place), mask)
        code.store(code.fadd(code.load(total, typ=FP32), code.fmul(own, own)), total)
    number = splat(code, code.sitofp(width, FLOAT))
    mean = code.fdiv(lane_sum(code, code.load(total, typ=FP32)), number)
    size = code.call(root, [code.fadd(mean, splat(code, eps))])
    with counting(code, LONG(0), width, LONG(LANES)) as start:
        mask, place = first_lanes(code, code.sub(width, start)), code.mul(start, LONG(2))
        own = load(at(code, x, place), mask)
        value = code.fmul(code.fdiv(own, size), load(at(code, weight, place), mask))
        store_bf16(module, code, value, at(code, out, place), mask)
    code.ret_void()
    return function
