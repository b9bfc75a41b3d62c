"""Costs of bits that do not depend on the batch, or on the number of ranks, on CPUs.

`python -m lab.bench.ranks` compares the sum over the ranks with an all-reduce; a pass of ranks
that gather (`target.degree_invariant`) with one of ranks that sum; and, on one rank, a pass whose
row-wise layers are summed in four blocks, as four ranks would sum them, with one as it is.
"""

from __future__ import annotations

import argparse
import multiprocessing
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from specserve.config.tree import DEMO
from specserve.host import usable_cores
from specserve.models import llama
from specserve.models.checkpoints.widen import inflate
from specserve.models.layers import make_linear, take_linear
from specserve.models.model import ModelOptions, open_model
from specserve.models.runner import Runner
from specserve.models.shard import Shard
from specserve.types import Step

SIZES = (2, 3, 4)
ROWS = (1, 8, 32, 512)
WIDTHS = (256, 1024, 4096)
PASS_ROWS = (1, 8, 32)
NUM_BLOCKS = 4
PROMPT = tuple(range(5, 105))
OPTIONS = ModelOptions(dtype="bfloat16", device="cpu", pages=600, prefix_caching=False)
PASSES = 10
"""Passes of one measurement."""
SECONDS = 0.05
"""About what one measurement of a sum takes."""


@dataclass(frozen=True, slots=True)
class SumComparison:
    """Seconds of two ways to compute the same thing, measured in turn."""

    before: Sequence[float]
    after: Sequence[float]

    def __str__(self) -> str:
        ratios = sorted(b / a for a, b in zip(self.before, self.after, strict=True))
        return (
            f"{median(self.before) * 1e3:.2f} | {median(self.after) * 1e3:.2f} | "
            f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        )


def compare(
    functions: Sequence[Callable[[], object]],
    *,
    pairs: int,
    times: int,
    clock: Callable[[], float] = time.perf_counter,
) -> SumComparison:
    """Measure two functions in turn, `times` calls each; the first pair warms up."""
    seconds = [[_seconds(function, times, clock) for function in functions] for _ in range(pairs)]
    return SumComparison(*zip(*seconds, strict=True))


def _seconds(function: Callable[[], object], times: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(times):
        function()
    return (clock() - start) / times


# Sums over the ranks


@dataclass(frozen=True, slots=True)
class RankTask:
    """Task of `size` ranks: the variants to compare, and how often."""

    size: int
    pairs: int
    shapes: tuple[tuple[int, int], ...]  # [rows, width] of sums
    pass_rows: tuple[int, ...] = ()
    model: Path | None = None


def compare_on_ranks(task: RankTask) -> tuple[list[SumComparison], list[SumComparison]]:
    """Compare sums by shape, then passes by rows, among processes of one thread each."""
    with TemporaryDirectory() as root:
        # Ranks are forked from one process that has imported everything.
        multiprocessing.get_context("forkserver").set_forkserver_preload(["specserve.models.llama"])
        ranks: Any = mp
        ranks.start_processes(_rank_main, (task, root), nprocs=task.size, start_method="forkserver")
        return torch.load(f"{root}/seen.pt", weights_only=False)  # type: ignore[no-any-return]


def _rank_main(rank: int, task: RankTask, root: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{root}/rendezvous",
        rank=rank,
        world_size=task.size,
        timeout=timedelta(minutes=10),
    )
    sums = [_compare_sum(Shard(rank, task.size), shape, pairs=task.pairs) for shape in task.shapes]
    passes = _compare_passes(rank, task) if task.pass_rows else []
    if rank == 0:
        torch.save((sums, passes), f"{root}/seen.pt")
    dist.barrier()
    dist.destroy_process_group()


def _compare_sum(shard: Shard, shape: tuple[int, int], *, pairs: int) -> SumComparison:
    """Compare an all-reduce with `Shard.sum`."""
    part = torch.zeros(shape, dtype=torch.bfloat16)
    # All ranks need the same number.
    times = max(1, int(SECONDS / (1e-3 + part.nbytes * 5e-9)))
    functions = partial(dist.all_reduce, part), partial(shard.sum, part)
    compare(functions, pairs=1, times=1)  # opens the connections
    return compare(functions, pairs=pairs, times=times)


def _compare_passes(rank: int, task: RankTask) -> list[SumComparison]:
    """Compare ranks that sum with ranks that gather."""
    assert task.model is not None
    runners = [
        _prompted(open_model(task.model, OPTIONS, shard=shard).runner, max(task.pass_rows))
        for shard in (Shard(rank, task.size), Shard(rank, task.size, gathers=True))
    ]
    seen = []
    for rows in task.pass_rows:
        functions = [partial(_decode, runner, rows) for runner in runners]
        compare(functions, pairs=1, times=1)  # compiles the kernels
        seen.append(compare(functions, pairs=task.pairs, times=PASSES))
    return seen


# Blocks


class BlockedLinear(nn.Module):
    """A row-wise layer whose products with blocks of the inner dimension are added as a tree.

    Each product is rounded to bf16, as a rank's is before it is sent.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.blocks = [make_linear(block) for block in weight.chunk(NUM_BLOCKS, dim=1)]

    def add_to_residual(self, x: Tensor, residual: Tensor) -> Tensor:
        sums = [
            block.forward(own)
            for block, own in zip(self.blocks, x.chunk(NUM_BLOCKS, dim=1), strict=True)
        ]
        while len(sums) > 1:
            sums = [a.add_(b) for a, b in zip(sums[::2], sums[1::2], strict=True)]
        return residual + sums[0]


def take_blocked(parent: Any, name: str) -> Any:
    """Return a linear layer in place of `parent`'s, in blocks if it is a row-wise one."""
    if name not in ("o_proj", "down_proj"):
        return take_linear(parent, name)
    weight = getattr(parent, name).weight
    setattr(parent, name, None)
    return BlockedLinear(weight)


def compare_blocks(model: Path, row_counts: Sequence[int], *, pairs: int) -> list[SumComparison]:
    """Compare passes of a Llama-shaped model, one row a sequence, by the number of rows.

    The seconds are of CPU time, which other work on the machine changes least.
    """
    plain = _prompted(open_model(model, OPTIONS).runner, max(row_counts))
    with patch.object(llama, "take_linear", take_blocked):
        blocked = _prompted(open_model(model, OPTIONS).runner, max(row_counts))
    seen = []
    for rows in row_counts:
        functions = partial(_decode, plain, rows), partial(_decode, blocked, rows)
        compare(functions, pairs=1, times=1)  # compiles the kernels
        seen.append(compare(functions, pairs=pairs, times=PASSES, clock=time.process_time))
    return seen


def _prompted(runner: Runner, num_sequences: int) -> Runner:
    """Prefill `num_sequences` sequences, and return the runner."""
    runner.run([Step(i, 0, PROMPT) for i in range(num_sequences)], [1] * num_sequences)
    return runner


def _decode(runner: Runner, rows: int) -> Tensor:
    return runner.run([Step(i, len(PROMPT), (5,)) for i in range(rows)], [1] * rows)


# Report


def report(model: Path, *, pairs: int, quick: bool) -> str:
    """Measure everything and return the tables."""
    sizes, shapes, pass_rows = (
        ((2,), ((1, 64),), (1,)) if quick else (SIZES, tuple(product(ROWS, WIDTHS)), PASS_ROWS)
    )
    sums = ["| ranks | rows | width | all-reduce, ms | in rank order, ms | ratio |"]
    passes = ["| ranks | rows of a pass | sum, ms | gather, ms | ratio |"]
    blocks = [f"| rows of a pass | as it is, CPU ms | in {NUM_BLOCKS} blocks, CPU ms | ratio |"]
    for table in (sums, passes, blocks):
        table.append("|---" * (table[0].count("|") - 1) + "|")
    for size in sizes:
        own_rows = pass_rows if size != 3 else ()  # the demo target has eight heads
        of_sums, of_passes = compare_on_ranks(RankTask(size, pairs, shapes, own_rows, model))
        for (rows, width), seen in zip(shapes, of_sums, strict=True):
            sums.append(f"| {size} | {rows} | {width} | {seen} |")
        for rows, seen in zip(own_rows, of_passes, strict=True):
            passes.append(f"| {size} | {rows} | {seen} |")
    for rows, seen in zip(pass_rows, compare_blocks(model, pass_rows, pairs=pairs), strict=True):
        blocks.append(f"| {rows} | {seen} |")
    return "\n".join([*sums, "", *passes, "", *blocks])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m lab.bench.ranks")
    parser.add_argument("--params", type=int, default=200_000_000, help="of the widened target")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="one shape, the target as it is")
    parser.add_argument("--out", type=Path, help="write the report here, too")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with TemporaryDirectory() as widened:
        model = DEMO / "target"
        if not options.quick:
            inflate(model, options.params, Path(widened))
            model = Path(widened)
        tables = report(model, pairs=options.pairs, quick=options.quick)
    text = (
        f"{date.today()}, {platform.machine()}, {usable_cores()} cores, torch "
        f"{torch.__version__}; bf16, one thread a rank; medians of {options.pairs} pairs measured "
        f"in turn, and the range of their ratios.\n\n{tables}\n"
    )
    print(text)
    if options.out:
        options.out.write_text(f"# Sums over ranks\n\n`python -m lab.bench.ranks`\n\n{text}")


if __name__ == "__main__":
    main()
