"""One text of a drafter's, most of which it may share with its forks. Knows no drafts, and asks of the text no more than to grow and shrink."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


class Written(Protocol):
    """A text that grows and shrinks at its end."""

    tokens: list[int]

    def extend(self, tokens: Sequence[int]) -> None: ...
    def truncate(self, length: int) -> None: ...


class Plain:
    """Nothing but its tokens."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def extend(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens

    def truncate(self, length: int) -> None:
        del self.tokens[length:]


@dataclass(slots=True)
class Trunk:
    """A text that strands share. All have its first `base` tokens; behind those it holds what one of them was asked for last."""

    text: Written
    base: int = 0
    num_strands: int = 1


class Strand:
    """What a trunk's strands have in common, and tokens of its own behind that. A fork copies those alone, be the text ever so long."""

    __slots__ = ("_fresh", "_own", "_trunk")

    def __init__(self, fresh: Callable[[], Written]) -> None:
        self._fresh, self._trunk = fresh, Trunk(fresh())
        self._own: list[int] = []

    def __len__(self) -> int:
        return self._trunk.base + len(self._own)

    def write(self, start: int, tokens: Sequence[int]) -> None:
        """Whatever stands past `start`, which is no more than there is, gives way to the tokens."""
        assert start <= len(self)
        if start < self._trunk.base:
            self._go_back(start)
        self._own[start - self._trunk.base :] = tokens

    def text(self, length: int) -> Written:
        """The trunk, made to hold the first `length` tokens: to be read now, for any strand's next question changes it.

        What was asked for once may be kept there. So only a `write` further back leads back.
        """
        trunk = self._trunk
        assert trunk.base <= length <= len(self)
        wanted = self._own[: length - trunk.base]
        trunk.text.truncate(trunk.base)
        trunk.text.extend(wanted)
        if trunk.num_strands == 1:
            trunk.base = length
            del self._own[: len(wanted)]
        return trunk.text

    def fork(self, length: int) -> Strand:
        """Another strand with the same first `length` tokens. Cheap, unless that is less than what the text was asked for before."""
        other, base = Strand(self._fresh), self._trunk.base
        if length < base:
            other._own = self._trunk.text.tokens[:length]
        else:
            other._trunk, other._own = self._trunk, self._own[: length - base]
            self._trunk.num_strands += 1
        return other

    def release(self) -> None:
        """Not to be used any more: those that are left have the trunk to themselves."""
        self._trunk.num_strands -= 1

    def _go_back(self, length: int) -> None:
        """Below what all strands have in common. If there are others, they keep the trunk, and this one starts another."""
        if self._trunk.num_strands == 1:
            self._trunk.base, self._own = length, []
        else:
            self._trunk.num_strands -= 1
            self._own = self._trunk.text.tokens[:length]
            self._trunk = Trunk(self._fresh())
