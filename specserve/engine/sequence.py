"""One request under way. Holds committed tokens only, and how much of them each worker has cached; nothing here is ever taken back."""

from __future__ import annotations

from specserve.types import (
    Chunk,
    DraftStep,
    Finish,
    Origin,
    Policy,
    Proposal,
    Request,
    Stats,
    Verdict,
    VerifyStep,
)


class Sequence:
    """Grows in `commit` alone. Always `draft_held <= target_held < length`: the newest token is not in any cache yet."""

    __slots__ = (
        "_accepted",
        "_anticipated",
        "_drafted",
        "_end",
        "_passes",
        "_rounds",
        "_stops",
        "committed",
        "draft_held",
        "draft_limit",
        "finish",
        "gamma_wish",
        "grammar",
        "policy",
        "seq_id",
        "source",
        "target_held",
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
    ) -> None:
        self.seq_id = seq_id
        self.policy = policy
        self.source = (
            () if decoder_start is None else request.prompt
        )  # what an encoder reads, whole, with the first token
        given = request.prompt if decoder_start is None else (decoder_start,)
        self.committed = [*given, *request.written]
        self.target_held = 0  # positions that are valid in the target's cache
        self.draft_held = 0  # the same for the drafter's
        self.draft_limit = (
            draft_limit if len(self.source) <= draft_limit else 0
        )  # positions that the drafter can hold; 0 when nothing drafts
        self.grammar = request.grammar
        self.gamma_wish = request.speculation.gamma
        self.finish: Finish | None = None
        self._end = min(len(given) + request.max_tokens, context)
        self._stops = (
            request.stop_token_ids if request.ignore_eos else request.stop_token_ids | end_ids
        )
        self._rounds = self._drafted = self._accepted = self._passes = self._anticipated = 0

    @property
    def length(self) -> int:
        return len(self.committed)

    @property
    def pending(self) -> int:
        """Tokens that the target has yet to read, those of a source included: 1 while decoding, more in a prompt."""
        unread = len(self.committed) - self.target_held
        return unread if self.target_held else unread + len(self.source)

    @property
    def max_drafts(self) -> int:
        """Draft tokens that could still be of use: the round adds one more by itself. Below 1 there is nothing to draft."""
        length = len(self.committed)
        return min(self._end - length - 1, self.draft_limit - length)

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
        )

    def draft_step(self, *, stop: int, gamma: int) -> DraftStep:
        """Fills whatever hole the drafter's cache has before `stop`, then asks for `gamma` tokens."""
        source, grammar = ((), None) if self.draft_held else (self.source, self.grammar)
        return DraftStep(
            self.seq_id,
            self.draft_held,
            tuple(self.committed[self.draft_held : stop]),
            gamma,
            self.policy,
            source,
            grammar,
        )

    def verify_step(self, *, stop: int, proposal: Proposal | None) -> VerifyStep:
        """Reads committed tokens up to `stop`; judges the proposal once all of them are read."""
        tokens = tuple(self.committed[self.target_held : stop])
        decide = stop == len(self.committed)
        source, grammar = ((), None) if self.target_held else (self.source, self.grammar)
        drafts, q = ((), None) if proposal is None else (proposal.tokens, proposal.q)
        return VerifyStep(
            self.seq_id, self.target_held, tokens, drafts, q, self.policy, decide, source, grammar
        )

    def read(self, *, stop: int, proposal: Proposal | None) -> None:
        """The target has read a chunk of the prompt up to `stop`, and perhaps the drafter too."""
        self.target_held = stop
        if proposal is not None:
            self.draft_held = min(proposal.held, stop)
        self._passes += 1

    def commit(self, verdict: Verdict, proposal: Proposal | None) -> Chunk:
        """Appends the accepted drafts and the next token, up to the first stop. The only place where a sequence grows."""
        if verdict.error is not None:
            return self.end(Finish.ERROR, error=verdict.error)
        drafts = proposal.tokens if proposal is not None else ()
        accepted = verdict.accepted
        assert self.finish is None
        assert accepted <= len(drafts)
        tokens = self._cut((*drafts[:accepted], verdict.next_token))
        self.read(stop=len(self.committed) + accepted, proposal=proposal)
        self.committed += tokens
        self._rounds += 1
        self._drafted += len(drafts)
        self._anticipated += proposal is not None and proposal.anticipated is True
        self._accepted += min(accepted, len(tokens))
        origins = _origins(proposed=len(drafts), accepted=accepted)[: len(tokens)]
        logprobs = None if verdict.logprobs is None else verdict.logprobs[: len(tokens)]
        return Chunk(self.seq_id, tokens, origins, logprobs, self.finish, self.stats)

    def end(self, finish: Finish, *, error: str | None = None) -> Chunk:
        """Ends the sequence from outside: cancelled or failed. The chunk is its last and brings no token."""
        assert self.finish is None
        self.finish = finish
        return Chunk(self.seq_id, (), (), finish=finish, stats=self.stats, error=error)

    def forget(self) -> None:
        """The workers hold nothing of it any more; the next rounds compute everything again from the committed tokens."""
        self.target_held = self.draft_held = 0

    def _cut(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Ends at the first stop token, which stays in, or where `max_tokens` or the context ends."""
        room = self._end - len(self.committed)
        if len(tokens) >= room:
            tokens = tokens[:room]
            self.finish = Finish.LENGTH
        if not self._stops.isdisjoint(tokens):
            self.finish = Finish.STOP
            tokens = tokens[: 1 + next(i for i, token in enumerate(tokens) if token in self._stops)]
        return tokens


def _origins(*, proposed: int, accepted: int) -> tuple[Origin, ...]:
    if not proposed:
        return (Origin.PLAIN,)
    last = Origin.BONUS if accepted == proposed else Origin.CORRECTION
    return (Origin.ACCEPTED,) * accepted + (last,)
