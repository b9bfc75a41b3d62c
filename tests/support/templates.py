"""Short chat templates in the style of four model families, and tokenizers that have them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from transformers import AutoTokenizer

from specserve.api.tokenizer import Tokenizer
from specserve.api.tools.formats import FORMATS, ModelCallFormat
from specserve.config.tree import DEMO

_HERMES = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Call within <tool_call></tool_call>.<|im_end|>\n"
    "{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LLAMA = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{% if tools and loop.first %}"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for call in m.tool_calls or [] %}"
    '{{ \'{"name": "\' + call.function.name + \'", "parameters": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}' }}"
    "{% else %}{{ m.content }}{% endfor %}<|eot_id|>{% endfor %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)
_MISTRAL = (
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% elif m.tool_calls %}[TOOL_CALLS] [{% for call in m.tool_calls %}"
    "{% if call.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, '
    '"id": "{{ call.id }}"}{% endfor %}]'
    '{% elif m.role == \'tool\' %}{"call_id": "{{ m.tool_call_id }}", "content": {{ m.content }}}'
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)

_DEEPSEEK = (
    "{{ tools | tojson }}{% for m in messages %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    "{{ 'PREFIX' + call.function.name + 'INFIX' + call.function.arguments + 'SUFFIX' }}"
    "{% endfor %}{% endfor %}"
)


def _deepseek(name: str) -> str:
    form, template = FORMATS[name], _DEEPSEEK
    for part, text in (
        ("PREFIX", form.prefix),
        ("INFIX", form.infix),
        ("SUFFIX", form.suffix + form.end),
    ):
        template = template.replace(part, text.replace("\n", "\\n"))
    return template


_QWEN3_CODER = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Reply with:\n<tool_call>\n<function=example>\n<parameter=p_1>\nvalue\n</parameter>\n"
    "</function>\n</tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{% if not loop.first %}{{ '\n' }}{% endif %}"
    "{{ '<tool_call>\n<function=' + call.function.name + '>\n' }}"
    "{% for key, value in call.function.arguments | items %}{{ '<parameter=' + key + '>\n' }}"
    "{{ value if value is string else value | tojson }}{{ '\n</parameter>\n' }}{% endfor %}"
    "{{ '</function>\n</tool_call>' }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The sentence is that of vLLM's templates for Llama 3.2 and 4.
_PYTHONIC = (
    "{% for m in messages %}HEADER{{ m.role }}END\n\n"
    "{% if tools and loop.first %}Respond in the format [func_name1(params_name1=params_value1, "
    "params_name2=params_value2...), func_name2(params)]\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% if m.tool_calls %}[{% for call in m.tool_calls %}{{ call.function.name }}("
    "{% for key, value in call.function.arguments | items %}{{ key }}={{ value | tojson }}"
    "{% if not loop.last %}, {% endif %}{% endfor %})"
    "{% if not loop.last %}, {% endif %}{% endfor %}]"
    "{% else %}{{ m.content }}{% endif %}EOT{% endfor %}HEADERassistantEND\n\n"
)
# As gpt-oss' template writes tools, reasoning and calls.
_HARMONY = (
    "{% if tools %}<|start|>developer<|message|># Tools\n{% for tool in tools %}"
    "{{ tool | tojson }}\n{% endfor %}<|end|>{% endif %}"
    "{% for m in messages %}{% if m.tool_calls %}{% if m.content and m.thinking %}"
    "{{ raise_exception('both content and thinking') }}{% endif %}"
    "{% set call = m.tool_calls[0].function %}<|start|>assistant to=functions.{{ call.name }}"
    "<|channel|>commentary json<|message|>{{ call.arguments | tojson }}<|call|>"
    "{% elif m.role == 'tool' %}<|start|>functions to=assistant<|channel|>commentary<|message|>"
    "{{ m.content | tojson }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "<|start|>assistant"
)


def _pythonic(header: str, header_end: str, end: str) -> str:
    template = _PYTHONIC.replace("HEADER", header).replace("EOT", end)
    return template.replace("END", header_end)


TEMPLATES: Mapping[str, str] = {
    "deepseek_v3": _deepseek("deepseek_v3"),
    "deepseek_v31": _deepseek("deepseek_v31"),
    "plain": "",
    "hermes": _HERMES,
    "qwen3_coder": _QWEN3_CODER,
    "llama": _LLAMA,
    "llama_pythonic": _pythonic("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "llama4_pythonic": _pythonic("<|header_start|>", "<|header_end|>", "<|eot|>"),
    "harmony": _HARMONY,
    "mistral": _MISTRAL,
    "mistral_tight": _MISTRAL.replace("[TOOL_CALLS] [", "[TOOL_CALLS]["),
    "mistral_named": (
        "{{ tools | tojson }}{% for m in messages %}{{ m.content }}[TOOL_CALLS][ARGS]{% endfor %}"
    ),
}
_DEEPSEEK_TOKENS = tuple(
    f"<\uff5ctool\u2581{name}\uff5c>"
    for name in (
        "calls\u2581begin",
        "calls\u2581end",
        "call\u2581begin",
        "call\u2581end",
        "sep",
    )
)
SPECIAL: Mapping[str, tuple[str, ...]] = {
    "deepseek_v3": _DEEPSEEK_TOKENS,
    "deepseek_v31": _DEEPSEEK_TOKENS,
    "hermes": ("<|im_start|>", "<|im_end|>"),
    "llama_pythonic": ("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    "llama4_pythonic": ("<|python_start|>", "<|python_end|>", "<|eot|>", "<|header_start|>"),
    "harmony": (
        "<|channel|>",
        "<|message|>",
        "<|end|>",
        "<|start|>",
        "<|constrain|>",
        "<|call|>",
        "<|return|>",
    ),
    "llama": ("<|python_tag|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
    "mistral": ("[TOOL_CALLS]", "[INST]", "[/INST]"),
    "mistral_tight": ("[TOOL_CALLS]",),
    "mistral_named": ("[TOOL_CALLS]", "[ARGS]"),
}
FAMILIES = tuple(TEMPLATES)


@cache
def family(name: str) -> Tokenizer:
    """Return the demo pair's tokenizer with a family's template and special tokens."""
    tokenizer = AutoTokenizer.from_pretrained(DEMO / "target")
    tokenizer.add_tokens(list(SPECIAL.get(name, ())), special_tokens=True)
    if name == "qwen3_coder":  # tokens that are not special
        tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    tokenizer.chat_template = TEMPLATES[name] or None
    return Tokenizer(tokenizer)


def call_format(name: str) -> ModelCallFormat:
    return ModelCallFormat.from_template(family(name).tool_template, family(name))
