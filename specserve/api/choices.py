"""Render one continuation as JSON: as a completion, or as the assistant's message of a chat."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from specserve.api.continuation import OutputDelta
from specserve.api.generation_request import Prompt
from specserve.api.output_logprobs import (
    LOWEST_LOGPROB,
    CompletionLogprobs,
    chat_logprobs,
    token_text,
)
from specserve.api.prompt_logprobs import PromptLogprobsJson, blocks, to_json
from specserve.api.tokenizer import Tokenizer
from specserve.api.tools.parse import CallDelta, merge_deltas
from specserve.sampling_params import Sampling
from specserve.types import PromptLogprobs


class Choice(Protocol):
    """One of a response's `choices`, without its index and finish_reason."""

    prompt_logprobs: PromptLogprobsJson

    def add_prompt_logprobs(self, logprobs: PromptLogprobs) -> Iterator[None]:
        """Take the logprobs of the prompt, before the first delta, a block at each step.

        A long prompt would keep other requests waiting if it became JSON at once.
        """
        ...

    def delta_json(self, delta: OutputDelta) -> str:
        """Return the members of a streamed chunk, as JSON without braces.

        Call it once for each delta, in their order.
        """
        ...

    def add_logprobs(self, delta: OutputDelta) -> None:
        """Take the logprobs of a delta of a response that is not streamed.

        They become JSON at once: at the end they would keep all other requests waiting.
        """
        ...

    def full_json(self, delta: OutputDelta) -> Iterator[str]:
        """Yield the members of a response that is not streamed, as JSON without braces, in parts.

        `delta` is all deltas as one; their logprobs have been added.
        """
        ...


class CompletionChoice:
    def __init__(self, tokenizer: Tokenizer, prompt: Prompt, sampling: Sampling) -> None:
        self._prompt, self._echo = prompt, prompt.echo
        self._num_echoed = sampling.num_logprobs if sampling.echo else None
        prefix_ids = prompt.prefix_ids if self._num_echoed is None else ()
        visible_ids = tokenizer.special_ids if prompt.shows_special else frozenset()
        self._logprobs = CompletionLogprobs(tokenizer, prefix_ids, visible_ids)
        self._lists = JsonLists()
        self.prompt_logprobs = _prompt_logprobs(tokenizer, prompt, sampling)

    def add_prompt_logprobs(self, logprobs: PromptLogprobs) -> Iterator[None]:
        yield from self.prompt_logprobs.add(logprobs)
        if self._num_echoed is None:
            return
        self._lists.add(self._logprobs.first(self._prompt.ids[0]))
        for ids, rows in blocks(self._prompt.ids, logprobs, self._num_echoed):
            delta = OutputDelta("", token_ids=tuple(ids), logprobs=tuple(rows))
            self._lists.add(self._logprobs.render(delta))
            yield
        self._logprobs.start_text(len(self._prompt.echo))

    def delta_json(self, delta: OutputDelta) -> str:
        text, self._echo = self._echo + delta.text, ""
        rendered = self._logprobs.render(delta)
        if self._lists.is_empty:
            logprobs = to_json(rendered)
        else:  # the first delta, after the prompt
            self._lists.add(rendered)
            logprobs, self._lists = "".join(self._lists.json()), JsonLists()
        return f'"text":{to_json(text)},"logprobs":{logprobs}{self.prompt_logprobs.take_member()}'

    def add_logprobs(self, delta: OutputDelta) -> None:
        self._lists.add(self._logprobs.render(delta))

    def full_json(self, delta: OutputDelta) -> Iterator[str]:
        yield f'"text":{to_json(self._echo + delta.text)},"logprobs":'
        yield from self._lists.json()
        yield self.prompt_logprobs.member()


class ChatChoice:
    def __init__(self, tokenizer: Tokenizer, prompt: Prompt, sampling: Sampling) -> None:
        self._tokenizer = tokenizer
        self.prompt_logprobs = _prompt_logprobs(tokenizer, prompt, sampling)
        self._role: dict[str, object] = {"role": "assistant"}  # in the first chunk
        self._lists = JsonLists()

    def add_prompt_logprobs(self, logprobs: PromptLogprobs) -> Iterator[None]:
        return self.prompt_logprobs.add(logprobs)

    def delta_json(self, delta: OutputDelta) -> str:
        members, self._role = self._role, {}
        logprobs = (
            "null" if delta.logprobs is None else to_json(chat_logprobs(self._tokenizer, delta))
        )
        if members:
            is_text = bool(delta.text) or (delta.calls is None and not delta.reasoning)
            members["content"] = delta.text if is_text else None
        elif delta.text:
            members = {"content": delta.text}
        members |= _reasoning_members(delta)
        if delta.calls:
            members["tool_calls"] = [_call_delta_json(call) for call in delta.calls]
        prompt_logprobs = self.prompt_logprobs.take_member()
        return f'"delta":{to_json(members)},"logprobs":{logprobs}{prompt_logprobs}'

    def add_logprobs(self, delta: OutputDelta) -> None:
        self._lists.add(chat_logprobs(self._tokenizer, delta))

    def full_json(self, delta: OutputDelta) -> Iterator[str]:
        message: dict[str, object] = {"role": "assistant", "content": delta.text, "refusal": None}
        if delta.reasoning:
            message |= {"content": delta.text or None, **_reasoning_members(delta)}
        if delta.calls:
            message |= {
                "content": delta.text or None,
                "tool_calls": [_call_json(call) for call in merge_deltas(delta.calls)],
            }
        yield f'"message":{to_json(message)},"logprobs":'
        yield from self._lists.json()
        yield self.prompt_logprobs.member()


def _reasoning_members(delta: OutputDelta) -> dict[str, object]:
    """Return the reasoning by the name that most clients read, and by vLLM's newer one."""
    reasoning = delta.reasoning
    return {"reasoning_content": reasoning, "reasoning": reasoning} if reasoning else {}


class JsonLists:
    """An object of lists that grow together, kept as JSON; members that are no lists stay."""

    def __init__(self) -> None:
        self._parts: dict[str, list[str]] = {}
        self._constants: dict[str, object] = {}

    @property
    def is_empty(self) -> bool:
        return not self._parts

    def add(self, members: Mapping[str, object] | None) -> None:
        """Append the lists of an object with the same members each time; None: there is nothing."""
        for name, value in (members or {}).items():
            if isinstance(value, list):
                self._parts.setdefault(name, []).append(to_json(value)[1:-1])
            else:
                self._constants[name] = value

    def json(self) -> Iterator[str]:
        """Yield the object in parts: null if nothing was added."""
        if not self._parts:
            yield "null"
            return
        for number, (name, parts) in enumerate(self._parts.items()):
            yield f'{"," if number else "{"}"{name}":['
            yield from _joined(part for part in parts if part)
            yield "]"
        yield "".join(f',"{name}":{to_json(value)}' for name, value in self._constants.items())
        yield "}"


def _joined(parts: Iterable[str]) -> Iterator[str]:
    """Yield the parts with commas between them."""
    for number, part in enumerate(parts):
        yield "," + part if number else part


def _call_json(call: CallDelta) -> dict[str, object]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _call_delta_json(call: CallDelta) -> dict[str, object]:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, **_call_json(call)}


def _prompt_logprobs(
    tokenizer: Tokenizer, prompt: Prompt, sampling: Sampling
) -> PromptLogprobsJson:
    return PromptLogprobsJson(
        prompt.ids,
        sampling.prompt_logprobs,
        token_text=partial(token_text, tokenizer),
        lowest=LOWEST_LOGPROB,
    )


@dataclass(frozen=True, slots=True)
class ResponseKind:
    """The JSON names of one endpoint's responses, and how it renders a choice."""

    id_prefix: str
    object_name: str  # of a response that is not streamed
    chunk_object_name: str  # of a streamed chunk
    choice: Callable[[Tokenizer, Prompt, Sampling], Choice]
    has_prompt_ids: bool = False  # each choice has its prompt's; else the response has them
    # Also beside the choices, where clients of vLLM look for a chat's.
    repeats_prompt_logprobs: bool = False


COMPLETION = ResponseKind(
    "cmpl-", "text_completion", "text_completion", CompletionChoice, has_prompt_ids=True
)
CHAT = ResponseKind(
    "chatcmpl-",
    "chat.completion",
    "chat.completion.chunk",
    ChatChoice,
    repeats_prompt_logprobs=True,
)
