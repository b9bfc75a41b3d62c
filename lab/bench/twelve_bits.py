"""Weights stored at 12 bits without loss, a trial: `python -m lab.bench.twelve_bits`.

Most weights of a matrix have one of 16 upper bytes, which hold sign and exponent. Those are stored
as 4 bits beside the lower byte, and a tile puts them together in registers: 96 bytes for 64 weights
in place of 128. Steps of the tile in which any other upper byte occurs are counted; they would be
stored as they are. Both tiles multiply the same numbers, in turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from llvmlite import binding, ir
from torch import Tensor

from specserve.models.compiled.functions import compile_module, function_of
from specserve.models.compiled.teams import Record, Stage, Team, new_entry, taking
from specserve.models.compiled.tiles import (
    PAIR_BYTES,
    PANEL,
    SUMS_BYTES,
    Tiles,
    add_assembler,
    clear_sums,
    row_products,
    starts_of_rows,
)
from specserve.models.compiled.vectors import (
    LONG,
    POINTER,
    at,
    new_function,
)
from specserve.models.linear_kernels import missing_for_compiled
from specserve.models.memory import keep_freed_memory, use_huge_pages
from specserve.tools.bench.report import machine

ROWS = (1, 2, 4, 8, 13)
STEP = PANEL * 2  # weights of a panel for one pair of inputs
LOW_BYTES, CODE_BYTES = STEP, STEP // 2
NUM_CODES = 16
FETCHED = 64
"""Steps of the tile that are fetched ahead."""
POINTERS, NUMBERS = ("x", "weight", "codes", "table", "out"), ("stride", "pairs", "panels")
ARGUMENTS = (*POINTERS, *NUMBERS)
PRODUCT = Record(
    dict.fromkeys(POINTERS, POINTER) | dict.fromkeys(NUMBERS, LONG) | {"next": POINTER}
)


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix at 12 bits: panels of lower bytes, panels of codes, and the upper bytes."""

    low: Tensor  # [steps, 64]
    codes: Tensor  # [steps, 32]
    table: Tensor  # [128] the upper bytes, four times, and where in 8 bytes each code begins
    decoded: Tensor  # [steps, 64] what it stands for, as bf16
    num_exceptions: int  # steps with another upper byte


def pack(weight: Tensor) -> Packed:
    """Pack steps [steps, 64] of bf16; exceptions get the first upper byte, which is wrong."""
    words = weight.view(torch.int16).int() & 0xFFFF
    low, high = words & 0xFF, words >> 8
    common = torch.bincount(high.flatten(), minlength=256).argsort(descending=True)[:NUM_CODES]
    code_of = torch.zeros(256, dtype=torch.int32)
    code_of[common] = torch.arange(NUM_CODES, dtype=torch.int32)
    codes = code_of[high]
    is_exception = common[codes] != high
    decoded = (low | common.int()[codes] << 8).to(torch.int16).view(torch.bfloat16)
    low, codes = (_as_unpacked(each) for each in (low, codes))
    half = STEP // 2
    return Packed(
        low.to(torch.uint8),
        (codes[:, :half] | codes[:, half:] << 4).to(torch.uint8),
        torch.cat(
            [
                common.repeat(4),
                torch.tensor([8 * (i % 8) + 4 * (i >= half) for i in range(STEP)]),
            ]
        ).to(torch.uint8),
        decoded,
        int(is_exception.any(1).sum()),
    )


def _as_unpacked(steps: Tensor) -> Tensor:
    """Return steps in the order in which bytes are interleaved: 8 and 8 of both vectors."""
    return steps.view(-1, 2, 4, 8).transpose(1, 2).flatten(1)


def decoding_tile(module: ir.Module, rows: int) -> ir.Function:
    """Build a tile as that of `specserve.models.compiled.tiles`, which decodes its weights."""
    kinds = [POINTER, LONG, POINTER, POINTER, LONG, POINTER, POINTER]
    function, code = new_function(module, f"decoding_tile{rows}", kinds)
    x, stride, low, codes, pairs, sums, table = function.args
    changed = [pairs, low, codes, *starts_of_rows(code, x, stride, rows)]
    add_assembler(code, changed, [sums, stride, table], partial(_decoding_assembler, rows))
    code.ret_void()
    return function


def _decoding_assembler(rows: int, operands: Sequence[str]) -> list[str]:
    count, low, codes, *pointers, sums, stride, table = operands
    stored = [(f"%zmm{i}", f"{64 * i}({sums})") for i in range(2 * rows)]
    return [
        *(f"vmovups {memory}, {register}" for register, memory in stored),
        *(f"vmovups {64 * i}({table}), %zmm{26 + i}" for i in range(2)),
        *(".p2align 5", "1:"),
        f"vmovups ({low}), %zmm30",
        f"vbroadcasti64x4 ({codes}), %zmm31",
        f"prefetcht0 {FETCHED * LOW_BYTES}({low})",
        f"prefetcht0 {FETCHED * CODE_BYTES}({codes})",
        "vpmultishiftqb %zmm31, %zmm27, %zmm31",
        "vpermb %zmm26, %zmm31, %zmm31",
        "vpunpcklbw %zmm31, %zmm30, %zmm29",
        "vpunpckhbw %zmm31, %zmm30, %zmm30",
        *row_products(rows, pointers, stride, weights=(29, 30), inputs=(28,)),
        *(f"addq $${LOW_BYTES}, {low}", f"addq $${CODE_BYTES}, {codes}"),
        *(f"addq $$4, {pointer}" for pointer in pointers),
        *(f"decq {count}", "jne 1b"),
        *(f"vmovups {register}, {memory}" for register, memory in stored),
    ]


def build(rows: Sequence[int]) -> tuple[Mapping[tuple[str, int], Callable[..., None]], Any]:
    """Return products with plain and with decoded weights, by the number of rows."""
    module = ir.Module("trial")
    module.triple = binding.get_default_triple()
    tiles, team = Tiles.of_bf16(module), Team(module)
    names = [(kind, count) for count in rows for kind in ("plain", "decoded")]
    for kind, count in names:
        decodes = decoding_tile(module, count) if kind == "decoded" else None
        work = _work(module, f"work_{kind}{count}", tiles, decodes, count)
        code, values, threads = new_entry(module, f"{kind}{count}", PRODUCT, ARGUMENTS)
        Stage(work, PRODUCT.new).run_alone(code, team, values, threads)
        code.ret_void()
    engine = compile_module(module)
    kinds = [PRODUCT.kind_of(name) for name in ARGUMENTS]
    functions = {
        (kind, count): function_of(engine, f"{kind}{count}", kinds) for kind, count in names
    }
    return functions, engine


def _work(
    module: ir.Module, name: str, tiles: Tiles, decodes: ir.Function | None, rows: int
) -> ir.Function:
    function, code = new_function(module, name, [POINTER])
    field = PRODUCT.load(code, function.args[0])
    pairs = field["pairs"]
    with taking(code, field["next"], LONG(1), field["panels"]) as panel:
        sums = at(code, field["out"], code.mul(panel, LONG(rows * SUMS_BYTES)))
        clear_sums(module, code, sums, LONG(rows))
        if decodes is None:
            tiles.add_products(
                code,
                x=field["x"],
                stride=field["stride"],
                rows=LONG(rows),
                height=LONG(rows),
                panel=at(code, field["weight"], code.mul(panel, code.mul(pairs, LONG(PAIR_BYTES)))),
                pairs=pairs,
                sums=sums,
                fetches=LONG(FETCHED * PAIR_BYTES),
            )
        else:
            step = code.mul(panel, pairs)
            low = at(code, field["weight"], code.mul(step, LONG(LOW_BYTES)))
            codes = at(code, field["codes"], code.mul(step, LONG(CODE_BYTES)))
            given = [field["x"], field["stride"], low, codes, pairs, sums, field["table"]]
            code.call(decodes, given)
    code.ret_void()
    return function


def measure(
    packed: Packed, *, pairs: int, rows: Sequence[int], turns: int, threads: int
) -> list[str]:
    functions, engine = build(rows)
    panels = len(packed.low) // pairs
    plain, low, codes = (_in_huge_pages(x) for x in (packed.decoded, packed.low, packed.codes))
    lines = []
    for count in rows:
        x = torch.randn(count, 2 * pairs, generator=torch.Generator().manual_seed(1)).bfloat16()
        outs = [torch.empty(panels, count, PANEL) for _ in range(2)]
        times: list[list[float]] = [[], []]
        for turn in range(turns + 1):
            for i, (kind, weight) in enumerate((("plain", plain), ("decoded", low))):
                tensors = (x, weight, codes, packed.table, outs[i])
                numbers = (x.shape[1] * 2, pairs, panels, threads)
                start = time.perf_counter()
                functions[kind, count](*(tensor.data_ptr() for tensor in tensors), *numbers)
                times[i] += [(time.perf_counter() - start) * 1e3] if turn else []
        assert torch.equal(*outs), "the sums differ"
        ratios = [decoded / own for own, decoded in zip(*times, strict=True)]
        lines.append(
            f"| {count} | {median(times[0]):.2f} | {median(times[1]):.2f} | {median(ratios):.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}) |"
        )
    del engine
    return lines


def _in_huge_pages(tensor: Tensor) -> Tensor:
    copy = torch.empty_like(tensor)
    use_huge_pages(copy.data_ptr(), copy.nbytes)
    return copy.copy_(tensor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--quick", action="store_true", help="a tiny matrix: measures nothing")
    parser.add_argument("--out", type=Path, help="write the page here, too")
    args = parser.parse_args()
    missing = missing_for_compiled()
    if missing is not None:
        print(f"nothing is measured: the tiles need {missing}")
        return
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    pairs, panels = (32, 4) if args.quick else (512, 3000)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(pairs * panels, STEP, generator=generator).mul(0.02).bfloat16()
    packed = pack(weight)
    lines = measure(
        packed,
        pairs=pairs,
        rows=(1, 8) if args.quick else ROWS,
        turns=1 if args.quick else args.turns,
        threads=args.threads,
    )
    text = "\n\n".join(
        (
            "# Weights at 12 bits",
            "`python -m lab.bench.twelve_bits`",
            f"{date.today()}, {machine()}, {args.threads} threads; {weight.nbytes / 1e6:.0f} MB of "
            f"normally distributed weights, {args.turns} turns, medians. "
            f"{packed.num_exceptions / len(weight):.1%} of the tile's steps hold a weight whose "
            "upper byte is none of the 16.",
            "\n".join(
                (
                    "| rows | 16 bits, ms | 12 bits, ms | 12 bits / 16 bits |",
                    "|---|---|---|---|",
                    *lines,
                )
            ),
        )
    )
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
