"""Checks of requests against the limits of the model, and how their tokens are drawn.

Knows nothing of load.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b

from specserve.config.sections import SpeculationConfig
from specserve.errors import BadValue, EmptyPrompt, TooLong, UnknownToken
from specserve.types import VERIFIERS, ModelInfo, Policy, Request, TokenRule

DEFAULT_VERIFIER = "block"  # of requests without a seed


class Admission:
    """The checks on requests for one model and one configuration."""

    def __init__(self, info: ModelInfo, speculation: SpeculationConfig) -> None:
        default_verifier = speculation.verifier or DEFAULT_VERIFIER
        if default_verifier not in VERIFIERS:
            raise BadValue(
                f"speculation.verifier must be one of {', '.join(VERIFIERS)}, "
                f"not {default_verifier!r}",
                param="speculation.verifier",
            )
        # Prompt and continuation together.
        self.context = min(info.max_context, info.num_pages * info.page_size)
        self._info = info
        self._vocab_size, self._max_gamma = info.vocab_size, speculation.max_gamma
        self._default_verifier, self._lenience = default_verifier, speculation.lenience

    def check(self, request: Request) -> None:
        """Raise for a request that can never be served."""
        prompt, gamma = request.prompt, request.speculation.gamma
        if not prompt:
            raise EmptyPrompt("the prompt is empty; it needs at least one token")
        if min(prompt) < 0 or max(prompt) >= self._vocab_size:
            wrong = next(token for token in prompt if not 0 <= token < self._vocab_size)
            raise UnknownToken(
                f"the prompt has token id {wrong}, "
                f"but the vocabulary ends at {self._vocab_size - 1}"
            )
        self._check_length(request)
        if request.prompt_logprobs is not None and self._info.decoder_start is not None:
            raise BadValue(
                "prompt_logprobs is not for encoder-decoders, which do not predict their prompt",
                param="prompt_logprobs",
            )
        is_empty = request.max_tokens == 0 and not request.generated
        if request.max_tokens <= len(request.generated) and not is_empty:
            raise BadValue(
                f"max_tokens must be {len(request.generated) + 1} or more, "
                f"not {request.max_tokens}",
                param="max_tokens",
            )
        if gamma is not None and gamma > self._max_gamma:
            raise BadValue(
                f"speculation.gamma must be at most {self._max_gamma}, not {gamma}",
                param="speculation.gamma",
            )
        if request.grammar is not None:
            self._check_constrained(request)
        if request.warp.rule is not None:
            self._check_rule(self._complete_rule(request.warp.rule))

    def max_length(self, request: Request) -> int:
        """Return the positions that the request's text may have.

        An encoder input has pages of its own, and the text must fit into the others.
        """
        if self._info.decoder_start is None:
            return self.context
        page_size = self._info.page_size
        return min(
            self._info.max_context,
            (self._info.num_pages - -(-len(request.prompt) // page_size)) * page_size,
        )

    def policy(self, request: Request) -> Policy:
        """Return how the request's tokens are drawn.

        A seeded request gets `coupled`, whose text depends on the seed and the target alone, unless
        it asks for another verifier.
        """
        verifier = request.speculation.verifier or (
            "coupled" if request.seeded else self._default_verifier
        )
        warp = request.warp
        if warp.rule is not None:
            warp = replace(warp, rule=self._complete_rule(warp.rule))
        return Policy(
            warp=warp,
            verifier=verifier,
            seed=request.seed,
            prompt_length=len(request.prompt) if self._info.decoder_start is None else 1,
            logprobs=request.logprobs,
            lenience=self._lenience if verifier == "lenient" else 1.0,
            constrained=request.grammar is not None,
            cache_salt=_page_salt(request),
            adapter=request.adapter,
        )

    def _complete_rule(self, rule: TokenRule) -> TokenRule:
        """Return the rule with the model's end tokens, where the text may not end at once."""
        if not rule.min_tokens:
            return rule
        return replace(rule, end_ids=tuple(sorted(self._info.end_ids.union(rule.end_ids))))

    def _check_rule(self, rule: TokenRule) -> None:
        """Raise if the rule forbids every first token, as far as that can be known without a text.

        What can be known later only has a precedence (sampling/token_rule.py).
        """
        forbidden = {word[0] for word in rule.bad_words if len(word) == 1}.union(rule.end_ids)
        param = "allowed_token_ids" if rule.allowed_ids else "bad_words"
        if forbidden.issuperset(rule.allowed_ids or range(self._vocab_size)):
            raise BadValue(
                f"{param}, with min_tokens and bad_words, leaves no token to write", param=param
            )

    def _check_constrained(self, request: Request) -> None:
        """Raise if the request cannot follow a grammar.

        Whether the grammar itself can be followed was checked before: that takes too long for the
        time between two rounds.
        """
        if request.ignore_eos:
            raise BadValue(
                "ignore_eos does not go with a grammar, whose text ends where the grammar does; "
                "leave one of them out",
                param="ignore_eos",
            )
        if not self._info.end_ids:
            raise BadValue(
                "the model has no token to end a text with, so it can follow no grammar",
                param="grammar",
            )

    def _check_length(self, request: Request) -> None:
        length, generated = len(request.prompt), len(request.generated)
        if self._info.decoder_start is None:
            if length + generated >= self.context:
                raise TooLong(
                    f"the prompt has {length + generated} tokens, "
                    f"but the context holds {self.context}, new tokens included"
                )
        elif length > self._info.max_context:
            raise TooLong(
                f"the prompt has {length} tokens, "
                f"but the encoder reads at most {self._info.max_context}"
            )
        elif self.max_length(request) < 2 + generated:
            raise TooLong(
                f"the prompt has {length} tokens, next to which the cache has no room for a text"
            )


def _page_salt(request: Request) -> bytes:
    """Return the salt of a request's pages, which no other adapter can find."""
    if request.adapter is None:
        return request.cache_salt
    return blake2b(request.cache_salt, key=request.adapter.version, digest_size=16).digest()
