"""Write the grammar of reasoning and of the answer after it, in Lark's notation for llguidance.

A marker that is one token is written by its id, since the library lets no text spell an added
token. The library's own limit of tokens, `max_tokens`, is not used: it does not survive a
rollback, and drafts are rolled back.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace

from specserve.api.reasoning.formats import PromptReasoning, PromptState
from specserve.api.tools.grammar import ANY_TEXT
from specserve.errors import BadValue
from specserve.grammar.validate import library_grammar
from specserve.sampling_params import Sampling
from specserve.types import Grammar

BUDGET = "thinking_token_budget"


def with_reasoning(
    sampling: Sampling,
    reasoning: PromptReasoning | None,
    budget: int | None,
    *,
    answer_opens: bool,
) -> Sampling:
    """Let the grammar of the answer begin after the reasoning, whose tokens may have a limit."""
    budget = None if budget == -1 else budget
    if budget is not None and reasoning is None:
        raise BadValue(
            f"{BUDGET} is not supported: this model's template shows no known form of reasoning",
            param=BUDGET,
        )
    if budget is not None and sampling.ignore_eos:
        raise BadValue(
            f"{BUDGET} and ignore_eos exclude one another: a text with a limit on its reasoning "
            "follows a grammar, and ends where that does",
            param=BUDGET,
        )
    if reasoning is None:
        return sampling
    text = reasoning_grammar(reasoning, sampling.grammar, budget, answer_opens=answer_opens)
    if text is None:
        return sampling
    return replace(sampling, response_format=None, guided={"grammar": text})


def reasoning_grammar(
    reasoning: PromptReasoning,
    answer: Grammar | None,
    budget: int | None,
    *,
    answer_opens: bool = False,
) -> str | None:
    """Return the grammar of reasoning and answer; None if nothing constrains them.

    `answer` is that of the answer alone, and None allows any text. The end of the reasoning is
    forced after `budget` tokens. With `answer_opens` the grammar of the answer has what opens it.
    """
    if budget is None and answer is None:
        return None
    form, state = reasoning.model.format, reasoning.state
    may_reason = state is not PromptState.CLOSED and (
        state is PromptState.OPEN or budget is None or budget > 0
    )
    opening = "" if state is PromptState.OPEN else _literal(reasoning, form.opening)
    thinking = f"{opening} body" if state is PromptState.OPEN else f"({opening} body)?"
    lead = "" if answer_opens else _literal(reasoning, form.answer_opening) or '"\\n\\n"?'
    rules = [f"start: {thinking if may_reason else ''} {lead} answer"]
    if may_reason:
        rules += _body(reasoning, budget)
    return "\n".join((*rules, _answer(reasoning, answer)))


def _body(reasoning: PromptReasoning, budget: int | None) -> list[str]:
    """Return the rule of the reasoning up to its closing marker."""
    model = reasoning.model
    end, *_ = model.literal_parts(model.format.closing)
    closing = _literal(reasoning, model.format.closing)
    if isinstance(end, str):
        if budget is not None:
            raise BadValue(
                f"{BUDGET} is not supported here: this model's {model.format.closing} is no token "
                "of its own, and so cannot be forced",
                param=BUDGET,
            )
        return [f"body[lazy]: {ANY_TEXT} {closing}"]
    others = ",".join(map(str, sorted({end, *model.special_ids})))
    times = "*" if budget is None else f"{{0,{budget}}}"
    text = "" if budget == 0 else f"<[^{others}]>{times}"
    return [f"body: {text} {closing}"]


def _answer(reasoning: PromptReasoning, answer: Grammar | None) -> str:
    if answer is None:
        # Optional reasoning must not be taken for an answer that begins like it.
        opening = re.escape(reasoning.model.format.opening).replace("/", "\\/")
        return f"answer: TEXT\nTEXT: {ANY_TEXT} & ~/{opening}(.|\\n)*/"
    if answer.kind == "lark":
        return f"answer: %lark {{\n{answer.text}\n}}"
    source = json.loads(library_grammar(answer))["grammars"][0]
    if answer.kind == "regex":
        return f"answer: %lark {{\n{source['lark_grammar']}\n}}"
    return f"answer: %json {json.dumps(source['json_schema'])}"


def _literal(reasoning: PromptReasoning, text: str) -> str:
    return " ".join(
        f"<[{part}]>" if isinstance(part, int) else json.dumps(part)
        for part in reasoning.model.literal_parts(text)
    )
