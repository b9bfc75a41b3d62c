"""Options of a prompt that is made of messages, and the variables of a chat template.

Knows no bodies and no tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

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
