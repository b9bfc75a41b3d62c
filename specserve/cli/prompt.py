"""The prompt of `specserve generate`: checked before any weights are read, and summed up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from specserve.config.sections import CacheConfig
from specserve.errors import BadValue, EmptyPrompt, TooLong

if TYPE_CHECKING:
    from specserve.checkpoint_files import Checkpoints
    from specserve.llm.llm import Output


def check_text(prompt: str) -> None:
    """Raise BadValue for bytes that are no text; needs no model."""
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise BadValue(
            "--prompt is not UTF-8, so no tokenizer can read it; give text in UTF-8",
            param="prompt",
        ) from None


def prompt_ids(prompt: str, checkpoints: Checkpoints, *, is_chat: bool | None) -> tuple[int, ...]:
    """Return the tokens of a prompt: a user's message in a chat, or the beginning of the text.

    With `is_chat` None it is a chat if the model has a template for one.
    """
    tokenizer = checkpoints.tokenizer
    if prompt and (tokenizer.has_chat_template if is_chat is None else is_chat):
        return tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
    return tokenizer.encode(prompt)


def check_length(
    length: int, max_tokens: int, checkpoints: Checkpoints, cache: CacheConfig
) -> str | None:
    """Return a line if the text will end before `max_tokens`, where the context does.

    Raises EmptyPrompt, or TooLong for a prompt of a length that leaves no room in the context.
    """
    context = checkpoints.context
    if not length:
        raise EmptyPrompt("the prompt is empty; it needs at least one token")
    if checkpoints.reads_prompt_apart:
        return None
    if cache.pages is not None:
        context = min(context, cache.pages * cache.page_size)
    room = context - length
    if room < 1:
        raise TooLong(
            f"the prompt has {length} tokens, but the context holds {context}, new tokens included"
        )
    if max_tokens <= room:
        return None
    return (
        f"--max-tokens {max_tokens} is more than fits: the context holds {context} tokens, "
        f"{length} of them the prompt's, so the text ends after {room}"
    )


def summary(output: Output, seconds: float) -> str:
    """Return the speed of an output, and what its draft was worth."""
    assert output.stats is not None, "an output without an error has stats"
    stats, num_tokens = output.stats, len(output.token_ids)
    drafts = (
        f"{stats.accepted} of {stats.drafted} draft tokens accepted"
        if stats.drafted
        else "no draft tokens"
    )
    return (
        f"{num_tokens} tokens in {seconds:.2f} s, {num_tokens / seconds:.0f} tokens/s; "
        f"{drafts}, {stats.target_passes} passes of the target"
    )
