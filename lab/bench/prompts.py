"""New prompts beside many running sequences, and equal prompts at once, on the real target.

`python -m lab.bench.prompts` measures the time to the first token of a new prompt and the longest
gap of the running sequences meanwhile, then what n continuations of one prompt compute.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from specserve.config.tree import DEMO, config_from_keys
from specserve.demo.corpus import held_out_tokens
from specserve.engine import Coordinator
from specserve.llm.inprocess import open_parts
from specserve.models.checkpoints.widen import inflate
from specserve.types import Chunk, Request, Warp

PROMPT = 300
SHORT_PROMPT = 16
RUNNING = (64, 256, 600)
CONTINUATIONS = 8
TOKENS = 700  # of a running sequence; none ends before the last new prompt has its first token
MAX_ROUNDS = 8
"""Rounds after which a prompt without a first token counts as starved."""


class MeteredCoordinator:
    """A coordinator over the target alone, in this process, that notes when tokens come."""

    def __init__(self, target: Path, keys: dict[str, object]) -> None:
        config = config_from_keys(
            {"target.path": str(target), "draft.kind": "none", "cache.pages": 26_000, **keys}
        )
        parts = open_parts(config)
        self.last_seen: dict[int, float] = {}  # when the newest token came, by sequence
        self.longest_gap = 0.0
        self.num_rows = 0  # that the target has computed
        self.coordinator = Coordinator(
            parts.target,
            None,
            info=parts.info,
            limits=config.limits,
            speculation=config.speculation,
            emit=self._note,
        )
        target_model: Any = parts.target
        self._count_rows(target_model._model.runner.network)

    def submit(self, prompt: Sequence[int], *, max_tokens: int) -> int:
        return self.coordinator.submit(
            Request(tuple(prompt), max_tokens, Warp(temperature=0.0), seed=1, ignore_eos=True)
        )

    def round(self) -> None:
        asyncio.run(self.coordinator.round())

    def end_all(self) -> None:
        for seq_id in self.last_seen:
            self.coordinator.cancel(seq_id)
        while self.coordinator.has_work:
            self.round()
        self.last_seen.clear()

    def _note(self, chunks: Sequence[Chunk]) -> None:
        now = time.perf_counter()
        for chunk in chunks:
            if chunk.tokens:
                before = self.last_seen.get(chunk.seq_id, now)
                self.longest_gap = max(self.longest_gap, now - before)
                self.last_seen[chunk.seq_id] = now

    def _count_rows(self, network: Any) -> None:
        forward = network.logits

        def counted(ids: Any, layout: Any, rows: Any) -> Any:
            self.num_rows += len(ids)
            return forward(ids, layout, rows)

        network.logits = counted


@dataclass(frozen=True, slots=True)
class NewPromptFigures:
    """Seconds of new prompts beside a number of running sequences."""

    running: int
    first_token: tuple[float, ...]  # of each prompt that got one
    num_starved: int  # prompts without a token after MAX_ROUNDS
    longest_gap: tuple[float, ...]  # of any running sequence, for each prompt
    plain_round: float  # median, of decoding alone

    def __str__(self) -> str:
        p50, p99 = (
            [f"{np.percentile(self.first_token, share):.3f}" for share in (50, 99)]
            if self.first_token
            else ("none", "none")
        )
        gap = f"{median(self.longest_gap):.3f} | {max(self.longest_gap):.3f}"
        return (
            f"| {self.running} | {len(self.first_token)} of "
            f"{len(self.first_token) + self.num_starved} | {p50} | {p99} | {gap} "
            f"| {self.plain_round:.3f} |"
        )


def measure_new_prompts(
    target: Path, text: Sequence[int], *, running: int, prompts: int, keys: dict[str, object]
) -> NewPromptFigures:
    """Submit one prompt after the other beside sequences that decode all the time."""
    engine = MeteredCoordinator(target, {"limits.max_running": running + 1, **keys})
    for i in range(running):
        engine.submit(text[i : i + SHORT_PROMPT], max_tokens=TOKENS)
    while len(engine.last_seen) < running:
        engine.round()
    plain = [_timed_round(engine) for _ in range(5)]
    first_token: list[float | None] = []
    gaps: list[float] = []
    for prompt in distinct_windows(text, count=1 + prompts):
        engine.longest_gap, start = 0.0, time.perf_counter()
        seq_id = engine.submit(prompt, max_tokens=2)
        for _ in range(MAX_ROUNDS):
            engine.round()
            if seq_id in engine.last_seen:
                break
        seen = engine.last_seen.get(seq_id)
        first_token.append(None if seen is None else seen - start)
        gaps.append(engine.longest_gap)
        engine.coordinator.cancel(seq_id)
        engine.round()
    engine.end_all()
    # The first passes of a shape take longer: the first prompt does not count.
    seconds = tuple(taken for taken in first_token[1:] if taken is not None)
    return NewPromptFigures(
        running, seconds, prompts - len(seconds), tuple(gaps[1:]), median(plain)
    )


@dataclass(frozen=True, slots=True)
class EqualPromptFigures:
    """Rows and seconds until all continuations of one prompt have their first token."""

    continuations: int
    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    first_seconds: tuple[float, ...]  # until the first of them has its own

    def __str__(self) -> str:
        return (
            f"| {self.continuations} | {median(self.rows):.0f} | {median(self.first_seconds):.3f} "
            f"| {median(self.seconds):.3f} | {min(self.seconds):.3f} to {max(self.seconds):.3f} |"
        )


def measure_equal_prompts(
    target: Path,
    text: Sequence[int],
    *,
    prompts: int,
    continuations: int,
    keys: dict[str, object],
) -> EqualPromptFigures:
    """Submit each prompt `continuations` times at once."""
    engine = MeteredCoordinator(target, keys)
    rows, seconds, first_seconds = [], [], []
    for prompt in distinct_windows(text, count=1 + prompts):
        engine.num_rows, start = 0, time.perf_counter()
        made = [engine.submit(prompt, max_tokens=30) for _ in range(continuations)]
        while not engine.last_seen:
            engine.round()
        first_seconds.append(time.perf_counter() - start)
        while len(engine.last_seen) < len(made):
            engine.round()
        seconds.append(time.perf_counter() - start)
        rows.append(engine.num_rows)
        engine.end_all()
    # The first passes of a shape take longer: the first prompt does not count.
    return EqualPromptFigures(
        continuations, tuple(rows[1:]), tuple(seconds[1:]), tuple(first_seconds[1:])
    )


def distinct_windows(text: Sequence[int], *, count: int) -> list[Sequence[int]]:
    """Return prompts of which no two begin alike."""
    return [text[i * PROMPT : (i + 1) * PROMPT] for i in range(count)]


def _timed_round(engine: MeteredCoordinator) -> float:
    start = time.perf_counter()
    engine.round()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=30, help="new prompts for each load")
    parser.add_argument("--running", type=int, nargs="*", default=RUNNING)
    parser.add_argument("--continuations", type=int, default=CONTINUATIONS)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--params", type=int, help="widen the demo target to so many parameters")
    parser.add_argument("--max-batch-tokens", type=int, help="instead of the hardware's")
    parser.add_argument("--quick", action="store_true", help="a tiny form, to see that it works")
    parser.add_argument("--json", type=Path, help="write all samples here, too")
    args = parser.parse_args()
    if args.quick:
        args.prompts, args.running = 2, (4,)
    keys: dict[str, object] = {"target.threads": args.threads}
    if args.max_batch_tokens:
        keys["limits.max_batch_tokens"] = args.max_batch_tokens
    torch.set_num_threads(args.threads)
    with ExitStack() as stack:
        target, params = DEMO / "target", 6_600_000
        if args.params:
            target = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "target"
            params = inflate(DEMO / "target", args.params, target)
        text = held_out_tokens(PROMPT * (1 + args.prompts) + max(args.running) + SHORT_PROMPT)
        print(
            f"{date.today()}, {platform.machine()}, {args.threads} threads, torch "
            f"{torch.__version__}; target of {params / 1e6:.0f}M parameters without a draft, "
            f"prompts of {PROMPT} tokens.\n\n"
            "| running | prompts with a token | TTFT p50 s | p99 s | longest gap of the running, "
            "median s | worst s | a round of decoding s |\n|---|---|---|---|---|---|---|"
        )
        new = []
        for running in args.running:
            new.append(
                measure_new_prompts(target, text, running=running, prompts=args.prompts, keys=keys)
            )
            print(new[-1], flush=True)
        equal = measure_equal_prompts(
            target,
            text,
            prompts=min(args.prompts, 10),
            continuations=args.continuations,
            keys=keys,
        )
    print(
        "\n| equal prompts at once | rows computed | first token s | all first tokens s | spread |"
        f"\n|---|---|---|---|---|\n{equal}"
    )
    if args.json:
        args.json.write_text(
            json.dumps({"new": [asdict(figures) for figures in new], "equal": asdict(equal)})
        )


if __name__ == "__main__":
    main()
