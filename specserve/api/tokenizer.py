"""Between text and token ids: a tokenizer, and a stream that turns tokens into text as they come. Knows no model."""

from __future__ import annotations

import codecs
import hashlib
import json
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from transformers.utils.logging import get_verbosity, set_verbosity

from specserve.errors import BadValue, ModelError, ModelNotFound, TokenizerMismatch, first_line

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CONTEXT = 4  # the longest character in bytes: so many tokens back a character may have begun


class Text:
    """A tokenizer of the transformers library. Every token is bytes to it, which may begin or end inside a character."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is None:
            raise ModelError(
                f"{type(tokenizer).__name__} is no tokenizer of the tokenizers library (tokenizer.json), which specserve needs"
            )
        self._special = {
            token for token, added in tokenizer.added_tokens_decoder.items() if added.special
        }
        decoder = json.loads(self._backend.to_str())["decoder"]
        self._byte_level = _uses(decoder, "ByteLevel")
        self._byte_fallback = _uses(decoder, "ByteFallback")
        self._pieces: dict[int, bytes] = {}

    @classmethod
    def load(cls, path: str | Path, *, revision: str | None = None) -> Text:
        """From a local directory or a hub name; raises ModelError when there is no tokenizer."""
        verbosity = get_verbosity()
        set_verbosity(logging.ERROR)
        try:
            return cls(
                AutoTokenizer.from_pretrained(str(path), revision=revision, trust_remote_code=False)
            )
        except (OSError, ValueError, KeyError, ImportError) as error:
            missing = ModelError if Path(path).is_dir() else ModelNotFound
            raise missing(f"no tokenizer can be loaded from {path}: {first_line(error)}") from error
        finally:
            set_verbosity(verbosity)

    def encode(self, text: str, *, special: bool = True) -> tuple[int, ...]:
        """Token ids; `special` adds what the model expects around a prompt, such as a begin token."""
        if not isinstance(text, str) or not _is_unicode(text):
            raise BadValue(
                "the prompt is not Unicode text: it holds half of a surrogate pair", param="prompt"
            )
        return tuple(self._backend.encode(text, add_special_tokens=special).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The whole text at once; special tokens have none."""
        stream = TextStream(self)
        return stream.push(token_ids) + stream.finish()

    def apply_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] = (),
    ) -> tuple[int, ...]:
        """The prompt that asks for the assistant's next message, by the model's own template if it has one. Others leave `tools` out."""
        _check_messages(messages)
        if not self._tokenizer.chat_template:
            lines = [f"{message['role']}: {message['content']}\n" for message in messages]
            return self.encode("".join(lines) + "assistant:")
        given, shown = (
            [dict(message) for message in messages],
            [dict(tool) for tool in tools] or None,
        )
        try:
            prompt = self._tokenizer.apply_chat_template(
                given, tools=shown, tokenize=False, add_generation_prompt=True
            )
        except (
            Exception
        ) as error:  # a template is a program of the model's maker and may raise what it likes
            raise BadValue(
                f"the model's chat template does not take these messages: {first_line(error)}",
                param="messages",
            ) from error
        return self.encode(prompt, special=False)

    @cached_property
    def tool_template(self) -> str:
        """The chat template that shows tools, if there is one; of several that a model may have, the one that does."""
        template = self._tokenizer.chat_template or ""
        return (
            template
            if isinstance(template, str)
            else str(template.get("tool_use", template.get("default", "")))
        )

    def special_id(self, name: str) -> int | None:
        """The id of a token without a text; None if there is none of that name."""
        token: int | None = self._backend.token_to_id(name)
        return token if token in self._special else None

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal vocabularies. Rows of padding in an embedding are no tokens and do not count."""
        pairs = sorted(
            (token, piece)
            for piece, token in self._backend.get_vocab(with_added_tokens=True).items()
        )
        return hashlib.blake2b(json.dumps(pairs).encode(), digest_size=16).hexdigest()

    def require_same(self, other: Text) -> None:
        """Raises TokenizerMismatch unless `other`, a draft's, gives every id the same meaning."""
        token = next(iter(self.differing(other)), None)
        if token is None:
            return
        here, there = (text._backend.id_to_token(token) for text in (self, other))
        raise TokenizerMismatch(
            f"the draft speaks another vocabulary than the target: token {token} is {here!r} to the target and {there!r} to the draft; "
            "a draft must have the target's tokenizer: choose one of the target's family, or a draft.kind that needs no second model"
        )

    def differing(self, other: Text) -> tuple[int, ...]:
        """The ids that mean something else to `other`, or nothing, or that mean nothing here."""
        if self.fingerprint == other.fingerprint:
            return ()
        ours, theirs = (text._backend.get_vocab(with_added_tokens=True) for text in (self, other))
        return tuple(sorted({token for _, token in ours.items() ^ theirs.items()}))

    @property
    def vocab_size(self) -> int:
        """Tokens, added ones too; an embedding may have rows of padding beyond."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def has_template(self) -> bool:
        """Whether the model's maker says how a chat is written."""
        return bool(self._tokenizer.chat_template)

    def piece(self, token_id: int, *, first: bool = False) -> bytes:
        """What a token adds to a text; `first` at its very beginning, where some tokenizers drop a space."""
        if first:
            return self._read(token_id, first=True)
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._read(token_id, first=False)
        return piece

    def has_text(self, token_id: int) -> bool:
        """Whether the token is a part of texts at all: not special, and not a mere row of padding."""
        return (
            0 <= token_id < 2**32
            and token_id not in self._special
            and self._backend.id_to_token(token_id) is not None
        )

    def name(self, token_id: int) -> str:
        """What the vocabulary calls a token, with text or without."""
        return self._backend.id_to_token(token_id) or ""

    @cached_property
    def longest(self) -> int:
        """Characters of the longest token: a text of so many times n characters has n tokens or more."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)))

    @cached_property
    def _anchor(self) -> int:
        """A token to put in front of another, so that the other is not first."""
        return next(
            token
            for token in range(self._backend.get_vocab_size())
            if self.has_text(token) and self._backend.decode([token]).strip().isalnum()
        )

    def _read(self, token_id: int, *, first: bool) -> bytes:
        if not self.has_text(token_id):
            return b""
        name: str = self._backend.id_to_token(token_id)
        if self._byte_level:
            return _byte_level(name)
        byte = _BYTE_TOKEN.fullmatch(name) if self._byte_fallback else None
        if byte:
            return bytes.fromhex(byte[1])
        if first:
            return self._decoded(token_id)
        return self._decoded(self._anchor, token_id).removeprefix(self._decoded(self._anchor))

    def _decoded(self, *token_ids: int) -> bytes:
        text: str = self._backend.decode(list(token_ids))
        return text.encode()


class TextStream:
    """The text of one continuation, token by token: never part of a character, never part of a stop string.

    With the tokens of the prompt before it, the first token is not the beginning of a text. Tokens that have none may be `shown` by their names.
    """

    def __init__(
        self,
        text: Text,
        prompt_ids: Sequence[int] = (),
        *,
        stop: Sequence[str] = (),
        shown: Collection[int] = (),
    ) -> None:
        self.stopped = False  # at the first stop string
        self.num_tokens = (
            0  # pushed until now; once stopped, up to the one that completed the stop string
        )
        self._text = text
        self._stop, self._shown = tuple(stop), shown
        self._reach = (
            max(map(len, self._stop), default=1) - 1
        )  # so many characters may be the beginning of a stop string
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._first = not any(text.has_text(token) for token in prompt_ids)
        for token in prompt_ids[-_CONTEXT:]:
            self._utf8.decode(text.piece(token))
        self._held = ""  # text that is not shown yet

    def push(self, token_ids: Sequence[int]) -> str:
        """What may be shown now."""
        for token in token_ids:
            if self.stopped:
                return ""
            self.num_tokens += 1
            if self._take(self._utf8.decode(self._piece(token))):
                return self._show(len(self._held))
        return self._show(len(self._held) - self._num_doubtful())

    def finish(self) -> str:
        """The rest: nothing more will come."""
        if not self.stopped:
            self._take(self._utf8.decode(b"", final=True))
        return self._show(len(self._held))

    def _piece(self, token: int) -> bytes:
        if self._first and self._text.has_text(token):
            self._first = False
            return self._text.piece(token, first=True)
        return self._text.name(token).encode() if token in self._shown else self._text.piece(token)

    def _take(self, text: str) -> bool:
        """Adds text; at a stop string, cuts it off there and says True."""
        start = max(0, len(self._held) - self._reach)  # no stop string lies wholly before it
        self._held += text
        if self._stop and text:
            found = [
                (at + len(stop), at)
                for stop in self._stop
                if (at := self._held.find(stop, start)) >= 0
            ]
            if found:
                self.stopped = True
                self._held = self._held[
                    : min(found)[1]
                ]  # the first to be complete; of several, the longest
        return self.stopped

    def _show(self, num_chars: int) -> str:
        shown, self._held = self._held[:num_chars], self._held[num_chars:]
        return shown

    def _num_doubtful(self) -> int:
        """The length of the longest end of the text that could become a stop string."""
        for length in range(min(self._reach, len(self._held)), 0, -1):
            end = self._held[-length:]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        return 0


def _uses(decoder: Any, kind: str) -> bool:
    """Whether a tokenizer's decoder, or one of a sequence of them, is of a kind."""
    return decoder is not None and (
        decoder["type"] == kind or any(_uses(part, kind) for part in decoder.get("decoders", ()))
    )


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: printable Latin-1 stands for itself, the other bytes for characters from 256 on."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


_ALPHABET = _byte_alphabet()


def _byte_level(name: str) -> bytes:
    if all(char in _ALPHABET for char in name):
        return bytes(_ALPHABET[char] for char in name)
    return name.encode()  # an added token, written as it is


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_messages(messages: Sequence[Mapping[str, object]]) -> None:
    if not isinstance(messages, (list, tuple)) or not messages:
        raise BadValue("messages must be a list with at least one message", param="messages")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise BadValue(
                f"messages[{i}] must have a role and a content, both text", param=f"messages[{i}]"
            )
