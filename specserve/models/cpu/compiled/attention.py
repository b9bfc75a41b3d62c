"""Attention over the pages of the KV cache, which are read in place.

The rows of a pass come in *runs*, each of one sequence. A thread takes a run and a key head at a
time, and goes through the keys in blocks that begin at multiples of 64. It lays a block's keys and
values out as panels, so that the products are of tiles, and keeps a running softmax: the
largest score, the sum of the weights, and the weighted sum of the values, which shrink as the
largest score grows. Blocks depend on positions alone, so that a row's bits do, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from llvmlite import ir

from specserve.machine_code.teams import Record, Stage, Team, new_entry, taking
from specserve.machine_code.vectors import (
    BITS,
    BYTE,
    FLOAT,
    FP32,
    INT,
    LANES,
    LINE,
    LONG,
    POINTER,
    WORDS,
    at,
    counting,
    exp,
    first_lanes,
    lane_max,
    lane_sum,
    larger,
    largest,
    load_bf16,
    load_long,
    load_masked,
    new_function,
    new_memory,
    prefetch,
    smaller,
    splat,
    store_bf16,
    transposed,
)
from specserve.models.cpu.compiled.amx_tiles import (
    AMX_ROWS,
    STEP_PAIRS,
    AmxTiles,
    begin_amx,
    end_amx,
)
from specserve.models.cpu.compiled.tiles import (
    PAIR_BYTES,
    PANEL,
    SUMS_BYTES,
    TILE_ROWS,
    Tiles,
    clear_sums,
    places_of_sums,
    row_sums,
    tile_height,
)

BLOCK = 2 * PANEL
"""Keys of a block."""
MAX_DIM = 256
MAX_SHARED = 128
"""Query heads that share a key head."""
MIN_TURNS = 8
"""Turns in which threads take tasks at least; otherwise they take all key heads of a run, whose
keys and values are neighbours in memory."""
RUN_ROWS = 56
"""Queries of a run and a key head, if a row does not have more: four tiles."""
HIDDEN = -1e30
"""Score of a hidden key. It weighs 0 beside any that is seen."""
NO_WINDOW = 1 << 40
"""More keys than there are."""
RUN_FIELDS = ("row", "count", "position", "sequence")
"""A run, as whole numbers: first row, rows, position of the first, row of the block table."""

POINTERS = (
    *("q", "k", "v"),  # rows of this pass
    *("keys", "values"),  # [slots, kv_heads, dim]
    "slots",  # [rows] where k and v go
    "out",  # [rows, heads, v_dim]
    "runs",  # [num_runs, 4]
    "block_table",  # [sequences, table_width]
    "rotary",  # [positions, 2, dim] cosines and signed sines, or null
    "sinks",  # [heads] fp32, or null
)
NUMBERS = (
    *("num_runs", "table_width", "page_size"),
    *("q_stride", "k_stride", "v_stride", "out_stride"),  # bytes of a row
    *("kv_heads", "shared", "dim", "v_dim", "window"),
)
FACTORS = ("scaling", "softcap")  # the latter may be 0
ARGUMENTS = (*POINTERS, *NUMBERS, *FACTORS)
"""A team's size follows."""
ATTENTION = Record(
    dict.fromkeys(POINTERS, POINTER)
    | dict.fromkeys(NUMBERS, LONG)
    | dict.fromkeys(FACTORS, FLOAT)
    | {"next": POINTER}  # the number of tasks that are taken: each is a run and a key head
)


class AttentionCode:
    """The attention of a module."""

    def __init__(self, module: ir.Module, tiles: Tiles, amx: AmxTiles | None, team: Team) -> None:
        """Build `attention`, which writes k and v into the pages and then attends."""
        copy_head = _copy_head(module)
        self._write = _write(module, copy_head)
        self.stage = Stage(_Work(module, tiles, amx, copy_head).function, ATTENTION.new)
        code, values, threads = new_entry(module, "attention", ATTENTION, ARGUMENTS)
        record = ATTENTION.new(code, values)
        with counting(code, LONG(0), values["num_runs"], LONG(1)) as index:
            self.add_write(code, record, index)
        self.stage.run_alone(code, team, values, threads)
        code.ret_void()

    def add_write(self, code: Any, record: Any, index: Any) -> None:
        """Build what writes a run's k, rotated, and v into their slots."""
        code.call(self._write, [record, index])


def _write(module: ir.Module, copy_head: ir.Function) -> ir.Function:
    function, code = new_function(module, "write_run", [POINTER, LONG])
    memory, index = function.args
    field = ATTENTION.load(code, memory)
    run = _run(code, field, index)
    with (
        counting(code, LONG(0), run["count"], LONG(1)) as i,
        counting(code, LONG(0), field["kv_heads"], LONG(1)) as head,
    ):
        row = code.add(run["row"], i)
        slot = load_long(code, field["slots"], row)
        place = code.add(code.mul(slot, field["kv_heads"]), head)
        angles = _angles(code, field, code.add(run["position"], i))
        for name, pool, dim, rotates in (
            ("k", "keys", field["dim"], angles),
            ("v", "values", field["v_dim"], POINTER(None)),
        ):
            num_bytes = code.mul(dim, LONG(2))
            own = at(code, field[name], code.mul(row, field[f"{name}_stride"]))
            own = at(code, own, code.mul(head, num_bytes))
            to = at(code, field[pool], code.mul(place, num_bytes))
            code.call(copy_head, [own, to, dim, rotates])
    code.ret_void()
    return function


def _copy_head(module: ir.Module) -> ir.Function:
    """Build a function that copies a head, rotated by angles if there are any.

    Each half of it, times cosines, is added to the other, times sines.
    """
    function, code = new_function(module, "copy_head", [POINTER, POINTER, LONG, POINTER])
    own, to, dim, angles = function.args
    load = partial(load_bf16, module, code)
    half = code.lshr(dim, LONG(1))
    half_bytes, dim_bytes = code.mul(half, LONG(2)), code.mul(dim, LONG(2))
    with code.if_else(code.icmp_unsigned("!=", angles, POINTER(None))) as (rotated, plain):
        with rotated, counting(code, LONG(0), half, LONG(LANES)) as start:
            mask = first_lanes(code, code.sub(half, start))
            first = code.mul(start, LONG(2))
            places = [first, code.add(first, half_bytes)]
            halves = [load(at(code, own, place), mask) for place in places]
            for i, place in enumerate(places):
                cosines = load(at(code, angles, place), mask)
                sines = load(at(code, angles, code.add(place, dim_bytes)), mask)
                value = code.fadd(code.fmul(halves[i], cosines), code.fmul(halves[1 - i], sines))
                store_bf16(module, code, value, at(code, to, place), mask)
        with plain, counting(code, LONG(0), dim, LONG(LANES)) as start:
            mask = first_lanes(code, code.sub(dim, start))
            place = code.mul(start, LONG(2))
            store_bf16(module, code, load(at(code, own, place), mask), at(code, to, place), mask)
    code.ret_void()
    return function


class _Work:
    """The work of a thread: it takes a run and a key head as long as there are any."""

    def __init__(
        self, module: ir.Module, tiles: Tiles, amx: AmxTiles | None, copy_head: ir.Function
    ) -> None:
        self._module, self._tiles, self._amx, self._copy_head = module, tiles, amx, copy_head
        self._find_slots = _find_slots(module)
        self._pack_keys, self._pack_values = _pack_keys(module), _pack_values(module)
        self._start_rows, self._weigh = _start_rows(module), _weigh(module)
        self._finish = _finish(module)
        self.function, self._code = new_function(module, "work_on_attention", [POINTER])
        code = self._code
        self._field = ATTENTION.load(code, self.function.args[0])
        self._scratch = {
            name: new_memory(code, ir.ArrayType(BYTE, size), align=64)
            for name, size in SCRATCH.items()
        }
        self._dims = {"keys": self._field["dim"], "values": self._field["v_dim"]}
        self._v_panels = code.sdiv(code.add(self._dims["values"], LONG(PANEL - 1)), LONG(PANEL))
        if amx is None:
            self._take_all()
        else:
            self._set_up = begin_amx(code)
            self._take_all()
            end_amx(code)
        code.ret_void()

    def _take_all(self) -> None:
        code, kv_heads = self._code, self._field["kv_heads"]
        num_tasks = code.mul(self._field["num_runs"], kv_heads)
        fair = code.sdiv(num_tasks, LONG(MIN_TURNS))
        step = larger(code, LONG(1), smaller(code, fair, kv_heads))
        with taking(code, self._field["next"], step, num_tasks) as first:
            stop = smaller(code, code.add(first, step), num_tasks)
            with counting(code, first, stop, LONG(1)) as task:
                run = _run(code, self._field, code.sdiv(task, kv_heads))
                self._attend(run, code.srem(task, kv_heads))

    def _attend(self, run: dict[str, Any], head: Any) -> None:
        """Build the attention of a run's rows to the keys of a head."""
        code, field, scratch = self._code, self._field, self._scratch
        rows = code.mul(run["count"], field["shared"])
        self._load_queries(run, head)
        state = [scratch["largest"], scratch["weights"], scratch["out"]]
        given = [rows, self._v_panels, field["shared"], _sinks(code, field, head)]
        code.call(self._start_rows, [*state, *given])
        stop = code.add(run["position"], run["count"])  # of the keys that the last row sees
        seen_from = code.sub(code.add(run["position"], LONG(1)), field["window"])
        first = code.and_(larger(code, seen_from, LONG(0)), LONG(-BLOCK))
        self._find(run, head, first, stop)
        with counting(code, first, stop, LONG(BLOCK)) as block:
            following = code.add(block, LONG(BLOCK))
            with code.if_then(code.icmp_signed("<", following, stop)):
                self._find(run, head, following, stop)
            keys = smaller(code, LONG(BLOCK), code.sub(stop, block))
            panels = code.sdiv(code.add(keys, LONG(PANEL - 1)), LONG(PANEL))
            self._add_scores(rows, head, block, panels)
            given = [scratch["scores"], scratch["p"], run["count"], field["shared"], panels]
            given += [self._v_panels, code.sub(run["position"], block)]
            given += [field[name] for name in ("window", "scaling", "softcap")]
            code.call(self._weigh, [*state, *given])
            self._add_values(rows, head, block, panels)
        shared_bytes = code.mul(field["shared"], code.mul(field["v_dim"], LONG(2)))
        out = at(code, field["out"], code.mul(run["row"], field["out_stride"]))
        out = at(code, out, code.mul(head, shared_bytes))
        given = [run["count"], field["shared"], field["v_dim"], out, field["out_stride"]]
        code.call(self._finish, [scratch["weights"], scratch["out"], *given])

    def _load_queries(self, run: dict[str, Any], head: Any) -> None:
        """Build the copy of a run's queries, rotated, in rows that lie side by side."""
        code, field = self._code, self._field
        head_bytes = code.mul(field["dim"], LONG(2))
        with (
            counting(code, LONG(0), run["count"], LONG(1)) as i,
            counting(code, LONG(0), field["shared"], LONG(1)) as j,
        ):
            row = at(code, field["q"], code.mul(code.add(run["row"], i), field["q_stride"]))
            own = code.mul(code.add(code.mul(head, field["shared"]), j), head_bytes)
            to = code.mul(code.add(code.mul(i, field["shared"]), j), head_bytes)
            angles = _angles(code, field, code.add(run["position"], i))
            given = [at(code, row, own), at(code, self._scratch["q"], to), field["dim"], angles]
            code.call(self._copy_head, given)

    def _find(self, run: dict[str, Any], head: Any, block: Any, stop: Any) -> None:
        """Build the search for a block's slots, which fetches its keys and values ahead."""
        code, field = self._code, self._field
        table_bytes = code.mul(field["table_width"], LONG(8))
        table = at(code, field["block_table"], code.mul(run["sequence"], table_bytes))
        keys = smaller(code, LONG(BLOCK), code.sub(stop, block))
        given = [table, field["page_size"], block, keys]
        for name in ("keys", "values"):
            pool, slot_bytes = self._pool(name, head)
            given += [pool, slot_bytes, code.mul(self._dims[name], LONG(2))]
        code.call(self._find_slots, [*given, self._slots(block)])

    def _add_scores(self, rows: Any, head: Any, block: Any, panels: Any) -> None:
        """Build the products of the queries with a block's keys."""
        code, pairs = self._code, self._code.lshr(self._field["dim"], LONG(1))
        packed = self._scratch["k"]
        given = [*self._pool("keys", head), self._slots(block), panels, pairs, packed]
        code.call(self._pack_keys, given)
        with counting(code, LONG(0), panels, LONG(1)) as panel:
            sums = at(code, self._scratch["scores"], code.mul(panel, LONG(PANEL_SUMS)))
            clear_sums(self._module, code, sums, rows)
            self._add_products(
                x=self._scratch["q"],
                stride=code.mul(self._field["dim"], LONG(2)),
                rows=rows,
                panel=at(code, packed, code.mul(panel, LONG(KEY_PANEL))),
                pairs=pairs,
                sums=sums,
            )

    def _add_values(self, rows: Any, head: Any, block: Any, panels: Any) -> None:
        """Build the sum of a block's values times their weights."""
        code, packed = self._code, self._scratch["v"]
        given = [*self._pool("values", head), self._slots(block), panels, self._dims["values"]]
        code.call(self._pack_values, [*given, packed])
        with counting(code, LONG(0), self._v_panels, LONG(1)) as panel:
            self._add_products(
                x=self._scratch["p"],
                stride=LONG(2 * BLOCK),
                rows=rows,
                panel=at(code, packed, code.mul(panel, LONG(VALUE_PANEL))),
                pairs=code.mul(panels, LONG(PANEL // 2)),
                sums=at(code, self._scratch["out"], code.mul(panel, LONG(PANEL_SUMS))),
            )

    def _add_products(self, *, rows: Any, pairs: Any, **given: Any) -> None:
        """Build the products of rows with a panel, by AMX where the pairs are whole steps of it."""
        code = self._code

        def add(tiles: Tiles, most: int, more: Sequence[Any]) -> None:
            height = tile_height(code, rows, LONG(most))
            given_rows = {"rows": rows, "pairs": pairs, "height": height}
            tiles.add_products(code, **given_rows, **given, add_more=lambda row: more)

        if self._amx is None:
            add(self._tiles, TILE_ROWS, ())
            return
        whole = code.icmp_signed("==", code.srem(pairs, LONG(STEP_PAIRS)), LONG(0))
        with code.if_else(whole) as (by_amx, otherwise):
            with by_amx:
                add(self._amx, AMX_ROWS, [self._set_up])
            with otherwise:
                add(self._tiles, TILE_ROWS, ())

    def _pool(self, name: str, head: Any) -> list[Any]:
        """Build the place of a head in slot 0 of the keys or values, and the bytes of a slot."""
        code = self._code
        head_bytes = code.mul(self._dims[name], LONG(2))
        slot_bytes = code.mul(self._field["kv_heads"], head_bytes)
        return [at(code, self._field[name], code.mul(head, head_bytes)), slot_bytes]

    def _slots(self, block: Any) -> Any:
        """Build the place of a block's slots; two blocks in a row have their own."""
        code = self._code
        turn = code.and_(code.lshr(block, LONG(BLOCK.bit_length() - 1)), LONG(1))
        return at(code, self._scratch["slots"], code.mul(turn, LONG(8 * BLOCK)))


KEY_PANEL = MAX_DIM // 2 * PAIR_BYTES
VALUE_PANEL = BLOCK // 2 * PAIR_BYTES
PANEL_SUMS = MAX_SHARED * SUMS_BYTES
"""Bytes of a panel's keys and values, and of the sums of all rows with a panel."""
SCRATCH = {
    "q": MAX_SHARED * MAX_DIM * 2,
    "k": BLOCK // PANEL * KEY_PANEL,
    "v": MAX_DIM // PANEL * VALUE_PANEL,
    "slots": 2 * BLOCK * 8,
    "scores": BLOCK // PANEL * PANEL_SUMS,
    "p": MAX_SHARED * BLOCK * 2,  # weights of a block's keys
    "largest": MAX_SHARED * 4 * LANES,  # of each row, in all lanes
    "weights": MAX_SHARED * 4 * LANES,  # their sum so far
    "out": MAX_DIM // PANEL * PANEL_SUMS,
}


def _run(code: Any, field: dict[str, Any], index: Any) -> dict[str, Any]:
    first = code.mul(index, LONG(len(RUN_FIELDS)))
    return {
        name: load_long(code, field["runs"], code.add(first, LONG(i)))
        for i, name in enumerate(RUN_FIELDS)
    }


def _angles(code: Any, field: dict[str, Any], position: Any) -> Any:
    """Build the place of a position's angles, or null."""
    present = code.icmp_unsigned("!=", field["rotary"], POINTER(None))
    place = at(code, field["rotary"], code.mul(position, code.mul(field["dim"], LONG(4))))
    return code.select(present, place, POINTER(None))


def _sinks(code: Any, field: dict[str, Any], head: Any) -> Any:
    present = code.icmp_unsigned("!=", field["sinks"], POINTER(None))
    first = code.mul(code.mul(head, field["shared"]), LONG(4))
    return code.select(present, at(code, field["sinks"], first), POINTER(None))


def _start_rows(module: ir.Module) -> ir.Function:
    """Build the start of the running softmax.

    A sink is a score without a value, which a row has seen before any key.
    """
    kinds = [POINTER, POINTER, POINTER, LONG, LONG, LONG, POINTER]
    function, code = new_function(module, "start_rows", kinds)
    tops, weights, out, rows, v_panels, shared, sinks = function.args
    with counting(code, LONG(0), rows, LONG(1)) as row:
        _store_lanes(code, FP32([HIDDEN] * LANES), tops, row)
        _store_lanes(code, FP32([0.0] * LANES), weights, row)
        with code.if_then(code.icmp_unsigned("!=", sinks, POINTER(None))):
            offset = code.mul(code.srem(row, shared), LONG(4))
            sink = code.load(at(code, sinks, offset), typ=FLOAT)
            _store_lanes(code, splat(code, sink), tops, row)
            _store_lanes(code, FP32([1.0] * LANES), weights, row)
    with counting(code, LONG(0), v_panels, LONG(1)) as panel:
        clear_sums(module, code, at(code, out, code.mul(panel, LONG(PANEL_SUMS))), rows)
    code.ret_void()
    return function


def _find_slots(module: ir.Module) -> ir.Function:
    """Build the search for the slots of a block's keys; those past the last are like the last.

    Their keys and values lie in many places of memory, and are fetched ahead.
    """
    of_pool = [POINTER, LONG, LONG]
    kinds = [POINTER, LONG, LONG, LONG, *of_pool, *of_pool, POINTER]
    function, code = new_function(module, "find_slots", kinds)
    table, page_size, block, keys, *pools, slots = function.args
    page, offset = new_memory(code, LONG), new_memory(code, LONG)
    code.store(code.sdiv(block, page_size), page)
    code.store(code.srem(block, page_size), offset)
    last = code.sub(keys, LONG(1))
    with counting(code, LONG(0), LONG(BLOCK), LONG(1)) as key:
        own, within = code.load(page, typ=LONG), code.load(offset, typ=LONG)
        slot = code.add(code.mul(load_long(code, table, own), page_size), within)
        code.store(slot, at(code, slots, code.mul(key, LONG(8))))
        goes_on = code.icmp_signed("<", key, last)
        with code.if_then(code.icmp_signed("<=", key, last)):
            for pool, slot_bytes, num_bytes in (pools[:3], pools[3:]):
                place = at(code, pool, code.mul(slot, slot_bytes))
                with counting(code, LONG(0), num_bytes, LONG(LINE)) as line:
                    prefetch(module, code, at(code, place, line))
        next_one = code.add(within, LONG(1))
        turns = code.icmp_signed("==", next_one, page_size)
        following = code.select(turns, LONG(0), next_one)
        code.store(code.select(goes_on, following, within), offset)
        both = code.and_(turns, goes_on)
        code.store(code.add(own, code.zext(both, LONG)), page)
    code.ret_void()
    return function


def _pack_keys(module: ir.Module) -> ir.Function:
    """Build the transposition of a block's keys into panels [pairs, 32, 2]."""
    kinds = [POINTER, LONG, POINTER, LONG, LONG, POINTER]
    function, code = new_function(module, "pack_keys", kinds)
    pool, slot_bytes, slots, panels, pairs, packed = function.args
    with counting(code, LONG(0), code.mul(panels, LONG(2)), LONG(1)) as half:
        first_key = code.mul(half, LONG(LANES))
        own = _places_of_keys(code, pool, slot_bytes, slots, first_key, LANES)
        to = at(code, packed, code.mul(code.lshr(half, LONG(1)), LONG(KEY_PANEL)))
        to = at(code, to, code.mul(code.and_(half, LONG(1)), LONG(4 * LANES)))
        with counting(code, LONG(0), pairs, LONG(LANES)) as pair:
            mask = first_lanes(code, code.sub(pairs, pair))
            place = code.mul(pair, LONG(4))
            rows = [load_masked(module, code, BITS, at(code, key, place), mask) for key in own]
            chunk = at(code, to, code.mul(pair, LONG(PAIR_BYTES)))
            for i, column in enumerate(transposed(code, rows)):
                code.store(column, at(code, chunk, LONG(i * PAIR_BYTES)), align=64)
    code.ret_void()
    return function


def _pack_values(module: ir.Module) -> ir.Function:
    """Build the layout of a block's values as panels [pairs of keys, 32, 2]."""
    kinds = [POINTER, LONG, POINTER, LONG, LONG, POINTER]
    function, code = new_function(module, "pack_values", kinds)
    pool, slot_bytes, slots, panels, v_dim, packed = function.args
    orders = [
        [half * LANES + lane // 2 + PANEL * (lane % 2) for lane in range(PANEL)] for half in (0, 1)
    ]
    with counting(code, LONG(0), code.mul(panels, LONG(PANEL // 2)), LONG(1)) as pair:
        own = _places_of_keys(code, pool, slot_bytes, slots, code.mul(pair, LONG(2)), 2)
        to = at(code, packed, code.mul(pair, LONG(PAIR_BYTES)))
        with counting(code, LONG(0), v_dim, LONG(PANEL)) as first:
            mask = first_lanes(code, code.sub(v_dim, first), PANEL)
            place = code.mul(first, LONG(2))
            one, other = (
                load_masked(module, code, WORDS, at(code, key, place), mask) for key in own
            )
            panel = at(code, to, code.mul(first, LONG(VALUE_PANEL // PANEL)))
            for i, order in enumerate(orders):
                mixed = code.shuffle_vector(one, other, ir.VectorType(INT, PANEL)(order))
                code.store(mixed, at(code, panel, LONG(4 * LANES * i)), align=64)
    code.ret_void()
    return function


def _places_of_keys(
    code: Any, pool: Any, slot_bytes: Any, slots: Any, first: Any, count: int
) -> list[Any]:
    """Build the places in a pool of `count` of a block's keys or values, from `first` on."""
    found = [load_long(code, slots, code.add(first, LONG(i))) for i in range(count)]
    return [at(code, pool, code.mul(slot_bytes, slot)) for slot in found]


def _weigh(module: ir.Module) -> ir.Function:
    """Build a block's part of the running softmax: from scores to weights in bf16."""
    kinds = [*[POINTER] * 5, *[LONG] * 6, FLOAT, FLOAT]
    function, code = new_function(module, "weigh", kinds)
    tops, weights, out, scores, p, count, shared, panels, v_panels, *rest = function.args
    position, window, scaling, softcap = rest  # the position is relative to the block
    scale, cap = splat(code, scaling), splat(code, softcap)
    is_capped = code.fcmp_ordered("!=", softcap, FLOAT(0.0))
    top, total = new_memory(code, FP32), new_memory(code, FP32)
    with (
        counting(code, LONG(0), count, LONG(1)) as i,
        counting(code, LONG(0), shared, LONG(1)) as j,
    ):
        row = code.add(code.mul(i, shared), j)
        stop = code.add(code.add(position, i), LONG(1))
        old = _load_lanes(code, tops, row)
        code.store(old, top)
        with counting(code, LONG(0), panels, LONG(1)) as panel:
            sums = at(code, scores, code.mul(panel, LONG(PANEL_SUMS)))
            for half, place in enumerate(places_of_sums(code, sums, row)):
                first = code.add(code.mul(panel, LONG(PANEL)), LONG(half * LANES))
                own = code.fmul(code.load(place, typ=FP32, align=4), scale)
                code.store(own, place, align=4)
                with code.if_then(is_capped):
                    code.store(_capped(module, code, own, cap), place, align=4)
                own = code.load(place, typ=FP32, align=4)
                is_seen = code.and_(
                    first_lanes(code, code.sub(stop, first)),
                    code.not_(first_lanes(code, code.sub(code.sub(stop, window), first))),
                )
                own = code.select(is_seen, own, FP32([HIDDEN] * LANES))
                code.store(own, place, align=4)
                code.store(largest(module, code, code.load(top, typ=FP32), own), top)
        new = lane_max(module, code, code.load(top, typ=FP32))
        _store_lanes(code, new, tops, row)
        code.store(FP32([0.0] * LANES), total)
        with counting(code, LONG(0), panels, LONG(1)) as panel:
            sums = at(code, scores, code.mul(panel, LONG(PANEL_SUMS)))
            to = at(code, p, code.mul(row, LONG(2 * BLOCK)))
            to = at(code, to, code.mul(panel, LONG(2 * PANEL)))
            for half, own in enumerate(row_sums(code, sums, row)):
                weight = exp(module, code, code.fsub(own, new))
                code.store(code.fadd(code.load(total, typ=FP32), weight), total)
                all_lanes = ir.VectorType(ir.IntType(1), LANES)([1] * LANES)
                store_bf16(module, code, weight, at(code, to, LONG(2 * LANES * half)), all_lanes)
        shrinks = exp(module, code, code.fsub(old, new))
        before = code.fmul(_load_lanes(code, weights, row), shrinks)
        _store_lanes(
            code, code.fadd(before, lane_sum(code, code.load(total, typ=FP32))), weights, row
        )
        factor = code.extract_element(shrinks, INT(0))
        with (
            code.if_then(code.fcmp_unordered("!=", factor, FLOAT(1.0))),
            counting(code, LONG(0), v_panels, LONG(1)) as panel,
        ):
            sums = at(code, out, code.mul(panel, LONG(PANEL_SUMS)))
            for place in places_of_sums(code, sums, row):
                own = code.fmul(code.load(place, typ=FP32, align=4), shrinks)
                code.store(own, place, align=4)
    code.ret_void()
    return function


def _capped(module: ir.Module, code: Any, value: Any, cap: Any) -> Any:
    """Build cap * tanh(value / cap), where tanh x = 1 - 2 / (1 + e^2x)."""
    one, two = FP32([1.0] * LANES), FP32([2.0] * LANES)
    power = exp(module, code, code.fdiv(code.fmul(value, two), cap))
    return code.fmul(code.fsub(one, code.fdiv(two, code.fadd(one, power))), cap)


def _finish(module: ir.Module) -> ir.Function:
    """Build the division by the sum of the weights, and the rounding to bf16."""
    kinds = [POINTER, POINTER, LONG, LONG, LONG, POINTER, LONG]
    function, code = new_function(module, "finish_attention", kinds)
    weights, sums, count, shared, v_dim, out, row_bytes = function.args
    with (
        counting(code, LONG(0), count, LONG(1)) as i,
        counting(code, LONG(0), shared, LONG(1)) as j,
    ):
        row = code.add(code.mul(i, shared), j)
        total = _load_lanes(code, weights, row)
        to = at(code, out, code.mul(i, row_bytes))
        to = at(code, to, code.mul(j, code.mul(v_dim, LONG(2))))
        with counting(code, LONG(0), v_dim, LONG(PANEL)) as first:
            panel = at(code, sums, code.mul(first, LONG(PANEL_SUMS // PANEL)))
            for half, own in enumerate(row_sums(code, panel, row)):
                start = code.add(first, LONG(half * LANES))
                mask = first_lanes(code, code.sub(v_dim, start))
                place = at(code, to, code.mul(start, LONG(2)))
                store_bf16(module, code, code.fdiv(own, total), place, mask)
    code.ret_void()
    return function


def _load_lanes(code: Any, array: Any, row: Any) -> Any:
    return code.load(at(code, array, code.mul(row, LONG(4 * LANES))), typ=FP32, align=64)


def _store_lanes(code: Any, value: Any, array: Any, row: Any) -> None:
    code.store(value, at(code, array, code.mul(row, LONG(4 * LANES))), align=64)


def rows_of_a_run(shared: int) -> int:
    """Return the rows that a run may have, with that many query heads to a key head."""
    return max(1, RUN_ROWS // shared)
