"""One HTTP request for text, parsed: its prompts, its `Sampling`, and what its response has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from specserve.api.best_of import BestOf
from specserve.api.reasoning.formats import PromptReasoning
from specserve.api.schema import GenerationBody
from specserve.api.tools.formats import ModelCallFormat
from specserve.errors import BadValue
from specserve.sampling_params import Sampling
from specserve.types import Adapter

MAX_LOGPROBS = 3_000_000
"""Logprobs of one response, of some 70 bytes each, that is not streamed; logprobs of its prompts,
which are sent at once, streamed or not.
"""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, and the text of it that the answer begins with."""

    ids: tuple[int, ...]
    echo: str = ""
    is_encoder_input: bool = False
    shows_special: bool = False  # the text has the names of special tokens

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """Tokens that the text continues; none if the prompt is encoder input."""
        return () if self.is_encoder_input else self.ids


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One HTTP request for text.

    Its continuations are `n` of the first prompt, then `n` of the second, and so on.
    """

    prompts: tuple[Prompt, ...]
    sampling: Sampling
    stream: bool
    include_usage: bool  # in a chunk of its own; a response that is not streamed always has it
    continuous_usage: bool = False  # in every chunk
    return_token_ids: bool = False
    request_id: str | None = None  # the client's, for the response's id
    best_of: BestOf | None = None  # of the continuations, only that many are sent
    call_format: ModelCallFormat | None = None  # how it calls tools; None: it cannot
    reasoning: PromptReasoning | None = None  # before the answer; None: no known format of it
    adapter: Adapter | None = None  # that `model` names

    @classmethod
    def from_body(
        cls,
        body: GenerationBody,
        prompts: tuple[Prompt, ...],
        sampling: Sampling,
        *,
        best_of: BestOf | None,
        reasoning: PromptReasoning | None = None,
        call_format: ModelCallFormat | None = None,
        adapter: Adapter | None = None,
    ) -> GenerationRequest:
        """Put a body's request together; raise BadValue for more logprobs than a response holds."""
        stream, options = body.stream is True, body.stream_options
        if options is not None and not stream:
            raise BadValue("stream_options goes with stream true", param="stream_options")
        _check_logprobs(len(prompts) * sampling.n, sampling, is_streamed=stream)
        _check_prompt_logprobs(prompts, sampling)
        if not sampling.skip_special_tokens:
            prompts = tuple(replace(prompt, shows_special=True) for prompt in prompts)
        return cls(
            prompts,
            sampling,
            stream,
            include_usage=options is not None and options.include_usage is True,
            continuous_usage=options is not None and options.continuous_usage,
            return_token_ids=body.return_token_ids is True,
            request_id=body.request_id,
            best_of=best_of,
            adapter=adapter,
            call_format=call_format,
            reasoning=reasoning,
        )


def _check_prompt_logprobs(prompts: Sequence[Prompt], sampling: Sampling) -> None:
    """Raise BadValue for prompts of which one response would hold too many logprobs."""
    counts = (sampling.prompt_logprobs, sampling.num_logprobs if sampling.echo else None)
    each = sum(count + 1 for count in counts if count is not None)
    num_logprobs = sum(len(prompt.ids) for prompt in prompts) * sampling.n * each
    if num_logprobs > MAX_LOGPROBS:
        raise BadValue(
            f"the logprobs of the prompts come to {num_logprobs:,}, and {MAX_LOGPROBS:,} is the "
            "most in one response; ask for fewer alternatives, or send fewer prompts",
            param="logprobs" if sampling.prompt_logprobs is None else "prompt_logprobs",
        )


def _check_logprobs(num_continuations: int, sampling: Sampling, *, is_streamed: bool) -> None:
    """Raise BadValue for logprobs of which one response would hold too many."""
    if sampling.num_logprobs is None or is_streamed:
        return
    most = num_continuations * sampling.max_tokens * (sampling.num_logprobs + 1)
    if most > MAX_LOGPROBS:
        raise BadValue(
            f"{num_continuations} continuations of up to {sampling.max_tokens} tokens with "
            f"{sampling.num_logprobs} alternatives beside each come to {most:,} logprobs, and "
            f"{MAX_LOGPROBS:,} is the most in one response; stream them, or ask for fewer",
            param="logprobs",
        )
