"""Load a checkpoint into a module with weights, whole or one rank's share."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from specserve.errors import ModelError, UnsupportedModel
from specserve.models.checkpoints.architecture import Architecture, architecture, num_layers_of
from specserve.models.checkpoints.decoders import (
    PADDED,
)
from specserve.models.checkpoints.fill import fill, fill_shapes
from specserve.models.checkpoints.gguf.files import INDEX
from specserve.models.checkpoints.held_bytes import (
    check_can_round,
    kept_float8_weights,
    report_quantized,
)
from specserve.models.checkpoints.library import (
    base_model_name,
    check_attention,
    empty_module,
    is_encoder_decoder,
    library_errors,
    load_whole,
    quiet_library,
    read_config,
)
from specserve.models.checkpoints.quantized.formats import read_format
from specserve.models.checkpoints.rounding import Rounding
from specserve.models.checkpoints.text_part import is_multimodal
from specserve.models.checkpoints.weights import (
    Codes,
    StoredSize,
    Weights,
    stored_tensors,
)
from specserve.models.coded_weight import CodedWeight
from specserve.models.plans import check_plan
from specserve.models.shard import Division, Shard
from specserve.models.skip import layers_of, without_layers

log = logging.getLogger(__name__)

FLOATS = ("F", "BF")
"""What the names of floating-point types in a file begin with."""
LIBRARY_ATTENTION = {"eager", "sdpa"}
"""The library's own attention, which every model supports without registering."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The library's module with weights, and what is known of it."""

    module: nn.Module  # the library's ...ForCausalLM, or ...ForConditionalGeneration
    config: Any  # the checkpoint's own, whatever the shard
    spec: Architecture
    layers: tuple[int, ...]  # numbers of the layers that are there


class PackedState(Protocol):
    """The state of a module whose linear layers have their weights elsewhere."""

    def fill(self, module: nn.Module) -> None: ...


def load_model(
    directory: Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    shard: Shard | None = None,
    attention: str = "sdpa",
    skip: Collection[int] = (),
    packed: PackedState | None = None,
    keeps: Codes | None = None,
    round_to: str | None = None,
) -> LoadedModel:
    """Load the model of a checkpoint for inference, without the layers to `skip`.

    Weights go to the device one tensor at a time, so that a GPU's never fill the host's memory.
    With layers to skip, or with a shard of several ranks, what is left out is never read. With
    packed weights nothing is: they are taken from there. Linear layers hold quantised weights as
    they are if those are what it `keeps`; `round_to` a name of `BITS` quantises them as they are
    read.
    Raises ModelError.
    """
    config, device = read_config(directory), torch.device(device)
    size = 1 if shard is None else shard.size
    check_plan(config, size)
    if round_to is not None:
        check_can_round(directory, config)
    _check_dtype_and_skip(config, dtype, skip)
    attention = _usable_attention(config, attention)
    with quiet_library(), library_errors(directory):
        spec = architecture(directory, config, size)  # before weights are read
        if packed is None:
            check_fits_files(directory, config)
            report_quantized(directory, config, dtype, device, size, keeps=keeps)
            _report_text_part(directory)
        if packed is not None:
            module = _empty_part(config, shard, skip, dtype=dtype, attention=attention)
            packed.fill(module)
        elif skip or size > 1 or round_to or _differs_from_library(directory):
            module = _load_part(
                directory,
                config,
                None if skip else shard,
                skip,
                device,
                dtype=dtype,
                attention=attention,
                keeps=keeps,
                round_to=round_to,
            )
        else:
            module = load_whole(directory, config, device, dtype=dtype, attention=attention)
        if packed is None:
            module.to(device)  # the buffers, and what a checkpoint does not hold
        module.eval().requires_grad_(False)
        layers = tuple(layer for layer in range(spec.num_layers) if layer not in skip)
        return LoadedModel(module, config, replace(spec, num_layers=len(layers)), layers)


def _check_dtype_and_skip(config: Any, dtype: torch.dtype, skip: Collection[int]) -> None:
    """Raise UnsupportedModel for a format that overflows, or layers that cannot be left out."""
    if is_encoder_decoder(config):
        if dtype == torch.float16:
            raise UnsupportedModel(
                f"{config.model_type} models overflow in float16; use dtype bfloat16 or float32"
            )
    elif config.model_type == "falcon" and skip:
        raise UnsupportedModel("falcon models cannot leave layers out; use another draft.kind")
    elif config.model_type in PADDED and skip:
        raise UnsupportedModel(
            f"{config.model_type} models cannot leave layers out: later ones share keys and values "
            "with earlier ones; use another draft.kind"
        )


def _usable_attention(config: Any, attention: str) -> str:
    """Return the attention to build the module with. Raises UnsupportedModel if it takes none."""
    if is_encoder_decoder(config):
        return "eager"  # nothing of it is used: the forward pass is ours
    if config.model_type == "falcon":
        return "eager"  # which `falcon` replaces
    if attention not in LIBRARY_ATTENTION:
        check_attention(config)
    return attention


def _report_text_part(directory: Path) -> None:
    if is_multimodal(directory):
        log.warning(
            "%s: the text model alone is opened; what sees images or hears is left out",
            directory.name,
        )


def _differs_from_library(directory: Path) -> bool:
    """Return whether a checkpoint's tensors differ from the tensors of the library's module."""
    is_gguf = (directory / INDEX).is_file()
    return is_gguf or read_format(directory) is not None or is_multimodal(directory)


def check_fits_files(directory: Path, config: Any) -> None:
    """Raise ModelError if config.json implies far more parameters than the files hold.

    The library would allocate and draw those that are missing, before it says so.
    """
    _check_types(directory)
    stored = StoredSize.of_files(directory)
    if num_layers_of(config) > stored.tensors:
        raise ModelError(
            f"{directory} has {num_layers_of(config)} layers by its config.json, and only "
            f"{stored.tensors} tensors"
        )
    module = empty_module(config, dtype=torch.float32, attention="eager")
    implied = sum(parameter.numel() for parameter in module.parameters())
    if implied > 2 * stored.numbers:  # tied weights may be counted twice
        raise ModelError(
            f"{directory} has {implied:,} parameters by its config.json, and "
            f"{stored.numbers:,} in its files"
        )


def _check_types(directory: Path) -> None:
    """Raise ModelError for weights that are no floating-point numbers, and no codes either."""
    if read_format(directory) is not None:
        return
    stored = stored_tensors(directory)
    for name in stored.names():
        kind = stored.dtype(name)
        if name.endswith("weight") and not kind.startswith(FLOATS):
            raise ModelError(
                f"{directory} holds {name} in {kind}, and weights are floating-point numbers"
            )


def _load_part(
    directory: Path,
    config: Any,
    shard: Shard | None,
    skip: Collection[int],
    device: torch.device,
    *,
    dtype: torch.dtype,
    attention: str,
    keeps: Codes | None,
    round_to: str | None,
) -> Any:
    """Load what belongs to a rank, or what is not skipped, tensor by tensor."""
    module = whole = empty_module(config, dtype=dtype, attention=attention)
    prefix, ignored = base_model_name(whole), None
    if skip:
        module = without_layers(whole, skip)
        name = layers_of(whole)[0].rpartition(".")[2]
        ignored = rf"(^|\.){name}\.({'|'.join(map(str, skip))})\."
    division = make_division(module, shard) if shard is not None and shard.size > 1 else None
    weights = Weights(directory, prefix=prefix, dtype=dtype)
    float8: Collection[str] = ()
    if keeps is Codes.FLOAT8 and round_to is None:
        float8 = kept_float8_weights(whole, weights, 1 if shard is None else shard.size)
    fill(
        module,
        weights,
        division,
        device,
        ignored=ignored,
        keeps_codes=keeps is Codes.INTEGERS or (keeps is not None and round_to is not None),
        float8=float8,
        rounding=None if round_to is None else Rounding.from_module(whole, round_to),
    )
    if division is not None:
        division.narrow(module)
    elif not _has_own_integers(module):
        module.tie_weights()
    return module


def _has_own_integers(module: Any) -> bool:
    """Return whether a tied head has integers beside the plain embedding."""
    return any(
        isinstance(module.get_parameter(name), CodedWeight) for name in module.all_tied_weights_keys
    )


def _empty_part(
    config: Any, shard: Shard | None, skip: Collection[int], *, dtype: torch.dtype, attention: str
) -> Any:
    """Return the module that loading would return, with shapes instead of weights."""
    module = empty_module(config, dtype=dtype, attention=attention)
    if skip:
        return without_layers(module, skip)
    if shard is not None and shard.size > 1:
        division = make_division(module, shard)
        fill_shapes(module, division)
        division.narrow(module)
    return module


def make_division(module: Any, shard: Shard) -> Division:
    head = next(
        name for name, part in module.named_modules() if part is module.get_output_embeddings()
    )
    return Division(module, shard, prefix=base_model_name(module), head=head)
