"""First step on a card: whether every result is right, and where the host waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from statistics import median
from time import perf_counter
from unittest import mock

import numpy as np
import torch

from specserve.models.gpu.card_kernels import card_kernels
from specserve.models.gpu.float8_kernels import float8_fault
from specserve.models.model import ModelOptions, open_model
from specserve.models.runner import Runner
from specserve.sampling.distribution import WarpBatch
from specserve.sampling.noise import Purpose, exponential, row_keys, uniform
from specserve.sampling.row_draws import draw_from_rows, draw_kernel_of
from specserve.sampling.truncation import by_sorting, renormaliser_of, top_k_top_p
from specserve.types import Step, Warp
from tests.gpu.folders import new_folder
from tests.gpu.random_models import LLAMA_1B, TINY, VOCAB, find_attention, load_shapes, open_random
from tests.gpu.sections import Results, Scale, Section
from tests.gpu.timing import counted_waits
from tests.support import checkpoints
from tests.support.card.rounds import MODES, OPTIONS, load_pair, run_rounds, uneven

TEXT = tuple(np.random.default_rng(0).integers(3, checkpoints.VOCAB, 900).tolist())
PROMPT_LENGTHS = (7, 130, 240)
COUNTS = ((5, 5, 5), (1, 8, 3), (1, 40, 2))
TOO_FAR = 1e-2


@cache
def checkpoint(kind: str) -> Path:
    directory = new_folder() / kind
    configs = {**checkpoints.CONFIGS, **checkpoints.ENCODER_DECODERS}
    return checkpoints.write(configs[kind](), directory)


def open_runner(kind: str, device: str, **options: object) -> Runner:
    known: dict[str, object] = {"dtype": "float32", "pages": 400, "prefix_caching": False}
    return open_model(
        checkpoint(kind),
        ModelOptions(device=device, **{**known, **options}),  # type: ignore[arg-type]
    ).runner


def decode(runner: Runner, counts: tuple[int, ...], turns: int = 2) -> torch.Tensor:
    """Return logits of passes of `counts` tokens after prompts."""
    is_t5 = hasattr(runner, "encoder_cache")
    lengths = []
    for seq_id, length in enumerate(PROMPT_LENGTHS):
        prompt = TEXT[:length]
        step = Step(seq_id, 0, (0,), prompt) if is_t5 else Step(seq_id, 0, prompt)
        runner.run([step], [0])
        lengths.append(len(step.tokens))
    found = []
    for _ in range(turns):
        steps = [
            Step(seq_id, start, TEXT[start : start + count])
            for seq_id, (start, count) in enumerate(zip(lengths, counts, strict=True))
        ]
        found.append(runner.run(steps, list(counts)).float().cpu())
        lengths = [start + count for start, count in zip(lengths, counts, strict=True)]
    return torch.cat(found)


def describe_machine(scale: Scale) -> Results:
    device = scale.device
    attention = find_attention(load_shapes(TINY), "auto", device)
    return {
        "torch": torch.__version__,
        "card": torch.cuda.get_device_name(device),
        "capability": torch.cuda.get_device_capability(device),
        "memory": torch.cuda.mem_get_info(device),
        "attention": type(attention).__name__,
        "kernels between products": card_kernels(device, torch.bfloat16) is not None,
        "FP8 products": float8_fault(device, torch.bfloat16) is None,
        "draws by one kernel": draw_kernel_of(device) is not None,
        "top-k and top-p by FlashInfer": renormaliser_of(device) is not None,
    }


def compare_noise(scale: Scale) -> Results:
    rows, vocab = (3, 500) if scale.is_small else (200, VOCAB)
    places = np.arange(rows)
    keys = row_keys(range(len(places)), [3], places, Purpose.COUPLED)
    ids = torch.arange(vocab, dtype=torch.int32)
    on_host = exponential(keys, ids)
    on_card = exponential(keys.to(scale.device), ids.to(scale.device)).cpu()
    weights = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)).softmax(-1)
    drawn = draw_from_rows(weights, keys)
    found = draw_from_rows(weights.to(scale.device), keys.to(scale.device))
    uniforms = uniform(keys), uniform(keys.to(scale.device)).cpu()
    return {
        "numbers": on_host.numel(),
        "unequal": int((on_host != on_card).sum()),
        "uniform unequal": int((uniforms[0] != uniforms[1]).sum()),
        "draws that differ": int((drawn != found.cpu()).sum()),
    }


def compare_architectures(scale: Scale) -> Results:
    """Compare logits in fp32; FlashInfer, which lacks it, in bf16."""
    kinds = [*checkpoints.ARCHITECTURES, *checkpoints.ENCODER_DECODERS]
    errors: dict[str, float | str] = {}
    for kind in kinds[:2] if scale.is_small else kinds:
        for counts in COUNTS:
            expected = decode(open_runner(kind, "cpu"), counts)
            for attention in ("sdpa", "invariant"):
                name = f"{kind}, {attention}, {counts}"
                try:
                    found = decode(open_runner(kind, "cuda", attention=attention), counts)
                    errors[name] = float((found - expected).abs().max())
                except Exception as error:  # the other architectures go on
                    errors[name] = f"{type(error).__name__}: {error}"[:200]
    numbers = [error for error in errors.values() if isinstance(error, float)]
    return {
        "compared": len(errors),
        "largest difference": max(numbers, default=None),
        "far off or failed": {
            name: error
            for name, error in errors.items()
            if isinstance(error, str) or error > TOO_FAR
        },
    }


def compare_flashinfer(scale: Scale) -> Results:
    """Compare bf16 logits by FlashInfer, and by torch's attention, with fp32 on the host."""
    found: dict[str, str] = {}
    for kind in checkpoints.ARCHITECTURES[: 1 if scale.is_small else None]:
        counts = COUNTS[1]
        expected = decode(open_runner(kind, "cpu"), counts)
        errors = []
        for attention in ("auto", "sdpa"):
            logits = decode(
                open_runner(kind, "cuda", dtype="bfloat16", attention=attention), counts
            )
            errors.append(float((logits - expected).abs().mean()))
        found[kind] = f"auto {errors[0]:.4f}, sdpa {errors[1]:.4f}"
    return found


def compare_graphs(scale: Scale) -> Results:
    """Compare replayed graphs with plain passes, over passes of random shapes."""
    graphed, plain = (
        open_runner("llama", "cuda", dtype="bfloat16", attention="sdpa", pages=900)
        for _ in range(2)
    )
    plain.pad_to_bucket = None
    random = np.random.default_rng(5)
    largest, lengths = 0.0, dict.fromkeys(range(12), 0)
    for _ in range(4 if scale.is_small else 120):
        count = int(random.integers(1, 9))
        steps = []
        for seq_id in random.choice(12, random.integers(1, 9), replace=False).tolist():
            start = int(random.integers(0, lengths[seq_id] + 1))
            lengths[seq_id] = start + count
            steps.append(Step(seq_id, start, tuple(random.integers(3, 280, count).tolist())))
        ours, theirs = (
            runner.run(steps, [count] * len(steps)).float() for runner in (graphed, plain)
        )
        largest = max(largest, float((ours - theirs).abs().max()))
    captured = getattr(graphed.network, "captured", {})
    return {"largest difference": largest, "shapes": len(captured)}


def compare_truncation(scale: Scale) -> Results:
    rows, vocab = (4, 6000) if scale.is_small else (64, VOCAB)
    logits = 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1))
    x = logits - logits.amax(-1, keepdim=True)
    top_k, top_p = np.tile([0, 40], rows // 2), np.tile([0.9, 0.8], rows // 2)
    expected = by_sorting(x, top_k, top_p) > -torch.inf
    found = top_k_top_p(x.to(scale.device), top_k, top_p).cpu() > -torch.inf
    return {"kept": int(expected.sum()), "kept differently": int((found != expected).sum())}


def measure_row_invariance(scale: Scale) -> Results:
    """Count logits in bf16 that depend on what shares the pass."""
    del scale
    found: dict[str, object] = {"of": 8 * checkpoints.VOCAB}
    for attention in ("auto", "sdpa", "invariant"):

        def rows_of_first(batch: int, kind: str = attention) -> torch.Tensor:
            runner = open_runner("llama", "cuda", dtype="bfloat16", attention=kind, pages=900)
            for seq_id in range(batch):
                runner.run([Step(seq_id, 0, TEXT[: 100 + 9 * seq_id])], [0])
            steps = [Step(i, 100 + 9 * i, TEXT[100 + 9 * i : 108 + 9 * i]) for i in range(batch)]
            return runner.run(steps, [8] * batch)[:8].cpu()

        alone = rows_of_first(1)
        found[attention] = {
            f"beside {batch - 1}": int((rows_of_first(batch) != alone).sum())
            for batch in (2, 8, 32)
        }
    return found


def count_waits(scale: Scale) -> Results:
    """Count the host's waits in the stages of a steady round, by place."""
    found: dict[str, object] = {}
    for name in list(MODES)[:1] if scale.is_small else MODES:
        for gammas in ([7], uneven(2 if scale.is_small else 8)):
            stages: dict[str, Counter[str]] = {}

            @contextmanager
            def stage(stage_name: str, kept: dict[str, Counter[str]] = stages) -> Iterator[None]:
                with counted_waits() as waits:
                    yield
                kept[stage_name] = waits

            target, drafter = load_pair(checkpoint("llama"), OPTIONS)
            run_rounds(target, drafter, MODES[name], gammas, stage)
            counts: Mapping[str, int] = {key: waits.total() for key, waits in stages.items()}
            places = sum(stages.values(), Counter[str]()).most_common(5)
            found[f"{name}, batch {len(gammas)}"] = f"{counts}, {places}"
    return found


def measure_captures(scale: Scale) -> Results:
    """Measure the seconds and the memory that a captured shape takes."""
    config = TINY if scale.is_small else LLAMA_1B
    with mock.patch("tests.gpu.random_models.open_flashinfer", side_effect=_no_flashinfer):
        model = open_random(config, scale.device, num_pages=400 if scale.is_small else 20_000)
    seconds, used = [], []
    shapes = [(1, 1), (1, 8), (8, 1), (8, 8), (32, 1), (32, 8), (32, 16), (64, 16)]
    for number, (batch, count) in enumerate(shapes[: 2 if scale.is_small else None]):
        seq_ids = [100 * number + i for i in range(batch)]
        for seq_id in seq_ids:
            model.runner.run([Step(seq_id, 0, TEXT[:200])], [0])
        free = torch.cuda.mem_get_info(scale.device)[0]
        torch.cuda.synchronize()
        started = perf_counter()
        model.runner.run([Step(i, 200, (5,) * count) for i in seq_ids], [count] * batch)
        torch.cuda.synchronize()
        seconds.append(perf_counter() - started)
        used.append((free - torch.cuda.mem_get_info(scale.device)[0]) >> 20)
        model.runner.release(seq_ids)
    captured = getattr(model.runner.network, "captured", {})
    return {"shapes": len(captured), "median seconds": median(seconds), "MiB of each": used}


def _no_flashinfer(*_: object) -> None:
    from specserve.models.gpu.flashinfer_attention import FlashInferUnusable

    raise FlashInferUnusable("graphs are captured with torch's attention")


def compare_warps(scale: Scale) -> Results:
    """Compare probabilities under several warps with the host's."""
    warps = [Warp(0.0), Warp(), Warp(0.7, 20, 0.9), Warp(0.9, min_p=0.05)]
    logits = 3 * torch.randn(8, checkpoints.VOCAB, generator=torch.Generator().manual_seed(2))
    batch = WarpBatch(warps, [2] * len(warps))
    on_host = batch.probabilities(logits)
    on_card = batch.probabilities(logits.to(scale.device)).cpu()
    return {"largest difference": float((on_host - on_card).abs().max())}


SECTIONS: Mapping[str, Section] = {
    "machine": describe_machine,
    "noise and draws, card against host": compare_noise,
    "logits of every architecture, fp32, card against host": compare_architectures,
    "mean error of bf16 logits": compare_flashinfer,
    "graphs against plain passes": compare_graphs,
    "probabilities, card against host": compare_warps,
    "top-k and top-p, card against host": compare_truncation,
    "row invariance in bf16: logits that change": measure_row_invariance,
    "waits of a round, by place": count_waits,
    "captured shapes": measure_captures,
}
