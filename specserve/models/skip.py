"""A model without some of its layers, over the same weights. Knows nothing of drafting."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor, nn

from specserve.errors import ConfigError


def skipped_layers(num_layers: int, wanted: Sequence[int] | None) -> tuple[int, ...]:
    """Return the layers to leave out; raise ConfigError if `wanted` names layers that cannot be.

    The default is every second layer between the first and the last, which a text can least do
    without.
    """
    if wanted is None:
        wanted = range(1, num_layers - 1, 2) or (num_layers - 1,)
    unknown = [layer for layer in wanted if layer >= num_layers]
    if unknown:
        raise ConfigError(
            f"draft.skip names layer {unknown[0]}, and the target's {num_layers} layers are "
            f"0 to {num_layers - 1}"
        )
    if len(wanted) >= num_layers:
        raise ConfigError(
            f"draft.skip leaves none of the target's {num_layers} layers; "
            "leave at least one in, or use another draft.kind"
        )
    return tuple(wanted)


class SkippedLayer(nn.Module):
    """A stand-in for a layer, so that the other layers keep their numbers.

    It has the attributes of the layer that the library asks for.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.__dict__.update(
            {name: value for name, value in vars(layer).items() if not name.startswith("_")}
        )

    def forward(self, hidden: Tensor, *_: object, **__: object) -> Tensor:
        return hidden


def layers_of(module: Any) -> tuple[str, nn.ModuleList]:
    """Return the name and the list of a language model's layers."""
    num_layers = module.config.num_hidden_layers
    return next(
        (name, part)
        for name, part in module.named_modules()
        if isinstance(part, nn.ModuleList) and len(part) == num_layers
    )


def without_layers(module: Any, skip: Collection[int]) -> Any:
    """Return a second model that shares everything else with this one, which is not changed."""
    name, layers = layers_of(module)
    return _with_part(
        module,
        name,
        nn.ModuleList(
            SkippedLayer(layer) if i in skip else layer for i, layer in enumerate(layers)
        ),
    )


def _with_part(module: Any, name: str, part: nn.Module) -> Any:
    first, _, rest = name.partition(".")
    other = copy.copy(module)
    other._modules = dict(module._modules)
    other._modules[first] = _with_part(module._modules[first], rest, part) if rest else part
    return other
