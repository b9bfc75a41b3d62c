"""Machine code around an EAGLE-3 head's layer in a pass.

`read_rows` makes a layer's input of tokens and states, and `keep_states` writes its output where
the target's states are missing. By single operations they take as long as the layer's products.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir

from specserve.machine_code.compiler import Function, compile_module, function_of, new_module
from specserve.machine_code.teams import Record, Team
from specserve.machine_code.vectors import (
    FLOAT,
    INT,
    LONG,
    NOTHING,
    POINTER,
    at,
    counting,
    intrinsic,
    larger,
    load_long,
    new_function,
)
from specserve.models.cpu.compiled.norms import Norms

HALF = ir.IntType(16)
POINTERS = (
    *("embedding", "no_state"),  # the second are zeros
    *("norm_token", "norm_state"),
    *("ids", "slots", "runs", "block_table"),
    *("x", "inputs"),  # [rows, hidden], and what the layer's first product reads
    *("previous", "states"),  # slots of the states that rows read, and the states
)
NUMBERS = (
    *("rows", "num_runs", "table_width", "page_size", "hidden"),
    *("state_stride", "input_stride"),  # bytes of a row
    *("adds_normed", "returns_states"),  # the residual is the normed state; outputs are states
    "blocked",  # bits of the bf16 score of a row without a state
)
ROWS = Record(dict.fromkeys(POINTERS, POINTER) | dict.fromkeys(NUMBERS, LONG) | {"eps": FLOAT})
"""What belongs to a pass."""
ONE, NAN = 0x3F80, 0x7FC0
"""Bits of bf16 numbers."""


@cache
def compile_rows() -> tuple[Function, Function]:
    """Return `read_rows` and `keep_states`, each of a pass's record."""
    module = new_module("eagle")
    _add_read_rows(module, Norms(module, Team(module)))
    _add_keep_states(module)
    engine = compile_module(module)
    read_rows, keep_states = (
        function_of(engine, name, [POINTER]) for name in ("read_rows", "keep_states")
    )
    return read_rows, keep_states


def _add_read_rows(module: ir.Module, norms: Norms) -> None:
    function, code = new_function(module, "read_rows", [POINTER, INT], linkage="external")
    field = ROWS.load(code, function.args[0])
    with counting(code, LONG(0), field["num_runs"], LONG(1)) as run:
        first, count, position, owner = (
            load_long(code, field["runs"], code.add(code.mul(run, LONG(4)), LONG(i)))
            for i in range(4)
        )
        with counting(code, LONG(0), count, LONG(1)) as i:
            row, own = code.add(first, i), code.add(position, i)
            before = larger(code, LONG(0), code.sub(own, LONG(1)))
            page = code.sdiv(before, field["page_size"])
            entry = code.add(code.mul(owner, field["table_width"]), page)
            slot = code.add(
                code.mul(load_long(code, field["block_table"], entry), field["page_size"]),
                code.srem(before, field["page_size"]),
            )
            code.store(slot, at(code, field["previous"], code.mul(row, LONG(8))))
            is_first = code.icmp_signed("==", own, LONG(0))
            _add_row(module, code, norms, field, row, slot, is_first)
    code.ret_void()


def _add_row(
    module: ir.Module, code: Any, norms: Norms, field: Any, row: Any, slot: Any, is_first: Any
) -> None:
    """Build the reading of a row, whose state is in a slot, if there is one."""
    row_bytes = code.mul(field["hidden"], LONG(2))
    state = at(code, field["states"], code.mul(slot, field["state_stride"]))
    number = code.and_(code.load(state, typ=HALF), HALF(0x7FFF))
    is_nan = code.icmp_unsigned(">", number, HALF(0x7F80))
    is_unknown = code.or_(is_first, is_nan)
    state = code.select(is_unknown, field["no_state"], state)
    token = code.mul(load_long(code, field["ids"], row), row_bytes)
    inputs = at(code, field["inputs"], code.mul(row, field["input_stride"]))
    normed = at(code, inputs, row_bytes)
    for x, weight, out in (
        (at(code, field["embedding"], token), "norm_token", inputs),
        (state, "norm_state", normed),
    ):
        given = {"weight": field[weight], "width": field["hidden"], "eps": field["eps"]}
        norms.add_norm(code, x=x, out=out, **given)
    marks = at(code, normed, row_bytes)
    code.store(HALF(ONE), marks)
    score = code.select(is_unknown, code.trunc(field["blocked"], HALF), HALF(0))
    code.store(score, at(code, marks, LONG(2)))
    adds_normed = code.icmp_signed("!=", field["adds_normed"], LONG(0))
    residual = code.select(adds_normed, normed, state)
    _copy(module, code, at(code, field["x"], code.mul(row, row_bytes)), residual, row_bytes)


def _add_keep_states(module: ir.Module) -> None:
    """Build the writing of outputs as states of the head's own, as `network` describes it.

    A state is unknown if its first number is NaN.
    """
    function, code = new_function(module, "keep_states", [POINTER, INT], linkage="external")
    field = ROWS.load(code, function.args[0])
    row_bytes = code.mul(field["hidden"], LONG(2))
    with counting(code, LONG(0), field["rows"], LONG(1)) as row:
        slot = load_long(code, field["slots"], row)
        state = at(code, field["states"], code.mul(slot, field["state_stride"]))
        mark = at(code, state, row_bytes)
        next_row = code.add(row, LONG(1))
        ends = code.icmp_signed("==", next_row, field["rows"])
        following = code.select(ends, row, next_row)
        is_read = code.icmp_signed("==", load_long(code, field["previous"], following), slot)
        is_last = code.or_(ends, code.not_(is_read))
        is_targets = code.icmp_unsigned("==", code.load(mark, typ=HALF), HALF(ONE))
        with code.if_then(code.or_(is_last, code.not_(is_targets))):
            inputs = at(code, field["inputs"], code.mul(row, field["input_stride"]))
            score = at(code, inputs, code.add(code.mul(row_bytes, LONG(2)), LONG(2)))
            is_known = code.icmp_unsigned("==", code.load(score, typ=HALF), HALF(0))
            returns = code.icmp_signed("!=", field["returns_states"], LONG(0))
            with code.if_else(code.and_(is_known, returns)) as (known, unknown):
                with known:
                    x = at(code, field["x"], code.mul(row, row_bytes))
                    _copy(module, code, state, x, row_bytes)
                with unknown:
                    code.store(HALF(NAN), state)
            code.store(HALF(0), mark)
    code.ret_void()


def _copy(module: ir.Module, code: Any, to: Any, source: Any, num_bytes: Any) -> None:
    kinds = [POINTER, POINTER, LONG, ir.IntType(1)]
    copy = intrinsic(module, "llvm.memcpy.p0.p0.i64", NOTHING, kinds)
    code.call(copy, [to, source, num_bytes, ir.IntType(1)(0)])
