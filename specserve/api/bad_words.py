"""Turn bad words, which are texts, into the token sequences that a request forbids.

Each text is tokenized at the start of a line and after a space, as vLLM and transformers do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from specserve.api.tokenizer import Tokenizer
from specserve.errors import BadValue
from specserve.sampling_params import Sampling
from specserve.types import Request, TokenRule

TokenSequences = tuple[tuple[int, ...], ...]

MAX_BAD_WORD_TOKENS = 2048
"""Tokens of all bad words of a request; they travel with each of its steps."""


def bad_word_ids(tokenizer: Tokenizer, sampling: Sampling) -> TokenSequences:
    """Return the token sequences of a request's bad words, each once.

    Raises BadValue for a text that cannot be tokenized, and for too many tokens.
    """
    texts = [prefix + word.lstrip() for word in sampling.bad_words or () for prefix in ("", " ")]
    try:
        sequences = dict.fromkeys(tokenizer.encode(text, special=False) for text in texts)
    except BadValue as error:
        raise BadValue(
            "bad_words has a text that is not Unicode: half of a surrogate pair", param="bad_words"
        ) from error
    found = tuple(sequence for sequence in sequences if sequence)
    num_tokens = sum(map(len, found))
    if num_tokens > MAX_BAD_WORD_TOKENS:
        raise BadValue(
            f"bad_words comes to {num_tokens} tokens; {MAX_BAD_WORD_TOKENS} is the most",
            param="bad_words",
        )
    return found


def forbid_words(requests: Sequence[Request], words: TokenSequences) -> list[Request]:
    """Return the requests with these words in their rules."""
    if not words:
        return list(requests)
    warps = [
        replace(request.warp, rule=replace(request.warp.rule or TokenRule(), bad_words=words))
        for request in requests
    ]
    return [replace(request, warp=warp) for request, warp in zip(requests, warps, strict=True)]
