"""Weights of each kind: how a product with one is cut, and the tiles that multiply it.

A kind is 16 for bf16 numbers, and another for small integers of each layout. A processor that has
AMX multiplies by it where the inputs, or a span's, are whole steps of it, whatever the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from specserve.machine_code.vectors import FP32, LANES, LINE, LONG, larger, new_memory
from specserve.models.cpu.compiled.amx_tiles import (
    AMX_ROWS,
    STEP_PAIRS,
    AmxTiles,
    ScaledAmxTiles,
    begin_amx,
    end_amx,
    may_use_amx,
)
from specserve.models.cpu.compiled.coded_tiles import (
    CODED_ROWS,
    KINDS,
    MINIMA,
    coded_tiles,
    header_bytes,
    sum_inputs,
    widening,
)
from specserve.models.cpu.compiled.tiles import PAIR_BYTES, TILE_ROWS, Tiles, tile_height

AMX = 128
"""What a kind has more where AMX multiplies it."""
BLOCK_PAIRS = 1024
"""Pairs of inputs after which the next tile has its turn, so that the panel stays in the cache."""
WIDENED_PAIRS = 256
"""The same of integers that are widened in memory for AMX."""
FIRST_WIDENED_PAIRS = 32
"""The same where one tile is all, so that other memory is read while AMX multiplies."""


def cut_product(code: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Build the sizes in which a product is cut: rows of a tile, and pairs of a block and a span.

    The kind becomes that of the tiles, and the bytes of a span and of a panel are added.
    """
    rows, pairs, kind = values["rows"], values["pairs"], values["kind"]
    is_coded = code.icmp_signed("!=", kind, LONG(16))
    # Where scales change, the sums are rounded: a block is of whole spans.
    span = code.select(is_coded, values["span"], LONG(1))
    by_amx = ir.IntType(1)(0)
    if may_use_amx():
        whole = code.select(is_coded, span, pairs)
        by_amx = code.icmp_signed("==", code.srem(whole, LONG(STEP_PAIRS)), LONG(0))
    most = code.select(is_coded, LONG(CODED_ROWS), LONG(TILE_ROWS))
    tile = tile_height(code, rows, code.select(by_amx, LONG(AMX_ROWS), most))
    has_one_tile = code.icmp_signed("==", tile, rows)
    widens = code.and_(by_amx, is_coded)
    widened = code.select(has_one_tile, LONG(FIRST_WIDENED_PAIRS), LONG(WIDENED_PAIRS))
    unwidened = code.select(has_one_tile, pairs, LONG(BLOCK_PAIRS))
    spans = larger(code, LONG(1), code.sdiv(code.select(widens, widened, unwidened), span))
    header = LONG(0)
    for own in KINDS:
        is_own = code.icmp_signed("==", kind, LONG(own))
        header = code.select(is_own, LONG(header_bytes(own)), header)
    bits = code.urem(kind, LONG(MINIMA))
    span_bytes = code.add(header, code.mul(span, code.mul(bits, LONG(PAIR_BYTES // 16))))
    return {
        "kind": code.select(by_amx, code.or_(kind, LONG(AMX)), kind),
        "tile": tile,
        "block": code.mul(spans, span),
        "span": span,
        "span_bytes": span_bytes,
        "panel_bytes": code.mul(code.sdiv(pairs, span), span_bytes),
    }


def has_minima(code: Any, kind: Any) -> Any:
    return code.icmp_signed("!=", code.and_(kind, LONG(MINIMA)), LONG(0))


@dataclass(frozen=True, slots=True)
class AmxRoom:
    """A thread's memory for AMX: the rows that it is set up for, and a block of widened weights."""

    set_up: Any
    weights: Any
    scales: Any


@contextmanager
def amx_room(code: Any, field: Mapping[str, Any]) -> Iterator[AmxRoom | None]:
    """Build a thread's use of AMX around what is built meanwhile, where there is AMX."""
    if not may_use_amx():
        yield None
        return
    by_amx = code.icmp_signed(">=", field["kind"], LONG(AMX))
    is_plain = code.icmp_signed("==", field["kind"], LONG(16 | AMX))
    widens = code.and_(by_amx, code.not_(is_plain))
    pairs = code.select(widens, field["block"], LONG(0))
    vectors = code.mul(pairs, LONG(PAIR_BYTES // (4 * LANES)))
    scales = code.mul(code.sdiv(pairs, field["span"]), LONG(4))
    yield AmxRoom(
        begin_amx(code),
        new_memory(code, FP32, count=vectors, align=LINE),
        new_memory(code, FP32, count=scales, align=LINE),
    )
    with code.if_then(by_amx):
        end_amx(code)


@dataclass(frozen=True, slots=True)
class PanelBlock:
    """A block of a panel, in whole spans, and the rows that it is multiplied with."""

    panel: Any
    pairs: Any
    span: Any
    fetches: Any
    add_input_sums: Callable[[Any], Any]  # builds the place of the input sums of a row's tile
    room: AmxRoom | None
    rows: Mapping[str, Any]


class AllTiles:
    """The tiles over weights of each kind."""

    def __init__(self, module: ir.Module, tiles: Tiles, amx: AmxTiles | None) -> None:
        self.sum_inputs = sum_inputs(module)
        self._tiles, self._amx = tiles, amx
        self._coded = {kind: coded_tiles(module, kind) for kind in KINDS}
        self._builders: dict[int, Callable[..., None]] = dict.fromkeys(KINDS, self._add_coded)
        self._builders[16] = self._add_plain
        if amx is not None:
            self._scaled = [ScaledAmxTiles(module, has_minima=own) for own in (False, True)]
            self._widening = {kind: widening(module, kind) for kind in KINDS}
            self._builders[16 | AMX] = self._add_plain_by_amx
            self._builders |= dict.fromkeys((kind | AMX for kind in KINDS), self._add_coded_by_amx)

    def add_products(self, code: Any, kind: Any, block: PanelBlock) -> None:
        """Build the products with a block of a panel, whose weights are of that kind."""
        after = code.append_basic_block("multiplied")
        switch = code.switch(kind, after)
        for own, add in self._builders.items():
            place = code.append_basic_block(f"of{own}")
            switch.add_case(LONG(own), place)
            code.position_at_end(place)
            add(code, own % AMX, block)
            code.branch(after)
        code.position_at_end(after)

    def _add_plain(self, code: Any, kind: int, block: PanelBlock) -> None:
        given = {"panel": block.panel, "pairs": block.pairs, "fetches": block.fetches}
        self._tiles.add_products(code, **given, **block.rows)

    def _add_plain_by_amx(self, code: Any, kind: int, block: PanelBlock) -> None:
        assert self._amx is not None
        assert block.room is not None
        add_more = [block.room.set_up]
        given = {"panel": block.panel, "pairs": block.pairs, "fetches": block.fetches}
        self._amx.add_products(code, **given, **block.rows, add_more=lambda row: add_more)

    def _add_coded(self, code: Any, kind: int, block: PanelBlock) -> None:
        spans = code.sdiv(block.pairs, block.span)

        def add_more(row: Any) -> list[Any]:
            return [spans, *_input_sums(kind, block, row)]

        given = {"panel": block.panel, "pairs": block.span, "fetches": block.fetches}
        self._coded[kind].add_products(code, **given, **block.rows, add_more=add_more)

    def _add_coded_by_amx(self, code: Any, kind: int, block: PanelBlock) -> None:
        room, spans = block.room, code.sdiv(block.pairs, block.span)
        assert room is not None
        given = [block.panel, spans, block.span, block.fetches, room.weights, room.scales]
        code.call(self._widening[kind], given)

        def add_more(row: Any) -> list[Any]:
            return [room.set_up, spans, room.scales, *_input_sums(kind, block, row)]

        tiles, widened = self._scaled[bool(kind & MINIMA)], room.weights
        tiles.add_products(code, panel=widened, pairs=block.span, **block.rows, add_more=add_more)


def _input_sums(kind: int, block: PanelBlock, row: Any) -> list[Any]:
    return [block.add_input_sums(row)] if kind & MINIMA else []
