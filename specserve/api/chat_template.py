"""Prompts that are made of messages: their options, and the chat templates that make them.

Knows no bodies and no tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specserve.errors import BadValue

_GENERATION_TAGS = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")
"""Tags of the transformers library, which mark an answer's tokens for training."""


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """How the last message ends, and variables of the template."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, object] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Characters that the variables add to a prompt, approximately."""
        return len(json.dumps(dict(self.variables))) if self.variables else 0


def variables_of(template: str) -> frozenset[str]:
    """Return the names that a template reads and does not set; none if it is no template."""
    # Imported here: it takes a tenth of a second, and few requests need it.
    from jinja2 import Environment, TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.meta import find_undeclared_variables

    try:
        tree = Environment(extensions=[loopcontrols]).parse(_GENERATION_TAGS.sub("", template))
    except TemplateError:
        return frozenset()
    return frozenset(find_undeclared_variables(tree)) - {"raise_exception", "strftime_now"}


def check_messages(messages: Sequence[Mapping[str, object]]) -> None:
    """Raise BadValue for messages that are no list of roles and contents."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise BadValue("messages must be a list with at least one message", param="messages")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise BadValue(
                f"messages[{i}] must have a role and a content, both text", param=f"messages[{i}]"
            )


def plain_chat(messages: Sequence[Mapping[str, object]], options: TemplateOptions) -> str:
    """Return the prompt of a model without a template: a line for each message."""
    lines = "".join(f"{message['role']}: {message['content']}\n" for message in messages)
    if options.continue_final_message:
        return lines[:-1]
    return lines + "assistant:" if options.add_generation_prompt else lines


def processor_template(directory: Path) -> str | None:
    """Return the chat template that a multimodal model has beside its tokenizer; None without."""
    path = directory / "chat_template.json"
    if not path.is_file():
        return None
    template = json.loads(path.read_text(encoding="utf-8")).get("chat_template")
    return template if isinstance(template, str) else None
