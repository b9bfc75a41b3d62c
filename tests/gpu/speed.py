"""Second step on a card: where the time of passes, sampling and rounds goes, at real sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from statistics import median
from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist

from specserve.models.model import Model
from specserve.models.shard import Shard
from specserve.models.target import TargetModel
from specserve.sampling.distribution import WarpBatch
from specserve.sampling.drafts import DraftBatch
from specserve.sampling.noise import Purpose, row_keys
from specserve.sampling.row_draws import _draw_by_torch, draw_kernel_of
from specserve.sampling.verify import RandomStreams, verify
from specserve.types import ModelInfo, SparseDistribution, Step, Warp
from tests.gpu.random_models import (
    CONTEXT,
    LLAMA_1B,
    LLAMA_8B,
    LLAMA_70B_RANK,
    PAGE_SIZE,
    TINY,
    VOCAB,
    open_random,
)
from tests.gpu.sections import Results, Scale, Section
from tests.gpu.timing import profile_work, time_queued, time_work
from tests.support.card.rounds import MODES, run_rounds, uneven
from tests.support.engines import load_drafter

RANDOM = np.random.default_rng(0)
SHAPES = ((1, 1, 512), (1, 8, 512), (1, 8, 4096), (8, 8, 1024), (32, 1, 1024), (32, 8, 1024))
"""Batch, rows of each sequence, and tokens before them."""
SMALL_SHAPES = ((1, 1, 40), (2, 3, 40))
WARPS: Mapping[str, Warp] = {
    "greedy": Warp(0.0),
    "T = 1": Warp(),
    "top-p 0.9": Warp(0.7, top_p=0.9),
    "top-k 50": Warp(0.7, top_k=50),
    "min-p 0.05": Warp(0.7, min_p=0.05),
}
RENDEZVOUS = "tcp://127.0.0.1:29533"


def words(count: int) -> tuple[int, ...]:
    return tuple(RANDOM.integers(3, 280, count).tolist())


def measure_ceilings(scale: Scale) -> Results:
    size, width = (2**20, 64) if scale.is_small else (2**32, 8192)
    device = scale.device
    one, other = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    square = torch.randn(width, width, device=device, dtype=torch.bfloat16)
    few = torch.zeros(1024, dtype=torch.int64, device=device)
    copied, product = time_queued(lambda: other.copy_(one)), time_queued(lambda: square @ square)
    return {
        "copy, TB/s": round(2 * size / copied / 1e9, 2),
        "bf16 products, TFLOP/s": round(2 * width**3 / product / 1e9),
        "8 kB to the host": str(time_work(lambda: few.cpu(), times=100)),
        "a small kernel, queued, us": round(1e3 * time_queued(lambda: few.add_(1), times=1000), 2),
    }


def time_passes(model: Model, scale: Scale) -> dict[str, str]:
    """Time passes of decoding and verifying, after texts of some length."""
    runner, found = model.runner, {}
    for batch, count, context in SMALL_SHAPES if scale.is_small else SHAPES:
        seq_ids = list(range(batch))
        for seq_id in seq_ids:
            for start in range(0, context, 512):
                runner.run([Step(seq_id, start, words(min(512, context - start)))], [0])
        steps = [Step(seq_id, context, (7,) * count) for seq_id in seq_ids]
        work = partial(runner.run, steps, [count] * batch)
        found[f"{batch} x {count} behind {context:,}"] = (
            f"{time_work(work)}; {'' if scale.is_small else profile_work(work)}"
        )
        runner.release(seq_ids)
    return found


def time_8b(scale: Scale) -> Results:
    config, pages = (TINY, 400) if scale.is_small else (LLAMA_8B, 20_000)
    found: dict[str, object] = {}
    for attention in ("auto", "sdpa"):
        for captures in (False, True) if attention == "sdpa" else (False,):
            model = open_random(
                config, scale.device, num_pages=pages, attention=attention, captures=captures
            )
            found[f"{attention}{', graphs' * captures}"] = time_passes(model, scale)
            del model
            torch.cuda.empty_cache()
    return found


def time_70b_rank(scale: Scale) -> Results:
    """Time one rank of four, with sums over a group of one."""
    config, pages = (TINY, 400) if scale.is_small else (LLAMA_70B_RANK, 6_000)
    if scale.is_small:
        return {"without sums": time_passes(open_random(TINY, scale.device, num_pages=400), scale)}
    dist.init_process_group("nccl", init_method=RENDEZVOUS, rank=0, world_size=1)
    try:
        model = open_random(config, scale.device, num_pages=pages, shard=Shard(0, 1))
        return {"with sums": time_passes(model, scale)}
    finally:
        dist.destroy_process_group()


def time_sampling(scale: Scale) -> Results:
    vocab = 6000 if scale.is_small else VOCAB
    found: dict[str, object] = {}
    for rows in (8,) if scale.is_small else (8, 64, 256):
        times = {**_time_warps(rows, vocab, scale), **_time_verifiers(rows, vocab, scale)}
        found |= {f"{rows} rows, {name}": time for name, time in times.items()}
    return found


def _time_warps(rows: int, vocab: int, scale: Scale) -> dict[str, str]:
    logits = (3 * torch.randn(rows, vocab, device=scale.device)).bfloat16()
    found = {}
    for name, warp in WARPS.items():
        batch = WarpBatch([warp] * (rows // 8), [8] * (rows // 8))
        warped = batch.greedy_tokens if batch.all_greedy else batch.probabilities
        torch.cuda.reset_peak_memory_stats(scale.device)
        before = torch.cuda.memory_allocated(scale.device)
        taken = time_work(partial(warped, logits))
        peak = (torch.cuda.max_memory_allocated(scale.device) - before) >> 20
        found[name] = f"{taken}, {peak} MiB at most"
    return found


def _time_verifiers(rows: int, vocab: int, scale: Scale) -> dict[str, str]:
    device, seqs = scale.device, rows // 8
    p = torch.randn(rows, vocab, device=device).softmax(-1)
    drafts = [words(7) for _ in range(seqs)]
    q = [_support(tokens, vocab) for tokens in drafts]

    def decide(rule: str) -> object:
        batch = DraftBatch.from_tokens(drafts, q, device=device)
        streams = RandomStreams.from_seeds(range(seqs), [9] * seqs)
        return verify([rule] * seqs, p, batch, streams)

    found = {rule: str(time_work(partial(decide, rule))) for rule in ("block", "coupled")}
    keys = row_keys(range(rows), [1], np.arange(rows), Purpose.NEXT, device=device)
    found["draws by torch"] = f"{time_queued(lambda: _draw_by_torch(p, keys, None, 0)):.3f} ms"
    kernel = draw_kernel_of(device)
    if kernel is not None:
        found["draws by one kernel"] = f"{time_queued(lambda: kernel(p, keys, None, 0)):.3f} ms"
    return found


def _support(tokens: tuple[int, ...], vocab: int) -> SparseDistribution:
    """Return 64 ids for each token, itself the first, all equally likely."""
    others = np.stack([RANDOM.choice(np.arange(300, vocab), 63, replace=False) for _ in tokens])
    ids = np.concatenate([np.array(tokens)[:, None], others], axis=1).astype(np.int64)
    return SparseDistribution(ids=ids, probs=np.full(ids.shape, 1 / 64, np.float32))


def time_rounds(scale: Scale) -> Results:
    """Time the stages of steady rounds of 8B with 1B: drafts are random, and mostly rejected."""
    sizes = (TINY, TINY) if scale.is_small else (LLAMA_8B, LLAMA_1B)
    target_model, draft = (
        open_random(config, scale.device, num_pages=800 if scale.is_small else 8_000)
        for config in sizes
    )
    vocab = sizes[0].vocab_size
    info = ModelInfo(vocab, CONTEXT, frozenset([2]), PAGE_SIZE, target_model.runner.cache.num_pages)
    found: dict[str, object] = {}
    for name in list(MODES)[: 1 if scale.is_small else 5]:
        for batch in (1, 2) if scale.is_small else (1, 32):
            seconds: dict[str, list[float]] = {}

            @contextmanager
            def stage(stage_name: str, kept: dict[str, list[float]] = seconds) -> Iterator[None]:
                torch.cuda.synchronize()
                started = perf_counter()
                yield
                torch.cuda.synchronize()
                kept.setdefault(stage_name, []).append(perf_counter() - started)

            target, drafter = (
                TargetModel(target_model.runner, info),
                load_drafter(draft, info, support=64),
            )
            gammas = [7] if batch == 1 else uneven(batch)
            run_rounds(
                target,
                drafter,
                MODES[name],
                gammas,
                stage,
                prompt_length=40 if scale.is_small else 500,
                num_rounds=3 if scale.is_small else 12,
            )
            steady = {key: median(times[2:]) * 1e3 for key, times in seconds.items()}
            found[f"{name}, batch {batch}"] = {key: f"{ms:.2f} ms" for key, ms in steady.items()}
    return found


def time_two_streams(scale: Scale) -> Results:
    """Time verifying and drafting on one card, one after the other and at once."""
    config = (TINY, TINY) if scale.is_small else (LLAMA_8B, LLAMA_1B)
    target, draft = (
        open_random(one, scale.device, num_pages=400 if scale.is_small else 4_000).runner
        for one in config
    )
    for runner in (target, draft):
        runner.run([Step(0, 0, words(300))], [0])

    def verify_once() -> object:
        return target.run([Step(0, 300, (7,) * 8)], [8])

    def draft_six() -> object:
        return [draft.run([Step(0, 300, (7,))], [1]) for _ in range(6)]

    other = torch.cuda.Stream(scale.device)  # type: ignore[no-untyped-call]

    def both() -> None:
        with torch.cuda.stream(other):
            draft_six()
        verify_once()
        torch.cuda.current_stream().wait_stream(other)

    works = {"verify": verify_once, "six drafts": draft_six, "both at once": both}
    return {name: str(time_work(work)) for name, work in works.items()}


SECTIONS: Mapping[str, Section] = {
    "ceilings": measure_ceilings,
    "passes of 8B": time_8b,
    "passes of one rank of 70B, of four": time_70b_rank,
    "sampling": time_sampling,
    "rounds of 8B with 1B, gamma 7": time_rounds,
    "verifying and drafting on two streams": time_two_streams,
}
