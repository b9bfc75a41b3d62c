"""Convert between text and token ids. Knows the tokenizers library, and no model."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from functools import cached_property
from inspect import signature
from pathlib import Path
from typing import Any

from specserve.api.chat_template import (
    TemplateOptions,
    check_messages,
    plain_chat,
    processor_template,
    variables_of,
)
from specserve.api.detokenizer import IncrementalDetokenizer
from specserve.api.token_bytes import TokenBytes
from specserve.errors import (
    BadValue,
    ModelError,
    ModelNotFound,
    SpecserveError,
    TokenizerMismatch,
    first_line,
)
from specserve.json_files import read_object
from specserve.models.checkpoints.gguf.files import find_gguf
from specserve.models.checkpoints.gguf.opening import open_gguf

_TOKENIZER_FILES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken")


def hide_torch() -> None:
    """Make transformers work as if torch were not installed, unless this process has imported it.

    Its tokenizers need no torch, which would cost seconds of a gateway's start and 200 MB. Its
    modules ask `is_torch_available` when they are imported, and do without if the answer is no.
    """
    if "torch" in sys.modules:
        return
    import transformers.utils.import_utils

    def is_torch_available() -> bool:
        return False

    for module in (transformers, transformers.utils, transformers.utils.import_utils):
        module.is_torch_available = is_torch_available  # type: ignore[attr-defined]


def _broken_file(directory: Path) -> str | None:
    """Return what is wrong with the first of the tokenizer's files that is no JSON."""
    for path in sorted(directory.glob("*token*.json")):
        try:
            read_object(path)
        except (OSError, ValueError) as error:
            return first_line(error)
    return None


class Tokenizer:
    """A tokenizer of the transformers library.

    It maps every token to bytes, which may begin or end inside a character.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is None:
            raise ModelError(
                f"{type(tokenizer).__name__} is no tokenizer of the tokenizers library "
                "(tokenizer.json), which specserve needs"
            )
        added = tokenizer.added_tokens_decoder
        self._added_ids = set(added)
        self._special_ids = {token for token, one in added.items() if one.special}
        self._token_bytes = TokenBytes(self._backend, self._special_ids)

    @classmethod
    def load(cls, path: str | Path, *, revision: str | None = None) -> Tokenizer:
        """Load from a local directory, a GGUF file or a hub name.

        Raises ModelError if there is no tokenizer.
        """
        # Imported here, since `hide_torch` must come before.
        from transformers import AutoTokenizer
        from transformers.utils.logging import get_verbosity, set_verbosity

        if (file := find_gguf(Path(path).expanduser())) is not None:
            path = open_gguf(file)
        verbosity = get_verbosity()
        set_verbosity(logging.ERROR)
        try:
            tokenizer: Any = AutoTokenizer.from_pretrained(
                str(path), revision=revision, trust_remote_code=False
            )
            if not tokenizer.chat_template:
                tokenizer.chat_template = processor_template(Path(path))
            return cls(tokenizer)
        except SpecserveError:
            raise
        # The library checks little of what the files say; a wrong value may raise anything.
        except Exception as error:
            missing = ModelError if Path(path).is_dir() else ModelNotFound
            why = _broken_file(Path(path)) or first_line(error)
            files = (file for kind in _TOKENIZER_FILES for file in Path(path).glob(kind))
            if Path(path).is_dir() and not any(files):
                why = (
                    "it has no tokenizer.json; copy tokenizer.json and tokenizer_config.json of "
                    "the model that it was made from"
                )
            raise missing(f"no tokenizer can be loaded from {path}: {why}") from error
        finally:
            set_verbosity(verbosity)

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """Return token ids; `special` adds what a model expects, such as a begin token."""
        if not isinstance(text, str) or not _is_unicode(text):
            raise BadValue(
                "the prompt is not Unicode text: it holds half of a surrogate pair", param="prompt"
            )
        return tuple(self._backend.encode(text, add_special_tokens=special).ids)

    def decode(self, token_ids: Sequence[int], *, shows_special: bool = False) -> str:
        """Return the whole text at once; special tokens have none unless they are shown."""
        visible_ids = self.special_ids if shows_special else ()
        detokenizer = IncrementalDetokenizer(self, visible_ids=visible_ids)
        return detokenizer.push(token_ids) + detokenizer.finish()

    def decode_to_continue(self, token_ids: Sequence[int]) -> str:
        """Return the text up to its last whole character; what continues it has the rest."""
        return IncrementalDetokenizer(self).push(token_ids)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] = (),
        options: TemplateOptions | None = None,
    ) -> tuple[int, ...]:
        """Return the prompt that asks for the assistant's next message.

        It is made by the model's own template. A model without one gets `role: content` lines,
        and `tools` are left out.
        """
        check_messages(messages)
        options = options or TemplateOptions()
        if not self._tokenizer.chat_template:
            return self.encode(plain_chat(messages, options))
        message_dicts, tool_dicts = (
            [dict(message) for message in messages],
            [dict(tool) for tool in tools] or None,
        )
        try:
            prompt = self._tokenizer.apply_chat_template(
                message_dicts,
                tools=tool_dicts,
                tokenize=False,
                add_generation_prompt=options.add_generation_prompt,
                continue_final_message=options.continue_final_message,
                **options.variables,
            )
        # A template is a program of the model's maker and may raise anything.
        except Exception as error:
            raise BadValue(
                f"the model's chat template does not take these messages: {first_line(error)}",
                param="messages",
            ) from error
        return self.encode(prompt, special=False)

    @cached_property
    def tool_template(self) -> str:
        """The chat template that renders tools, or an empty text.

        A model may have several templates; `tool_use` is preferred to `default`.
        """
        template = self._tokenizer.chat_template or ""
        return (
            template
            if isinstance(template, str)
            else str(template.get("tool_use", template.get("default", "")))
        )

    @cached_property
    def template_variables(self) -> frozenset[str]:
        """Names that the chat template reads and that a request may set."""
        templates = self._tokenizer.chat_template or ""
        texts = [templates] if isinstance(templates, str) else list(templates.values())
        own = signature(self._tokenizer.apply_chat_template).parameters
        taken = {"messages", *own, *self._tokenizer.special_tokens_map}
        return frozenset(name for text in texts for name in variables_of(text)) - taken

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens, which add no text unless they are requested."""
        return frozenset(self._special_ids)

    def added_id(self, name: str) -> int | None:
        """Return the id of the added token `name`; None if there is none.

        A text under a grammar cannot spell an added token, whether it is special or not.
        """
        token: int | None = self._backend.token_to_id(name)
        return token if token in self._added_ids else None

    def prompt_tail(self, token_ids: Sequence[int]) -> str:
        """Return the text of the last tokens of a prompt, with the names of special ones."""
        return "".join(
            self.token_name(token)
            if token in self._special_ids
            else self.token_bytes(token).decode(errors="replace")
            for token in token_ids
        )

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the vocabulary. Rows of padding in an embedding are no tokens."""
        pairs = sorted(
            (token, name) for name, token in self._backend.get_vocab(with_added_tokens=True).items()
        )
        return hashlib.blake2b(json.dumps(pairs).encode(), digest_size=16).hexdigest()

    def require_same_vocabulary(self, other: Tokenizer) -> None:
        """Raise TokenizerMismatch unless `other`, a draft's, gives every id the same meaning."""
        token = next(iter(self.differing_ids(other)), None)
        if token is None:
            return
        target_name, draft_name = (
            tokenizer._backend.id_to_token(token) for tokenizer in (self, other)
        )
        raise TokenizerMismatch(
            f"the draft speaks another vocabulary than the target: token {token} is "
            f"{target_name!r} to the target and {draft_name!r} to the draft; "
            "only a draft of kind neural is translated, when it serves: a stage of a cascade, and "
            "specserve plan --measure, need a draft with the target's tokenizer"
        )

    def has_other_meanings(self, other: Tokenizer) -> bool:
        """Return True if some id is one token here and another one in `other`.

        Ids that only one of the two has, such as added tokens, mean nothing to the other.
        """
        return any(
            self._backend.id_to_token(token) is not None
            and other._backend.id_to_token(token) is not None
            for token in self.differing_ids(other)
        )

    def differing_ids(self, other: Tokenizer) -> tuple[int, ...]:
        """Return the ids that are in one vocabulary only, or mean another token in `other`."""
        if self.fingerprint == other.fingerprint:
            return ()
        ours, theirs = (
            tokenizer._backend.get_vocab(with_added_tokens=True) for tokenizer in (self, other)
        )
        return tuple(sorted({token for _, token in ours.items() ^ theirs.items()}))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; an embedding may have rows of padding beyond."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def has_chat_template(self) -> bool:
        """True if the model's maker says how a chat is written."""
        return bool(self._tokenizer.chat_template)

    def token_bytes(self, token_id: int, *, first: bool = False) -> bytes:
        """Return what a token adds to a text.

        `first` is for the very beginning of a text, where some tokenizers drop a space.
        """
        return self._token_bytes.get(token_id, first=first)

    def is_lone_byte(self, token_id: int) -> bool:
        """Return True if a token stands for a byte of a character that has no token."""
        return self._token_bytes.is_lone_byte(token_id)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All ids that are tokens, added ones included."""
        return tuple(sorted(self._backend.get_vocab(with_added_tokens=True).values()))

    @property
    def begin_id(self) -> int | None:
        """Return the token that begins a text, if there is one."""
        found: int | None = self._tokenizer.bos_token_id
        return found

    @property
    def end_id(self) -> int | None:
        """Return the token that ends a text, if there is one."""
        found: int | None = self._tokenizer.eos_token_id
        return found

    @property
    def unknown_id(self) -> int | None:
        """Return the token in the place of what has no token, if there is one."""
        found: int | None = self._tokenizer.unk_token_id
        return found

    def encode_many(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        """Return the token ids of each text, without those that a model expects around it."""
        encoded = self._backend.encode_batch(list(texts), add_special_tokens=False)
        return [tuple(one.ids) for one in encoded]

    def has_text(self, token_id: int) -> bool:
        """Return True if a token adds text: it is not special, and no row of padding."""
        return self._token_bytes.has_text(token_id)

    def token_name(self, token_id: int) -> str:
        """Return the vocabulary's name of a token, with text or without."""
        return self._backend.id_to_token(token_id) or ""

    @cached_property
    def max_token_length(self) -> int:
        """Characters of the longest token: m times as many characters take m tokens or more."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)))


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
