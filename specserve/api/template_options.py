"""Parse the options of a chat template that a request gives beside messages and tools.

A variable that the template does not read would change nothing. It is left out and reported, since
clients send some to every model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specserve.api.chat_schema import ChatBody, TokenizeBody
from specserve.api.chat_template import TemplateOptions
from specserve.errors import BadValue


class TemplateVariables(Protocol):
    """The names that a model's chat template reads, as a Tokenizer knows them."""

    @property
    def template_variables(self) -> frozenset[str]: ...


def parse_template_options(
    body: ChatBody | TokenizeBody, template: TemplateVariables
) -> TemplateOptions:
    """Return the options of a chat, without variables that the template does not read."""
    continues = body.continue_final_message is True
    if continues and body.add_generation_prompt:
        raise BadValue(
            "continue_final_message and add_generation_prompt exclude one another: "
            "the prompt ends inside the last message, or behind it",
            param="continue_final_message",
        )
    adds = body.add_generation_prompt is not False and not continues
    return TemplateOptions(adds, continues, _variables(body, template))


def unread_variables(body: ChatBody | TokenizeBody, template: TemplateVariables) -> Sequence[str]:
    """Return the names of what a chat gives and the template does not read."""
    return [
        f"chat_template_kwargs.{name}"
        for name in body.chat_template_kwargs or {}
        if name not in template.template_variables
    ]


def _variables(body: ChatBody | TokenizeBody, template: TemplateVariables) -> dict[str, object]:
    given = body.chat_template_kwargs or {}
    variables = {
        name: value for name, value in given.items() if name in template.template_variables
    }
    effort = body.reasoning_effort if isinstance(body, ChatBody) else None
    if effort is None:
        return variables
    if "reasoning_effort" in template.template_variables:
        if "reasoning_effort" in variables:
            raise BadValue(
                "reasoning_effort stands in chat_template_kwargs, too; give one of them",
                param="reasoning_effort",
            )
        return variables | {"reasoning_effort": effort}
    if effort != "none":
        raise BadValue(
            "reasoning_effort is not supported: the model's chat template does not know it",
            param="reasoning_effort",
        )
    return variables
