"""Bytes that each token adds to a text. Knows the tokenizers library; no texts, no chats."""

from __future__ import annotations

import json
import re
from collections.abc import Set
from functools import cached_property
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes:
    """The bytes of the tokens of a tokenizer of the tokenizers library, its backend.

    They may begin or end inside a character. Special tokens have none.
    """

    def __init__(self, backend: Any, special_ids: Set[int]) -> None:
        self._backend, self._special_ids = backend, special_ids
        decoder = json.loads(backend.to_str())["decoder"]
        self._byte_level = _has_decoder(decoder, "ByteLevel")
        self._byte_fallback = _has_decoder(decoder, "ByteFallback")
        self._known: dict[int, bytes] = {}

    def get(self, token_id: int, *, first: bool) -> bytes:
        """Return the bytes of a token, at the very beginning of a text or elsewhere."""
        if first:
            return self._compute(token_id, first=True)
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._compute(token_id, first=False)
        return found

    def has_text(self, token_id: int) -> bool:
        """Return True if a token adds text: it is not special, and no row of padding."""
        return (
            0 <= token_id < 2**32
            and token_id not in self._special_ids
            and self._backend.id_to_token(token_id) is not None
        )

    def is_lone_byte(self, token_id: int) -> bool:
        """Return True if a token stands for a byte of a character that has no token."""
        name: str = self._backend.id_to_token(token_id) or ""
        return self._byte_fallback and bool(_BYTE_TOKEN.fullmatch(name))

    @cached_property
    def _anchor(self) -> int:
        """A token to put in front of another, so that the other is not first."""
        return next(
            token
            for token in range(self._backend.get_vocab_size())
            if self.has_text(token) and self._backend.decode([token]).strip().isalnum()
        )

    def _compute(self, token_id: int, *, first: bool) -> bytes:
        if not self.has_text(token_id):
            return b""
        name: str = self._backend.id_to_token(token_id)
        if self._byte_level:
            return _byte_level(name)
        byte = _BYTE_TOKEN.fullmatch(name) if self._byte_fallback else None
        if byte:
            return bytes.fromhex(byte[1])
        if first:
            return self._decode(token_id)
        return self._decode(self._anchor, token_id).removeprefix(self._decode(self._anchor))

    def _decode(self, *token_ids: int) -> bytes:
        text: str = self._backend.decode(list(token_ids))
        return text.encode()


def _has_decoder(decoder: Any, kind: str) -> bool:
    """Return True if a tokenizer's decoder, or one of a sequence of them, is of a kind."""
    return decoder is not None and (
        decoder["type"] == kind
        or any(_has_decoder(part, kind) for part in decoder.get("decoders", ()))
    )


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's printable characters for bytes.

    Printable Latin-1 is itself; the other bytes have the characters from 256 on.
    """
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
