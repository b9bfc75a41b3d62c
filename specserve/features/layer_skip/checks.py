"""Checks of the keys of a drafter that skips layers."""

from __future__ import annotations

from specserve.config.tree import Config
from specserve.errors import ConfigError


def check_config(config: Config) -> None:
    """Raise ConfigError for layers that cannot be left out, or not on these ranks."""
    draft, tensor_parallel = config.draft, config.target.tensor_parallel
    if draft.kind == "layer_skip" and draft.path is not None:
        raise ConfigError(
            "draft.kind layer_skip drafts with the target's own layers; leave draft.path out"
        )
    if draft.skip is not None and draft.kind != "layer_skip":
        raise ConfigError(
            f"draft.skip belongs to the kind layer_skip, and draft.kind is {draft.kind}; "
            "leave it out"
        )
    if draft.skip is not None and len(set(draft.skip)) < len(draft.skip):
        raise ConfigError(
            f"draft.skip names a layer twice: {', '.join(map(str, draft.skip))}; name each once"
        )
    if draft.placement == "together" and draft.kind == "layer_skip" and tensor_parallel > 1:
        raise ConfigError(
            "draft.kind layer_skip drafts together with a target of one rank only, and "
            f"target.tensor_parallel is {tensor_parallel}; choose draft.placement apart"
        )
