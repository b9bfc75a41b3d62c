"""One running request: its committed tokens, and how many of them each worker has cached.

Draft tokens are never part of it, so nothing here is ever taken back.
"""

from __future__ import annotations

from specserve.types import (
    Chunk,
    DraftStep,
    FinishReason,
    Origin,
    Policy,
    PromptScoring,
    Proposal,
    Request,
    Stats,
    Verdict,
    VerifyStep,
)


class Sequence:
    """Committed tokens of one request; they grow in `commit` alone.

    Always `draft_cached <= target_cached < length`: the newest token is not in any cache yet.
    """

    __slots__ = (
        "_accepted",
        "_accepted_by_position",
        "_anticipated",
        "_cached_tokens",
        "_drafted",
        "_drafts",
        "_irreproducible",
        "_max_length",
        "_passes",
        "_prefill_time_ms",
        "_prompt_logprobs",
        "_queue_time_ms",
        "_rounds",
        "_stop_ids",
        "awaits_grammar",
        "client",
        "committed",
        "draft_cached",
        "draft_limit",
        "encoder_input",
        "finish",
        "grammar",
        "policy",
        "priority",
        "queued_at",
        "requested_gamma",
        "seq_id",
        "started_at",
        "target_cached",
        "turn",
    )

    def __init__(
        self,
        seq_id: int,
        request: Request,
        policy: Policy,
        *,
        context: int,
        draft_limit: int,
        end_ids: frozenset[int],
        decoder_start: int | None = None,
        irreproducible: str | None = None,
    ) -> None:
        self.seq_id, self.policy = seq_id, policy
        self.client = request.client
        self.priority = request.priority  # among the client's sequences; a lower one runs first
        self.turn = 0  # set when the sequence starts to run: higher than those that run already
        # What the encoder reads, whole, with the first token.
        self.encoder_input = () if decoder_start is None else request.prompt
        prompt = request.prompt if decoder_start is None else (decoder_start,)
        self.committed = [*prompt, *request.generated]
        self.target_cached = 0  # valid positions in the target's cache
        self.draft_cached = 0  # valid positions in the drafter's cache
        # Positions that the drafter has room for; 0 when nothing drafts.
        self.draft_limit = draft_limit if len(self.encoder_input) <= draft_limit else 0
        self.grammar, self.requested_gamma = request.grammar, request.speculation.gamma
        self.awaits_grammar = False  # the target has yet to compile it
        self.finish: FinishReason | None = None
        # Alternatives beside each token of the prompt; None: no logprobs, or a chunk with tokens,
        # which comes after all of them, was sent.
        self._prompt_logprobs = None if request.generated else request.prompt_logprobs
        self._max_length = min(len(prompt) + request.max_tokens, context)
        own_stop_ids = request.stop_token_ids
        self._stop_ids = own_stop_ids if request.ignore_eos else own_stop_ids | end_ids
        self._irreproducible = irreproducible
        self._rounds = self._drafted = self._accepted = self._passes = self._anticipated = 0
        self._drafts, self._accepted_by_position = 0, list[int]()
        self.queued_at = 0.0  # by the coordinator's clock
        self.started_at: float | None = None  # when its first pass began
        self._queue_time_ms = self._prefill_time_ms = 0.0  # set with the first token
        self._cached_tokens: int | None = None  # the same, or with a preemption before it

    @property
    def length(self) -> int:
        return len(self.committed)

    @property
    def num_generated(self) -> int:
        """Committed tokens after the prompt, earlier engines' tokens included."""
        return len(self.committed) - self.policy.prompt_length

    @property
    def scores_prompt(self) -> bool:
        """True while logprobs of the prompt are wanted: all its positions must be computed."""
        return self._prompt_logprobs is not None

    @property
    def num_pending(self) -> int:
        """Tokens that the target has yet to compute, encoder input included.

        That is 1 while decoding, and more while a prompt is prefilled.
        """
        pending = len(self.committed) - self.target_cached
        return pending if self.target_cached else pending + len(self.encoder_input)

    @property
    def max_drafts(self) -> int:
        """Draft tokens that could still be of use; below 1 there is nothing to draft.

        The round adds one more token by itself.
        """
        length = len(self.committed)
        if self.awaits_grammar:
            return 0
        return min(self._max_length - length - 1, self.draft_limit - length)

    @property
    def stats(self) -> Stats:
        return Stats(
            verifier=self.policy.verifier,
            lossless=self.policy.verifier != "lenient",
            rounds=self._rounds,
            drafted=self._drafted,
            accepted=self._accepted,
            target_passes=self._passes,
            anticipated=self._anticipated,
            irreproducible=self._irreproducible,
            drafts=self._drafts,
            accepted_by_position=tuple(self._accepted_by_position),
            cached_tokens=self._cached_tokens or 0,
            queue_time_ms=self._queue_time_ms,
            prefill_time_ms=self._prefill_time_ms,
        )

    def draft_step(self, *, stop: int, gamma: int) -> DraftStep:
        """Return the step that fills the drafter's cache up to `stop` and requests `gamma` tokens.

        After rounds without drafts there is a hole in that cache; the step carries all of it.
        """
        encoder_input = () if self.draft_cached else self.encoder_input
        grammar = None if self.draft_cached else self.grammar
        return DraftStep(
            self.seq_id,
            self.draft_cached,
            tuple(self.committed[self.draft_cached : stop]),
            gamma,
            self.policy,
            encoder_input,
            grammar,
        )

    def verify_step(
        self, *, stop: int, proposal: Proposal | None, next_gamma: int = 0
    ) -> VerifyStep:
        """Return the step that computes committed tokens up to `stop` and verifies the proposal.

        It needs a verdict once all committed tokens are computed.
        """
        tokens = tuple(self.committed[self.target_cached : stop])
        encoder_input = () if self.target_cached else self.encoder_input
        grammar = None if self.target_cached else self.grammar
        drafts, q = ((), None) if proposal is None else (proposal.tokens, proposal.q)
        return VerifyStep(
            self.seq_id,
            self.target_cached,
            tokens,
            drafts,
            q,
            self.policy,
            stop == len(self.committed),
            encoder_input,
            grammar,
            next_gamma,
            self._scoring(stop),
        )

    def _scoring(self, stop: int) -> PromptScoring | None:
        if self._prompt_logprobs is None:
            return None
        next_token = self.committed[stop] if stop < self.policy.prompt_length else None
        return PromptScoring(self._prompt_logprobs, next_token)

    def advance(self, *, stop: int, proposal: Proposal | None) -> None:
        """Record that the target has cached the positions up to `stop`, and the drafter its own."""
        self.target_cached = stop
        if proposal is not None:
            self.draft_cached = min(proposal.num_cached, stop)
        self._passes += 1

    def wait_for_grammar(self, proposal: Proposal | None) -> None:
        """Record a pass that decided nothing; the next one computes the newest token again."""
        self.awaits_grammar = True
        self.advance(stop=len(self.committed) - 1, proposal=proposal)

    def prompt_chunk(self, verdict: Verdict) -> Chunk:
        """Return the chunk that sends logprobs of a part of the prompt."""
        assert not verdict.is_decision
        logprobs = verdict.prompt_logprobs
        return Chunk(self.seq_id, self.num_generated, (), (), prompt_logprobs=logprobs)

    def commit(self, verdict: Verdict, proposal: Proposal | None, now: float = 0.0) -> Chunk:
        """Append the accepted draft tokens and the next token, up to the first stop.

        This is the only place where a sequence grows. `now` is the verdict's time.
        """
        if verdict.error is not None:
            return self.end(FinishReason.ERROR, error=verdict.error)
        drafts = proposal.tokens if proposal is not None else ()
        accepted = verdict.accepted
        assert self.finish is None
        assert accepted <= len(drafts)
        assert verdict.is_decision
        self.awaits_grammar = False
        tokens = self._cut_at_end((*drafts[:accepted], verdict.next_token))
        self.advance(stop=len(self.committed) + accepted, proposal=proposal)
        self.committed += tokens
        self._prompt_logprobs = None
        if not self._rounds and self.started_at is not None:
            self._queue_time_ms = 1e3 * (self.started_at - self.queued_at)
            self._prefill_time_ms = 1e3 * (now - self.started_at)
            if self._cached_tokens is None:
                self._cached_tokens = verdict.cached_tokens
        self._rounds += bool(tokens)
        self._drafts += bool(drafts)
        self._drafted += len(drafts)
        self._anticipated += proposal is not None and proposal.anticipated is True
        if accepted:
            self._count_accepted(min(accepted, len(tokens)))
        return Chunk(
            self.seq_id,
            self.num_generated - len(tokens),
            tokens,
            _origins(proposed=len(drafts), accepted=accepted)[: len(tokens)],
            None if verdict.logprobs is None else verdict.logprobs[: len(tokens)],
            self.finish,
            self.stats,
            prompt_logprobs=verdict.prompt_logprobs,
        )

    def _count_accepted(self, accepted: int) -> None:
        self._accepted += accepted
        self._accepted_by_position += [0] * (accepted - len(self._accepted_by_position))
        for position in range(accepted):
            self._accepted_by_position[position] += 1

    def end(self, finish: FinishReason, *, error: str | None = None) -> Chunk:
        """End a cancelled or failed sequence and return its last chunk, which has no tokens."""
        assert self.finish is None
        self.finish = finish
        return Chunk(
            self.seq_id, self.num_generated, (), (), finish=finish, stats=self.stats, error=error
        )

    def reset_caches(self) -> None:
        """Record that nothing is cached: it is recomputed, and may find pages of its own then."""
        self.target_cached = self.draft_cached = 0
        self._cached_tokens = self._cached_tokens or 0

    def _cut_at_end(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Return the tokens up to the first stop token, `max_tokens` or the end of the context.

        A stop token itself is kept.
        """
        room = self._max_length - len(self.committed)
        if len(tokens) >= room:
            tokens = tokens[:room]
            self.finish = FinishReason.LENGTH
        if not self._stop_ids.isdisjoint(tokens):
            self.finish = FinishReason.STOP
            first = next(i for i, token in enumerate(tokens) if token in self._stop_ids)
            tokens = tokens[: 1 + first]
        return tokens


def _origins(*, proposed: int, accepted: int) -> tuple[Origin, ...]:
    if not proposed:
        return (Origin.PLAIN,)
    last = Origin.BONUS if accepted == proposed else Origin.CORRECTION
    return (Origin.ACCEPTED,) * accepted + (last,)
