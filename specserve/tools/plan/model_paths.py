"""The models that a plan is about, and how they compare in size. Opens no weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specserve.config.tree import DEMO
from specserve.errors import BadValue
from specserve.models.checkpoints.find import describe, find_config
from specserve.tools.plan.options import PlanOptions


@dataclass(frozen=True, slots=True)
class ModelPaths:
    """Directories of target and draft."""

    target: Path
    draft: Path | None


def find_models(options: PlanOptions) -> ModelPaths | None:
    """Return the named models, the demo pair by default, or None if only numbers were given."""
    if options.draft_quantize is not None and options.target is not None and options.draft is None:
        raise BadValue(
            "--draft-quantize rounds the draft's weights; name it by --draft",
            param="draft_quantize",
        )
    if options.target is None and options.draft is None:
        if options.config is not None and not options.measure:
            return None
        numbers = options.alpha is not None or options.cost is not None or options.stages
        return (
            None
            if numbers and not options.gpus and not options.measure
            else ModelPaths(DEMO / "target", DEMO / "draft")
        )
    if options.target is None:
        raise BadValue("--draft needs --target, the model that it drafts for", param="draft")
    return ModelPaths(
        find_config(options.target, key="--target"),
        None if options.draft is None else find_config(options.draft, key="--draft"),
    )


def parameter_ratio(models: ModelPaths) -> float:
    """Return how many parameters the draft has for each of the target's."""
    assert models.draft is not None
    return describe(models.draft).num_parameters / describe(models.target).num_parameters
