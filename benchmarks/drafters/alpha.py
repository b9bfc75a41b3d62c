"""alpha as measured beside sum min(p, q), for any drafter. Knows no kinds.

Texts are written at temperature 1 under `speculative`; the drafter's proposals are noted on the way. A place counts if it was judged. There q is
what its token was drawn from, and p what the library says the target's distribution is behind the very text that was written.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.drafters.recording_drafter import Noting
from specserve.config.tree import parse
from specserve.inprocess import open_parts
from specserve.llm import LLM, Output
from specserve.sampling_params import Sampling
from specserve.types import Proposal

GAMMA = 4  # tokens drafted
PAGES = 2048
Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Judged:
    """A draft token that the target looked at."""

    place: int  # in its proposal
    beta: float  # sum min(p, q): the acceptance that p and q promise
    accepted: bool


@dataclass(frozen=True, slots=True)
class Share:
    """Of judged drafts: how many were accepted, and how many should have been."""

    judged: int
    accepted: int
    expected: float
    error: float  # of `accepted`, one standard deviation

    @classmethod
    def of(cls, drafts: Iterable[Judged]) -> Share:
        found = list(drafts)
        betas = [draft.beta for draft in found]
        return cls(
            len(found),
            sum(draft.accepted for draft in found),
            sum(betas),
            math.sqrt(sum(beta * (1 - beta) for beta in betas)),
        )

    @property
    def alpha(self) -> float:
        return self.accepted / self.judged

    @property
    def overlap(self) -> float:
        return self.expected / self.judged

    @property
    def errors_off(self) -> float:
        return (self.accepted - self.expected) / self.error if self.error else 0.0


@dataclass(frozen=True, slots=True)
class Found:
    """What became of one drafter's proposals."""

    rounds: int  # that asked for drafts
    proposed: int  # rounds that got some
    drafts: tuple[Judged, ...]

    @property
    def share(self) -> Share:
        return Share.of(self.drafts)

    def at(self, place: int) -> Share:
        return Share.of(draft for draft in self.drafts if draft.place == place)

    @property
    def tokens_per_round(self) -> float:
        return 1 + self.share.accepted / self.rounds


def measured(keys: Mapping[str, object], prompts: Prompts, module: Any, *, tokens: int) -> Found:
    """Of a drafter by its keys; `module` is the target as the library has it."""
    outputs, proposals = written(keys, prompts, tokens=tokens)
    return Found(
        len(proposals),
        sum(bool(one.tokens) for one in proposals),
        tuple(judged(outputs, proposals, module)),
    )


def written(
    keys: Mapping[str, object], prompts: Prompts, *, tokens: int
) -> tuple[list[Output], list[Proposal]]:
    own: dict[str, object] = {
        "target.dtype": "float32",
        "target.threads": 1,
        "draft.threads": 1,
        "cache.pages": PAGES,
        "speculation.gamma": GAMMA,
    }
    config = parse(own | dict(keys))
    parts = open_parts(config)
    assert parts.drafter is not None
    noting = Noting(parts.drafter)
    wanted = [
        Sampling(
            max_tokens=tokens, seed=i, ignore_eos=True, speculation={"verifier": "speculative"}
        )
        for i in range(len(prompts))
    ]
    with LLM.over(replace(parts, drafter=noting), config) as llm:
        return llm.generate(prompts, wanted), noting.proposals


def judged(
    outputs: Sequence[Output], proposals: Sequence[Proposal], module: Any
) -> Iterator[Judged]:
    """The sequences of an engine are numbered in the order of their prompts."""
    for seq_id, output in enumerate(outputs):
        text = (*output.prompt_token_ids, *output.token_ids)
        with torch.inference_mode():
            p: Tensor = (
                module(input_ids=torch.tensor([text])).logits[0].softmax(-1)
            )  # [tokens, vocab]
        for proposal in (one for one in proposals if one.seq_id == seq_id):
            yield from _looked_at(proposal, text, p)


def _looked_at(proposal: Proposal, text: Sequence[int], p: Tensor) -> Iterator[Judged]:
    """Up to the first refusal, or the end of the text. A token that was refused is never drawn anew, so one that agrees was accepted."""
    for place, token in enumerate(proposal.tokens):
        at = proposal.start + place
        if at >= len(text):
            return
        accepted = token == text[at]
        yield Judged(place, _overlap(proposal, place, p[at - 1]), accepted)
        if not accepted:
            return


def _overlap(proposal: Proposal, place: int, p: Tensor) -> float:
    """A draft that was certain has a one-hot q, whose overlap is p of its token."""
    if proposal.q is None:
        return float(p[proposal.tokens[place]])
    ids, q = torch.from_numpy(proposal.q.ids[place]), torch.from_numpy(proposal.q.probs[place])
    return float(torch.minimum(p[ids], q).sum())
