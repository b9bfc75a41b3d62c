"""How long a round takes on cards of a stated speed, from the real code at a real model's sizes.

`python -m tests.support.card.roofline` writes the table. Every operation of the target's rank 0 and
of the draft runs on emulated cards whose tensors have shapes and no values. A kernel takes as long
as its bytes or its products do, and never less than a launch; the host enqueues kernels ahead of
the card until it must wait for it. Nothing else that the host does is counted, and neither are a
card's choice of kernels, its clocks, or the other ranks' pace.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig

from specserve.models import layers
from specserve.models import shard as shard_module
from specserve.models.attention import Attention, GroupedAttention
from specserve.models.attention_kernels import sdpa_kernel
from specserve.models.checkpoints.architecture import architecture
from specserve.models.checkpoints.fill import fill_shapes
from specserve.models.checkpoints.load import LoadedModel, make_division
from specserve.models.gpu import triton_kernels
from specserve.models.gpu.card_kernels import CardKernels
from specserve.models.gpu.flashinfer_attention import FlashInferAttention, find_flashinfer
from specserve.models.model import Model
from specserve.models.shard import Shard
from specserve.models.target import TargetModel
from specserve.sampling import row_draws, truncation
from specserve.sampling.triton_draw import draw_rows
from specserve.types import ModelInfo
from tests.gpu.random_models import (
    CONTEXT,
    LLAMA_1B,
    LLAMA_70B,
    PAGE_SIZE,
    TINY,
    VOCAB,
    assemble,
    load_shapes,
)
from tests.support.card import CardTensor, Ledger, emulated_cards, flashinfer
from tests.support.card.kernels import interpreted_kernels
from tests.support.card.rounds import GAMMA, MODES, CardMode, run_rounds, uneven
from tests.support.card.tensors import CARDS, Repeated
from tests.support.engines import load_drafter

GRAPH_ROWS = (1, 8, 32, 64, 128)
"""Rows of the graphs that the passes of a round have; each takes seconds to capture here."""
RANKS, PROMPT, NUM_PAGES, CARD_BYTES = 4, 2048, 20_000, 80 * 10**9
SHOWN_MODES = (
    "greedy",
    "T = 0.7, top-p 0.9",
    "T = 0.7, top-p 0.9, coupled",
    "T = 0.7 with penalties",
)
PRODUCTS = ("linear", "mm", "bmm", "addmm")
ATTENTION = ("paged attention", "scaled_dot_product_attention")
COLLECTIVES = ("all_reduce", "all_gather", "all_to_all", "gather")
NEEDED = (*PRODUCTS, *ATTENTION, *COLLECTIVES)
KERNELS = CardKernels(
    triton_kernels.rotate_and_write, triton_kernels.gated, triton_kernels.rms_norm
)


@dataclass(frozen=True, slots=True)
class CardSpeed:
    """Speeds that cards of the H100 class and their host reach."""

    read_bytes_s: float = 2.75e12
    flops_s: float = 600e12
    kernel_s: float = 2e-6  # the least
    launch_s: float = 5.5e-6  # of the host, from Python
    replay_s: float = 20e-6  # of the host, for a whole graph
    fetch_s: float = 15e-6  # from the end of a kernel until the host goes on
    # Of four cards, as others measured NCCL: 21 us for 0.5 MB and 39 us for 4 MB.
    sum_s: float = 18.4e-6
    sum_bytes_s: float = 1.94e11
    collective_launch_s: float = 18e-6

    def kernel_seconds(
        self, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
    ) -> float:
        moved = sum(tensor.nbytes for tensor in (*inputs, *outputs))
        if name == "index_select":
            moved = 2 * outputs[0].nbytes + inputs[-1].nbytes
        elif name == "index_copy_":
            moved = 2 * inputs[-1].nbytes + inputs[1].nbytes
        elif name == "batch_prefill":
            moved = 2 * outputs[0].nbytes  # see `add_paged_attention`
        elif name == "rotate_and_write_kernel":
            _, v, _, _, _, q_out, _, _ = inputs
            moved = 2 * q_out.nbytes + 4 * v.nbytes
        elif name == "draw_kernel":
            weights, rows, *_ = inputs
            moved = len(rows) * weights.shape[1] * weights.element_size()
        flops = 0
        if name in PRODUCTS:
            flops = 2 * outputs[0].numel() * inputs[-2 if name == "addmm" else 0].shape[-1]
        elif name == "scaled_dot_product_attention":
            flops = 4 * inputs[0].numel() * inputs[1].shape[-2]
        return max(self.kernel_s, moved / self.read_bytes_s, flops / self.flops_s)

    def sum_seconds(self, num_bytes: int) -> float:
        return self.sum_s + num_bytes / self.sum_bytes_s


@dataclass(slots=True)
class TimedLedger(Ledger):
    """A ledger with two clocks: the host's, and that of the card, which works through a queue."""

    speed: CardSpeed = field(default_factory=CardSpeed)
    host_s: float = 0.0
    card_s: float = 0.0
    busy: dict[str, float] = field(default_factory=dict)  # seconds of the card, by operation

    def add_kernel(self, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        Ledger.add_kernel(self, name, inputs, outputs)
        self.host_s += self.speed.launch_s
        self._run(name, self.speed.kernel_seconds(name, inputs, outputs))

    def add_replayed(self, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        self._run(name, self.speed.kernel_seconds(name, inputs, outputs))

    def add_replay(self) -> None:
        Ledger.add_replay(self)
        self.host_s += self.speed.replay_s

    def add_wait(self, reason: str, place: str) -> None:
        Ledger.add_wait(self, reason, place)
        self.host_s = max(self.host_s, self.card_s) + self.speed.fetch_s

    def add_collective(self, name: str, num_bytes: int) -> None:
        self.kernels[name] += 1
        self.host_s += self.speed.collective_launch_s
        self._run(name, self.speed.sum_seconds(num_bytes))

    def repeat_collective(self, name: str, num_bytes: int) -> None:
        """Note a collective of a captured graph."""
        self._run(name, self.speed.sum_seconds(num_bytes))

    def add_paged_attention(self, read_bytes: int, flops: int) -> None:
        speed = self.speed
        self._run("paged attention", max(read_bytes / speed.read_bytes_s, flops / speed.flops_s))

    def _run(self, name: str, seconds: float) -> None:
        self.busy[name] = self.busy.get(name, 0.0) + seconds
        self.card_s = max(self.card_s, self.host_s) + seconds


@contextmanager
def timed_collectives(ledger: TimedLedger) -> Iterator[None]:
    """Let ranks that are not there take part: results have the right shapes."""

    def add(name: str, tensor: Any, num_bytes: int) -> None:
        repeated = Repeated(lambda: ledger.repeat_collective(name, num_bytes))
        CARDS[-1].record(tensor.card, (repeated, (), {}, ()))
        ledger.add_collective(name, num_bytes)

    def all_reduce(tensor: Tensor, **_: object) -> None:
        add("all_reduce", tensor, tensor.nbytes)

    def all_gather(parts: Tensor, part: Tensor, **_: object) -> None:
        add("all_gather", parts, parts.nbytes)

    def all_to_all(parts: Tensor, given: Tensor, **_: object) -> None:
        add("all_to_all", given, given.nbytes)

    def gather(part: Tensor, parts: list[Tensor] | None, **_: object) -> None:
        add("gather", part, part.nbytes * RANKS)

    with (
        mock.patch.multiple(
            dist, all_reduce=all_reduce, gather=gather, all_to_all_single=all_to_all
        ),
        mock.patch.object(shard_module, "_all_gather", all_gather),
    ):
        yield


def load_share(config: LlamaConfig, shard: Shard) -> LoadedModel:
    """Return one rank's share of a model, with shapes instead of weights."""
    loaded = load_shapes(config)
    division = make_division(loaded.module, shard)
    fill_shapes(loaded.module, division)
    division.narrow(loaded.module)
    return replace(loaded, spec=architecture(Path("/nowhere"), config, shard.size))


def open_shapes(
    loaded: LoadedModel, *, card: int, has_libraries: bool, shard: Shard | None
) -> Model:
    """Put a model onto an emulated card without values."""
    loaded, device = copy.deepcopy(loaded), torch.device("cuda", card)
    module: Any = loaded.module
    for part in module.modules():
        for name, weight in list(part._parameters.items()):
            if weight is not None:
                on_card = CardTensor(torch.empty_like(weight, device="meta"), card)
                part._parameters[name] = torch.nn.Parameter(on_card, requires_grad=False)
    module.model.rotary_emb.to(device)
    attention: Attention = GroupedAttention(sdpa_kernel)
    if has_libraries:
        attention = FlashInferAttention(
            find_flashinfer(device), page_size=PAGE_SIZE, device=device, kernels=KERNELS
        )
    return assemble(loaded, attention, device, num_pages=NUM_PAGES, shard=shard)


@contextmanager
def chosen_kernels(*, has_libraries: bool) -> Iterator[None]:
    """Let the kernels of FlashInfer and Triton be chosen, or none; a trial needs values."""

    def renormalise(p: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
        return flashinfer.top_p_renorm_probs(flashinfer.top_k_renorm_probs(p, top_k), top_p)

    def chosen(kernel: Any) -> Any:
        return lambda *_: kernel if has_libraries else None

    with (
        mock.patch.object(layers, "card_kernels", chosen(KERNELS)),
        mock.patch.object(row_draws, "draw_kernel_of", chosen(draw_rows)),
        mock.patch.object(truncation, "renormaliser_of", chosen(renormalise)),
        flashinfer.installed(graph_rows=GRAPH_ROWS) if has_libraries else nullcontext(),
    ):
        yield


@dataclass(frozen=True, slots=True)
class StageTime:
    """One stage of a round: until the host goes on, and where the card's seconds went."""

    seconds: float
    busy: Mapping[str, float]  # seconds of the card, by operation
    num_kernels: int
    num_waits: int

    @property
    def needed(self) -> float:
        """Seconds of what no way of running the model does without."""
        return sum(self.busy.get(name, 0.0) for name in NEEDED)

    @property
    def overhead(self) -> float:
        return 1 - self.needed / self.seconds

    def __str__(self) -> str:
        longest = sorted(self.busy.items(), key=lambda item: -item[1])[:6]
        parts = ", ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in longest)
        return f"{self.seconds * 1e3:.2f} ms, {self.num_kernels} kernels: {parts}"


def time_round(
    models: tuple[LoadedModel, LoadedModel],
    mode: CardMode,
    gammas: Sequence[int],
    *,
    has_libraries: bool,
) -> dict[str, StageTime]:
    """Time the stages of a steady round: the target's rank 0 of four, the draft on its own card."""
    ledger = TimedLedger()
    found: dict[str, StageTime] = {}

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        ledger.clear()
        yield
        seconds = max(ledger.host_s, ledger.card_s)
        found[name] = StageTime(seconds, dict(ledger.busy), ledger.num_kernels, ledger.num_waits)

    with (
        emulated_cards(2, ledger=ledger, memory_bytes=CARD_BYTES, has_values=False),
        interpreted_kernels(),
        chosen_kernels(has_libraries=has_libraries),
        timed_collectives(ledger),
        torch.inference_mode(),
    ):
        target = open_shapes(models[0], card=0, has_libraries=has_libraries, shard=Shard(0, RANKS))
        draft = open_shapes(models[1], card=1, has_libraries=has_libraries, shard=None)
        info = ModelInfo(VOCAB, CONTEXT, frozenset([2]), PAGE_SIZE, NUM_PAGES)
        drafter = load_drafter(draft, info, support=64)
        run_rounds(
            TargetModel(target.runner, info), drafter, mode, gammas, stage, prompt_length=PROMPT
        )
    return found


# In milliseconds; the review of commit 4c943cd estimated them, with torch's attention.
BEFORE = {
    ("greedy", 1): "21 to 23",
    ("T = 0.7, top-p 0.9", 1): "22 to 25",
    ("greedy", 32): "35",
    ("T = 0.7, top-p 0.9", 32): "45 to 48",
    ("T = 0.7 with penalties", 32): "55 to 60",
}


def table(
    models: tuple[LoadedModel, LoadedModel], modes: Sequence[str], batches: Sequence[int]
) -> Iterator[str]:
    """Yield the lines of the table."""
    yield (
        "| mode | batch | before, estimated | torch alone | with FlashInfer and Triton | overhead "
        "| kernels, waits | propose, where nothing was ready |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for batch in batches:
        gammas = uneven(batch)
        for name in modes:
            alone, best = (
                time_round(models, MODES[name], gammas, has_libraries=has_libraries)
                for has_libraries in (False, True)
            )
            verify = best["verify"]
            yield (
                f"| {name} | {batch} | {BEFORE.get((name, batch), '')} "
                f"| {alone['verify'].seconds * 1e3:.1f} | {verify.seconds * 1e3:.1f} "
                f"| {verify.overhead:.0%} | {verify.num_kernels}, {verify.num_waits} "
                f"| {best['propose'].seconds * 1e3:.1f} |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small models, one mode and batch")
    parser.add_argument("--details", choices=MODES, help="the stages of this mode alone")
    parser.add_argument("--out", type=Path, help="write the page here, too")
    args = parser.parse_args()
    target, draft = (TINY, TINY) if args.quick else (LLAMA_70B, LLAMA_1B)
    models = load_share(target, Shard(0, RANKS)), load_shapes(draft)
    if args.details is not None:
        for batch, gammas in ((1, [GAMMA]), (32, uneven(32))):
            found = time_round(models, MODES[args.details], gammas, has_libraries=True)
            for stage, time in found.items():
                print(f"batch {batch}, {stage}: {time}")
        return
    modes, batches = (SHOWN_MODES[:1], (32,)) if args.quick else (SHOWN_MODES, (1, 32))
    lines = "\n".join(table(models, modes, batches))
    speed = CardSpeed()
    text = (
        f"{date.today()}, torch {torch.__version__}, emulated cards without values: **nothing here "
        f"is measured on a GPU**. A Llama of 70B on {RANKS} cards and one of 1B on a fifth, in "
        f"bf16, {PROMPT:,} tokens of context, gamma up to {GAMMA}. Milliseconds of a round whose "
        "drafts are ready: the target's rank 0, from the request to the verdicts.\n\n"
        f"{lines}\n\n"
        f"Assumed: {speed.read_bytes_s / 1e12:.2f} TB/s, {speed.flops_s / 1e12:.0f} TFLOP/s, at "
        f"least {speed.kernel_s * 1e6:.0f} us a kernel; {speed.launch_s * 1e6:.1f} us of the host "
        f"to launch one, {speed.fetch_s * 1e6:.0f} us to fetch a result; a sum over four cards "
        f"{speed.sum_s * 1e6:.0f} us and {speed.sum_bytes_s / 1e9:.0f} GB/s (NCCL, as others "
        "measured it). *Overhead* is everything but products, attention and sums over ranks. "
        "Kernels are those that the host launches one by one: a pass of up to "
        f"{GRAPH_ROWS[-1]} rows is the replay of a graph, whose kernels are in the times alone. "
        "What the host does beside launching is not counted, nor are the link and the "
        "coordinator.\n"
    )
    print(text)
    if args.out:
        head = "# A round on cards, by counting\n\n`python -m tests.support.card.roofline`\n\n"
        args.out.write_text(head + text)


if __name__ == "__main__":
    main()
