"""The engine in one process beside transformers, on the widened demo target.

`python -m lab.bench.engine` measures everything in one run, in turns (A B A B), and reports
medians with their spread.
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

from lab.bench import without_amx
from lab.bench.meters import (
    MemoryFloor,
    attach_meter,
    measure_memory_floor,
    models_of,
)
from specserve.config.tree import DEMO
from specserve.demo.corpus import held_out_prompts
from specserve.llm.llm import LLM
from specserve.models.checkpoints.weights import num_stored_parameters
from specserve.models.checkpoints.widen import inflate
from specserve.models.cpu import row_invariance
from specserve.models.cpu.linear_kernels import LinearKernel
from specserve.sampling_params import Sampling
from specserve.theory import tokens_per_round
from specserve.types import DraftStep, Policy, VerifyStep, Warp

GAMMA = 7
TOKENS, QUICK_TOKENS = 128, 24
STEPS, QUICK_STEPS = 200, 20
BATCH = 16


@dataclass(frozen=True, slots=True)
class ThroughputSample:
    """Output tokens per second of one closed loop, in every turn."""

    name: str
    rates: tuple[float, ...]

    @property
    def median_rate(self) -> float:
        return median(self.rates)

    def ratio_to(self, other: ThroughputSample) -> float:
        """Return the median of the ratios of each turn."""
        return median(mine / theirs for mine, theirs in zip(self.rates, other.rates, strict=True))

    def __str__(self) -> str:
        return (
            f"| {self.name} | {self.median_rate:.1f} "
            f"| {min(self.rates):.1f} to {max(self.rates):.1f} |"
        )


class TransformersEngine:
    """The `generate` of transformers, plain or assisted by a draft model."""

    def __init__(self, target: Path, draft: Path, *, tokens: int) -> None:
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
        self.tokens = tokens

    def generate(self, prompt: Sequence[int], *, assisted: bool) -> int:
        """Continue the prompt and return the number of output tokens."""
        ids = torch.tensor([list(prompt)])
        assistant: dict[str, Any] = {"assistant_model": self.draft} if assisted else {}
        out = self.target.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self.tokens,
            min_new_tokens=self.tokens,
            do_sample=False,
            pad_token_id=0,
            **assistant,
        )
        return int(out.shape[1] - len(prompt))


class MeteredEngine:
    """One LLM at a fixed gamma, with a meter attached."""

    def __init__(self, target: Path, draft: Path, *, gamma: int, threads: int, tokens: int) -> None:
        keys: dict[str, object] = {
            "speculation.gamma": gamma,
            "cache.prefix_caching": False,
            "target.threads": threads,
            "draft.threads": 1,
        }
        self.llm = LLM(target, draft, **keys)
        self.meter = attach_meter(self.llm)
        self.tokens = tokens

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_tokens: int | None = None,
        repetition_penalty: float = 1.0,
    ) -> int:
        """Continue the prompts together and return the number of output tokens."""
        sampling = Sampling(
            max_tokens=max_tokens or self.tokens,
            temperature=0.0,
            ignore_eos=True,
            repetition_penalty=repetition_penalty,
        )
        outputs = self.llm.generate(list(prompts), sampling)
        return sum(len(output.token_ids) for output in outputs)


def run_in_turns(
    runs: dict[str, Callable[[int], int]], *, turns: int
) -> dict[str, ThroughputSample]:
    """Measure each run once a turn, after a warm-up turn that is not counted.

    A run gets the number of the turn and returns the number of its output tokens.
    """
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(-1, turns):
        for name, run in runs.items():
            start = time.perf_counter()
            tokens = run(max(turn, 0))
            if turn >= 0:
                rates[name].append(tokens / (time.perf_counter() - start))
    return {name: ThroughputSample(name, tuple(values)) for name, values in rates.items()}


@dataclass(frozen=True, slots=True)
class LockstepRound:
    """Times and rates of lockstep rounds.

    Theorem 3.8 predicts `predicted_rate` for the same alpha, gamma and passes.
    """

    alpha: float
    draft_pass: float
    verify_pass: float
    measured_rate: float  # tokens per second while decoding
    predicted_rate: float
    host_share: float


def measure_lockstep(engine: MeteredEngine, prompts: Sequence[Sequence[int]]) -> LockstepRound:
    """Measure batch 1, one prompt after the other, without the time of the prefill."""
    engine.meter.reset()
    tokens, seconds, prefill = 0, 0.0, 0.0
    for prompt in prompts:
        start = time.perf_counter()
        engine.generate([prompt], max_tokens=1)
        middle = time.perf_counter()
        tokens += engine.generate([prompt]) - 1
        prefill += middle - start
        seconds += time.perf_counter() - middle
    meter = engine.meter
    draft, verify = meter.draft.median_seconds(1), meter.target.median_seconds(GAMMA + 1)
    expected = tokens_per_round(meter.alpha, GAMMA)
    forward = meter.target.total + meter.draft.total
    return LockstepRound(
        alpha=meter.alpha,
        draft_pass=draft,
        verify_pass=verify,
        measured_rate=tokens / (seconds - prefill),
        predicted_rate=expected / (GAMMA * draft + verify),
        host_share=1 - forward / (seconds + prefill),
    )


def decode_rate(engine: MeteredEngine, prompts: Sequence[Sequence[int]]) -> float:
    """Return the output tokens per second of decoding together, without the prefill."""
    start = time.perf_counter()
    first = engine.generate(prompts, max_tokens=1)
    middle = time.perf_counter()
    tokens = engine.generate(prompts) - first
    return tokens / (time.perf_counter() - middle - (middle - start))


def verify_over_step(
    plain: MeteredEngine, drafting: MeteredEngine, prompts: Sequence[Sequence[int]]
) -> float:
    """Return the time of verifying GAMMA draft tokens over that of a plain pass, in turns."""
    ratios = []
    for prompt in prompts:
        for engine in (plain, drafting):
            engine.meter.reset()
            engine.generate([prompt])
        verify = drafting.meter.target.median_seconds(GAMMA + 1)
        ratios.append(verify / plain.meter.target.median_seconds(1))
    return median(ratios)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one step of one sequence on one thread, with all of the worker's work for it."""

    draft: float
    target: float


def time_demo_steps(prompt: Sequence[int], *, times: int = STEPS) -> StepTimes:
    """Measure the demo pair as it ships, draft and target in turns."""
    keys: dict[str, object] = {"speculation.gamma": 0}
    with LLM(None, None, **keys) as llm:
        target, drafter = models_of(llm)
        assert drafter is not None
        torch.set_num_threads(1)
        policy = Policy(Warp(temperature=0.0), "block", 0, len(prompt))
        prompt = tuple(prompt)
        drafter.propose([DraftStep(0, 0, prompt, 0, policy)], math.inf)
        target.verify([VerifyStep(0, 0, prompt, (), None, policy)])
        seconds: dict[str, list[float]] = {"draft": [], "target": []}
        for turn in range(times):
            newest = (turn,)  # another token each time, or the drafter returns the last proposal
            start = time.perf_counter()
            drafter.propose([DraftStep(0, len(prompt), newest, GAMMA, policy)], math.inf)
            middle = time.perf_counter()
            target.verify([VerifyStep(0, len(prompt), newest, (), None, policy)])
            seconds["draft"].append((middle - start) / GAMMA)
            seconds["target"].append(time.perf_counter() - middle)
    return StepTimes(median(seconds["draft"]), median(seconds["target"]))


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """All figures of one run."""

    samples: dict[str, ThroughputSample]
    floor: MemoryFloor
    batch_speedup: float  # decoding BATCH sequences over decoding one, in tokens per second
    verify_over_step: float
    round: LockstepRound
    steps: StepTimes

    def rows(self) -> list[tuple[str, str, str]]:
        """Return each figure with its value and its goal."""
        plain, peer, drafting, assisted, batched, penalised = self.samples.values()
        floor, round_, steps = self.floor, self.round, self.steps
        step, read = (f"{median(seconds) * 1e3:.2f} ms" for seconds in (floor.steps, floor.reads))
        passes = f"{round_.draft_pass * 1e3:.2f} ms, {round_.verify_pass * 1e3:.2f} ms"
        return [
            ("plain against transformers, batch 1", f"{plain.ratio_to(peer):.2f}", "2"),
            (
                f"plain step ({step}) / reading the weights ({read})",
                f"{floor.ratio:.2f}",
                "at most 1.3",
            ),
            (
                f"verification of {GAMMA + 1} rows / a plain pass",
                f"{self.verify_over_step:.2f}",
                "at most 1.1",
            ),
            (
                f"batch {BATCH} against batch 1, decoding (in brackets: prompts included)",
                f"{self.batch_speedup:.2f} ({batched.ratio_to(plain):.2f})",
                "6",
            ),
            (
                f"batch {BATCH} with a repetition penalty against without",
                f"{penalised.ratio_to(batched):.2f}",
                "",
            ),
            (
                f"gamma {GAMMA} against transformers assisted",
                f"{drafting.ratio_to(assisted):.2f}",
                "2",
            ),
            (f"gamma {GAMMA} against plain", f"{drafting.ratio_to(plain):.2f}", ""),
            (
                f"lockstep ({round_.measured_rate:.0f} tokens/s) against Theorem 3.8",
                f"{round_.measured_rate / round_.predicted_rate:.3f}",
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
            ("host overhead outside forward passes", f"{round_.host_share:.1%}", "at most 4%"),
        ]


def measure(
    plain: MeteredEngine,
    drafting: MeteredEngine,
    peer: TransformersEngine,
    *,
    turns: int,
    weights: int,
    steps: int,
) -> EngineFigures:
    prompts = held_out_prompts(count=max(BATCH, turns), length=plain.tokens)
    batch = prompts[:BATCH]
    samples = run_in_turns(
        {
            "specserve, plain, batch 1": lambda turn: plain.generate([prompts[turn]]),
            "transformers, plain, batch 1": lambda turn: peer.generate(
                prompts[turn], assisted=False
            ),
            f"specserve, gamma {GAMMA}, batch 1": lambda turn: drafting.generate([prompts[turn]]),
            f"transformers, assisted by {GAMMA}, batch 1": lambda turn: peer.generate(
                prompts[turn], assisted=True
            ),
            f"specserve, plain, batch {BATCH}": lambda _: plain.generate(batch),
            f"specserve, plain, batch {BATCH}, repetition penalty": lambda _: plain.generate(
                batch, repetition_penalty=1.1
            ),
        },
        turns=turns,
    )
    return EngineFigures(
        samples,
        measure_memory_floor(
            plain.llm,
            lambda: [plain.generate([prompt]) for prompt in prompts[:turns]],
            num_bytes=weights,
        ),
        median(
            decode_rate(plain, batch) / decode_rate(plain, [prompts[turn]]) for turn in range(turns)
        ),
        verify_over_step(plain, drafting, prompts[:turns]),
        measure_lockstep(drafting, prompts[:turns]),
        time_demo_steps(prompts[0], times=steps),
    )


def report(target: Path, draft: Path, *, turns: int, threads: int, tokens: int, steps: int) -> str:
    """Measure everything and return the tables."""
    torch.set_num_threads(threads)
    plain, drafting = (
        MeteredEngine(target, draft, gamma=gamma, threads=threads, tokens=tokens)
        for gamma in (0, GAMMA)
    )
    weights = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    peer = TransformersEngine(target, draft, tokens=tokens)
    figures = measure(plain, drafting, peer, turns=turns, weights=weights, steps=steps)
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
    return "\n".join(rows)


def fail_check(names: Sequence[str]) -> None:
    """Let kernels of these names fail where they are tried: each is replaced by the next."""
    tried = row_invariance.is_row_invariant

    def is_row_invariant(kernel: LinearKernel, *shape: Any) -> bool:
        return kernel.name not in names and tried(kernel, *shape)

    row_invariance.is_row_invariant = is_row_invariant  # type: ignore[assignment]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--params", type=int, default=200_000_000, help="parameters of the widened target"
    )
    parser.add_argument(
        "--failing",
        nargs="+",
        choices=("compiled", "onednn"),
        default=(),
        help="kernels that fail the check of row invariance, as on some processors",
    )
    without_amx.add_option(parser)
    parser.add_argument("--out", type=Path, help="write the report here, too")
    parser.add_argument("--quick", action="store_true", help="a tiny form, to see that it works")
    args = parser.parse_args()
    without_amx.obey(args)
    if args.failing:
        fail_check(args.failing)
    if args.quick:
        args.turns = args.threads = 1
    tokens, steps = (QUICK_TOKENS, QUICK_STEPS) if args.quick else (TOKENS, STEPS)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        target = DEMO / "target" if args.quick else directory / "target"
        params = (
            num_stored_parameters(target)
            if args.quick
            else inflate(DEMO / "target", args.params, target)
        )
        table = report(
            target,
            DEMO / "draft",
            turns=args.turns,
            threads=args.threads,
            tokens=tokens,
            steps=steps,
        )
    machine = (
        f"{date.today()}, {platform.machine()}, {args.threads} threads, torch {torch.__version__}"
    )
    work = (
        f"demo target widened to {params / 1e6:.0f}M, bf16, greedy, {tokens} tokens in and out, "
        f"{args.turns} turns"
    )
    text = f"{machine}; {work}.\n\n{table}\n"
    print(text)
    if args.out:
        args.out.write_text(
            f"# The engine in one process\n\n`python -m lab.bench.engine`\n\n{text}"
        )


if __name__ == "__main__":
    main()
