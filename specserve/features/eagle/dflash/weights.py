"""The tensors of DFlash and DSpark drafts, and whether a draft is of a target.

Beside its layers a draft has the product that joins the target's states, and two norms. Embedding
and vocabulary head are the target's, unless the files have them.
"""

from __future__ import annotations

from pathlib import Path

from specserve.errors import ModelError, UnsupportedModel
from specserve.features.eagle.checkpoint import (
    HeadTensors,
    layer_shapes,
    require_fingerprint,
    require_sizes,
)
from specserve.features.eagle.dflash.config import DFlashInfo
from specserve.models.checkpoints.library import read_config

MARKOV_FROM, MARKOV_TO = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
"""Factors of what a token adds to the logits of the token after it."""
OWN_MASK = "mask_embedding"
"""Embedding of the mask in drafts of a layout that is not computed here."""


class DFlashWeights(HeadTensors):
    """The weights of a DFlash or DSpark draft."""

    def __init__(self, directory: Path, info: DFlashInfo) -> None:
        super().__init__(directory, "DFlash draft", info.vocab_size)
        self.info = info
        if OWN_MASK in self:
            raise UnsupportedModel(
                f"the DFlash draft at {directory} has an embedding of its own for the mask, which "
                "is not read here",
                param="draft.path",
            )
        self._check_shapes()

    @property
    def draft_vocab_size(self) -> int:
        """Return how many tokens it can draft: all, where the vocabulary head is the target's."""
        has_head = "lm_head.weight" in self
        return self.shape("lm_head.weight")[0] if has_head else self.info.vocab_size

    def _check_shapes(self) -> None:
        """Raise ModelError for tensors of other sizes than config.json states."""
        info, hidden = self.info, self.info.layer.hidden_size
        expected = {
            "fc.weight": (hidden, len(info.tapped_layers) * info.target_hidden_size),
            "hidden_norm.weight": (hidden,),
            "norm.weight": (hidden,),
        }
        for index in range(info.num_layers):
            expected |= layer_shapes(info.layer, f"layers.{index}", hidden)
        if "d2t" in self or self.draft_vocab_size != info.vocab_size:
            expected["d2t"] = (self.draft_vocab_size,)
            expected["lm_head.weight"] = (self.draft_vocab_size, hidden)
        if "embed_tokens.weight" in self:
            expected["embed_tokens.weight"] = (info.vocab_size, hidden)
        if info.markov_rank:
            expected[MARKOV_FROM] = (info.vocab_size, info.markov_rank)
            expected[MARKOV_TO] = (self.draft_vocab_size, info.markov_rank)
        self.require(expected)


def require_dflash_for(target: Path, directory: Path) -> DFlashInfo:
    """Return a draft's config; raise ModelError unless the draft reads this target.

    Reads headers, and of the target's weights no more than its norms.
    """
    info, config = DFlashInfo.from_directory(directory), read_config(target)
    taps, draft = info.tapped_layers, f"the DFlash draft at {directory}"
    sizes = info.target_hidden_size, info.vocab_size
    require_sizes(target, config, draft, sizes, taps, is_whole=bool(taps))
    weights, hidden = DFlashWeights(directory, info), info.layer.hidden_size
    for name in ("embed_tokens.weight", "lm_head.weight"):
        if name not in weights and hidden != config.hidden_size:
            raise ModelError(
                f"{draft} has no {name} of its own, and the target's {config.hidden_size} numbers "
                f"a token do not fit its {hidden}"
            )
    require_fingerprint(target, draft, info.target, command="specserve dflash")
    return info
