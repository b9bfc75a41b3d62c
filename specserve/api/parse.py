"""From what a client sent to what the engine can do: the model's name, prompts as ids, and one `Sampling`. Refuses what can never succeed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TypeVar

from specserve.api.schema import ChatBody, CompletionBody, Generate, Message, Shape
from specserve.api.service import Served
from specserve.api.tokenizer import Text
from specserve.api.tools.formats import Spelling
from specserve.api.tools.messages import for_template
from specserve.api.tools.offer import Offer, offered
from specserve.errors import BadRequest, BadValue, EmptyPrompt, NotServed, TooLong, UnknownToken
from specserve.sampling_params import Sampling
from specserve.types import Speculation

MAX_CONTINUATIONS = 512  # of one HTTP request: its prompts times n
TOKENIZED = 100_000  # characters that /tokenize takes, whatever the context
SMALL = (
    20_000  # characters that the event loop may tokenize itself, in some 5 ms; more go to a thread
)
SMALL_GRAMMAR = 2_000  # and of a grammar, which is checked in as long
ELSEWHERE = (
    "max_tokens",
    "speculation",
    "response_format",
    "guided",
)  # what has a shape of its own in a body
SAMPLED = tuple(field.name for field in fields(Sampling) if field.name not in ELSEWHERE)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, and the text of it that the answer begins with."""

    ids: tuple[int, ...]
    echo: str = ""
    is_source: bool = False

    @property
    def before(self) -> tuple[int, ...]:
        """What the text continues: nothing where the prompt is a source."""
        return () if self.is_source else self.ids


@dataclass(frozen=True, slots=True)
class Asked:
    """One HTTP request, understood. Its continuations are `n` of the first prompt, then of the second, and so on."""

    prompts: tuple[Prompt, ...]
    sampling: Sampling
    stream: bool
    include_usage: bool  # in a chunk of its own; an answer in one piece always has it
    spelling: Spelling | None = None  # how it calls functions; None: it cannot


class Reader:
    """Reads bodies whose shape is right."""

    def __init__(self, text: Text, served: Served) -> None:
        self._text, self._served = text, served

    @cached_property
    def _spelling(self) -> Spelling:
        return Spelling.of(self._text.tool_template, self._text)

    async def completion(self, body: CompletionBody) -> Asked:
        self.check_model(body.model)
        sampling = self._sampling(body, default_max_tokens=16)
        if self._served.encodes:
            sampling.check_source()
        await _check_grammar(sampling)
        given = _prompts(body.prompt)
        if len(given) * sampling.n > MAX_CONTINUATIONS:
            raise BadValue(
                f"{len(given)} prompts times n {sampling.n} is more than the {MAX_CONTINUATIONS} that one request may ask for",
                param="n",
            )
        for prompt in given:
            self._check_size(len(prompt), param="prompt")
        size = sum(len(prompt) for prompt in given)
        prompts = await _aside(
            size, lambda: tuple(self._prompt(prompt, echo=sampling.echo) for prompt in given)
        )
        return _asked(body, prompts, sampling)

    async def chat(self, body: ChatBody) -> Asked:
        """What is wrong with parameters is said before anything is done with messages."""
        self.check_model(body.model)
        offer, sampling = offered(body), self._sampling(body, default_max_tokens=1)
        await _check_grammar(sampling)
        if offer is not None:
            sampling = await self._with_tools(sampling, offer)
        ids = await self.chat_ids(body.messages, offer)
        self._check(ids, param="messages")
        sampling = replace(sampling, max_tokens=_max_tokens(body, self._served.room(len(ids))))
        asked = _asked(body, (Prompt(ids, is_source=self._served.encodes),), sampling)
        return asked if offer is None else replace(asked, spelling=self._spelling)

    async def _with_tools(self, sampling: Sampling, offer: Offer) -> Sampling:
        """Of an answer that calls, or is what it would have to be without tools."""
        answer = sampling.grammar
        if answer is not None and not offer.must_call and not self._spelling.format.trigger:
            raise BadValue(
                "response_format and tools exclude one another here: this model's calls begin as JSON does",
                param="response_format",
            )
        await _aside(offer.size, lambda: offer.check(self._spelling, answer), small=SMALL_GRAMMAR)
        return replace(
            sampling,
            response_format=None,
            guided={"grammar": offer.grammar(self._spelling, answer)},
        )

    async def chat_ids(
        self, messages: Sequence[Message], offer: Offer | None = None
    ) -> tuple[int, ...]:
        """The prompt that the model's template makes of messages and tools."""
        tools = [] if offer is None else offer.shown
        plain = for_template(messages, tools, self._spelling)
        size = sum(len(str(value)) for message in plain for value in message.values())
        size += offer.size if offer is not None and self._spelling.taught else 0
        self._check_size(size, param="messages")
        try:
            return await _aside(size, lambda: self._text.apply_chat(plain, tools=tools))
        except BadRequest as error:
            raise type(error)(str(error), param="messages") from error

    async def text_ids(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        if len(text) > TOKENIZED:
            self._check_size(len(text), param="prompt")
        return await _aside(len(text), lambda: self._text.encode(text, special=special))

    async def text_of(self, ids: Sequence[int]) -> str:
        """Of no more ids than a request could have."""
        if len(ids) > self._served.max_context:
            raise TooLong(
                f"tokens has {len(ids)} ids, but the context holds {self._served.max_context}",
                param="tokens",
            )
        self.check_ids(ids, param="tokens")
        return await _aside(len(ids), lambda: self._text.decode(ids))

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self._served.name:
            raise NotServed(
                f"the model {name[:200]!r} is not served here; {self._served.name!r} is",
                param="model",
            )

    def check_ids(self, ids: Sequence[int], *, param: str) -> None:
        """Raises UnknownToken for what is outside the vocabulary."""
        end = self._served.vocab_size
        if ids and (min(ids) < 0 or max(ids) >= end):
            wrong = next(token for token in ids if not 0 <= token < end)
            raise UnknownToken(
                f"{param} has a token id {str(wrong)[:30]}, but the vocabulary ends at {end - 1}",
                param=param,
            )

    def _prompt(self, prompt: str | Sequence[int], *, echo: bool) -> Prompt:
        ids = self._text.encode(prompt) if isinstance(prompt, str) else tuple(prompt)
        self._check(ids, param="prompt")
        if not echo:
            return Prompt(ids, is_source=self._served.encodes)
        return Prompt(ids, prompt if isinstance(prompt, str) else self._text.decode(ids))

    def _check_size(self, size: int, *, param: str) -> None:
        """Characters or ids: what is far too long costs no tokenizing, which takes a hundred times its memory."""
        most = self._served.max_context * self._text.longest
        if size > most:
            raise TooLong(
                f"the prompt has a length of {size}, but the context holds {self._served.max_context} tokens, at most {most} characters",
                param=param,
            )

    def _check(self, ids: tuple[int, ...], *, param: str) -> None:
        longest = self._served.longest_prompt
        if not ids:
            raise EmptyPrompt("the prompt is empty; it needs at least one token", param=param)
        self.check_ids(ids, param=param)
        if len(ids) > longest:
            what = "new tokens included" if not self._served.encodes else "of the source alone"
            raise TooLong(
                f"the prompt has {len(ids)} tokens, but the context holds {self._served.max_context}, {what}",
                param=param,
            )

    def _sampling(self, body: Generate, *, default_max_tokens: int) -> Sampling:
        given = {
            name: value for name in SAMPLED if (value := getattr(body, name, None)) is not None
        }
        speculation = None if body.speculation is None else body.speculation.model_dump()
        sampling = Sampling(
            max_tokens=_max_tokens(body, default_max_tokens),
            speculation=speculation,
            response_format=_structure(body.response_format),
            guided=_guided(body),
            **given,
        )
        sampling.check_ids(self._served.vocab_size)
        assert isinstance(sampling.speculation, Speculation)
        gamma, most = sampling.speculation.gamma, self._served.max_gamma
        if gamma is not None and gamma > most:
            raise BadValue(
                f"speculation.gamma must be at most {most}, not {str(gamma)[:30]}",
                param="speculation.gamma",
            )
        return sampling


def _asked(body: Generate, prompts: tuple[Prompt, ...], sampling: Sampling) -> Asked:
    stream, options = body.stream is True, body.stream_options
    if options is not None and not stream:
        raise BadValue("stream_options goes with stream true", param="stream_options")
    return Asked(
        prompts,
        sampling,
        stream,
        include_usage=options is not None and options.include_usage is True,
    )


def _max_tokens(body: Generate, default: int) -> int:
    """Under either name; what is wrong is said of the name that was used."""
    if body.max_completion_tokens is None:
        return default if body.max_tokens is None else body.max_tokens
    if body.max_tokens not in (None, body.max_completion_tokens):
        raise BadValue(
            "max_tokens and max_completion_tokens say the same thing; give one of them",
            param="max_completion_tokens",
        )
    if body.max_completion_tokens < 1:
        raise BadValue(
            "max_completion_tokens must be a whole number, 1 or more", param="max_completion_tokens"
        )
    return body.max_completion_tokens


def _prompts(given: str | list[int] | list[str | list[int]]) -> list[str | list[int]]:
    """One text or one list of ids is one prompt; anything else is a list of prompts."""
    if isinstance(given, str):
        return [given]
    ids = [token for token in given if isinstance(token, int)]
    prompts = [prompt for prompt in given if not isinstance(prompt, int)]
    return prompts or [ids]


def _structure(given: Shape | None) -> dict[str, object] | None:
    """By the names that clients use; what is null was not given."""
    return (
        None
        if given is None
        else {
            name: value
            for name, value in given.model_dump(by_alias=True).items()
            if value is not None
        }
    )


def _guided(body: Generate) -> dict[str, object] | None:
    """Under one name or in one object."""
    flat = {
        name: value
        for name in ("regex", "grammar", "json", "choice")
        if (value := getattr(body, f"guided_{name}")) is not None
    }
    if body.guided is not None and flat:
        raise BadValue(
            f"guided and guided_{next(iter(flat))} say the same thing; give one of them",
            param="guided",
        )
    return _structure(body.guided) if body.guided is not None else flat or None


async def _check_grammar(sampling: Sampling) -> None:
    grammar = sampling.grammar
    if grammar is not None:
        await _aside(len(grammar.text), sampling.check_grammar, small=SMALL_GRAMMAR)


async def _aside(size: int, work: Callable[[], T], *, small: int = SMALL) -> T:
    """Work that grows with `size`, in a thread if it would hold up other requests."""
    return work() if size <= small else await asyncio.to_thread(work)
