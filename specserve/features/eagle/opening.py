"""Open EAGLE-3 heads and draft heads from a config, and check that their files fit the target."""

from __future__ import annotations

import logging
from pathlib import Path

from specserve.api.tokenizer import Tokenizer
from specserve.config.sections import DraftConfig
from specserve.config.tree import Config
from specserve.drafters.branches import Fanout
from specserve.drafters.ngram.drafter import NgramDrafter
from specserve.drafters.registry import OpenDrafter, fanout_from_config
from specserve.features.eagle.checkpoint import require_eagle_for
from specserve.features.eagle.dflash.drafter import DFlashDrafter
from specserve.features.eagle.dflash.weights import require_dflash_for
from specserve.features.eagle.drafter import EagleDrafter
from specserve.features.eagle.heads import require_heads_for
from specserve.features.eagle.heads_drafter import HeadsDrafter
from specserve.grammar.matcher import GrammarCompiler
from specserve.models.checkpoints.find import find_checkpoint
from specserve.models.target import TargetModel
from specserve.types import ModelInfo

log = logging.getLogger(__name__)


def open_eagle_together(config: Config, target: TargetModel) -> OpenDrafter:
    """Return the EAGLE-3 head of a config beside its target, with copies where a text repeats."""
    eagle = EagleDrafter.from_config(config, target)
    eagle.copies = NgramDrafter(copies=True)
    return _opened(eagle, fanout=None)


def open_dflash_together(config: Config, target: TargetModel) -> OpenDrafter:
    """Return the DFlash draft of a config beside its target."""
    return _opened(DFlashDrafter.from_config(config, target), fanout=None)


def open_eagle_apart(
    config: Config, target: ModelInfo, grammar_compiler: GrammarCompiler | None
) -> OpenDrafter:
    """Return the EAGLE-3 head of a config on a device of its own."""
    eagle = EagleDrafter.apart(config, target, grammar_compiler)
    fanout = fanout_from_config(config)
    if fanout is not None and not eagle.can_anticipate:
        _log_no_anticipation("P-EAGLE head", config)
        fanout = None
    return _opened(eagle, fanout=fanout)


def open_dflash_apart(
    config: Config, target: ModelInfo, grammar_compiler: GrammarCompiler | None
) -> OpenDrafter:
    """Return the DFlash draft of a config on a device of its own."""
    if fanout_from_config(config) is not None:
        _log_no_anticipation("DFlash draft", config)
    return _opened(DFlashDrafter.apart(config, target, grammar_compiler), fanout=None)


def _log_no_anticipation(what: str, config: Config) -> None:
    log.info(
        "the %s at %s drafts in one pass and does not anticipate; its proposals are made when "
        "they are asked for",
        what,
        config.draft.path,
    )


def _opened(drafter: EagleDrafter | DFlashDrafter, *, fanout: Fanout | None) -> OpenDrafter:
    """Return a drafter that hands the target's states to the head."""
    return OpenDrafter(
        drafter,
        context=drafter.context,
        runners=(drafter.runner,),
        fanout=fanout,
        receive_hidden=drafter.receive_hidden,
    )


def open_heads(config: Config, target: TargetModel) -> HeadsDrafter:
    """Return the draft heads of a config beside their target."""
    return HeadsDrafter.from_config(config, target)


def require_eagle_files(target: Path, tokenizer: Tokenizer, draft: DraftConfig) -> None:
    """Raise unless the target is what an EAGLE-3 head reads."""
    require_eagle_for(target, _head_of(draft))


def require_dflash_files(target: Path, tokenizer: Tokenizer, draft: DraftConfig) -> None:
    """Raise unless the target is what a DFlash draft reads."""
    require_dflash_for(target, _head_of(draft))


def require_heads_files(target: Path, tokenizer: Tokenizer, draft: DraftConfig) -> None:
    """Raise unless the heads were fitted to the target."""
    assert draft.path is not None, "the config has been checked"
    require_heads_for(target, Path(draft.path))


def tapped_layers(target: Path, num_layers: int, draft: DraftConfig) -> tuple[int, ...]:
    """Return the layers of the target whose inputs the EAGLE-3 head of a config reads."""
    return require_eagle_for(target, _head_of(draft)).taps(num_layers)


def layers_for_dflash(target: Path, num_layers: int, draft: DraftConfig) -> tuple[int, ...]:
    """Return the layers of the target whose inputs the DFlash draft of a config reads."""
    return require_dflash_for(target, _head_of(draft)).tapped_layers


def _head_of(draft: DraftConfig) -> Path:
    assert draft.path is not None, "the config has been checked"
    return find_checkpoint(draft.path, revision=draft.revision, key="draft.path")
