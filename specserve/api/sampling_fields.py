"""Parse the fields of a body that say how to sample into `Sampling`. Knows no prompts."""

from __future__ import annotations

import secrets
from dataclasses import fields

from specserve.api.best_of import BestOf
from specserve.api.constraints import members, parse_constraint
from specserve.api.schema import GenerationBody
from specserve.api.service import ServedModel
from specserve.errors import BadValue
from specserve.sampling_params import Sampling
from specserve.types import Speculation

NESTED_FIELDS = ("max_tokens", "speculation", "response_format", "guided", "adapter")
"""Fields of Sampling that are no copies of the body's; `model` names an adapter there."""
FLAT_FIELDS = tuple(field.name for field in fields(Sampling) if field.name not in NESTED_FIELDS)


def parse_sampling(
    body: GenerationBody, served: ServedModel, best_of: BestOf | None, *, default_max_tokens: int
) -> Sampling:
    """Return the parameters of a body; raise BadValue for those that the model cannot honour."""
    given = dict(served.sampling_defaults) | {
        name: value for name in FLAT_FIELDS if (value := getattr(body, name, None)) is not None
    }
    if body.cache_prompt is False and body.cache_salt is None:
        given["cache_salt"] = secrets.token_hex()
    speculation = None if body.speculation is None else body.speculation.model_dump()
    sampling = Sampling(
        max_tokens=max_tokens_of(body, default_max_tokens),
        speculation=speculation,
        response_format=members(body.response_format),
        guided=parse_constraint(body),
        **given,
    )
    sampling.check_ids(served.vocab_size)
    assert isinstance(sampling.speculation, Speculation)
    gamma, most = sampling.speculation.gamma, served.max_gamma
    if gamma is not None and gamma > most:
        raise BadValue(
            f"speculation.gamma must be at most {most}, not {str(gamma)[:30]}",
            param="speculation.gamma",
        )
    _check_repeat_last_n(body, sampling)
    return sampling if best_of is None else best_of.widen(sampling)


def max_tokens_of(body: GenerationBody, default: int) -> int:
    """Return max_tokens, given by either name. An error names the name that was used."""
    if body.max_completion_tokens is None:
        return default if body.max_tokens is None else body.max_tokens
    if body.max_tokens not in (None, body.max_completion_tokens):
        raise BadValue(
            "max_tokens and max_completion_tokens say the same thing; give one of them",
            param="max_completion_tokens",
        )
    can_be_empty = getattr(body, "echo", None) or body.prompt_logprobs is not None
    if body.max_completion_tokens < (0 if can_be_empty else 1):
        raise BadValue(
            "max_completion_tokens must be a whole number, 1 or more, "
            "or 0 with echo or prompt_logprobs",
            param="max_completion_tokens",
        )
    return body.max_completion_tokens


def _check_repeat_last_n(body: GenerationBody, sampling: Sampling) -> None:
    """Raise BadValue for penalties on a part of the text; they look at all of it."""
    given = [
        f"{name} {value:g}"
        for name, off in (
            ("repetition_penalty", 1),
            ("presence_penalty", 0),
            ("frequency_penalty", 0),
        )
        if (value := getattr(sampling, name)) != off
    ]
    if body.repeat_last_n not in (None, -1) and given:
        raise BadValue(
            "repeat_last_n must be -1: penalties look at the whole text, and of them there is "
            f"{', '.join(given)}, sent or recommended by the model",
            param="repeat_last_n",
        )
