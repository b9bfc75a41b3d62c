"""Give a draft other weights between two rounds, over the caches that it has. Knows no training.

Draft tokens and their q stay what they are, so the text stays exact whatever computed the keys and
values that a draft attends to. Mixed ones may only be accepted less often.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from specserve.drafters.eagle import EagleDrafter, EagleParts
from specserve.drafters.heads import HeadsDrafter
from specserve.drafters.neural.drafter import NeuralDrafter
from specserve.models.heads import Heads
from specserve.models.network import Network
from specserve.models.runner import Runner
from specserve.types import Step

MAX_RECOMPUTED = 512
"""Tokens of a sequence whose keys and values are computed again at once by other weights."""


class SwappableDraft(Protocol):
    """A draft of some kind, with what computes it: a network, or what a head is made of."""

    @property
    def device(self) -> torch.device: ...

    def swap(self, network: Any) -> Any:
        """Draft with another network from now on, and return the one until now."""
        ...

    def recompute(self, seq_id: int, *, committed: int, salt: bytes) -> bool:
        """Compute what is cached of a sequence with the weights of now, if that can be done.

        Past `committed` it has draft tokens. Returns False if nothing was done.
        """
        ...


class EagleSwap:
    """The network of an EAGLE-3 head, and the product that joins the target's states.

    What earlier weights have cached stays: the target's states, which another product would join
    otherwise, are not kept. So running sequences attend to keys of both until they end.
    """

    def __init__(self, drafter: EagleDrafter) -> None:
        self._drafter, self._parts = drafter, drafter.head.parts
        self._num_swaps = 0

    @property
    def device(self) -> torch.device:
        return self._drafter.runner.device

    def swap(self, network: EagleParts) -> EagleParts:
        """Draft with other parts from now on, and return those until now.

        Sequences that begin later share no pages with earlier ones.
        """
        earlier, self._parts = self._parts, network
        self._drafter.use(network)
        self._num_swaps += 1
        self._drafter.head.cache.generation = self._num_swaps.to_bytes(4)
        return earlier

    def recompute(self, seq_id: int, *, committed: int, salt: bytes) -> bool:
        """Return False: the states that this would take are not there any more."""
        return False


class HeadsSwap:
    """The heads of a `HeadsDrafter`, which cache nothing of their own."""

    def __init__(self, drafter: HeadsDrafter) -> None:
        self._drafter = drafter

    @property
    def device(self) -> torch.device:
        return self._drafter.heads.weight.device

    def swap(self, network: Heads) -> Heads:
        """Draft with other heads from now on, and return those until now."""
        return self._drafter.swap(network)

    def recompute(self, seq_id: int, *, committed: int, salt: bytes) -> bool:
        """Return False: nothing is cached."""
        return False


class DraftWeights:
    """The network of a neural draft, and the keys and values that earlier ones have computed."""

    def __init__(self, drafter: NeuralDrafter) -> None:
        runner = drafter.runner
        assert isinstance(runner, Runner), "a draft of another tokenizer is refused"
        self._drafter, self._runner = drafter, runner
        self._num_swaps = 0

    @property
    def device(self) -> torch.device:
        return self._runner.device

    def swap(self, network: Network) -> Network:
        """Draft with another network from now on, and return the one until now.

        Sequences that begin later share no pages with earlier ones.
        """
        earlier, self._runner.network = self._runner.network, network
        self._num_swaps += 1
        self._runner.cache.generation = self._num_swaps.to_bytes(4)
        return earlier

    @torch.inference_mode()
    def recompute(self, seq_id: int, *, committed: int, salt: bytes) -> bool:
        """Compute the keys and values of a sequence with the weights of now.

        Past `committed` it has draft tokens. Returns False if nothing was done: it is gone or long,
        or there is no room beside branches that share its pages.
        """
        length, cache = self._drafter.num_cached(seq_id), self._runner.cache
        committed = min(committed, length)
        if (
            not 0 < committed <= length <= MAX_RECOMPUTED
            or -(-length // cache.page_size) > cache.num_free
            or length - committed >= cache.page_size  # a pass of that many would register them
        ):
            return False
        tokens = tuple(cache.tokens(seq_id).tolist())
        self._runner.release([seq_id])
        self._runner.run([Step(seq_id, 0, tokens[:committed], cache_salt=salt)], [0])
        if committed < length:
            self._runner.run([Step(seq_id, committed, tokens[committed:])], [0])
        return True
