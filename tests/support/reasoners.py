"""Tokenizers of models that reason: short templates in the style of three families."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from transformers import AutoTokenizer

from specserve.api.reasoning.formats import ModelReasoning, PromptReasoning
from specserve.api.tokenizer import Tokenizer
from specserve.config.tree import DEMO

_TALK = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.reasoning_content }}{{ m.content }}"
_TOOLS = "{% if tools %}{{ tools | tojson }} in <tool_call></tool_call>{% endif %}"
_QWEN = (
    _TOOLS + _TALK + "{% for call in m.tool_calls or [] %}<tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}<|im_start|>assistant\n{# </think> #}"
)
TEMPLATES: Mapping[str, str] = {
    "optional": _QWEN,
    "open": _QWEN + "<think>\n",
    "closed": _QWEN + "<think>\n\n</think>\n\n",
    "untokenized": _QWEN,
    "harmony": (
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
        "<|start|>assistant{# <|channel|> #}"
    ),
}
_QWEN_MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
_HARMONY_MARKERS = (
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|start|>",
    "<|constrain|>",
    "<|call|>",
    "<|return|>",
)


@cache
def reasoner(name: str) -> Tokenizer:
    """Return the demo pair's tokenizer with a family's template and added tokens.

    As in Qwen's, the markers of thinking are tokens that are added, and not special.
    """
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "target")
    tokenizer.chat_template = TEMPLATES[name]
    if name == "harmony":
        tokenizer.add_tokens(list(_HARMONY_MARKERS), special_tokens=True)
    else:
        tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=True)
        tokenizer.add_tokens([] if name == "untokenized" else list(_QWEN_MARKERS))
    return Tokenizer(tokenizer)


def prompt_reasoning(name: str) -> PromptReasoning:
    """Return the reasoning of an answer to a short chat."""
    tokenizer = reasoner(name)
    model = ModelReasoning.from_template(tokenizer.tool_template, tokenizer)
    assert model is not None
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    return PromptReasoning(model, model.prompt_state(tokenizer.prompt_tail(ids[-16:])))
