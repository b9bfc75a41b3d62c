"""Compare two tokenizers, and make the tables by which a draft of another tokenizer is translated.

Knows tokenizers, and neither models nor tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specserve.api.tokenizer import Tokenizer
from specserve.errors import TokenizerMismatch
from specserve.features.other_tokenizer.translation import TokenTranslation

MIN_SHARED = 0.1
"""Least share of the smaller vocabulary's tokens with text that the other must have too."""
BEFORE = ("\n", "=")
"""Texts put before another one, so that a tokenizer that begins texts with a space does not."""


@dataclass(frozen=True, slots=True)
class SharedVocabulary:
    """The tokens that a target and a draft of another tokenizer have in common.

    Tokens with text are the same if their bytes are; others, if they have one name or begin or
    end texts in both.
    """

    target: Mapping[bytes, int]
    draft: Mapping[bytes, int]
    special: Mapping[int, int]  # the target's ids to the draft's

    @classmethod
    def from_tokenizers(cls, target: Tokenizer, draft: Tokenizer) -> SharedVocabulary:
        return cls(_ids_by_bytes(target), _ids_by_bytes(draft), _shared_special(target, draft))

    @property
    def num_shared(self) -> int:
        return len(self.target.keys() & self.draft.keys())

    def require_overlap(self, draft: str) -> None:
        """Raise TokenizerMismatch if too few tokens are shared for drafts to be worth anything.

        `draft` names the model with its key.
        """
        smaller = min(len(self.target), len(self.draft))
        if self.num_shared < MIN_SHARED * smaller:
            raise TokenizerMismatch(
                f"{draft} has another tokenizer, which shares {self.num_shared:,} of "
                f"its {len(self.draft):,} tokens with the target's {len(self.target):,}, and "
                f"translating takes {MIN_SHARED:.0%} of the smaller vocabulary; choose a draft "
                "whose tokenizer is nearer to the target's, or a draft.kind without a model"
            )

    def __str__(self) -> str:
        return (
            f"{self.num_shared:,} of the draft's {len(self.draft):,} tokens are shared with the "
            f"target, which has {len(self.target):,}"
        )


def make_translation(
    shared: SharedVocabulary, target: Tokenizer, draft: Tokenizer
) -> TokenTranslation:
    """Return how the draft spells each of the target's tokens, and which tokens both have."""
    speller = Speller(draft, shared.draft)
    ids = dict(shared.special)
    for text, token in shared.target.items():
        if text in shared.draft:
            ids[token] = shared.draft[text]
    known = frozenset(target.token_ids)
    filler = draft.unknown_id or 0
    others = [token for token in range(max(known) + 1) if token not in ids]
    spelt = speller.spell_many(
        [target.token_bytes(token) or target.token_name(token).encode() for token in others]
    )
    spellings: dict[int, tuple[int, ...]] = {token: (own,) for token, own in ids.items()}
    spellings |= {token: own or (filler,) for token, own in zip(others, spelt, strict=True)}
    begins = target.begin_id
    if begins is not None and begins not in ids and draft.end_id is not None:
        spellings[begins] = (draft.end_id,)  # what separates texts is nearest to a begin
    pairs = np.array(sorted(ids.items()), np.int64).reshape(-1, 2)
    return TokenTranslation(
        pairs[:, 0].copy(),
        pairs[:, 1].copy(),
        [spellings[token] for token in range(max(known) + 1)],
        prefix=() if _tokens_before(target) else _tokens_before(draft),
        filler=filler,
    )


class Speller:
    """Spells bytes in the tokens of one tokenizer, as it spells them in the middle of a text."""

    def __init__(self, tokenizer: Tokenizer, ids: Mapping[bytes, int]) -> None:
        self._tokenizer, self._ids = tokenizer, ids
        self._longest = max(map(len, ids), default=0)

    def spell_many(self, texts: Sequence[bytes]) -> list[tuple[int, ...]]:
        """Return the tokens of each text; what has none is left out.

        They are the tokenizer's where their bytes are the text's. It may put a space before
        a text, and takes no part of a character: otherwise the longest tokens that fit are taken.
        """
        found: dict[bytes, tuple[int, ...]] = {}
        for before in ("", *BEFORE):
            missing = [text for text in dict.fromkeys(texts) if text not in found]
            found |= self._encode(missing, before)
        return [found.get(text) or self._longest_tokens(text) for text in texts]

    def _encode(self, texts: Iterable[bytes], before: str) -> dict[bytes, tuple[int, ...]]:
        """Return what the tokenizer makes of whole texts after `before`, where that is right."""
        whole = [(text, text.decode()) for text in texts if _is_whole(text)]
        encoded = self._tokenizer.encode_many([before + decoded for _, decoded in whole])
        num_before = len(self._tokenizer.encode(before, special=False)) if before else 0
        found = {}
        for (text, _), tokens in zip(whole, encoded, strict=True):
            own = tokens[num_before:]
            if own and b"".join(map(self._tokenizer.token_bytes, own)) == text:
                found[text] = own
        return found

    def _longest_tokens(self, text: bytes) -> tuple[int, ...]:
        tokens, start = [], 0
        while start < len(text):
            for stop in range(min(start + self._longest, len(text)), start, -1):
                if (token := self._ids.get(text[start:stop])) is not None:
                    tokens.append(token)
                    break
            else:
                stop = start + 1
            start = stop
        return tuple(tokens)


def _ids_by_bytes(tokenizer: Tokenizer) -> dict[bytes, int]:
    """Return the ids of tokens with text, by their bytes.

    An ordinary token is before one for a lone byte with equal bytes.
    """
    ordered = sorted(tokenizer.token_ids, key=lambda token: (tokenizer.is_lone_byte(token), token))
    found: dict[bytes, int] = {}
    for token in ordered:
        if text := tokenizer.token_bytes(token):
            found.setdefault(text, token)
    return found


def _shared_special(target: Tokenizer, draft: Tokenizer) -> dict[int, int]:
    names = {draft.token_name(token): token for token in draft.special_ids}
    shared = {
        token: names[target.token_name(token)]
        for token in target.special_ids
        if target.token_name(token) in names
    }
    for ours, theirs in ((target.begin_id, draft.begin_id), (target.end_id, draft.end_id)):
        if ours is not None and theirs is not None:
            shared.setdefault(ours, theirs)
    return shared


def _tokens_before(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that a tokenizer puts before a text."""
    bare, whole = (tokenizer.encode("a", special=special) for special in (False, True))
    return whole[: whole.index(bare[0])] if bare and bare[0] in whole else ()


def _is_whole(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
