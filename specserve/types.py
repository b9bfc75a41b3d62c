"""The nouns that travel. Frozen; nothing here knows torch, Ray or HTTP."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specserve.errors import BadValue

VERIFIERS = ("speculative", "block", "coupled", "lenient")
GRAMMARS = ("json_schema", "regex", "lark")


@dataclass(frozen=True, slots=True)
class SparseRows:
    """Rows of a distribution on their support only; each row sums to 1. One row for each draft token."""

    ids: NDArray[np.int64]  # [rows, support]
    probs: NDArray[np.float32]  # [rows, support]


@dataclass(frozen=True, slots=True)
class Warp:
    """How logits become the distribution that is sampled. Temperature 0 is greedy: a one-hot. Top-k 0 is off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def has_penalties(self) -> bool:
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
        )


@dataclass(frozen=True, slots=True)
class Policy:
    """How the tokens of one sequence are drawn; constant for its whole life."""

    warp: Warp
    verifier: str  # one of VERIFIERS
    seed: int  # 64 bits; every draw of the sequence follows from it
    prompt_length: int  # presence and frequency count what was written after it
    logprobs: int | None = (
        None  # how many alternatives to report beside each token; None: no logprobs at all
    )
    lenience: float = 1.0  # of `lenient` alone
    constrained: bool = False  # there is a grammar for what is written after `prompt_length`; it comes with the steps that start at 0


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a whole text must be: a JSON schema, a regular expression or a Lark grammar, by `kind`, in `text`."""

    kind: str  # one of GRAMMARS
    text: str


@dataclass(frozen=True, slots=True)
class Step:
    """Write `tokens` at `start`. Whatever a worker has cached past `start` is gone: this is the truncation."""

    seq_id: int
    start: int
    tokens: tuple[int, ...]
    source: tuple[
        int, ...
    ] = ()  # of an encoder-decoder: what the encoder reads; comes with every step that starts at 0, and with no other

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class DraftStep:
    """Write committed tokens, then guess `gamma` more. Gamma 0 only fills the cache."""

    seq_id: int
    start: int
    tokens: tuple[int, ...]  # committed; never empty
    gamma: int
    policy: Policy
    source: tuple[int, ...] = ()  # as in Step
    grammar: Grammar | None = None  # likewise


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens that continue a prefix, and the distribution that each was drawn from (None: each was certain)."""

    seq_id: int
    start: int  # length of the prefix they continue
    tokens: tuple[int, ...]
    q: SparseRows | None
    held: int  # positions that the drafter now holds; its next step starts there or earlier
    anticipated: bool | None = (
        None  # whether it was prepared before it was asked for; None: nothing was known to prepare for
    )


@dataclass(frozen=True, slots=True)
class Foreseen:
    """The answer to a step that nobody has asked yet: to one whose last token is `token`, where the proposal begins."""

    token: int
    proposal: Proposal


@dataclass(frozen=True, slots=True)
class Span:
    """Something that an actor did, by some clock."""

    name: str
    begun: float
    ended: float


@dataclass(frozen=True, slots=True)
class VerifyStep:
    """Write committed tokens and behind them the proposal's; judge the proposal, unless the prompt goes on."""

    seq_id: int
    start: int
    tokens: tuple[int, ...]  # committed; never empty
    drafts: tuple[int, ...]
    q: SparseRows | None
    policy: Policy
    decide: bool = True  # False: a chunk of a prompt that is not its last; no verdict is wanted
    source: tuple[int, ...] = ()  # as in Step
    grammar: Grammar | None = None  # likewise


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of one token, under the target's unwarped distribution: its own, and those of the likeliest tokens in falling order."""

    token: float
    top_ids: tuple[int, ...]
    top: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the target made of a proposal: the first `accepted` tokens stand, then comes `next_token`."""

    seq_id: int
    accepted: int
    next_token: int  # a correction if accepted < proposed, else the bonus
    logprobs: tuple[Logprobs, ...] | None  # accepted + 1 of them
    error: str | None = (
        None  # why this sequence alone cannot go on; what the rest says is then nothing
    )


class Origin(StrEnum):
    """Where a token came from: of a round with drafts accepted, correction or bonus; else plain."""

    ACCEPTED = "accepted"
    CORRECTION = "correction"
    BONUS = "bonus"
    PLAIN = "plain"


class Finish(StrEnum):
    STOP = "stop"
    TOOL_CALLS = "tool_calls"  # never an engine's word: a stop, of an answer that was read as calls
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Stats:
    """What speculation did for one request; the fields of the response's `specserve` object."""

    verifier: str
    lossless: bool
    rounds: int  # rounds that committed at least one token
    drafted: int
    accepted: int
    target_passes: int  # rounds and prompt chunks
    anticipated: int = 0
    resumed: int = 0

    def after(self, earlier: Stats) -> Stats:
        """Of a request that an earlier engine began."""
        return replace(
            self,
            rounds=earlier.rounds + self.rounds,
            drafted=earlier.drafted + self.drafted,
            accepted=earlier.accepted + self.accepted,
            target_passes=earlier.target_passes + self.target_passes,
            anticipated=earlier.anticipated + self.anticipated,
        )

    @property
    def mean_accepted_length(self) -> float:
        """Accepted draft tokens a round."""
        return self.accepted / self.rounds if self.rounds else 0.0


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens that one round committed for one request; `finish` comes with the last. `stats` are those until then."""

    seq_id: int
    tokens: tuple[int, ...]
    origins: tuple[Origin, ...]
    logprobs: tuple[Logprobs, ...] | None = None
    finish: Finish | None = None
    stats: Stats | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Speculation:
    """A request's own wish: gamma None is the server's choice, 0 is off; verifier None is the server's default."""

    gamma: int | None = None
    verifier: str | None = None

    def __post_init__(self) -> None:
        if self.gamma is not None and self.gamma < 0:
            raise BadValue(
                f"speculation.gamma must be 0 or more, not {self.gamma}", param="speculation.gamma"
            )
        if self.verifier is not None and self.verifier not in VERIFIERS:
            raise BadValue(
                f"speculation.verifier must be one of {', '.join(VERIFIERS)}, not {self.verifier!r}",
                param="speculation.verifier",
            )


@dataclass(frozen=True, slots=True)
class Request:
    """One continuation asked for. The seed is always there; `seeded` says that the client chose it."""

    prompt: tuple[int, ...]
    max_tokens: int
    warp: Warp
    seed: int
    seeded: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None
    speculation: Speculation = field(default_factory=Speculation)
    grammar: Grammar | None = None
    written: tuple[
        int, ...
    ] = ()  # by an engine that is gone, and known to the client: the text goes on behind them


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the coordinator must know of the target."""

    vocab_size: int  # ids below it are valid
    max_context: int  # prompt and continuation together; of an encoder-decoder the source, and what is written, each
    end_ids: frozenset[int]
    page_size: int
    num_pages: int
    curve: tuple[
        tuple[int, float], ...
    ] = ()  # seconds of a pass by the rows in it, as its warm-up found them; () if it did not look
    decoder_start: int | None = (
        None  # the token that every text of an encoder-decoder begins with, its prompt being the source; None: no encoder
    )


class Target(Protocol):
    """Checks proposals. Answers one verdict for each step with `decide`, in their order.

    A worker elsewhere is at work from the call on, one in this process from when it is awaited.
    """

    def verify(self, steps: Sequence[VerifyStep]) -> Awaitable[Sequence[Verdict]]: ...
    async def release(self, seq_ids: Sequence[int]) -> None: ...


class Drafter(Protocol):
    """Guesses. Answers one proposal for each step, in their order; fewer tokens than asked for, or none, is an answer too.

    The deadline is seconds from now, after which shorter proposals are better than later ones.
    """

    def propose(
        self, steps: Sequence[DraftStep], deadline: float
    ) -> Awaitable[Sequence[Proposal]]: ...
    async def release(self, seq_ids: Sequence[int]) -> None: ...
