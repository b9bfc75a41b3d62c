"""Checks of the keys of EAGLE-3 heads and draft heads."""

from __future__ import annotations

from specserve.config.tree import Config
from specserve.errors import ConfigError


def check_config(config: Config) -> None:
    """Raise ConfigError for heads and drafts without files, or where they cannot draft."""
    draft, tensor_parallel = config.draft, config.target.tensor_parallel
    if draft.kind == "heads" and draft.path is None:
        raise ConfigError(
            "draft.kind heads needs draft.path, heads that "
            "`specserve heads --target M --text FILE --out DIR` has fitted to the target"
        )
    if draft.kind == "eagle" and draft.path is None:
        raise ConfigError(
            "draft.kind eagle needs draft.path, an EAGLE-3 head that was trained for the target; "
            "`specserve eagle --target M --text FILE --out DIR` trains one"
        )
    if draft.kind == "dflash" and draft.path is None:
        raise ConfigError(
            "draft.kind dflash needs draft.path, a DFlash or DSpark draft that was trained for the "
            "target; `specserve dflash --target M --text FILE --out DIR` trains one"
        )
    if draft.kind == "heads" and tensor_parallel > 1:
        raise ConfigError(
            "draft.kind heads needs the whole vocabulary head on one rank, "
            f"and target.tensor_parallel is {tensor_parallel}; set it to 1"
        )
    if draft.placement == "apart" and draft.kind == "heads":
        raise ConfigError(
            "draft.kind heads drafts with the target's own vocabulary head, together with it; "
            "leave draft.placement out"
        )
