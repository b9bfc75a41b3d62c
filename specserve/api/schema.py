"""Schemas of the bodies that clients send, for the OpenAPI page and for a first check.

The ranges of values are checked by `Sampling` (sampling_params.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    FailFast,
    Field,
    PrivateAttr,
    StrictInt,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from typing_extensions import TypeAliasType

from specserve.api.dialects import is_neutral
from specserve.api.strict_model import Body, StrictModel, Unsupported
from specserve.errors import BadValue
from specserve.grammar.request import MAX_DEPTH, is_too_deep
from specserve.sampling_params import MAX_COUNT
from specserve.sampling_values import MAX_BIASES

# Bounds of what no other limit bounds. OpenAI takes as many messages, and as much metadata.
MAX_MESSAGES = 2048
MAX_PARTS = 2048
MAX_LABEL = 512  # characters of a name, or of what is taken and not used
MAX_METADATA = 16
MAX_TOOLS = 128
MAX_CALLS = 128
FUNCTION_NAME = r"^[A-Za-z0-9_-]{1,64}$"
REQUEST_ID = r"^[A-Za-z0-9._:-]{1,128}$"
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


def max_entries(most: int) -> BeforeValidator:
    """Return a validator that counts entries before they are checked.

    Pydantic would report every single one, in a hundred times the memory of the body.
    """

    def check(given: Any, info: ValidationInfo) -> Any:
        if isinstance(given, Mapping) and len(given) > most:
            raise BadValue(
                f"{info.field_name} has {len(given)} entries; {most} is the most",
                param=info.field_name,
            )
        return given

    return BeforeValidator(check)


def _check_depth(given: Any) -> Any:
    """Refuse what is nested too deeply, before anything recurses into it."""
    if is_too_deep(given):
        raise PydanticCustomError("too_deep", f"it is nested more than {MAX_DEPTH} levels deep")
    return given


# A faulty list is refused at its first fault, since a body of megabytes may hold a million.
# Strict by themselves: FastAPI shares their schema outside of the strict models.
Ids = TypeAliasType("Ids", Annotated[list[StrictInt], FailFast()])
Texts = TypeAliasType("Texts", Annotated[list[str], FailFast()])
Label = Annotated[str, Field(max_length=MAX_LABEL)]
Prompts = TypeAliasType("Prompts", Annotated[list[str | Ids], FailFast()])
JsonSchema = Annotated[dict[str, Any], BeforeValidator(_check_depth)]


class StreamOptions(StrictModel):
    UNSUPPORTED: ClassVar[Unsupported] = {"include_obfuscation": (False,)}

    include_usage: bool | None = Field(
        None, description="Send a chunk with the usage, and no choices, before the end."
    )
    continuous_usage_stats: bool | None = Field(
        None, description="Put the usage so far into every chunk."
    )


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
    temperature: float | None = Field(None, description="0 is greedy.")
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
    logprobs: bool | int | None = Field(
        None, description="A number asks for that many alternatives to each token."
    )


class TextPart(StrictModel):
    IGNORES_UNKNOWN = True

    type: Literal["text"]
    text: str

    @field_validator("type", mode="before")
    @classmethod
    def is_text(cls, kind: Any) -> Any:
        if isinstance(kind, str) and kind != "text":
            raise BadValue(
                f"a part of a message has the type {kind[:40]!r}; this model takes text alone",
                param="messages",
            )
        return kind


Parts = TypeAliasType("Parts", Annotated[list[TextPart], FailFast(), Field(max_length=MAX_PARTS)])


class CalledFunction(StrictModel):
    IGNORES_UNKNOWN = True

    name: Annotated[str, Field(pattern=FUNCTION_NAME)]
    arguments: str = Field(description="JSON, as the model wrote it.")


class ToolCall(StrictModel):
    IGNORES_UNKNOWN = True

    id: Label
    type: Literal["function"]
    function: CalledFunction


ToolCalls = TypeAliasType(
    "ToolCalls", Annotated[list[ToolCall], FailFast(), Field(max_length=MAX_CALLS)]
)


class Message(StrictModel):
    UNSUPPORTED: ClassVar[Unsupported] = {
        "function_call": (),
        "audio": (),
        "refusal": (),
        "annotations": ([],),
    }
    IGNORES_UNKNOWN = True

    role: Literal["system", "developer", "user", "assistant", "tool"]
    tool_calls: ToolCalls | None = Field(None, description="Of the assistant.")
    content: str | Parts | None = Field(
        None, validate_default=True, description="May be left out beside tool_calls."
    )
    name: Label | None = None
    tool_call_id: Label | None = Field(None, description="Which call a tool answers.")
    reasoning_content: str | None = Field(None, description="Of the assistant, for the template.")
    reasoning: str | None = Field(None, description="A newer name of reasoning_content.")

    @field_validator("tool_calls")
    @classmethod
    def belong_to_the_assistant(
        cls, calls: list[ToolCall] | None, info: ValidationInfo
    ) -> list[ToolCall] | None:
        if calls and info.data.get("role") != "assistant":
            raise PydanticCustomError("misplaced", "only the assistant's messages have tool_calls")
        return calls

    @field_validator("content")
    @classmethod
    def is_there(
        cls, content: str | list[TextPart] | None, info: ValidationInfo
    ) -> str | list[TextPart] | None:
        """Refuse a message without content, unless it has calls."""
        if content is None and not info.data.get("tool_calls"):
            raise PydanticCustomError("missing", "a text is needed, except beside tool_calls")
        return content


Messages = TypeAliasType(
    "Messages", Annotated[list[Message], FailFast(), Field(max_length=MAX_MESSAGES)]
)


class FunctionTool(StrictModel):
    name: Annotated[str, Field(pattern=FUNCTION_NAME)]
    description: str | None = None
    parameters: JsonSchema | None = Field(
        None, description="A JSON schema of an object; left out, there are none."
    )
    strict: bool | None = Field(None, description="Taken; arguments obey the schema either way.")


class ToolBody(StrictModel):
    type: Literal["function"]
    function: FunctionTool


class FunctionName(StrictModel):
    name: Label


class NamedTool(StrictModel):
    type: Literal["function"]
    function: FunctionName


NamedTools = TypeAliasType(
    "NamedTools",
    Annotated[list[NamedTool], FailFast(), Field(max_length=MAX_TOOLS)],
)


class ToolSet(StrictModel):
    mode: Literal["auto", "required"]
    tools: NamedTools


class AllowedTools(StrictModel):
    """A choice among some of the tools; the model is shown all of them."""

    type: Literal["allowed_tools"]
    allowed_tools: ToolSet


ChosenTools = Annotated[NamedTool | AllowedTools, Field(discriminator="type")]
Tools = TypeAliasType("Tools", Annotated[list[ToolBody], FailFast(), Field(max_length=MAX_TOOLS)])


class ChatBody(GenerationBody):
    """Body of `POST /v1/chat/completions`."""

    UNSUPPORTED: ClassVar[Unsupported] = {
        **GenerationBody.UNSUPPORTED,
        "audio": (),
        "function_call": ("none", "auto"),  # without functions, neither asks for anything
        "functions": ([],),
        "prediction": (),
        "add_special_tokens": (False,),
        "verbosity": ("medium",),
        "web_search_options": (),
    }

    messages: Messages
    logprobs: bool | None = None
    thinking_token_budget: Annotated[int, Field(ge=-1, le=MAX_COUNT)] | None = Field(
        None, description="Tokens of reasoning, behind which its end is forced; -1 is no limit."
    )
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTools | None = Field(
        None, description="auto, unless there are no tools."
    )
    parallel_tool_calls: bool | None = Field(
        None, description="Whether one answer may call several times; true by default."
    )
    reasoning_effort: Effort | None = Field(
        None, description="For a model whose chat template knows it; without one, none is taken."
    )
    add_generation_prompt: bool | None = Field(
        None, description="Whether the prompt ends with the opening of an answer; true by default."
    )
    continue_final_message: bool | None = Field(
        None, description="Continue the last message instead of answering it."
    )
    chat_template_kwargs: Annotated[dict[str, Any] | None, BeforeValidator(_check_depth)] = Field(
        None, description="Variables of the model's chat template."
    )

    @model_validator(mode="before")
    @classmethod
    def take_unbounded(cls, given: Any) -> Any:
        """Take n_predict -1, which llama.cpp's clients send for what there is room for."""
        unbounded = isinstance(given, Mapping) and is_neutral(given.get("n_predict"), (-1,))
        return {**given, "n_predict": None} if unbounded else given


class TokenizeBody(Body):
    """Body of `POST /tokenize`: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool | None = Field(None, description="As in chats.")
    continue_final_message: bool | None = Field(None, description="As in chats.")
    chat_template_kwargs: Annotated[dict[str, Any] | None, BeforeValidator(_check_depth)] = Field(
        None, description="As in chats."
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
