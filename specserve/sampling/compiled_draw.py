"""One function of machine code for draws from rows of weights on a CPU: noise, division, argmax.

Its noise has the bits of `noise.exponential`, which takes some twenty operations. It seldom takes
the logarithm: with v / 2**32 just below the uniform number u, -log(1 - u) is at least v / 2**32, so
that weight * 2**32 / v bounds a token's score from above. Only where the bound exceeds the best
score so far can a token win.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from torch import Tensor

from specserve.machine_code.compiler import Function, compile_module, function_of, new_module
from specserve.machine_code.teams import Record, Stage, Team, new_entry, taking
from specserve.machine_code.vectors import (
    BITS,
    FLOAT,
    FP32,
    INT,
    LANES,
    LN2_HIGH,
    LONG,
    POINTER,
    at,
    counting,
    first_lanes,
    intrinsic,
    lane_max,
    load_masked,
    new_function,
    new_memory,
    smaller,
    splat,
)

PART = 1 << 13
"""Tokens of a row that a thread takes at a time."""
SLACK = 2.0**-20
"""Share by which a bound exceeds the score, more than all of its roundings take away."""
LEAST_BOUND = 2.0**-100
"""Products of bounds below it have lost bits, and count as 0."""
LAST = 0xFFFFFFFF

HALF = LANES // 2
FP64 = ir.VectorType(ir.DoubleType(), HALF)
LONGS = ir.VectorType(LONG, HALF)
LANE_BITS = ir.IntType(LANES)
FRACTION_BITS, ONE = 52, 1023 << 52  # of float64
LAST_POWER = 23
"""Power in the series of the logarithm from which on float64 does not change."""

POINTERS = (
    "weights",
    "rows",  # which row each draw is from, or null: draw i is from row i
    "keys",  # [draws, 2]
    "best",  # [draws] of 64 bits: a score's 32, and LAST minus its token
)
NUMBERS = ("num", "vocab", "stride", "first_id", "parts")
ARGUMENTS = (*POINTERS, *NUMBERS)
DRAW = Record(
    dict.fromkeys(POINTERS, POINTER)
    | dict.fromkeys(NUMBERS, LONG)
    | {"next": POINTER}  # the number of tasks that are taken: each is a draw and a part of its row
)


def draw_rows(
    weights: Tensor, keys: Tensor, rows: Tensor | None, first_id: int
) -> tuple[Tensor, Tensor]:
    """Return scores and tokens of a draw from each of these rows: see `row_draws.best_of_rows`."""
    assert weights.dtype == torch.float32
    assert weights.stride(1) == 1
    num, vocab = len(keys), weights.shape[1]
    keys, best = keys.contiguous(), np.full(num, LAST - first_id, dtype=np.uint64)
    _function()(
        *(weights.data_ptr(), None if rows is None else rows.data_ptr()),
        *(keys.data_ptr(), best.ctypes.data, num, vocab, 4 * weights.stride(0), first_id),
        *(-(-vocab // PART), torch.get_num_threads()),
    )
    scores, tokens = np.divmod(best, np.uint64(LAST + 1))
    return (
        torch.from_numpy(scores.astype(np.uint32).view(np.float32)),
        torch.from_numpy(LAST - tokens.view(np.int64)),
    )


@cache
def _function() -> Function:
    module = new_module("draws")
    code, values, threads = new_entry(module, "draw", DRAW, ARGUMENTS)
    Stage(_work(module), DRAW.new).run_alone(code, Team(module), values, threads)
    code.ret_void()
    kinds = [DRAW.kind_of(name) for name in ARGUMENTS]
    return function_of(compile_module(module), "draw", kinds)


def _work(module: ir.Module) -> ir.Function:
    """Build what a thread does: take parts of rows, and leave the best of each draw."""
    best_of_part = _best_of_part(module)
    function, code = new_function(module, "work_on_draws", [POINTER])
    field = DRAW.load(code, function.args[0])
    score, token = new_memory(code, FLOAT), new_memory(code, LONG)
    tasks = code.mul(field["num"], field["parts"])
    with taking(code, field["next"], LONG(1), tasks) as task:
        draw = code.sdiv(task, field["parts"])
        place = code.mul(draw, LONG(8))
        is_listed = code.icmp_unsigned("!=", field["rows"], POINTER(None))
        # The keys stand for a list that is not there.
        listed = at(code, code.select(is_listed, field["rows"], field["keys"]), place)
        row = code.select(is_listed, code.load(listed, typ=LONG), draw)
        weights = at(code, field["weights"], code.mul(row, field["stride"]))
        start = code.mul(code.srem(task, field["parts"]), LONG(PART))
        stop = smaller(code, code.add(start, LONG(PART)), field["vocab"])
        given = [weights, at(code, field["keys"], place), field["first_id"], start, stop]
        code.call(best_of_part, [*given, score, token])
        # Scores are not negative: they have the order of their bits, and NaN comes last.
        bits = code.zext(code.bitcast(code.load(score, typ=FLOAT), INT), LONG)
        left = code.sub(LONG(LAST), code.load(token, typ=LONG))
        both = code.or_(code.shl(bits, LONG(32)), left)
        code.atomic_rmw("umax", at(code, field["best"], place), both, "monotonic")
    code.ret_void()
    return function


def _best_of_part(module: ir.Module) -> ir.Function:
    """Build the search for the best score, and the first token that has it; 0 without weights.

    Its arguments are a row of weights, a key, the first token's id, the part's start and stop in
    the row, and where score and token go.
    """
    kinds = [POINTER, POINTER, LONG, LONG, LONG, POINTER, POINTER]
    function, code = new_function(module, "best_of_part", kinds)
    weights, key, first_id, start, stop, best, token = function.args
    keys = [splat(code, code.load(at(code, key, LONG(4 * i)), typ=INT)) for i in range(2)]
    code.store(FLOAT(0.0), best)
    code.store(code.add(first_id, start), token)
    with counting(code, start, stop, LONG(LANES)) as first:
        mask = first_lanes(code, code.sub(stop, first))
        own = at(code, weights, code.mul(first, LONG(4)))
        weight = code.bitcast(load_masked(module, code, BITS, own, mask), FP32)
        first_token = code.add(first_id, first)
        ids = splat(code, code.trunc(first_token, INT))
        ids = code.add(ids, BITS(list(range(LANES))))
        numbers = code.xor(_hash32(code, ids, keys), _bits(1 << 31))
        highest = code.load(best, typ=FLOAT)
        least = code.fmul(code.uitofp(numbers, FP32), FP32([2.0**-32 * (1 - SLACK)] * LANES))
        bound = code.fmul(least, splat(code, highest))
        is_exact = code.fcmp_ordered(">=", bound, FP32([LEAST_BOUND] * LANES))
        bound = code.select(is_exact, bound, FP32([0.0] * LANES))
        may_win = code.bitcast(code.fcmp_unordered(">", weight, bound), LANE_BITS)
        with code.if_then(code.icmp_unsigned("!=", may_win, LANE_BITS(0)), likely=False):
            scores = code.fdiv(weight, _noise(module, code, numbers))
            score, winners = _best_lanes(module, code, scores)
            wins = code.fcmp_unordered(">", score, highest)
            wins = code.and_(wins, code.fcmp_ordered("ord", highest, highest))
            with code.if_then(wins):
                code.store(score, best)
                count = intrinsic(module, "llvm.cttz.i64", LONG, [LONG, ir.IntType(1)])
                place = code.call(count, [code.zext(winners, LONG), ir.IntType(1)(1)])
                code.store(code.add(first_token, place), token)
    code.ret_void()
    return function


def _best_lanes(module: ir.Module, code: Any, scores: Any) -> tuple[Any, Any]:
    """Build the best of a vector's scores and the bits of the lanes that have it.

    What is not a number is the best of all.
    """
    top = lane_max(module, code, scores)
    undefined = code.bitcast(code.fcmp_unordered("uno", scores, scores), LANE_BITS)
    equal = code.bitcast(code.fcmp_ordered("==", scores, top), LANE_BITS)
    is_number = code.icmp_unsigned("==", undefined, LANE_BITS(0))
    return (
        code.select(is_number, code.extract_element(top, INT(0)), FLOAT(math.nan)),
        code.select(is_number, equal, undefined),
    )


def _hash32(code: Any, ids: Any, keys: list[Any]) -> Any:
    """Build the hash of `noise`."""
    x = code.xor(ids, keys[0])
    x = code.xor(x, code.lshr(x, _bits(16)))
    x = code.mul(x, _bits(0x21F0AAAD))
    x = code.xor(x, code.lshr(x, _bits(15)))
    x = code.mul(code.add(x, keys[1]), _bits(0x735A2D97))
    return code.xor(x, code.lshr(x, _bits(15)))


def _noise(module: ir.Module, code: Any, numbers: Any) -> Any:
    """Build -log(1 - u) in float64, rounded, for u a half above each number, over 2**32."""
    left = code.xor(numbers, _bits(LAST))  # 2**32 - 1 - number
    halves = []
    for first in (0, HALF):
        lanes = ir.VectorType(INT, HALF)(list(range(first, first + HALF)))
        whole = code.uitofp(code.shuffle_vector(left, BITS(ir.Undefined), lanes), FP64)
        rest = code.fmul(code.fadd(whole, _doubles(0.5)), _doubles(2.0**-32))  # 1 - u, exact
        minus_log = code.fneg(_log(module, code, rest))
        halves.append(code.fptrunc(minus_log, ir.VectorType(FLOAT, HALF)))
    return code.shuffle_vector(*halves, BITS(list(range(LANES))))


def _log(module: ir.Module, code: Any, x: Any) -> Any:
    """Build the natural logarithm of a vector of normal float64 numbers, to about its last bit.

    With x = 2^n m, m between the roots of 1/2 and 2, and s = (m - 1) / (m + 1), it is
    n ln 2 + 2 (s + s^3 / 3 + s^5 / 5 ...): s^2 is at most 0.0295.
    """
    fused = intrinsic(module, "llvm.fma.v8f64", FP64, [FP64, FP64, FP64])
    bits = code.bitcast(x, LONGS)
    n = code.sub(code.lshr(bits, LONGS([FRACTION_BITS] * HALF)), LONGS([1023] * HALF))
    fraction = code.and_(bits, LONGS([(1 << FRACTION_BITS) - 1] * HALF))
    m = code.bitcast(code.or_(fraction, LONGS([ONE] * HALF)), FP64)  # from 1 to 2
    is_large = code.fcmp_ordered(">", m, _doubles(math.sqrt(2)))
    m = code.select(is_large, code.fmul(m, _doubles(0.5)), m)
    n = code.sitofp(code.add(n, code.zext(is_large, LONGS)), FP64)
    f = code.fsub(m, _doubles(1.0))
    s = code.fdiv(f, code.fadd(f, _doubles(2.0)))
    square = code.fmul(s, s)
    series = _doubles(2 / LAST_POWER)
    for power in range(LAST_POWER - 2, 1, -2):
        series = code.call(fused, [series, square, _doubles(2 / power)])
    log_m = code.call(fused, [code.fmul(s, square), series, code.fadd(s, s)])
    # ln 2 in two parts, of which the first has few bits, so that its product with n is exact.
    low = code.call(fused, [n, _doubles(math.log(2) - LN2_HIGH), log_m])
    return code.call(fused, [n, _doubles(LN2_HIGH), low])


def _bits(number: int) -> Any:
    return BITS([number] * LANES)


def _doubles(number: float) -> Any:
    return FP64([number] * HALF)
