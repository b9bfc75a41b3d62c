"""Which requests can be served, and how their tokens will be drawn. Knows the model's limits; nothing of load."""

from __future__ import annotations

from specserve.errors import BadValue, EmptyPrompt, TooLong, UnknownToken
from specserve.types import VERIFIERS, ModelInfo, Policy, Request

DEFAULT_VERIFIER = "block"


class Admission:
    """For one model and one config."""

    def __init__(
        self, info: ModelInfo, *, max_gamma: int, default_verifier: str, lenience: float
    ) -> None:
        if default_verifier not in VERIFIERS:
            raise BadValue(
                f"speculation.verifier must be one of {', '.join(VERIFIERS)}, not {default_verifier!r}",
                param="speculation.verifier",
            )
        self.context = min(
            info.max_context, info.num_pages * info.page_size
        )  # prompt and continuation together
        self._info = info
        self._vocab_size, self._max_gamma = info.vocab_size, max_gamma
        self._default_verifier, self._lenience = default_verifier, lenience

    def check(self, request: Request) -> None:
        """Raises for a request that can never be served."""
        prompt, gamma = request.prompt, request.speculation.gamma
        if not prompt:
            raise EmptyPrompt("the prompt is empty; it needs at least one token")
        if min(prompt) < 0 or max(prompt) >= self._vocab_size:
            wrong = next(token for token in prompt if not 0 <= token < self._vocab_size)
            raise UnknownToken(
                f"the prompt has token id {wrong}, but the vocabulary ends at {self._vocab_size - 1}"
            )
        self._check_length(request)
        if request.max_tokens <= len(request.written):
            raise BadValue(
                f"max_tokens must be {len(request.written) + 1} or more, not {request.max_tokens}",
                param="max_tokens",
            )
        if gamma is not None and gamma > self._max_gamma:
            raise BadValue(
                f"speculation.gamma must be at most {self._max_gamma}, not {gamma}",
                param="speculation.gamma",
            )
        if request.grammar is not None:
            self._check_constrained(request)

    def room(self, request: Request) -> int:
        """Positions that the request's text may have. A source has pages of its own, next to which the text must fit."""
        if self._info.decoder_start is None:
            return self.context
        page_size = self._info.page_size
        return min(
            self._info.max_context,
            (self._info.num_pages - -(-len(request.prompt) // page_size)) * page_size,
        )

    def policy(self, request: Request) -> Policy:
        """A seeded request gets `coupled`, whose text depends on the seed and the target alone, unless it asks for another."""
        verifier = request.speculation.verifier or (
            "coupled" if request.seeded else self._default_verifier
        )
        return Policy(
            warp=request.warp,
            verifier=verifier,
            seed=request.seed,
            prompt_length=len(request.prompt) if self._info.decoder_start is None else 1,
            logprobs=request.logprobs,
            lenience=self._lenience if verifier == "lenient" else 1.0,
            constrained=request.grammar is not None,
        )

    def _check_constrained(self, request: Request) -> None:
        """Whether the grammar itself can be followed has been looked at before: it takes too long for the time between two rounds."""
        if request.ignore_eos:
            raise BadValue(
                "ignore_eos does not go with a grammar, whose text ends where the grammar does; leave one of them out",
                param="ignore_eos",
            )
        if not self._info.end_ids:
            raise BadValue(
                "the model has no token to end a text with, so it can follow no grammar",
                param="grammar",
            )

    def _check_length(self, request: Request) -> None:
        length, written = len(request.prompt), len(request.written)
        if self._info.decoder_start is None:
            if length + written >= self.context:
                raise TooLong(
                    f"the prompt has {length + written} tokens, but the context holds {self.context}, new tokens included"
                )
        elif length > self._info.max_context:
            raise TooLong(
                f"the source has {length} tokens, but the encoder reads at most {self._info.max_context}"
            )
        elif self.room(request) < 2 + written:
            raise TooLong(
                f"the source has {length} tokens, next to which the cache has no room for a text"
            )
