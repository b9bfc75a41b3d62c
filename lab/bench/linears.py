"""Kernels of linear layers beside one another: `python -m lab.bench.linears`.

All linear layers of a model, one after the other, in each kernel in turns, by the rows of a pass;
beside them a plain read of as many bytes. In bf16 zentorch takes part where it is installed, in
float32 torch's own product.
"""

from __future__ import annotations

import argparse
import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional as F

from specserve.models.cpu.linear_kernels import (
    LinearKernel,
    OneDnnKernel,
    linear_kernel,
    missing_for_compiled,
)
from specserve.models.cpu.mapped_file import tensor_address
from specserve.models.memory import keep_freed_memory, use_huge_pages
from specserve.tools.bench.report import machine

ROWS = (1, 2, 4, 8, 12, 16, 24, 32, 64, 128, 512)
Shapes = Sequence[tuple[int, int]]
"""(inputs, outputs) of the linear layers of a pass."""
Layer = Callable[[Mapping[int, Tensor]], Tensor]
MODELS: Mapping[str, Shapes] = {
    "demo target widened to 200M": (
        *[(256, 512), (256, 256), (256, 64256), (32128, 256)] * 8,
        (256, 4096),
    ),
    "16 layers of 1,024 x 2,816, head of 32,000": (
        *[(1024, 2048), (1024, 1024), (1024, 5632), (2816, 1024)] * 16,
        (1024, 32000),
    ),
}
TINY: Mapping[str, Shapes] = {"two layers of 64 x 96": [(64, 96), (96, 64)] * 2}


class ZenKernel:
    """AMD's kernels, of the package zentorch."""

    name = "zentorch"

    def __init__(self) -> None:
        importlib.import_module("zentorch")  # registers its operations

    def pack(self, weight: Tensor) -> Tensor:
        packed: Tensor = torch.ops.zentorch.zentorch_weight_prepack_for_linear(weight)
        return packed

    def product(
        self, x: Tensor, packed: Tensor, outputs: int, bias: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        out: Tensor = torch.ops.zentorch.zentorch_linear_unary(
            x, packed, bias, is_weight_prepacked=True
        )
        return out

    def unrounded_product(
        self, x: Tensor, packed: Tensor, outputs: int, bias: Tensor | None
    ) -> Tensor:
        raise NotImplementedError

    def interleave(self, gate: Tensor, up: Tensor) -> Tensor:
        raise NotImplementedError

    def gated_product(self, x: Tensor, packed: Tensor, outputs: int) -> Tensor:
        raise NotImplementedError


class TorchKernel(OneDnnKernel):
    """The product that torch chooses for plain weights."""

    name = "torch"

    def pack(self, weight: Tensor) -> Tensor:
        return weight

    def product(
        self, x: Tensor, packed: Tensor, outputs: int, bias: Tensor | None, residual: Tensor | None
    ) -> Tensor:
        return F.linear(x, packed, bias)


@dataclass(slots=True)
class KernelTimes:
    """Milliseconds of a pass of some rows in each kernel, turn by turn."""

    rows: int
    by_kernel: dict[str, list[float]]
    reads: list[float] = field(default_factory=list)

    def row(self) -> str:
        base = next(iter(self.by_kernel))  # oneDNN's
        cells = [f"{median(times):.2f}" for times in self.by_kernel.values()]
        ratios = [
            f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            for name, times in self.by_kernel.items()
            if name != base
            for ratios in [
                [own / other for own, other in zip(times, self.by_kernel[base], strict=True)]
            ]
        ]
        return f"| {self.rows} | {' | '.join([f'{median(self.reads):.2f}', *cells, *ratios])} |"


def kernels(dtype: torch.dtype) -> list[LinearKernel]:
    found = [linear_kernel("onednn", dtype)]
    if dtype == torch.float32:
        return [*found, TorchKernel()]
    if missing_for_compiled() is None:
        found.append(linear_kernel("compiled"))
    with suppress(ImportError):
        found.append(ZenKernel())
    return found


def measure(
    shapes: Shapes, rows: Sequence[int], *, turns: int, dtype: torch.dtype
) -> list[KernelTimes]:
    generator = torch.Generator().manual_seed(0)
    weights = [
        torch.randn(outputs, inputs, generator=generator).to(dtype) for inputs, outputs in shapes
    ]
    passes = {kernel.name: _layers(kernel, weights) for kernel in kernels(dtype)}
    memory = torch.ones(sum(weight.nbytes for weight in weights) // 4)  # fp32, as many bytes
    use_huge_pages(memory.data_ptr(), memory.nbytes)
    found = []
    for count in rows:
        given = {
            inputs: torch.randn(count, inputs, generator=generator).to(dtype)
            for inputs in {inputs for inputs, _ in shapes}
        }
        times = KernelTimes(count, {name: [] for name in passes})
        for turn in range(turns + 1):
            read = _milliseconds(memory.sum)
            for name, layers in passes.items():
                spent = _milliseconds(partial(_run, layers, given))
                if turn:  # the first one compiles and allocates
                    times.by_kernel[name].append(spent)
            times.reads += [read] if turn else []
        found.append(times)
    return found


def _layers(kernel: LinearKernel, weights: Sequence[Tensor]) -> list[Layer]:
    """Pack the weights, and return functions that take inputs by their width."""
    layers: list[Layer] = []
    for weight in weights:
        packed = kernel.pack(weight)
        if packed.layout == torch.strided or isinstance(kernel, OneDnnKernel):
            use_huge_pages(tensor_address(packed), weight.nbytes)
        layers.append(partial(_multiply, kernel, packed, tuple(weight.shape)))
    return layers


def _multiply(
    kernel: LinearKernel, packed: Tensor, shape: tuple[int, ...], given: Mapping[int, Tensor]
) -> Tensor:
    outputs, inputs = shape
    return kernel.product(given[inputs], packed, outputs, None, None)


def _run(layers: Sequence[Layer], given: Mapping[int, Tensor]) -> None:
    for layer in layers:
        layer(given)


def _milliseconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def table(name: str, shapes: Shapes, times: Sequence[KernelTimes], *, itemsize: int) -> str:
    names = list(times[0].by_kernel)
    size = sum(inputs * outputs for inputs, outputs in shapes) * itemsize / 1e6
    head = [
        "rows",
        "reading",
        *(f"{kernel}, ms" for kernel in names),
        *(f"{kernel} / {names[0]}" for kernel in names[1:]),
    ]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(row.row() for row in times)]
    return f"## {name}, {size:.0f} MB\n\n" + "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--quick", action="store_true", help="tiny layers: measures nothing")
    parser.add_argument("--out", type=Path, help="write the page here, too")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    keep_freed_memory()
    dtype: torch.dtype = getattr(torch, args.dtype)
    models, rows, turns = (TINY, (1, 8), 1) if args.quick else (MODELS, ROWS, args.turns)
    with torch.inference_mode():
        tables = [
            table(name, shapes, times, itemsize=dtype.itemsize)
            for name, shapes in models.items()
            for times in [measure(shapes, rows, turns=turns, dtype=dtype)]
        ]
    wanted = "" if dtype == torch.bfloat16 else f" --dtype {args.dtype}"
    text = "\n\n".join(
        (
            "# Kernels of linear layers",
            f"`python -m lab.bench.linears{wanted}`",
            f"{date.today()}, {machine()}, {args.threads} threads, torch {torch.__version__}; "
            f"{args.dtype}, all linear layers of a pass one after the other, {turns} turns, "
            "medians. *Reading* sums as many bytes as the weights have.",
            *tables,
        )
    )
    print(text)
    if args.out is not None:
        args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
