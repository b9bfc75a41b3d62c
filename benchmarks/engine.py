"""The engine in one process against transformers, on the widened demo target: `python -m benchmarks.engine`.

Everything is measured in one run, in turns (A B A B), and reported as medians with their spread.
"""

from __future__ import annotations

import argparse
import math
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.meters import Floor, against_floor, metered, shares
from specserve.config.tree import DEMO
from specserve.demo.corpus import held_out_prompts
from specserve.llm import LLM
from specserve.sampling_params import Sampling
from specserve.theory import tokens_per_round
from specserve.tools.inflate import inflate
from specserve.types import DraftStep, Policy, VerifyStep, Warp

GAMMA, TOKENS, WIDE = 7, 128, 16


@dataclass(frozen=True, slots=True)
class Sample:
    """Output tokens a second of one closed loop, in every turn."""

    name: str
    rates: tuple[float, ...]

    @property
    def middle(self) -> float:
        return median(self.rates)

    def against(self, other: Sample) -> float:
        """The ratio, turn by turn."""
        return median(mine / theirs for mine, theirs in zip(self.rates, other.rates, strict=True))

    def __str__(self) -> str:
        return (
            f"| {self.name} | {self.middle:.1f} | {min(self.rates):.1f} to {max(self.rates):.1f} |"
        )


class Peer:
    """transformers' own generate(), plain or assisted."""

    def __init__(self, target: Path, draft: Path) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        library: Any = logging
        library.set_verbosity_error()
        library.disable_progress_bar()
        load: Any = AutoModelForCausalLM.from_pretrained
        self.target = load(target, dtype=torch.bfloat16)
        self.draft = load(draft, dtype=torch.bfloat16)
        self.draft.generation_config.num_assistant_tokens = GAMMA
        self.draft.generation_config.num_assistant_tokens_schedule = "constant"
        self.draft.generation_config.assistant_confidence_threshold = 0.0

    def tokens(self, prompt: Sequence[int], *, assisted: bool) -> int:
        ids = torch.tensor([list(prompt)])
        more: dict[str, Any] = {"assistant_model": self.draft} if assisted else {}
        out = self.target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=TOKENS,
            min_new_tokens=TOKENS,
            do_sample=False,
            pad_token_id=0,
            **more,
        )
        return int(out.shape[1] - len(prompt))


class Ours:
    """One engine at a fixed gamma, with a meter on it."""

    def __init__(self, target: Path, draft: Path, *, gamma: int, threads: int) -> None:
        keys: dict[str, object] = {
            "speculation.gamma": gamma,
            "cache.prefix_caching": False,
            "target.threads": threads,
            "draft.threads": 1,
        }
        self.llm = LLM(target, draft, **keys)
        self.meter = metered(self.llm)

    def tokens(self, prompts: Sequence[Sequence[int]], *, max_tokens: int = TOKENS) -> int:
        outputs = self.llm.generate(
            list(prompts), Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        )
        return sum(len(output.token_ids) for output in outputs)


def in_turns(runs: dict[str, Callable[[int], int]], *, turns: int) -> dict[str, Sample]:
    """Each of the runs once a turn, after one that does not count; a run is given the turn's number."""
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(-1, turns):
        for name, run in runs.items():
            start = time.perf_counter()
            tokens = run(max(turn, 0))
            if turn >= 0:
                rates[name].append(tokens / (time.perf_counter() - start))
    return {name: Sample(name, tuple(values)) for name, values in rates.items()}


@dataclass(frozen=True, slots=True)
class Round:
    """Where the time of lockstep rounds goes, and what Theorem 3.8 says of the same alpha, gamma and passes."""

    alpha: float
    draft_pass: float
    verify_pass: float
    measured: float  # tokens a second while decoding
    predicted: float
    host_share: float


def lockstep(ours: Ours, prompts: Sequence[Sequence[int]]) -> Round:
    """Batch 1, one prompt after the other; the reading of the prompts is taken out of the time."""
    ours.meter.reset()
    tokens, seconds, reading = 0, 0.0, 0.0
    for prompt in prompts:
        start = time.perf_counter()
        ours.tokens([prompt], max_tokens=1)
        middle = time.perf_counter()
        tokens += ours.tokens([prompt]) - 1
        reading += middle - start
        seconds += time.perf_counter() - middle
    meter = ours.meter
    draft, verify = meter.draft.typical(1), meter.target.typical(GAMMA + 1)
    expected = tokens_per_round(meter.alpha, GAMMA)
    forward = meter.target.total + meter.draft.total
    return Round(
        alpha=meter.alpha,
        draft_pass=draft,
        verify_pass=verify,
        measured=tokens / (seconds - reading),
        predicted=expected / (GAMMA * draft + verify),
        host_share=1 - forward / (seconds + reading),
    )


def decoding(ours: Ours, prompts: Sequence[Sequence[int]]) -> float:
    """Output tokens a second of decoding together, the reading of the prompts taken out."""
    start = time.perf_counter()
    first = ours.tokens(prompts, max_tokens=1)
    middle = time.perf_counter()
    tokens = ours.tokens(prompts) - first
    return tokens / (time.perf_counter() - middle - (middle - start))


@dataclass(frozen=True, slots=True)
class Steps:
    """Seconds of one step for one sequence on one thread, all that the worker does for it included."""

    draft: float
    target: float


def demo_steps(prompt: Sequence[int], *, times: int = 200) -> Steps:
    """Of the demo pair as it ships, in turns."""
    keys: dict[str, object] = {"speculation.gamma": 0}
    with LLM(None, None, **keys) as llm:
        coordinator: Any = llm._coordinator
        drafter, target = coordinator.drafter._model, coordinator.target._model
        torch.set_num_threads(1)
        policy = Policy(Warp(temperature=0.0), "block", 0, len(prompt))
        prompt, newest = tuple(prompt), tuple(prompt[:1])
        drafter.propose([DraftStep(0, 0, prompt, 0, policy)], math.inf)
        target.verify([VerifyStep(0, 0, prompt, (), None, policy)])
        seconds: dict[str, list[float]] = {"draft": [], "target": []}
        for _ in range(times):
            start = time.perf_counter()
            drafter.propose([DraftStep(0, len(prompt), newest, GAMMA, policy)], math.inf)
            middle = time.perf_counter()
            target.verify([VerifyStep(0, len(prompt), newest, (), None, policy)])
            seconds["draft"].append((middle - start) / GAMMA)
            seconds["target"].append(time.perf_counter() - middle)
    return Steps(median(seconds["draft"]), median(seconds["target"]))


@dataclass(frozen=True, slots=True)
class Figures:
    """All that one run has measured."""

    samples: dict[str, Sample]
    floor: Floor
    wider: float  # how much faster a wide batch decodes than a single sequence
    round: Round
    steps: Steps

    def rows(self) -> list[tuple[str, str, str]]:
        """(figure, value, goal)"""
        ours, theirs, fast, assisted, wide = self.samples.values()
        floor, round_, steps = self.floor, self.round, self.steps
        step, read = (f"{median(seconds) * 1e3:.2f} ms" for seconds in (floor.steps, floor.reads))
        passes = f"{round_.draft_pass * 1e3:.2f} ms, {round_.verify_pass * 1e3:.2f} ms"
        return [
            ("plain against transformers, batch 1", f"{ours.against(theirs):.2f}", "2"),
            (
                f"plain step ({step}) / reading the weights ({read})",
                f"{floor.ratio:.2f}",
                "at most 1.3",
            ),
            (
                f"batch {WIDE} against batch 1, decoding (in brackets: prompts included)",
                f"{self.wider:.2f} ({wide.against(ours):.2f})",
                "6",
            ),
            (f"gamma {GAMMA} against transformers assisted", f"{fast.against(assisted):.2f}", "2"),
            (f"gamma {GAMMA} against plain", f"{fast.against(ours):.2f}", ""),
            (
                f"lockstep ({round_.measured:.0f} tokens/s) against Theorem 3.8",
                f"{round_.measured / round_.predicted:.3f}",
                "0.9",
            ),
            (
                f"alpha; draft pass, verify pass of {GAMMA + 1} rows",
                f"{round_.alpha:.3f}; {passes}",
                "",
            ),
            (
                "draft step of the shipped pair, one thread",
                f"{steps.draft * 1e3:.3f} ms",
                "at most 0.5 ms",
            ),
            (
                "the same / a step of the shipped target",
                f"{steps.draft / steps.target:.3f}",
                "at most 0.2",
            ),
            ("host overhead outside forward passes", f"{round_.host_share:.1%}", "at most 5%"),
        ]


def measured(plain: Ours, guessing: Ours, peer: Peer, *, turns: int, weights: int) -> Figures:
    prompts = held_out_prompts(count=WIDE, length=TOKENS)
    samples = in_turns(
        {
            "specserve, plain, batch 1": lambda turn: plain.tokens([prompts[turn]]),
            "transformers, plain, batch 1": lambda turn: peer.tokens(prompts[turn], assisted=False),
            f"specserve, gamma {GAMMA}, batch 1": lambda turn: guessing.tokens([prompts[turn]]),
            f"transformers, assisted by {GAMMA}, batch 1": lambda turn: peer.tokens(
                prompts[turn], assisted=True
            ),
            f"specserve, plain, batch {WIDE}": lambda _: plain.tokens(prompts),
        },
        turns=turns,
    )
    return Figures(
        samples,
        against_floor(
            plain.llm,
            lambda: [plain.tokens([prompt]) for prompt in prompts[:turns]],
            num_bytes=weights,
        ),
        median(
            decoding(plain, prompts) / decoding(plain, [prompts[turn]]) for turn in range(turns)
        ),
        lockstep(guessing, prompts[:turns]),
        demo_steps(prompts[0]),
    )


def report(target: Path, draft: Path, *, turns: int, threads: int) -> str:
    torch.set_num_threads(threads)
    plain, guessing = (Ours(target, draft, gamma=gamma, threads=threads) for gamma in (0, GAMMA))
    weights = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    figures = measured(plain, guessing, Peer(target, draft), turns=turns, weights=weights)
    rows = [
        "| output tokens a second | median | spread |",
        "|---|---|---|",
        *map(str, figures.samples.values()),
        "",
    ]
    rows += [
        "| figure | value | goal |",
        "|---|---|---|",
        *(f"| {name} | {value} | {goal} |" for name, value, goal in figures.rows()),
    ]
    prompts = held_out_prompts(count=1, length=TOKENS)
    spent = shares(lambda: guessing.tokens(prompts))
    rows += [
        "",
        f"| where the time of gamma {GAMMA} goes (torch.profiler, which slows Python down) | share |",
        "|---|---|",
    ]
    rows += [f"| {kind} | {share:.1%} |" for kind, share in spent.items()]
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--params", type=int, default=200_000_000, help="parameters of the widened target"
    )
    parser.add_argument("--out", type=Path, help="write the report here, too")
    args = parser.parse_args()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        params = inflate(DEMO / "target", args.params, directory / "target")
        table = report(directory / "target", DEMO / "draft", turns=args.turns, threads=args.threads)
    machine = (
        f"{date.today()}, {platform.machine()}, {args.threads} threads, torch {torch.__version__}"
    )
    work = f"demo target widened to {params / 1e6:.0f}M, bf16, greedy, {TOKENS} tokens in and out, {args.turns} turns"
    text = f"{machine}; {work}.\n\n{table}\n"
    print(text)
    if args.out:
        args.out.write_text(f"# The engine in one process\n\n`make bench`\n\n{text}")


if __name__ == "__main__":
    main()
