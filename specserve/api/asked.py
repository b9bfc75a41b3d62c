"""From what a client sent to what the engine can do: the model's name, prompts as ids, and one `Sampling`. Refuses what can never succeed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

from specserve.api.schema import ChatBody, CompletionBody, Generate, Message
from specserve.api.service import Served
from specserve.api.text import Text
from specserve.errors import BadRequest, BadValue, EmptyPrompt, NotServed, TooLong, UnknownToken
from specserve.request import Sampling
from specserve.types import Speculation

MAX_CONTINUATIONS = 512  # of one HTTP request: its prompts times n
TOKENIZED = 100_000  # characters that /tokenize takes, whatever the context
SMALL = 20_000  # characters that the event loop may tokenize itself, in some 5 ms; more go to a thread
SAMPLED = tuple(field.name for field in fields(Sampling) if field.name not in ("max_tokens", "speculation"))

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


class Reader:
    """Reads bodies whose shape is right."""

    def __init__(self, text: Text, served: Served) -> None:
        self._text, self._served = text, served

    async def completion(self, body: CompletionBody) -> Asked:
        self.check_model(body.model)
        sampling = self._sampling(body, default_max_tokens=16)
        if self._served.encodes:
            sampling.check_source()
        given = _prompts(body.prompt)
        if len(given) * sampling.n > MAX_CONTINUATIONS:
            raise BadValue(f"{len(given)} prompts times n {sampling.n} is more than the {MAX_CONTINUATIONS} that one request may ask for", param="n")
        for prompt in given:
            self._check_size(len(prompt), param="prompt")
        size = sum(len(prompt) for prompt in given)
        prompts = await _aside(size, lambda: tuple(self._prompt(prompt, echo=sampling.echo) for prompt in given))
        return _asked(body, prompts, sampling)

    async def chat(self, body: ChatBody) -> Asked:
        self.check_model(body.model)
        self._sampling(body, default_max_tokens=1)  # what is wrong with it is said before anything is done
        ids = await self.chat_ids(body.messages)
        self._check(ids, param="messages")
        sampling = self._sampling(body, default_max_tokens=self._served.room(len(ids)))
        return _asked(body, (Prompt(ids, is_source=self._served.encodes),), sampling)

    async def chat_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The prompt that the model's template makes of messages."""
        plain = [_plain(message) for message in messages]
        size = sum(len(value) for message in plain for value in message.values())
        self._check_size(size, param="messages")
        try:
            return await _aside(size, lambda: self._text.apply_chat(plain))
        except BadRequest as error:
            raise type(error)(str(error), param="messages") from error

    async def text_ids(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        if len(text) > TOKENIZED:
            self._check_size(len(text), param="prompt")
        return await _aside(len(text), lambda: self._text.encode(text, special=special))

    async def text_of(self, ids: Sequence[int]) -> str:
        """Of no more ids than a request could have."""
        if len(ids) > self._served.max_context:
            raise TooLong(f"tokens has {len(ids)} ids, but the context holds {self._served.max_context}", param="tokens")
        self.check_ids(ids, param="tokens")
        return await _aside(len(ids), lambda: self._text.decode(ids))

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self._served.name:
            raise NotServed(f"the model {name[:200]!r} is not served here; {self._served.name!r} is", param="model")

    def check_ids(self, ids: Sequence[int], *, param: str) -> None:
        """Raises UnknownToken for what is outside the vocabulary."""
        end = self._served.vocab_size
        if ids and (min(ids) < 0 or max(ids) >= end):
            wrong = next(token for token in ids if not 0 <= token < end)
            raise UnknownToken(f"{param} has a token id {str(wrong)[:30]}, but the vocabulary ends at {end - 1}", param=param)

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
                f"the prompt has a length of {size}, but the context holds {self._served.max_context} tokens, at most {most} characters", param=param
            )

    def _check(self, ids: tuple[int, ...], *, param: str) -> None:
        longest = self._served.longest_prompt
        if not ids:
            raise EmptyPrompt("the prompt is empty; it needs at least one token", param=param)
        self.check_ids(ids, param=param)
        if len(ids) > longest:
            what = "new tokens included" if not self._served.encodes else "of the source alone"
            raise TooLong(f"the prompt has {len(ids)} tokens, but the context holds {self._served.max_context}, {what}", param=param)

    def _sampling(self, body: Generate, *, default_max_tokens: int) -> Sampling:
        given = {name: value for name in SAMPLED if (value := getattr(body, name, None)) is not None}
        speculation = None if body.speculation is None else body.speculation.model_dump()
        sampling = Sampling(max_tokens=_max_tokens(body, default_max_tokens), speculation=speculation, **given)
        sampling.check_ids(self._served.vocab_size)
        assert isinstance(sampling.speculation, Speculation)
        gamma, most = sampling.speculation.gamma, self._served.max_gamma
        if gamma is not None and gamma > most:
            raise BadValue(f"speculation.gamma must be at most {most}, not {str(gamma)[:30]}", param="speculation.gamma")
        return sampling


def _asked(body: Generate, prompts: tuple[Prompt, ...], sampling: Sampling) -> Asked:
    stream, options = body.stream is True, body.stream_options
    if options is not None and not stream:
        raise BadValue("stream_options goes with stream true", param="stream_options")
    return Asked(prompts, sampling, stream, include_usage=options is not None and options.include_usage is True)


def _max_tokens(body: Generate, default: int) -> int:
    """Under either name; what is wrong is said of the name that was used."""
    if body.max_completion_tokens is None:
        return default if body.max_tokens is None else body.max_tokens
    if body.max_tokens not in (None, body.max_completion_tokens):
        raise BadValue("max_tokens and max_completion_tokens say the same thing; give one of them", param="max_completion_tokens")
    if body.max_completion_tokens < 1:
        raise BadValue("max_completion_tokens must be a whole number, 1 or more", param="max_completion_tokens")
    return body.max_completion_tokens


def _prompts(given: str | list[int] | list[str | list[int]]) -> list[str | list[int]]:
    """One text or one list of ids is one prompt; anything else is a list of prompts."""
    if isinstance(given, str):
        return [given]
    ids = [token for token in given if isinstance(token, int)]
    prompts = [prompt for prompt in given if not isinstance(prompt, int)]
    return prompts or [ids]


def _plain(message: Message) -> dict[str, str]:
    """As templates know messages. They have no developers, whose word is the system's, and no parts."""
    content = message.content if isinstance(message.content, str) else "\n".join(part.text for part in message.content)
    plain = {"role": "system" if message.role == "developer" else message.role, "content": content}
    return plain | {name: value for name in ("name", "tool_call_id") if (value := getattr(message, name)) is not None}


async def _aside(size: int, work: Callable[[], T]) -> T:
    """Work that grows with `size`, in a thread if it would hold up other requests."""
    return work() if size <= SMALL else await asyncio.to_thread(work)
