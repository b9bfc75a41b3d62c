"""Parse a client's body into a GenerationRequest: the model's name, prompt ids and `Sampling`.

A request that can never succeed is refused here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TypeVar

from specserve.api.adapter_registry import AdapterRegistry
from specserve.api.best_of import BestOf
from specserve.api.chat_schema import ChatBody, Message
from specserve.api.chat_template import TemplateOptions
from specserve.api.generation_request import GenerationRequest, Prompt
from specserve.api.reasoning.formats import PROMPT_TAIL, ModelReasoning, PromptReasoning
from specserve.api.reasoning.grammar import with_reasoning
from specserve.api.sampling_fields import max_tokens_of, parse_sampling
from specserve.api.schema import CompletionBody, GenerationBody
from specserve.api.service import ServedModel
from specserve.api.template_options import parse_template_options
from specserve.api.tokenizer import Tokenizer
from specserve.api.tools.formats import ModelCallFormat
from specserve.api.tools.messages import to_template_messages
from specserve.api.tools.offer import Offer, parse_offer
from specserve.errors import BadRequest, BadValue, EmptyPrompt, TooLong, UnknownToken
from specserve.sampling_params import MAX_COUNT, Sampling
from specserve.types import Adapter

MAX_CONTINUATIONS = 512
"""Continuations of one HTTP request: its prompts times n."""
MAX_TOKENIZE_CHARS = 100_000
"""Characters that /tokenize takes, whatever the context."""
MAX_INLINE_CHARS = 20_000
"""Characters that the event loop may tokenize itself, in some 5 ms; more go to a thread."""
MAX_INLINE_GRAMMAR = 2_000
"""Characters of a grammar that the event loop may check itself, in as long."""
DEFAULT_OPTIONS = TemplateOptions()

T = TypeVar("T")


class RequestParser:
    """Parser of bodies that have passed the schema."""

    def __init__(
        self, tokenizer: Tokenizer, served: ServedModel, adapters: AdapterRegistry | None = None
    ) -> None:
        self._tokenizer, self._served = tokenizer, served
        self._adapters = adapters or AdapterRegistry(served.name)

    @cached_property
    def _call_format(self) -> ModelCallFormat:
        return ModelCallFormat.from_template(self._tokenizer.tool_template, self._tokenizer)

    @cached_property
    def _reasoning(self) -> ModelReasoning | None:
        return ModelReasoning.from_template(self._tokenizer.tool_template, self._tokenizer)

    @property
    def has_reasoning(self) -> bool:
        """True if the model reasons in a known form before it answers."""
        return self._reasoning is not None and not self._served.is_encoder_decoder

    async def completion(self, body: CompletionBody) -> GenerationRequest:
        adapter, best_of = self.find_adapter(body.model), BestOf.from_body(body)
        sampling = parse_sampling(body, self._served, best_of, default_max_tokens=16)
        if self._served.is_encoder_decoder:
            sampling.check_encoder_input()
        await _check_grammar(sampling)
        given = _as_prompts(body.prompt)
        if len(given) * sampling.n > MAX_CONTINUATIONS:
            raise BadValue(
                f"{len(given)} prompts times n {sampling.n} is more than the {MAX_CONTINUATIONS} "
                "that one request may ask for",
                param="n",
            )
        keep = self._truncation(body)
        for prompt in given:
            self._check_size(len(prompt), param="prompt", is_cut=keep is not None)
        size = sum(len(prompt) for prompt in given)
        prompts = await _in_thread_if_large(
            size,
            lambda: tuple(self._prompt(prompt, echo=sampling.echo, keep=keep) for prompt in given),
        )
        return GenerationRequest.from_body(
            body, prompts, sampling, best_of=best_of, adapter=adapter
        )

    async def chat(self, body: ChatBody) -> GenerationRequest:
        """Parse a chat. Parameters are checked before anything is done with messages."""
        adapter = self.find_adapter(body.model)
        offer, best_of = parse_offer(body), BestOf.from_body(body)
        sampling = parse_sampling(body, self._served, best_of, default_max_tokens=MAX_COUNT)
        if self._served.is_encoder_decoder:
            sampling.check_encoder_input()
        await _check_grammar(sampling)
        if offer is not None:
            sampling = await self._with_tools(sampling, offer)
        keep, options = self._truncation(body), parse_template_options(body, self._tokenizer)
        ids = await self.chat_ids(body.messages, offer, options, is_cut=keep is not None)
        ids = ids if keep is None else ids[-keep:]
        self._check_prompt(ids, param="messages")
        reasoning = self._prompt_reasoning(ids)
        sampling = with_reasoning(
            sampling,
            reasoning,
            body.thinking_token_budget,
            answer_opens=offer is not None and self._call_format.format.is_channel,
        )
        sampling = replace(
            sampling, max_tokens=max_tokens_of(body, self._served.max_new_tokens(len(ids)))
        )
        call_format = None if offer is None else offer.typed_format(self._call_format)
        prompt = Prompt(ids, is_encoder_input=self._served.is_encoder_decoder)
        return GenerationRequest.from_body(
            body,
            (prompt,),
            sampling,
            best_of=best_of,
            reasoning=reasoning,
            call_format=call_format,
            adapter=adapter,
        )

    def _prompt_reasoning(self, ids: Sequence[int]) -> PromptReasoning | None:
        if self._reasoning is None or not self.has_reasoning:
            return None
        tail = self._tokenizer.prompt_tail(ids[-PROMPT_TAIL:])
        return PromptReasoning(self._reasoning, self._reasoning.prompt_state(tail))

    async def _with_tools(self, sampling: Sampling, offer: Offer) -> Sampling:
        """Constrain the answer to tool calls, or to the `sampling` without them.

        The answer may be without calls unless the offer demands one.
        """
        answer = sampling.grammar
        if answer is not None and not offer.must_call and not self._call_format.format.trigger:
            raise BadValue(
                "response_format and tools exclude one another here: "
                "this model's calls begin as JSON does",
                param="response_format",
            )
        await _in_thread_if_large(
            offer.size,
            lambda: offer.check(self._call_format, answer),
            max_inline=MAX_INLINE_GRAMMAR,
        )
        return replace(
            sampling,
            response_format=None,
            guided={"grammar": offer.grammar(self._call_format, answer)},
        )

    async def chat_ids(
        self,
        messages: Sequence[Message],
        offer: Offer | None = None,
        options: TemplateOptions = DEFAULT_OPTIONS,
        *,
        is_cut: bool = False,
    ) -> tuple[int, ...]:
        """Return the prompt that the model's template makes of messages and tools.

        A prompt that will be cut may be longer than the context.
        """
        tools = [] if offer is None else offer.definitions
        template_messages = to_template_messages(messages, tools, self._call_format)
        size = sum(len(str(value)) for message in template_messages for value in message.values())
        size += offer.size if offer is not None and self._call_format.in_template else 0
        size += options.size
        self._check_size(size, param="messages", is_cut=is_cut)
        try:
            return await _in_thread_if_large(
                size,
                lambda: self._tokenizer.apply_chat_template(
                    template_messages, tools=tools, options=options
                ),
            )
        except BadRequest as error:
            raise type(error)(str(error), param="messages") from error

    async def text_ids(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """Return the ids of a text, which may be longer than the context."""
        if len(text) > MAX_TOKENIZE_CHARS:
            self._check_size(len(text), param="prompt")
        return await _in_thread_if_large(
            len(text), lambda: self._tokenizer.encode(text, special=special)
        )

    async def decode_ids(self, ids: Sequence[int]) -> str:
        """Return the text of ids, special tokens by their names; they must fit in the context."""
        if len(ids) > self._served.max_context:
            raise TooLong(
                f"tokens has {len(ids)} ids, but the context holds {self._served.max_context}",
                param="tokens",
            )
        self.check_ids(ids, param="tokens")
        return await _in_thread_if_large(
            len(ids), lambda: self._tokenizer.decode(ids, shows_special=True)
        )

    def find_adapter(self, model: str | None) -> Adapter | None:
        """Return the adapter that `model` names. Raises NotServed for the name of another model."""
        return self._adapters.of_model(model)

    def check_ids(self, ids: Sequence[int], *, param: str) -> None:
        """Raise UnknownToken for an id outside the vocabulary."""
        end = self._served.vocab_size
        if ids and (min(ids) < 0 or max(ids) >= end):
            wrong = next(token for token in ids if not 0 <= token < end)
            raise UnknownToken(
                f"{param} has a token id {str(wrong)[:30]}, but the vocabulary ends at {end - 1}",
                param=param,
            )

    def _prompt(self, prompt: str | Sequence[int], *, echo: bool, keep: int | None) -> Prompt:
        ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else tuple(prompt)
        is_cut = keep is not None and len(ids) > keep
        ids = ids[-keep:] if keep is not None else ids
        self._check_prompt(ids, param="prompt")
        if not echo:
            return Prompt(ids, is_encoder_input=self._served.is_encoder_decoder)
        is_text = isinstance(prompt, str) and not is_cut
        return Prompt(ids, str(prompt) if is_text else self._tokenizer.decode_to_continue(ids))

    def _truncation(self, body: GenerationBody) -> int | None:
        """Return how many tokens of a prompt are kept, the last ones; None: all."""
        keep = body.truncate_prompt_tokens
        if keep is None or keep > 0:
            return keep
        if keep != -1:
            raise BadValue(
                f"truncate_prompt_tokens must be 1 or more, or -1, not {str(keep)[:30]}",
                param="truncate_prompt_tokens",
            )
        if self._served.is_encoder_decoder:
            return self._served.max_prompt_length
        return max(1, self._served.max_context - max_tokens_of(body, 1))

    def _check_size(self, size: int, *, param: str, is_cut: bool = False) -> None:
        """Raise TooLong for more characters or ids than can fit in the context.

        They are refused before tokenizing, which takes a hundred times their memory. A prompt
        that will be cut may have as many as /tokenize takes.
        """
        most = self._served.max_context * self._tokenizer.max_token_length
        most = max(most, MAX_TOKENIZE_CHARS) if is_cut else most
        if size > most:
            raise TooLong(
                f"the prompt has a length of {size}, but this model's maximum context length is "
                f"{self._served.max_context} tokens, at most {most} characters",
                param=param,
            )

    def _check_prompt(self, ids: tuple[int, ...], *, param: str) -> None:
        if not ids:
            raise EmptyPrompt("the prompt is empty; it needs at least one token", param=param)
        self.check_ids(ids, param=param)
        if len(ids) > self._served.max_prompt_length:
            what = (
                "new tokens included"
                if not self._served.is_encoder_decoder
                else "of the encoder input alone"
            )
            raise TooLong(
                f"the prompt has {len(ids)} tokens, but this model's maximum context length is "
                f"{self._served.max_context}, {what}",
                param=param,
            )


def _as_prompts(given: str | list[int] | list[str | list[int]]) -> list[str | list[int]]:
    """Return a list of prompts; one text or one list of ids is one prompt."""
    if isinstance(given, str):
        return [given]
    ids = [token for token in given if isinstance(token, int)]
    prompts = [prompt for prompt in given if not isinstance(prompt, int)]
    return prompts or [ids]


async def _check_grammar(sampling: Sampling) -> None:
    grammar = sampling.grammar
    if grammar is not None:
        await _in_thread_if_large(
            len(grammar.text), sampling.check_grammar, max_inline=MAX_INLINE_GRAMMAR
        )


async def _in_thread_if_large(
    size: int, work: Callable[[], T], *, max_inline: int = MAX_INLINE_CHARS
) -> T:
    """Do work that grows with `size`, in a thread if it would hold up other requests."""
    return work() if size <= max_inline else await asyncio.to_thread(work)
