"""A real engine that an agent's script makes write: it thinks, calls two tools, and answers.

The text of a turn follows from the number of turns in the prompt. The engine is forced to its
tokens by a grammar of them, after they have been found to obey the grammar of the request.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

from transformers import LlamaConfig

from specserve.api.tokenizer import Tokenizer
from specserve.api.tools.formats import FORMATS
from specserve.config.tree import config_from_keys
from specserve.types import Chunk, Grammar, Request
from tests.conformance.scripted_engine import CONTEXT, END_ID, ScriptedEngine
from tests.support.checkpoints import write
from tests.support.engine_service import EngineService
from tests.support.templates import family

KEPT, DROPPED = "kept", "dropped"  # by the template: reasoning of earlier turns
_CONTENT = "\n{{ m.content }}"
_REASONING = (
    "\n{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
)
_ROLE = "<|im_start|>assistant\n"


def agent_tokenizer(reasoning: str) -> Tokenizer:
    """Return a tokenizer whose template shows tools and calls, and keeps or drops reasoning."""
    tokenizer = copy.deepcopy(family("hermes")._tokenizer)
    template = tokenizer.chat_template + "{# </think> #}"
    if reasoning == KEPT:
        template = template.replace(_CONTENT, _REASONING + "{{ m.content }}")
    tokenizer.chat_template = template
    return Tokenizer(tokenizer)


def script(turn: int) -> str:
    """Return what the agent's model writes in a turn: two calls, or an answer to their results."""
    thought = f"<think>\nTurn {turn} comes after {turn} others.\n</think>\n\n"
    if turn % 2:
        return f"{thought}Both files of turn {turn - 1} are equal."
    calls = [("read", f'{{"path": "/{turn}/{name}"}}') for name in ("old", "new")]
    text = "" if turn % 4 else "I read both."
    return thought + text + FORMATS["hermes"].render(calls)


class AgentEngine(EngineService):
    """A tiny model of random weights that writes the script."""

    def __init__(self, directory: Path, tokenizer: Tokenizer) -> None:
        write(
            LlamaConfig(
                vocab_size=tokenizer.vocab_size,
                max_position_embeddings=CONTEXT,
                hidden_size=32,
                intermediate_size=32,
                num_hidden_layers=1,
                num_attention_heads=2,
                eos_token_id=END_ID,
            ),
            directory,
        )
        tokenizer._tokenizer.save_pretrained(directory)
        keys = {
            "target.path": str(directory),
            "target.dtype": "float32",
            "target.threads": 1,
            "draft.kind": "none",
            "cache.pages": 4 * CONTEXT // 16,
            "limits.max_context": CONTEXT,
            "limits.max_batch_tokens": 2048,
        }
        super().__init__(config_from_keys({}, keys))
        self.tokenizer = tokenizer
        self._script_follower = ScriptedEngine(tokenizer=tokenizer)

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        self.requests.append(request)
        prompt = self.tokenizer._tokenizer.decode(request.prompt, skip_special_tokens=False)
        text = script(prompt.count(_ROLE) - 1)
        assert request.grammar is not None, "the tools constrain each turn"
        assert self._script_follower.admits(request.grammar, text), text
        tokens = self.tokenizer.encode(text, special=False)
        forced = Grammar("lark", "start: " + " ".join(f"<[{token}]>" for token in tokens))
        async for chunk in super().generate(replace(request, grammar=forced)):
            yield chunk
