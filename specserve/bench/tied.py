"""Drafters tied to the demo target, on code that nobody was trained on: alpha as measured beside what p and q say. `python -m specserve.bench.tied`

Texts are written at temperature 1 under `speculative`; the drafter's proposals are noted on the way. A place counts if it was judged. There q is
what its token was drawn from, and p what the library says the target's distribution is behind the very text that was written.

With `--cost`, what heads add to a pass of the target instead: the same pass with and without them, in turns.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from specserve.bench.held_out import held_out_prompts
from specserve.config import DEMO, parse
from specserve.drafters.tied import HeadsDrafter
from specserve.llm import LLM, Output
from specserve.local import open_parts
from specserve.models.heads import require_heads_of
from specserve.models.load import load_model
from specserve.models.rank import open_rank
from specserve.models.target import TargetModel
from specserve.request import Sampling
from specserve.types import Drafter, DraftStep, Policy, Proposal, VerifyStep, Warp

GAMMA, LENGTH = 4, 128  # tokens drafted; tokens of a prompt
VARIANTS: dict[str, dict[str, object]] = {
    "heads": {"draft.kind": "heads"},
    "layer_skip": {"draft.kind": "layer_skip"},
    "layer_skip, without 2, 4": {"draft.kind": "layer_skip", "draft.skip": [2, 4]},
    "layer_skip, without 3": {"draft.kind": "layer_skip", "draft.skip": [3]},
}


@dataclass(slots=True)
class Noting:
    """A drafter that keeps what it proposed, in order."""

    drafter: Drafter
    proposals: list[Proposal] = field(default_factory=list)

    async def propose(self, steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]:
        proposals = await self.drafter.propose(steps, math.inf)
        self.proposals += proposals
        return proposals

    async def release(self, seq_ids: Sequence[int]) -> None:
        await self.drafter.release(seq_ids)


@dataclass(slots=True)
class Place:
    """The judged drafts of one place in a proposal."""

    judged: int = 0
    accepted: int = 0
    expected: float = 0.0  # sum of sum min(p, q)
    variance: float = 0.0

    def add(self, beta: float, *, accepted: bool) -> None:
        self.judged += 1
        self.accepted += accepted
        self.expected += beta
        self.variance += beta * (1 - beta)

    def row(self) -> str:
        alpha, expected, error = self.accepted / self.judged, self.expected / self.judged, math.sqrt(self.variance) / self.judged
        return f"{self.judged:,} | {alpha:.3f} | {expected:.3f} ± {error:.3f} | {(alpha - expected) / error:+.1f}"


def written(keys: dict[str, object], prompts: Sequence[Sequence[int]], *, tokens: int) -> tuple[list[Output], list[Proposal]]:
    config = parse({"target.dtype": "float32", "target.threads": 1, "draft.threads": 1, "cache.pages": 2048, "speculation.gamma": GAMMA} | keys)
    parts = open_parts(config)
    assert parts.drafter is not None
    noting = Noting(parts.drafter)
    wanted = [Sampling(max_tokens=tokens, seed=i, ignore_eos=True, speculation={"verifier": "speculative"}) for i in range(len(prompts))]
    with LLM.over(replace(parts, drafter=noting), config) as llm:
        return llm.generate(prompts, wanted), noting.proposals


def judged(outputs: Sequence[Output], proposals: Sequence[Proposal], module: Any) -> Iterator[tuple[int, float, bool]]:
    """Of each draft that was judged: its place in the proposal, sum min(p, q), and whether it was accepted."""
    for seq_id, output in enumerate(outputs):
        text = (*output.prompt_token_ids, *output.token_ids)
        with torch.inference_mode():
            p: Tensor = module(input_ids=torch.tensor([text])).logits[0].softmax(-1)  # [tokens, vocab]
        for proposal in (one for one in proposals if one.seq_id == seq_id and one.q is not None):
            assert proposal.q is not None
            for place, token in enumerate(proposal.tokens):
                at = proposal.start + place
                if at >= len(text):
                    break
                ids, q = torch.from_numpy(proposal.q.ids[place]), torch.from_numpy(proposal.q.probs[place])
                yield place, float(torch.minimum(p[at - 1, ids], q).sum()), token == text[at]  # a refused one is never drawn anew
                if token != text[at]:
                    break


def table(*, num_prompts: int, tokens: int) -> str:
    module = load_model(DEMO / "target", dtype=torch.float32, device="cpu").module
    prompts = held_out_prompts(count=num_prompts, length=LENGTH)
    rows = ["| drafter | place | judged | alpha measured | sum min(p, q) | standard errors off |", "|---|---|---|---|---|---|"]
    for name, keys in VARIANTS.items():
        places = [Place() for _ in range(GAMMA)]
        for place, beta, accepted in judged(*written(keys, prompts, tokens=tokens), module):
            places[place].add(beta, accepted=accepted)
        rows += [f"| {name} | {place + 1} | {one.row()} |" for place, one in enumerate(places) if one.judged]
    return "\n".join(rows)


def rounds(target: TargetModel, drafter: HeadsDrafter | None, *, sequences: int, number: int) -> list[float]:
    """Seconds of each of so many rounds that judge one token of each sequence, and draft behind it if there are heads."""
    policy = Policy(Warp(), "block", 1, LENGTH)
    target.verify([VerifyStep(i, 0, (i + 1,) * LENGTH, (), None, policy) for i in range(sequences)])
    seconds = []
    for start in range(LENGTH, LENGTH + number):
        begun = time.perf_counter()
        verdicts = target.verify([VerifyStep(i, start, (7,), (), None, policy) for i in range(sequences)])
        if drafter is not None:
            asked = [DraftStep(one.seq_id, start + 1, (one.next_token,), GAMMA, policy) for one in verdicts]
            assert all(proposal.tokens for proposal in drafter.propose(asked, math.inf))
        seconds.append(time.perf_counter() - begun)
    target.release(range(sequences))
    return seconds


def cost(checkpoint: Path, *, turns: int = 7, number: int = 30) -> str:
    """Of the demo target, or a widened copy of it, whose heads are the same."""
    keys: dict[str, object] = {"target.path": str(checkpoint), "draft.path": str(DEMO / "heads"), "cache.pages": 512}
    config = parse({"draft.kind": "heads"} | keys)
    require_heads_of(checkpoint, DEMO / "heads")
    alone, telling = open_rank(checkpoint, parse({"draft.kind": "none"} | keys)), open_rank(checkpoint, config)
    assert isinstance(alone, TargetModel)
    assert isinstance(telling, TargetModel)
    heads = HeadsDrafter.of(config, telling)
    rows = ["| sequences | pass alone, ms | with heads, ms | ratio |", "|---|---|---|---|"]
    for sequences in (1, 8, 32):
        pairs = [
            (median(rounds(alone, None, sequences=sequences, number=number)), median(rounds(telling, heads, sequences=sequences, number=number)))
            for _ in range(turns)
        ]
        plain, drafting = median(one for one, _ in pairs), median(other for _, other in pairs)
        ratios = sorted(other / one for one, other in pairs)
        rows.append(f"| {sequences} | {1e3 * plain:.2f} | {1e3 * drafting:.2f} | {median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=200, help="of each text")
    parser.add_argument("--cost", type=Path, metavar="DIR", help="of the demo target or a widened copy")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the report here, too")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    report = table(num_prompts=args.prompts, tokens=args.tokens) if args.cost is None else cost(args.cost)
    print(report)
    if args.out:
        args.out.write_text(f"# Drafters tied to the target\n\n`python -m specserve.bench.tied`\n\n{report}\n")


if __name__ == "__main__":
    main()
