"""Waits and kernels of a steady round on an emulated card, by mode and batch.

`python -m tests.support.card.rounds` writes the table. Kernels inside a replayed graph are not
counted: the host launches them all at once.
"""

from __future__ import annotations

import argparse
import itertools
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path

import numpy as np
import torch

from specserve.drafters.anticipation import Anticipation
from specserve.drafters.base import ForkableDrafter
from specserve.drafters.branches import Fanout
from specserve.models.gpu import row_graphs
from specserve.models.model import ModelOptions, open_model
from specserve.models.target import TargetModel
from specserve.types import DraftStep, Policy, VerifyStep, Warp
from tests.support import checkpoints
from tests.support.card import Ledger, emulated_cards, flashinfer
from tests.support.engines import load_drafter, load_target

GAMMA, PROMPT, ROUNDS = 7, 100, 4
NUCLEUS = Warp(temperature=0.7, top_p=0.9)
PENALISED = Warp(temperature=0.7, top_p=0.9, presence_penalty=0.5, repetition_penalty=1.1)
OPTIONS = ModelOptions(dtype="bfloat16", device="cuda:0", attention="sdpa", pages=3000)
FLASHINFER_OPTIONS = replace(OPTIONS, attention="flashinfer")


@dataclass(frozen=True, slots=True)
class CardMode:
    """How the sequences of a round are drawn."""

    warp: Warp
    verifier: str = "block"
    logprobs: int | None = None


MODES: Mapping[str, CardMode] = {
    "greedy": CardMode(Warp(temperature=0.0)),
    "T = 1": CardMode(Warp()),
    "T = 0.7, top-p 0.9": CardMode(NUCLEUS),
    "T = 0.7, top-p 0.9, coupled": CardMode(NUCLEUS, "coupled"),
    "T = 0.7 with penalties": CardMode(PENALISED),
    "greedy with 5 logprobs": CardMode(Warp(temperature=0.0), logprobs=5),
}


@dataclass(frozen=True, slots=True)
class CardCounts:
    """Waits of the host and kernels that it launches in one stage of a round."""

    waits: int
    kernels: int
    details: str = field(compare=False)

    def __str__(self) -> str:
        return f"{self.waits}, {self.kernels}"


BY_FLASHINFER = ("greedy", "T = 0.7, top-p 0.9")
"""Modes that are counted with FlashInfer, too."""

Stage = Callable[[str], AbstractContextManager[None]]
"""Is entered for each stage of a round: `propose`, `verify` and `prepare`."""


def count_round(
    checkpoint: Path, mode: CardMode, gammas: Sequence[int], options: ModelOptions = OPTIONS
) -> dict[str, CardCounts]:
    """Count the stages of the last of several rounds."""
    counts: dict[str, CardCounts] = {}
    with emulated_cards() as ledger:
        pair = load_pair(checkpoint, options)
        run_rounds(*pair, mode, gammas, lambda name: _counting(ledger, counts, name))
    return counts


def load_pair(checkpoint: Path, options: ModelOptions) -> tuple[TargetModel, ForkableDrafter]:
    """Load a target onto the card, and a draft of the same weights."""
    target = load_target(checkpoint, options)
    return target, load_drafter(open_model(checkpoint, options), target.info, support=64)


def run_rounds(
    target: TargetModel,
    drafter: ForkableDrafter,
    mode: CardMode,
    gammas: Sequence[int],
    stage: Stage,
    *,
    prompt_length: int = PROMPT,
    num_rounds: int = ROUNDS,
) -> None:
    """Run rounds over sequences with these gammas, after one that reads their prompts."""
    num, length = len(gammas), prompt_length
    vocab = target.info.vocab_size
    text = tuple(np.random.default_rng(0).integers(3, vocab, length + num).tolist())
    # By its own clock, so that what is prepared does not depend on this machine's speed.
    anticipation = Anticipation(drafter, Fanout(), clock=itertools.count(0.0, 0.001).__next__)
    policies = [
        Policy(mode.warp, mode.verifier, seed, length, mode.logprobs) for seed in range(num)
    ]
    texts = [list(text[i : i + length]) for i in range(num)]
    cached, drafted = [0] * num, [0] * num
    for turn in range(num_rounds + 1):
        wanted = gammas if turn else [0] * num
        with stage("propose"):
            proposals = anticipation.propose(
                [
                    DraftStep(i, drafted[i], tuple(texts[i][drafted[i] :]), wanted[i], policy)
                    for i, policy in enumerate(policies)
                ],
                math.inf,
            )
        with stage("verify"):
            verdicts = target.verify(
                [
                    VerifyStep(
                        i,
                        cached[i],
                        tuple(texts[i][cached[i] :]),
                        proposals[i].tokens,
                        proposals[i].q,
                        policy,
                    )
                    for i, policy in enumerate(policies)
                ]
            )
        with stage("prepare"):
            anticipation.prepare(lambda: False)
        for i, verdict in enumerate(verdicts):
            cached[i] = len(texts[i]) + verdict.accepted
            drafted[i] = min(cached[i], proposals[i].num_cached)
            texts[i] += [*proposals[i].tokens[: verdict.accepted], verdict.next_token]
    target.release(range(num))
    anticipation.release(range(num))
    anticipation.prepare(lambda: False)  # drops the branches, too


@contextmanager
def _counting(ledger: Ledger, counts: dict[str, CardCounts], stage: str) -> Iterator[None]:
    ledger.clear()
    yield
    # A capture happens once for each of its sizes, in no steady round.
    captures = sum(n for (_, place), n in ledger.waits.items() if "graph_capture.py" in place)
    counts[stage] = CardCounts(ledger.num_waits - captures, ledger.num_kernels, str(ledger))


def uneven(batch: int) -> list[int]:
    """Return gammas as a pacer gives them: three different ones in turn."""
    return [GAMMA - i % 3 for i in range(batch)]


def table(
    checkpoint: Path,
    batches: Sequence[int],
    modes: Sequence[str],
    by_flashinfer: Sequence[str],
    graph_rows: tuple[int, ...],
) -> Iterator[str]:
    """Yield the lines of the table."""
    yield "| mode | batch | propose | verify | prepare |"
    yield "|---|---|---|---|---|"
    for name in modes:
        for batch in batches:
            gammas, described = uneven(batch), f"{batch}, uneven" if batch > 1 else "1"
            found = count_round(checkpoint, MODES[name], gammas)
            yield f"| {name} | {described} | {' | '.join(map(str, found.values()))} |"
    for name in by_flashinfer:
        for batch in batches:
            gammas, described = uneven(batch), f"{batch}, uneven" if batch > 1 else "1"
            with flashinfer.installed(graph_rows=graph_rows):
                found = count_round(checkpoint, MODES[name], gammas, FLASHINFER_OPTIONS)
            counts = " | ".join(map(str, found.values()))
            yield f"| {name}, FlashInfer | {described} | {counts} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--quick", action="store_true", help="one sequence in one mode")
    parser.add_argument("--details", choices=MODES, help="waits by their place, of this mode alone")
    parser.add_argument("--out", type=Path, help="write the page here, too")
    args = parser.parse_args()
    modes: Sequence[str] = tuple(MODES)
    by_flashinfer: Sequence[str] = BY_FLASHINFER
    batches: Sequence[int] = (1, args.batch)
    graph_rows = row_graphs.ROWS
    if args.quick:
        batches, modes, by_flashinfer = (1,), ("greedy",), ("greedy",)
        graph_rows = graph_rows[:4]  # each is captured
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = checkpoints.make("llama", Path(directory) / "llama")
        if args.details is not None:
            counts = count_round(checkpoint, MODES[args.details], uneven(args.batch))
            for stage, found in counts.items():
                print(f"{stage}: {found.details}")
            return
        lines = "\n".join(table(checkpoint, batches, modes, by_flashinfer, graph_rows))
    text = (
        f"{date.today()}, torch {torch.__version__}, an emulated card. Waits of the host and "
        f"kernels that it launches in one steady round: a Llama of two layers, gamma up to {GAMMA}"
        f", anticipation on, attention by torch where nothing else is said.\n\n{lines}\n"
    )
    print(text)
    if args.out:
        args.out.write_text(
            "# Waits and kernels on a card\n\n`python -m tests.support.card.rounds`\n\n" + text
        )


if __name__ == "__main__":
    main()
