"""Compare measured alpha with sum min(p, q), for any drafter. Knows no kinds of drafters.

Texts are generated at temperature 1 under `speculative`, and the drafter's proposals are recorded.
Every verified draft token counts. Its q is the draft distribution that it was drawn from; its p is
the library's target distribution after the text as it was generated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from specserve.config.tree import config_from_keys
from specserve.llm.inprocess import open_parts
from specserve.llm.llm import LLM, Output
from specserve.sampling_params import Sampling
from specserve.types import Drafter, DraftStep, Proposal

GAMMA = 4
PAGES = 2048
Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class VerifiedToken:
    """Draft token that the target verified."""

    position: int
    """Index in its proposal."""
    beta: float
    """Expected acceptance, sum min(p, q)."""
    accepted: bool


@dataclass(frozen=True, slots=True)
class AlphaEstimate:
    """Number of verified draft tokens, how many were accepted, and how many p and q predict."""

    verified: int
    accepted: int
    expected: float
    error: float
    """Standard deviation of `accepted`."""

    @classmethod
    def from_tokens(cls, tokens: Iterable[VerifiedToken]) -> AlphaEstimate:
        verified = list(tokens)
        betas = [token.beta for token in verified]
        return cls(
            len(verified),
            sum(token.accepted for token in verified),
            sum(betas),
            math.sqrt(sum(beta * (1 - beta) for beta in betas)),
        )

    @property
    def alpha(self) -> float:
        return self.accepted / self.verified

    @property
    def overlap(self) -> float:
        return self.expected / self.verified

    @property
    def standard_errors_off(self) -> float:
        return (self.accepted - self.expected) / self.error if self.error else 0.0


@dataclass(frozen=True, slots=True)
class DrafterMeasurement:
    """Rounds and verified draft tokens of one drafter."""

    rounds: int
    """Rounds in which the drafter was called with a gamma above 0."""
    rounds_with_drafts: int
    """Rounds in which it proposed at least one token."""
    tokens: tuple[VerifiedToken, ...]

    @property
    def estimate(self) -> AlphaEstimate:
        return AlphaEstimate.from_tokens(self.tokens)

    def estimate_at(self, position: int) -> AlphaEstimate:
        return AlphaEstimate.from_tokens(
            token for token in self.tokens if token.position == position
        )

    @property
    def tokens_per_round(self) -> float:
        return 1 + self.estimate.accepted / self.rounds


@dataclass(slots=True)
class RecordingDrafter:
    """Drafter that passes every call on and keeps the proposals of rounds with a gamma, in order.

    It lifts the deadline, so that proposals are complete.
    """

    drafter: Drafter
    proposals: list[Proposal] = field(default_factory=list)

    async def propose(self, steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]:
        proposals = await self.drafter.propose(steps, math.inf)
        self.proposals += [
            proposal for step, proposal in zip(steps, proposals, strict=True) if step.gamma
        ]
        return proposals

    async def release(self, seq_ids: Sequence[int]) -> None:
        await self.drafter.release(seq_ids)


def measure_drafter(
    keys: Mapping[str, object], prompts: Prompts, module: Any, *, tokens: int
) -> DrafterMeasurement:
    """Measure the drafter that config `keys` describe; `module` is the library's target."""
    outputs, proposals = generate_and_record(keys, prompts, tokens=tokens)
    return DrafterMeasurement(
        len(proposals),
        sum(bool(proposal.tokens) for proposal in proposals),
        tuple(verified_tokens(outputs, proposals, module)),
    )


def generate_and_record(
    keys: Mapping[str, object], prompts: Prompts, *, tokens: int
) -> tuple[list[Output], list[Proposal]]:
    defaults: dict[str, object] = {
        "target.dtype": "float32",
        "target.threads": 1,
        "draft.threads": 1,
        "cache.pages": PAGES,
        "speculation.gamma": GAMMA,
    }
    config = config_from_keys(defaults | dict(keys))
    parts = open_parts(config)
    assert parts.drafter is not None
    recorder = RecordingDrafter(parts.drafter)
    sampling = [
        Sampling(
            max_tokens=tokens, seed=i, ignore_eos=True, speculation={"verifier": "speculative"}
        )
        for i in range(len(prompts))
    ]
    with LLM.from_parts(replace(parts, drafter=recorder), config) as llm:
        return llm.generate(prompts, sampling), recorder.proposals


def verified_tokens(
    outputs: Sequence[Output], proposals: Sequence[Proposal], module: Any
) -> Iterator[VerifiedToken]:
    """Yield the draft tokens that were verified, by output.

    An engine numbers its sequences in the order of their prompts.
    """
    for seq_id, output in enumerate(outputs):
        text = (*output.prompt_token_ids, *output.token_ids)
        with torch.inference_mode():
            # [tokens, vocab]
            p: Tensor = module(input_ids=torch.tensor([text])).logits[0].softmax(-1)
        for proposal in (one for one in proposals if one.seq_id == seq_id):
            yield from _verified_in(proposal, text, p)


def _verified_in(proposal: Proposal, text: Sequence[int], p: Tensor) -> Iterator[VerifiedToken]:
    """Yield the proposal's tokens up to the first rejection, or up to the end of the text.

    A rejected token is never drawn again as its own correction, so a token that agrees with the
    text was accepted.
    """
    for position, token in enumerate(proposal.tokens):
        index = proposal.start + position
        if index >= len(text):
            return
        accepted = token == text[index]
        yield VerifiedToken(position, _overlap(proposal, position, p[index - 1]), accepted)
        if not accepted:
            return


def _overlap(proposal: Proposal, position: int, p: Tensor) -> float:
    """Return sum min(p, q). A proposal without q is one-hot: its overlap is p of the token."""
    if proposal.q is None:
        return float(p[proposal.tokens[position]])
    ids = torch.from_numpy(proposal.q.ids[position])
    q = torch.from_numpy(proposal.q.probs[position])
    return float(torch.minimum(p[ids], q).sum())
