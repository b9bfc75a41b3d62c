"""Schemas of the bodies that clients send, for the OpenAPI page and for a first check.

Chats have theirs in chat_schema.py. The ranges of values are checked by `Sampling`
(sampling_params.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, Field, PrivateAttr, model_validator

from specserve.api.field_types import Ids, JsonSchema, Label, Prompts, Texts, max_entries
from specserve.api.strict_model import Body, StrictModel, Unsupported
from specserve.errors import BadValue
from specserve.sampling_values import MAX_BIASES

MAX_METADATA = 16  # entries, as many as OpenAI takes
REQUEST_ID = r"^[A-Za-z0-9._:-]{1,128}$"


class StreamOptions(StrictModel):
    UNSUPPORTED: ClassVar[Unsupported] = {"include_obfuscation": (False,)}

    include_usage: bool | None = Field(
        None, description="Send a chunk with the usage, and no choices, before the end."
    )
    continuous_usage_stats: bool | None = Field(
        None, description="Put the usage so far into every chunk, unless include_usage is false."
    )

    @property
    def continuous_usage(self) -> bool:
        return self.continuous_usage_stats is True and self.include_usage is not False


class SpeculationBody(StrictModel):
    gamma: int | Literal["auto"] | None = Field(
        None, description="Draft tokens a round; 0 turns speculation off."
    )
    verifier: Literal["auto", "speculative", "block", "coupled", "lenient"] | None = None


class NamedSchema(StrictModel):
    name: Label
    description: str | None = None
    json_schema: JsonSchema | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="Taken; the schema is obeyed either way.")


class ResponseFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = Field(None, description="Goes with the type json_schema.")
    object_schema: JsonSchema | None = Field(
        None, alias="schema", description="Goes with the type json_object."
    )


class Guided(StrictModel):
    """A constraint on the text; exactly one member is given."""

    regex: str | None = None
    grammar: str | None = Field(
        None, description="In Lark's notation, as llguidance reads it, or in GBNF."
    )
    json_schema: JsonSchema | str | None = Field(None, alias="json")
    choice: Texts | None = Field(None, description="One of these texts.")
    structural_tag: JsonSchema | str | None = Field(
        None, description="Free text with tags whose content is constrained, as vLLM has them."
    )


class StructuredOutputs(Guided):
    """vLLM's form of `guided`."""

    UNSUPPORTED: ClassVar[Unsupported] = {
        "whitespace_pattern": (),
        "disable_fallback": (False, True),  # there is none
        "disable_any_whitespace": (False,),
        "disable_additional_properties": (False,),
    }

    json_object: bool | None = Field(None, description="Any JSON object.")


class GenerationBody(Body):
    """Parameters that completions and chats share."""

    UNSUPPORTED: ClassVar[Unsupported] = {
        "service_tier": ("auto", "default"),
        "modalities": (["text"],),
    }
    # Other names of parameters, as other servers call them.
    SYNONYMS: ClassVar[Mapping[str, str]] = {
        "n_predict": "max_tokens",
        "repeat_penalty": "repetition_penalty",
    }
    _sent_names: dict[str, str] = PrivateAttr(default_factory=dict)

    model: str | None = Field(
        None, description="The served model's name; left out, it is that one."
    )
    max_tokens: int | None = Field(
        None,
        description="A text ends where the context does, too, with finish_reason length. "
        "0 goes with echo or prompt_logprobs: nothing is written.",
    )
    max_completion_tokens: int | None = Field(None, description="Another name for max_tokens.")
    temperature: float | None = Field(
        None, description="0 is greedy. Left out, it is what the model recommends, or 1."
    )
    top_p: float | None = None
    top_k: int | None = Field(None, description="0 and -1 are off.")
    min_p: float | None = None
    n: int | None = None
    stop: str | Texts | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(
        None,
        description="New tokens before which no end token or stop token is written, and no stop "
        "string ends the text.",
    )
    bad_words: Texts | None = Field(
        None, description="Texts that are not written, at the start of a word or inside the text."
    )
    allowed_token_ids: Ids | None = Field(None, description="No other tokens are written.")
    priority: int | None = Field(
        None, description="A lower one runs first, among the waiting requests of the same client."
    )
    seed: int | None = Field(
        None,
        description="Makes the text repeatable, whatever drafts and whatever else is in the batch.",
    )
    top_logprobs: int | None = Field(None, description="Goes with logprobs true.")
    prompt_logprobs: int | None = Field(
        None, description="So many alternatives to each token of the prompt, with its own logprob."
    )
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float] | None, max_entries(MAX_BIASES)] = Field(
        None, description="Token ids and what is added to their logits."
    )
    response_format: ResponseFormat | None = Field(None, description="What the text must be.")
    guided: Guided | None = Field(
        None, description="What the text must be, in another form; the four below say the same."
    )
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_json: JsonSchema | str | None = None
    guided_choice: Texts | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: SpeculationBody | None = None
    user: Label | None = Field(None, description="Taken and not used, like the three below.")
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    metadata: Annotated[dict[Label, Label] | None, max_entries(MAX_METADATA)] = None
    cache_salt: Annotated[Label | None, Field(min_length=1)] = Field(
        None, description="Pages are shared only with prompts of the same salt."
    )
    structured_outputs: StructuredOutputs | None = Field(
        None, description="Another name for guided, vLLM's."
    )
    json_schema: JsonSchema | str | None = Field(
        None, description="Another name for guided_json, llama.cpp's."
    )
    grammar: str | None = Field(None, description="llama.cpp's: in GBNF, or in Lark's notation.")
    n_predict: int | None = Field(
        None, description="Another name for max_tokens; a chat may say -1, what there is room for."
    )
    repeat_penalty: float | None = Field(None, description="Another name for repetition_penalty.")
    repeat_last_n: int | None = Field(
        None, description="-1: penalties look at the whole text. Without penalties, any number."
    )
    cache_prompt: bool | None = Field(
        None, description="false: no pages are shared, as with a cache_salt of its own."
    )
    best_of: int | None = Field(
        None, description="Continuations from which the n likeliest are taken, by mean logprob."
    )
    include_stop_str_in_output: bool | None = Field(
        None, description="The text ends with the stop string, or with the text of a stop token."
    )
    skip_special_tokens: bool | None = Field(
        None, description="false: special tokens appear in the text by their names."
    )
    truncate_prompt_tokens: int | None = Field(
        None, description="Keep the last so many tokens of each prompt; -1: as many as fit."
    )
    return_token_ids: bool | None = Field(
        None, description="Add the ids of the prompt's tokens and of the new ones."
    )
    request_id: str | None = Field(
        None,
        pattern=REQUEST_ID,
        description="The end of the response's id: up to 128 letters, digits and . _ : -",
    )
    store: bool | None = Field(None, description="Taken; nothing is stored.")

    @property
    def sent_names(self) -> Mapping[str, str]:
        """Names that the client used, by the names that checks use."""
        return self._sent_names

    @model_validator(mode="after")
    def take_synonyms(self) -> Self:
        """Copy what was given under another name; refuse two names with different values."""
        for sent, name in self.SYNONYMS.items():
            value = getattr(self, sent)
            if value is None:
                continue
            if getattr(self, name) not in (None, value):
                raise BadValue(
                    f"{sent} and {name} say the same thing; give one of them", param=sent
                )
            setattr(self, name, value)
            self._sent_names[name] = sent
        return self


class CompletionBody(GenerationBody):
    """Body of `POST /v1/completions`."""

    UNSUPPORTED: ClassVar[Unsupported] = {
        **GenerationBody.UNSUPPORTED,
        "suffix": ("",),
        "add_special_tokens": (True,),
    }

    prompt: str | Ids | Prompts = Field(description="A text, token ids, or a list of both.")
    echo: bool | None = None
    logprobs: int | bool | None = Field(
        None, description="A number asks for that many alternatives to each token."
    )


class DetokenizeBody(Body):
    """Body of `POST /detokenize`."""

    model: str | None = None
    tokens: Ids


class ErrorBody(BaseModel):
    """The error itself."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """Body of every error response."""

    error: ErrorBody
