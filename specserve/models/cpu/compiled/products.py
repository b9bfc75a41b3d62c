"""Products of bf16 rows with a packed weight.

A weight [out, in] is packed into panels of 32 outputs, [panels, in / 2, 32, 2], so that a product
reads it once and in order. A row's bits do not depend on the rows beside it, nor on the thread that
computes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    at_if_any,
    counting,
    exp,
    first_lanes,
    larger,
    load_bf16,
    new_function,
    new_memory,
    rounded,
    smaller,
    store_bf16,
    store_fp32,
)
from specserve.models.cpu.compiled.coded_tiles import INPUT_SUMS_BYTES, SUMS_ROWS
from specserve.models.cpu.compiled.tiles import PANEL, TILE_ROWS, clear_sums, row_sums
from specserve.models.cpu.compiled.weight_kinds import (
    AllTiles,
    PanelBlock,
    amx_room,
    cut_product,
    has_minima,
)

MAX_ROWS = 74 * TILE_ROWS
"""Rows of one product; each thread has their sums over a panel on its stack."""
CHUNK_BYTES = 1 << 18
"""Bytes of panels that a thread takes at a time, if that leaves each of four two turns or more.

They fit into the cache beside a core. A thread that is held up takes fewer of them.
"""
GROUP_TILES = 4
"""Tiles that all panels of such a chunk are multiplied with before the next ones have their turn.

Their results lie in few enough places of memory that the processor knows all addresses.
"""
PREFETCH_BYTES = 4096
"""Distance of the weights that are fetched ahead."""

OUTPUTS = {"product": PANEL, "unrounded_product": PANEL, "gated_product": LANES}
"""Functions, and how many outputs each makes of a panel."""
ARGUMENTS = (
    *("x", "weight", "out", "residual", "bias"),  # pointers; the last two may be null
    *("rows", "pairs", "columns"),
    *("kind", "span"),  # of a weight: 16 or one of KINDS, and the pairs of inputs that share scales
    *("x_stride", "out_stride"),  # bytes of a row; the residual's is that of the result
)
"""A team's size follows."""
PRODUCT = Record(
    dict.fromkeys(ARGUMENTS[:5], POINTER)
    | dict.fromkeys(ARGUMENTS[5:], LONG)
    | dict.fromkeys(
        ("panels", "chunk", "block", "tile", "group", "span_bytes", "panel_bytes"), LONG
    )
    | {"next": POINTER}  # the number of panels that are taken
)


def add_products(module: ir.Module, team: Team, tiles: AllTiles) -> dict[str, Stage]:
    """Build `product`, `unrounded_product` and `gated_product`.

    The second leaves its result in fp32, and takes no residual. The third makes silu(gate) * up of
    its own result: its panels have 16 rows of the gate's weight and the same 16 of the other, and
    it takes neither bias nor residual.
    """
    stages = {}
    finishes = {
        "product": (_finish(module), 2),
        "unrounded_product": (_finish_unrounded(module), 4),
        "gated_product": (_finish_gated(module), 2),
    }
    for name, (finish, out_bytes) in finishes.items():
        work = _work(module, name, tiles, finish, out_bytes)
        stages[name] = Stage(work, partial(_new_record, OUTPUTS[name]))
        code, values, threads = new_entry(module, name, PRODUCT, ARGUMENTS)
        stages[name].run_alone(code, team, values, threads)
        code.ret_void()
    return stages


def _new_record(outputs: int, code: Any, values: Mapping[str, Any]) -> Any:
    """Build the record of a product that makes a number of outputs of a panel."""
    cut = cut_product(code, values)
    panels = code.sdiv(code.add(values["columns"], LONG(outputs - 1)), LONG(outputs))
    fitting = code.sdiv(LONG(CHUNK_BYTES), cut["panel_bytes"])
    fair = code.sdiv(panels, LONG(8))
    # Many rows would have many sums of inputs.
    fits = code.icmp_signed(">", fitting, LONG(0))
    has_groups = code.or_(fits, has_minima(code, cut["kind"]))
    group = code.mul(cut["tile"], LONG(GROUP_TILES))
    return PRODUCT.new(
        code,
        {
            **values,
            **cut,
            "panels": panels,
            "chunk": larger(code, LONG(1), smaller(code, fitting, fair)),
            "group": code.select(has_groups, group, values["rows"]),
        },
    )


def _work(
    module: ir.Module, name: str, tiles: AllTiles, finish: ir.Function, out_bytes: int
) -> ir.Function:
    """Build what a thread does: take panels as long as there are any.

    A number of the result, and of the residual, has `out_bytes`.
    """
    function, code = new_function(module, f"work_on_{name}", [POINTER])
    field = PRODUCT.load(code, function.args[0])
    rows, in_stride = field["rows"], field["x_stride"]
    sums = new_memory(code, ir.ArrayType(FP32, MAX_ROWS * PANEL // LANES))
    sums_inputs = has_minima(code, field["kind"])
    input_sums = _room_for_input_sums(code, field, sums_inputs)
    is_one_group = code.icmp_signed("<=", rows, field["group"])
    with code.if_then(code.and_(sums_inputs, is_one_group)):
        _sum_inputs(code, tiles, field, field["x"], rows, input_sums)
    taken = taking(code, field["next"], field["chunk"], field["panels"])
    with amx_room(code, field) as field["room"], taken as first:
        stop = smaller(code, code.add(first, field["chunk"]), field["panels"])
        with counting(code, LONG(0), rows, field["group"]) as group:
            group_rows = smaller(code, field["group"], code.sub(rows, group))
            x = at(code, field["x"], code.mul(group, in_stride))
            with code.if_then(code.and_(sums_inputs, code.not_(is_one_group))):
                _sum_inputs(code, tiles, field, x, group_rows, input_sums)
            with counting(code, first, stop, LONG(1)) as panel:
                clear_sums(module, code, sums, group_rows)
                # The first tile brings the panel into the cache.
                is_first = code.icmp_signed("==", group, LONG(0))
                fetches = code.select(is_first, LONG(PREFETCH_BYTES), LONG(0))
                weight = at(code, field["weight"], code.mul(panel, field["panel_bytes"]))
                _add_blocks(code, tiles, field, x, group_rows, weight, sums, input_sums, fetches)
                column = code.mul(panel, LONG(OUTPUTS[name]))
                results = _results(code, field, column, group, out_bytes)
                code.call(finish, [sums, group_rows, *results])
    code.ret_void()
    return function


def _results(
    code: Any, field: Mapping[str, Any], column: Any, row: Any, out_bytes: int
) -> list[Any]:
    """Build what a panel is finished with, after its sums and rows."""
    stride = field["out_stride"]
    offset = code.add(code.mul(column, LONG(out_bytes)), code.mul(row, stride))
    residual = at_if_any(code, field["residual"], offset)
    bias = at_if_any(code, field["bias"], code.mul(column, LONG(2)))
    left = code.sub(field["columns"], column)
    return [at(code, field["out"], offset), stride, residual, bias, left]


def _add_blocks(
    code: Any,
    tiles: AllTiles,
    field: Mapping[str, Any],
    x: Any,
    rows: Any,
    weight: Any,
    sums: Any,
    input_sums: Any,
    fetches: Any,
) -> None:
    """Build the products of a panel, block by block."""
    pairs, block, span = field["pairs"], field["block"], field["span"]
    tile_sums = code.mul(code.sdiv(pairs, span), LONG(INPUT_SUMS_BYTES))
    with counting(code, LONG(0), pairs, block) as pair:
        number = code.sdiv(pair, span)
        block_sums = at(code, input_sums, code.mul(number, LONG(INPUT_SUMS_BYTES)))

        def add_input_sums(row: Any, sums_of_tiles: Any = block_sums) -> Any:
            tile = code.sdiv(row, field["tile"])
            return at(code, sums_of_tiles, code.mul(tile, tile_sums))

        own = PanelBlock(
            panel=at(code, weight, code.mul(number, field["span_bytes"])),
            pairs=smaller(code, block, code.sub(pairs, pair)),
            span=span,
            fetches=fetches,
            add_input_sums=add_input_sums,
            room=field["room"],
            rows={
                "x": at(code, x, code.mul(pair, LONG(4))),
                "stride": field["x_stride"],
                "rows": rows,
                "height": field["tile"],
                "sums": sums,
            },
        )
        tiles.add_products(code, field["kind"], own)


def _sum_inputs(
    code: Any, tiles: AllTiles, field: Mapping[str, Any], x: Any, rows: Any, sums: Any
) -> None:
    spans = code.sdiv(field["pairs"], field["span"])
    given = [x, field["x_stride"], rows, field["tile"], spans, field["span"], sums]
    code.call(tiles.sum_inputs, given)


def _room_for_input_sums(code: Any, field: Mapping[str, Any], sums_inputs: Any) -> Any:
    """Build room for the sums of a group's inputs over each span, if they are needed."""
    tiles = code.sdiv(field["group"], field["tile"])
    spans = code.sdiv(field["pairs"], field["span"])
    size = code.mul(code.mul(tiles, spans), LONG(SUMS_ROWS))
    return new_memory(code, FLOAT, count=code.select(sums_inputs, size, LONG(0)))


FINISH_ARGUMENTS = [POINTER, LONG, POINTER, LONG, POINTER, POINTER, LONG]
"""Sums, rows, out, bytes of a row of out and of residual, residual, bias, columns that are left."""


def _finish(module: ir.Module) -> ir.Function:
    """Build the function that adds bias and residual to a panel's sums, and rounds to bf16."""
    function, code = new_function(module, "finish", FINISH_ARGUMENTS)
    sums, rows, out, stride, residual, bias, columns = function.args
    masks = _panel_masks(code, columns)
    biases = _panel_biases(module, code, bias, masks)
    with counting(code, LONG(0), rows, LONG(1)) as row:
        offset = code.mul(row, stride)
        for i, own in enumerate(row_sums(code, sums, row)):
            place = code.add(offset, LONG(2 * LANES * i))
            more = load_bf16(module, code, at_if_any(code, residual, place), masks[i])
            value = code.fadd(code.fadd(own, biases[i]), more)
            store_bf16(module, code, value, at(code, out, place), masks[i])
    code.ret_void()
    return function


def _finish_unrounded(module: ir.Module) -> ir.Function:
    """Build the function that adds the bias to a panel's sums, and leaves them in fp32."""
    function, code = new_function(module, "finish_unrounded", FINISH_ARGUMENTS)
    sums, rows, out, stride, _, bias, columns = function.args
    masks = _panel_masks(code, columns)
    biases = _panel_biases(module, code, bias, masks)
    with counting(code, LONG(0), rows, LONG(1)) as row:
        first = at(code, out, code.mul(row, stride))
        for i, own in enumerate(row_sums(code, sums, row)):
            place = at(code, first, LONG(4 * LANES * i))
            store_fp32(module, code, code.fadd(own, biases[i]), place, masks[i])
    code.ret_void()
    return function


def _panel_masks(code: Any, columns: Any) -> list[Any]:
    """Build the masks of a panel's two vectors, of which there may be fewer columns."""
    return [first_lanes(code, code.sub(columns, LONG(LANES * i))) for i in range(2)]


def _panel_biases(module: ir.Module, code: Any, bias: Any, masks: Sequence[Any]) -> list[Any]:
    return [
        load_bf16(module, code, at_if_any(code, bias, LONG(2 * LANES * i)), mask)
        for i, mask in enumerate(masks)
    ]


def _finish_gated(module: ir.Module) -> ir.Function:
    """Build the function that makes silu(gate) * up of a panel's sums.

    It rounds to bf16 wherever a network of single operations does.
    """
    function, code = new_function(module, "finish_gated", FINISH_ARGUMENTS)
    sums, rows, out, stride, _, _, columns = function.args
    mask = first_lanes(code, columns)
    with counting(code, LONG(0), rows, LONG(1)) as row:
        gate, up = (rounded(code, value) for value in row_sums(code, sums, row))
        one = FP32([1.0] * LANES)
        silu = code.fdiv(gate, code.fadd(one, exp(module, code, code.fneg(gate))))
        value = code.fmul(rounded(code, silu), up)
        store_bf16(module, code, value, at(code, out, code.mul(row, stride)), mask)
    code.ret_void()
    return function
