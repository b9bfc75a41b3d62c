"""Fourth step on a card: models of true shapes decode, plainly and with a draft of 1B."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import perf_counter

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from specserve.config.tree import DEMO
from specserve.demo.corpus import held_out_prompts
from specserve.llm.llm import LLM, Output
from specserve.sampling_params import Sampling
from specserve.types import Speculation
from tests.gpu.folders import new_folder
from tests.gpu.sections import Results, Scale, Section
from tests.gpu.true_shapes import LLAMA_1B, LLAMA_8B, Shape, write_shape

PROMPT, TOKENS, REPEATS = 128, 256, 3
SMALL = Shape(hidden=256, mlp=640, layers=8, heads=8, kv_heads=4, head_dim=32, vocab=4096)
PREFILL, PREFILL_BATCH = 1900, 16
Gamma = int | str


@dataclass(frozen=True, slots=True)
class Cell:
    """One setting: streams, draft tokens a round, temperature."""

    streams: int
    gamma: Gamma = 0
    temperature: float = 0.0
    is_profiled: bool = False

    def __str__(self) -> str:
        drafts = "plain" if self.gamma == 0 else f"gamma {self.gamma}"
        return f"{self.streams} streams, {drafts}" + (", T = 1" if self.temperature else "")


PLAIN = [
    *(Cell(streams, is_profiled=True) for streams in (1, 8, 32, 64)),
    *(Cell(streams, temperature=1.0) for streams in (1, 32)),
]
DRAFTED = [
    *(Cell(1, gamma) for gamma in (0, 3, 5, "auto")),
    *(Cell(streams, gamma) for streams in (8, 32) for gamma in (0, 3, "auto")),
    *(Cell(64, gamma) for gamma in (0, "auto")),
]


@cache
def pair(is_small: bool, device: torch.device) -> tuple[Path, Path]:
    """Return target and draft, which are written once."""
    folder = new_folder()
    target, draft = (SMALL, SMALL) if is_small else (LLAMA_8B, LLAMA_1B)
    return (
        write_shape(DEMO / "target", target, folder / "target", device),
        write_shape(DEMO / ("target" if is_small else "draft"), draft, folder / "draft", device),
    )


@contextmanager
def opened(scale: Scale, *, has_draft: bool) -> Iterator[LLM]:
    device = torch.device("cpu") if scale.is_small else scale.device
    target, draft = pair(scale.is_small, device)
    keys: dict[str, object] = {
        "target.device": "cuda",
        "draft.device": "cuda",
        "target.dtype": "bfloat16",
        "draft.dtype": "bfloat16",
        "cache.prefix_caching": False,
        "cache.pages": 400 if scale.is_small else 9000,
        "limits.max_running": 64,
        **({} if has_draft else {"draft.kind": "none"}),
    }
    with LLM(target, draft if has_draft else None, **keys) as llm:
        yield llm


def generate(llm: LLM, prompts: Sequence[Sequence[int]], cell: Cell, tokens: int) -> list[Output]:
    wanted = Speculation(gamma=None if cell.gamma == "auto" else int(cell.gamma))
    sampling = Sampling(
        max_tokens=tokens, temperature=cell.temperature, seed=7, ignore_eos=True, speculation=wanted
    )
    return llm.generate([list(prompt) for prompt in prompts], sampling)


def measure(scale: Scale, cells: Sequence[Cell], *, has_draft: bool) -> Results:
    found: dict[str, object] = {}
    tokens, repeats = (6, 1) if scale.is_small else (TOKENS, REPEATS)
    with opened(scale, has_draft=has_draft) as llm:
        plain: dict[tuple[int, float], list[tuple[int, ...]]] = {}
        for cell in cells[:2] if scale.is_small else cells:
            prompts = held_out_prompts(count=cell.streams, length=PROMPT)
            generate(llm, prompts, cell, tokens)  # captures, compiles, and teaches the pacer
            speeds, outputs = [], list[Output]()
            for _ in range(repeats):
                started = perf_counter()
                outputs = generate(llm, prompts, cell, tokens)
                speeds.append(sum(len(each.token_ids) for each in outputs) / _since(started))
            texts = [tuple(each.token_ids) for each in outputs]
            known = plain.setdefault((cell.streams, cell.temperature), texts)
            stats = [each.stats for each in outputs if each.stats is not None]
            line = f"{sorted(speeds)[len(speeds) // 2]:,.0f} tokens/s "
            line += f"({min(speeds):,.0f} to {max(speeds):,.0f})"
            if cell.gamma != 0:
                accepted, drafted = (sum(getattr(one, key) for one in stats) for key in WORDS)
                same = sum(one == other for one, other in zip(texts, known, strict=True))
                line += f", {accepted} of {drafted} draft tokens accepted, {same} of "
                line += f"{cell.streams} texts as without"
            if cell.is_profiled and not scale.is_small:
                line += f", card busy {_busy_share(llm, prompts, cell):.1%}"
            found[str(cell)] = line
    return found


WORDS = ("accepted", "drafted")


def _since(started: float) -> float:
    return perf_counter() - started


def _busy_share(llm: LLM, prompts: Sequence[Sequence[int]], cell: Cell) -> float:
    """Return the share of the time from the first kernel to the last in which one ran."""
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        generate(llm, prompts, cell, TOKENS)
        torch.cuda.synchronize()
    ranges = sorted(
        (event.time_range.start, event.time_range.end)
        for event in record.events() or ()
        if event.device_type == DeviceType.CUDA
    )
    start, busy = float(ranges[0][0]), 0.0
    stop = start
    for first, last in ranges:
        busy += max(0.0, last - max(first, stop))
        stop = max(stop, float(last))
    return busy / (stop - start)


def decode_plainly(scale: Scale) -> Results:
    return measure(scale, PLAIN, has_draft=False)


def decode_with_draft(scale: Scale) -> Results:
    return measure(scale, DRAFTED, has_draft=True)


def prefill(scale: Scale) -> Results:
    """Time prompts whose first token ends them."""
    count, length = (2, 100) if scale.is_small else (PREFILL_BATCH, PREFILL)
    text = [token for prompt in held_out_prompts(count=64, length=PROMPT) for token in prompt]
    prompts = [text[first : first + length] for first in range(count)]
    found: dict[str, object] = {}
    with opened(scale, has_draft=False) as llm:
        for number in (1, count):
            generate(llm, prompts[:number], Cell(number), 1)
            started = perf_counter()
            generate(llm, prompts[:number], Cell(number), 1)
            speed = number * length / _since(started)
            found[f"{number} prompts of {length} tokens"] = f"{speed:,.0f} tokens/s"
    return found


SECTIONS: Mapping[str, Section] = {
    "8B, plain": decode_plainly,
    "8B with a draft of 1B": decode_with_draft,
    "8B, prompts": prefill,
}
