"""A drafter whose weights are swapped at random, in the middle of sequences."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from specserve.drafters.learning.swap import DraftWeights
from specserve.drafters.neural.drafter import NeuralDrafter
from specserve.models.checkpoints.load import load_model
from specserve.models.model import Model, open_model
from specserve.models.network import Network
from specserve.types import DraftStep, Proposal
from tests.support.engines import AnticipatingDrafter, Engine, load_drafter, model_options


class SwappingDrafter(AnticipatingDrafter):
    """A drafter that anticipates, swaps networks at random, and recomputes some sequences."""

    def __init__(self, drafter: NeuralDrafter, networks: Sequence[Network]) -> None:
        super().__init__(drafter, None)
        self.weights, self.networks = DraftWeights(drafter), networks
        self.committed: dict[int, int] = {}
        self.stale: list[int] = []
        self.num_swaps = self.num_recomputed = 0

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]:
        proposals = self.anticipation.propose(steps, deadline)
        self.committed |= {step.seq_id: step.stop for step in steps}
        for seq_id in self.stale[: int(self.rng.integers(0, 3))]:
            self.num_recomputed += self.weights.recompute(
                seq_id, committed=self.committed[seq_id], salt=b""
            )
            self.stale.remove(seq_id)
        looks = int(self.rng.integers(1, 12))
        self.anticipation.prepare(lambda: self._interrupted_after(looks))
        if self.rng.random() < 0.3:
            other = self.networks[int(self.rng.integers(len(self.networks)))]
            self.weights.swap(other)
            self.stale = list(self.committed)
            self.num_swaps += 1
        return proposals

    def release(self, seq_ids: Sequence[int]) -> None:
        super().release(seq_ids)
        for seq_id in seq_ids:
            self.committed.pop(seq_id, None)
        self.stale = [seq_id for seq_id in self.stale if seq_id in self.committed]

    @classmethod
    def replace_in(cls, engine: Engine, drafts: Sequence[Path], *, support: int) -> SwappingDrafter:
        """Give the engine a drafter that swaps between the weights of these checkpoints."""
        opened = open_model(drafts[0], model_options(pages=engine.target.info.num_pages * 2))
        engine.drafter = load_drafter(opened, engine.target.info, support=support)
        drafter = cls(engine.drafter, [rebuilt(opened, draft) for draft in drafts])
        engine.ahead = drafter
        return drafter


def rebuilt(opened: Model, draft: Path) -> Network:
    """Return the network of an open model with the weights of another checkpoint."""
    assert opened.rebuild is not None
    module = load_model(draft, dtype=opened.runner.cache.keys[0].dtype, device="cpu").module
    return opened.rebuild(dict(module.named_parameters()))
