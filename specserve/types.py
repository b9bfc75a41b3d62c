"""The shared nouns: requests, steps, proposals, verdicts, chunks, and the two worker protocols.

Everything is frozen. Knows no torch, Ray or HTTP.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specserve.errors import BadValue
from specserve.logprobs import Logprobs as Logprobs
from specserve.logprobs import PromptLogprobs as PromptLogprobs
from specserve.logprobs import PromptScoring as PromptScoring
from specserve.request_stats import Stats as Stats

VERIFIERS = ("speculative", "block", "coupled", "lenient")
GRAMMARS = ("json_schema", "regex", "lark")


@dataclass(frozen=True, slots=True)
class SparseDistribution:
    """The draft distribution q, on its support only: one row for each draft token.

    Each row sums to 1.
    """

    ids: NDArray[np.int64]  # [rows, support]
    probs: NDArray[np.float32]  # [rows, support]


@dataclass(frozen=True, slots=True)
class TokenRule:
    """Tokens that a text may not have, by their ids, their positions or the tokens before them.

    sampling/token_rule.py says which part has precedence where they leave no token together.
    """

    min_tokens: int = 0
    """Number of new tokens before which none of `end_ids` may be written."""
    end_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that the new tokens may not contain; none is empty."""
    allowed_ids: tuple[int, ...] = ()
    """The only tokens that may be written; () allows all."""


@dataclass(frozen=True, slots=True)
class Warp:
    """How logits become the distribution that is sampled from.

    Temperature 0 is greedy: a one-hot distribution. Top-k 0 is off.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    rule: TokenRule | None = None

    @property
    def needs_history(self) -> bool:
        """True if the distribution depends on the tokens before."""
        return self.rule is not None or self.has_penalties

    @property
    def depends_on_ids(self) -> bool:
        """True if tokens with equal logits may have different probabilities."""
        return bool(self.logit_bias) or self.needs_history

    @property
    def truncates(self) -> bool:
        """True if some tokens lose their probability to the likelier ones."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def has_penalties(self) -> bool:
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
        )


@dataclass(frozen=True, slots=True)
class Adapter:
    """A low-rank adapter (LoRA) of the target, whose files every rank can read."""

    name: str
    path: str  # of its directory
    version: bytes  # a hash of its files: another version is another adapter


@dataclass(frozen=True, slots=True)
class Policy:
    """How the tokens of one sequence are drawn, and whose pages it may share.

    It is constant for the sequence's whole life.
    """

    warp: Warp
    verifier: str  # one of VERIFIERS
    seed: int  # 64 bits; every draw of the sequence follows from it
    # Positions before the first generated token: the prompt, or the start token of an
    # encoder-decoder. Presence and frequency count the tokens after them.
    prompt_length: int
    logprobs: int | None = None  # alternatives to report beside each token; None: no logprobs
    lenience: float = 1.0  # for the verifier `lenient` only
    # True if a grammar constrains the tokens after `prompt_length`. The grammar itself comes with
    # the steps that start at 0.
    constrained: bool = False
    # Sequences find one another's pages only if their salts are equal.
    cache_salt: bytes = b""
    # Of the target alone; the drafter stays as it is. It is part of the salt.
    adapter: Adapter | None = None


@dataclass(frozen=True, slots=True)
class Grammar:
    """A rule for a whole text: a JSON schema, a regular expression or a Lark grammar."""

    kind: str  # one of GRAMMARS
    text: str


@dataclass(frozen=True, slots=True)
class Step:
    """Work for one sequence: compute `tokens` from position `start` on.

    A worker drops everything that it has cached past `start`: this is the truncation.
    """

    seq_id: int
    start: int
    tokens: tuple[int, ...]
    # What the encoder of an encoder-decoder reads. It comes with every step that starts at 0, and
    # with no other.
    encoder_input: tuple[int, ...] = ()
    cache_salt: bytes = b""  # as in Policy
    adapter: Adapter | None = None  # as in Policy

    @property
    def stop(self) -> int:
        """Position after `tokens`."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class DraftStep:
    """Work for the drafter: compute committed tokens, then draft `gamma` more.

    With gamma 0 the drafter only fills its cache.
    """

    seq_id: int
    start: int
    tokens: tuple[int, ...]  # committed; never empty
    gamma: int
    policy: Policy
    encoder_input: tuple[int, ...] = ()  # as in Step
    grammar: Grammar | None = None  # comes with every step that starts at 0, and with no other

    @property
    def stop(self) -> int:
        """Position after `tokens`, where the proposal starts."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens that continue a prefix, and the distribution q that each was drawn from.

    Without `q` every draft token was certain: q is a one-hot distribution.
    """

    seq_id: int
    start: int  # length of the prefix that they continue
    tokens: tuple[int, ...]
    q: SparseDistribution | None
    num_cached: int  # positions in the drafter's cache; its next step starts there or earlier
    # True if it was prepared before it was requested; None if nothing was known to prepare for.
    anticipated: bool | None = None


@dataclass(frozen=True, slots=True)
class PreparedProposal:
    """The answer to a step that has not been sent yet.

    It answers the step whose last token is `token`, at the position before the proposal.
    """

    token: int
    proposal: Proposal


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of work of one worker, by that worker's clock."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class VerifyStep:
    """Work for the target: compute committed and draft tokens, and verify the draft tokens.

    A chunk of a prompt that is not its last has no draft tokens and needs no decision.
    """

    seq_id: int
    start: int
    tokens: tuple[int, ...]  # committed; never empty
    drafts: tuple[int, ...]
    q: SparseDistribution | None
    policy: Policy
    needs_verdict: bool = True
    encoder_input: tuple[int, ...] = ()  # as in Step
    grammar: Grammar | None = None  # as in DraftStep
    # Draft tokens wanted after the verdict, of a drafter in the target's process. It prefills a
    # chunk of a prompt for which it is not 0.
    gamma: int = 0
    scoring: PromptScoring | None = None  # such a step computes all of its tokens

    @property
    def stop(self) -> int:
        """Position after `tokens`, where the draft tokens start."""
        return self.start + len(self.tokens)

    @property
    def is_answered(self) -> bool:
        """True if the target answers with a verdict."""
        return self.needs_verdict or self.scoring is not None

    @property
    def scored_tokens(self) -> tuple[int, ...]:
        """Tokens of the prompt whose logprobs are wanted: one after each position, from `start`.

        No token follows the last position of the prompt.
        """
        if self.scoring is None:
            return ()
        after = self.scoring.next_token
        return self.tokens[1:] if after is None else (*self.tokens[1:], after)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The target's decision on a proposal: `accepted` draft tokens, then `next_token`."""

    seq_id: int
    accepted: int
    next_token: int  # a correction if accepted < proposed, else the bonus
    logprobs: tuple[Logprobs, ...] | None  # accepted + 1 of them
    # Why this sequence alone cannot go on; the other fields mean nothing then.
    error: str | None = None
    prompt_logprobs: PromptLogprobs | None = None  # of the step's `scored_tokens`
    # False: the step is a chunk of a prompt and needed no decision, or its grammar is not compiled
    # yet, so that it has to be repeated. Only the logprobs of the prompt mean anything then.
    is_decision: bool = True
    cached_tokens: int = 0  # found in the prefix cache, with the first decision on a sequence

    @classmethod
    def failed(cls, seq_id: int, error: str) -> Verdict:
        return cls(seq_id, 0, 0, None, error)


class Origin(StrEnum):
    """Origin of a token.

    A round with draft tokens commits accepted ones and a correction or a bonus; a round without
    commits a plain token.
    """

    ACCEPTED = "accepted"
    CORRECTION = "correction"
    BONUS = "bonus"
    PLAIN = "plain"


class FinishReason(StrEnum):
    STOP = "stop"
    TOOL_CALLS = "tool_calls"  # set by the API alone, for a stopped answer that parses as calls
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens that one round committed for one request, with the statistics so far.

    `start` is the number of generated tokens before these, earlier engines' tokens included, so
    that a receiver notices a chunk that was lost. `finish` comes with the last chunk. Logprobs of
    a prompt come in parts, up to the first chunk with tokens; a prompt that is computed again
    sends them again.
    """

    seq_id: int
    start: int
    tokens: tuple[int, ...]
    origins: tuple[Origin, ...]
    logprobs: tuple[Logprobs, ...] | None = None
    finish: FinishReason | None = None
    stats: Stats | None = None
    error: str | None = None
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Speculation:
    """A request's own settings for speculation.

    Gamma None leaves the choice to the server, 0 is off; verifier None is the server's default.
    """

    gamma: int | None = None
    verifier: str | None = None

    def __post_init__(self) -> None:
        if self.gamma is not None and self.gamma < 0:
            raise BadValue(
                f"speculation.gamma must be 0 or more, not {self.gamma}", param="speculation.gamma"
            )
        if self.verifier is not None and self.verifier not in VERIFIERS:
            raise BadValue(
                f"speculation.verifier must be one of {', '.join(VERIFIERS)}, "
                f"not {self.verifier!r}",
                param="speculation.verifier",
            )


@dataclass(frozen=True, slots=True)
class Request:
    """One continuation to generate.

    There is always a seed; `seeded` is True if the client chose it. With `max_tokens` 0 the prompt
    is computed and nothing generated.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    warp: Warp
    seed: int
    seeded: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # alternatives beside each token of the prompt; None: none
    speculation: Speculation = field(default_factory=Speculation)
    grammar: Grammar | None = None
    cache_salt: bytes = b""  # as in Policy, without what an adapter adds
    adapter: Adapter | None = None  # None: the target as it is
    priority: int = 0  # among the client's own requests; a lower one runs first
    # Whose request it is, for fair shares of a full engine; "": all such requests are one client's.
    client: str = ""
    # Headers `traceparent` and `tracestate` under which the engine's span belongs; (): no spans.
    trace_context: tuple[tuple[str, str], ...] = ()
    # Tokens that an engine which is gone generated and the client has received: the text goes on
    # after them.
    generated: tuple[int, ...] = ()


Curve = tuple[tuple[int, float], ...]
"""Seconds of a target pass, by its rows."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Properties of the target that the coordinator needs."""

    vocab_size: int  # ids below it are valid
    # Prompt and continuation together; for an encoder-decoder the limit of each.
    max_context: int
    end_ids: frozenset[int]
    page_size: int
    num_pages: int
    # Seconds of a pass by the positions in it, as the warm-up measured them; () without warm-up.
    curve: Curve = ()
    prefix_caching: bool = False  # sequences find the full pages of others that begin equally
    # The token that every text of an encoder-decoder begins with, its prompt being the encoder
    # input; None: there is no encoder.
    decoder_start: int | None = None
    runs_ahead: bool = False  # plain rounds do not wait for the host
    # Why a text may depend on what else is served; None: it does not.
    irreproducible: str | None = None
    # Parameters of requests that say nothing else, as the checkpoint recommends them.
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)


class Target(Protocol):
    """The model that verifies; returns one verdict per step that is answered, in their order.

    A remote worker starts at the call, one in this process when the result is awaited.
    """

    def verify(self, steps: Sequence[VerifyStep]) -> Awaitable[Sequence[Verdict]]: ...
    async def release(self, seq_ids: Sequence[int]) -> None: ...


class Drafter(Protocol):
    """A source of draft tokens; returns one proposal per step, in their order.

    A proposal may be shorter than requested, or empty. The deadline is in seconds from now; after
    it shorter proposals are better than later ones.
    """

    def propose(
        self, steps: Sequence[DraftStep], deadline: float
    ) -> Awaitable[Sequence[Proposal]]: ...
    async def release(self, seq_ids: Sequence[int]) -> None: ...
