"""From a checkpoint to a module with weights, whole or one rank's share. The only room of the models that knows transformers."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as library_logging

from specserve.errors import ModelError, ModelNotFound, UnsupportedModel
from specserve.models.plans import Heads, check_plan
from specserve.models.shard import Division, Shard
from specserve.models.skip import layers_of, without
from specserve.models.weights import Weights, files

WANTED_FILES = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.txt")
LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}  # others keep a state that is no list of keys and values
OWN_ATTENTION = {"eager", "sdpa"}  # the library's, which models know without asking its register


@dataclass(frozen=True, slots=True)
class Architecture:
    """What a runner must know of a model, and of this rank's part of it."""

    model_type: str
    num_layers: int
    num_heads: int  # on this rank
    kv_heads: int  # on this rank
    head_dim: int  # of queries and keys
    v_head_dim: int
    hidden_size: int
    vocab_size: int  # rows of logits; a tokenizer may know fewer
    max_context: int
    end_ids: frozenset[int]
    tied: bool  # the vocabulary head is the embedding


@dataclass(frozen=True, slots=True)
class Loaded:
    module: nn.Module  # the library's ...ForCausalLM
    config: Any  # the checkpoint's own, whatever the shard
    spec: Architecture
    kept: tuple[int, ...]  # numbers of the layers that are there


@contextmanager
def _quiet_library() -> Iterator[None]:
    """Loading reports through exceptions; the library's progress bars and warnings stay off meanwhile."""
    verbosity, bars = library_logging.get_verbosity(), library_logging.is_progress_bar_enabled()
    library_logging.set_verbosity(logging.ERROR)
    library_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        library_logging.set_verbosity(verbosity)
        if bars:
            library_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def register_attention(name: str, function: Callable[..., Any]) -> None:
    """Make `function` known to the library's modelling code as the attention implementation `name`."""
    AttentionInterface.register(name, function)


def find_checkpoint(model: str | Path, *, revision: str | None = None) -> Path:
    """The directory that holds `model`: a local path, or else a hub name, downloaded unless it lies in the hub's cache."""
    path = Path(model).expanduser()
    if not path.exists():
        path = _downloaded(str(model), revision)
    if not path.is_dir():
        raise ModelNotFound(f"{model} is a file; a model is a directory with config.json and safetensors files")
    if not (path / "config.json").is_file():
        raise ModelNotFound(f"{model} is no model: it has no config.json")
    files(path)
    return path


def _downloaded(name: str, revision: str | None) -> Path:
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        raise ModelNotFound(f"{name} does not exist")
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(WANTED_FILES)))
    except (OSError, ValueError) as error:  # no such name or revision, no network, a name that the hub could not have
        at = f" at revision {revision}" if revision else ""
        raise ModelNotFound(f"{name} is no local directory, and the hub did not give it{at}: {_first_line(error)}") from error


@_quiet_library()
def read_config(directory: Path) -> Any:
    """The library's config of a checkpoint; raises unless it is of a decoder-only language model that specserve can run."""
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise UnsupportedModel(f"{directory} cannot be read as a model that transformers knows: {_first_line(error)}") from error
    _check_decoder(config)
    return config


def _check_decoder(config: Any) -> None:
    kind = config.model_type
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    written = set(getattr(config, "architectures", None) or [known])
    encodes = config.is_encoder_decoder or getattr(config, "use_bidirectional_attention", None) is True
    if known not in written or encodes or config.get_text_config() is not config:
        raise UnsupportedModel(f"{kind} ({', '.join(map(str, written))}) is no decoder-only language model")
    strange = set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES
    if strange or not isinstance(getattr(config, "num_attention_heads", None), int):
        raise UnsupportedModel(f"{kind} has layers that are not plain attention: {', '.join(sorted(strange)) or 'no heads'}")
    if getattr(config, "num_kv_shared_layers", None) or getattr(config, "is_heterogeneous", False):
        raise UnsupportedModel(f"{kind} has layers that differ in their sizes, or share keys and values")
    if not isinstance(getattr(config, "max_position_embeddings", None), int):
        raise UnsupportedModel(f"{kind} states no context length (max_position_embeddings)")
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModel("quantized checkpoints are not supported; use one in bf16, fp16 or fp32")


def load_model(
    directory: Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    shard: Shard | None = None,
    attention: str = "sdpa",
    skip: Collection[int] = (),
) -> Loaded:
    """The model of a checkpoint, for inference, without the layers to `skip`.

    With those, or with a shard of several ranks, what is left out is never read.
    """
    config = read_config(directory)
    size = 1 if shard is None else shard.size
    check_plan(config, size)
    modelling: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if attention not in OWN_ATTENTION and not modelling._supports_attention_backend:
        raise UnsupportedModel(f"{config.model_type} computes its attention itself, so that no other can be put in its place")
    with _quiet_library(), _library_errors(directory):
        if skip:
            module = _partial(directory, config, skip, dtype=dtype, attention=attention)
        elif shard is None or size == 1:
            module = _whole(directory, dtype=dtype, attention=attention)
        else:
            module = _share(directory, config, shard, dtype=dtype, attention=attention)
        module.to(device).eval().requires_grad_(False)
        kept = tuple(layer for layer in range(config.num_hidden_layers) if layer not in skip)
        return Loaded(module, config, replace(_architecture(directory, config, size), num_layers=len(kept)), kept)


def _architecture(directory: Path, config: Any, size: int) -> Architecture:
    heads = Heads.of(config).local(size)
    head_dim = getattr(config, "qk_head_dim", None) or getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Architecture(
        model_type=config.model_type,
        num_layers=config.num_hidden_layers,
        num_heads=heads.query,
        kv_heads=heads.kv,
        head_dim=head_dim,
        v_head_dim=getattr(config, "v_head_dim", None) or head_dim,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_context=_context(config),
        end_ids=_end_ids(directory, config),
        tied=bool(config.tie_word_embeddings),
    )


def _context(config: Any) -> int:
    """Some rotary frequencies switch for all texts of a pass once one is long. Contexts end before, so that no text changes another's."""
    rotary = getattr(config, "rope_parameters", None) or {}
    switch: int | None = rotary["original_max_position_embeddings"] if rotary.get("rope_type") == "longrope" else None
    longest: int = config.max_position_embeddings
    return longest if switch is None else min(longest, switch)


def _end_ids(directory: Path, config: Any) -> frozenset[int]:
    """generation_config.json has the last word, as in the library's generate()."""
    ids: Any = config.eos_token_id
    if (directory / "generation_config.json").is_file():
        written = GenerationConfig.from_pretrained(directory, local_files_only=True).eos_token_id
        ids = ids if written is None else written
    return frozenset() if ids is None else frozenset([ids] if isinstance(ids, int) else ids)


def _whole(directory: Path, *, dtype: torch.dtype, attention: str) -> Any:
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=dtype,
        attn_implementation=attention,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        output_loading_info=True,
    )
    module, report = loaded
    _check_complete(directory, missing=report["missing_keys"], unexpected=report["unexpected_keys"])
    return module


def _share(directory: Path, config: Any, shard: Shard, *, dtype: torch.dtype, attention: str) -> Any:
    module = _empty(config, dtype=dtype, attention=attention)
    head = next(name for name, part in module.named_modules() if part is module.get_output_embeddings())
    division = Division(module, shard, prefix=module.base_model_prefix, head=head)
    _fill(module, Weights(directory, prefix=module.base_model_prefix), division)
    division.narrow(module)
    return module


def _partial(directory: Path, config: Any, skip: Collection[int], *, dtype: torch.dtype, attention: str) -> Any:
    whole = _empty(config, dtype=dtype, attention=attention)
    module, weights = without(whole, skip), Weights(directory, prefix=whole.base_model_prefix)
    name = layers_of(whole)[0].rpartition(".")[2]
    _fill(module, weights, None, ignored=rf"(^|\.){name}\.({'|'.join(map(str, skip))})\.")
    module.tie_weights()
    return module


def _empty(config: Any, *, dtype: torch.dtype, attention: str) -> Any:
    with init_empty_weights(include_buffers=False):
        return AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            copy.deepcopy(config), dtype=dtype, attn_implementation=attention
        )


def _fill(module: Any, weights: Weights, division: Division | None, *, ignored: str | None = None) -> None:
    """Reads what an empty model lacks, all of it or a rank's part. Raises for tensors that are missing, or more than it has use for."""
    wanted: dict[str, Tensor] = module.state_dict()
    sources = {name: _source(name, weights, module.all_tied_weights_keys) for name in wanted}
    _check_complete(weights.directory, missing=[name for name, source in sources.items() if source not in weights])
    for name, empty in wanted.items():
        _set_tensor(module, name, _read_part(weights, sources[name], division, name, empty))
    _check_complete(weights.directory, unexpected=_unexpected(module, weights, ignored))


def _source(name: str, weights: Weights, tied: dict[str, str]) -> str:
    """The name to read a parameter from: its own, or, when the file leaves it out, that of the parameter it is tied to."""
    twins = {**{source: target for target, source in tied.items()}, **tied}
    return name if name in weights else twins.get(name, name)


def _read_part(weights: Weights, source: str, division: Division | None, name: str, empty: Tensor) -> Tensor:
    part = None if division is None else division.part(name, empty.shape)
    tensor = weights.read(source) if part is None else weights.read(source, dim=part.dim, ranges=part.ranges)
    shape = empty.shape if part is None else part.shape(empty.shape)
    if tensor.shape != shape:
        raise ModelError(f"{weights.directory} holds {source} in another shape than config.json implies")
    is_zero = division is not None and division.is_zero(name)
    return (torch.zeros_like(tensor) if is_zero else tensor).to(empty.dtype)


def _set_tensor(module: nn.Module, name: str, value: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    parent = module.get_submodule(owner)
    setattr(parent, leaf, nn.Parameter(value, requires_grad=False) if leaf in parent._parameters else value)


def _unexpected(module: Any, weights: Weights, ignored: str | None) -> set[str]:
    """What nobody read, without what is `ignored`, and the buffers that older versions of the library used to write."""
    known = re.compile("|".join((r"rotary_emb\.inv_freq", *(module._keys_to_ignore_on_load_unexpected or ()), *([ignored] if ignored else ()))))
    return {name for name in weights.unread() if not known.search(name)}


def _check_complete(directory: Path, *, missing: Iterable[str] = (), unexpected: Iterable[str] = ()) -> None:
    for names, what in ((sorted(missing), "lacks"), (sorted(unexpected), "has, beside the model's,")):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ModelError(f"{directory} {what} the tensors {', '.join(names[:3])}{more}")


@contextmanager
def _library_errors(directory: Path) -> Iterator[None]:
    """What the library and safetensors say of a broken checkpoint, as one of our sentences."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"{directory} cannot be loaded: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n", 1)[0] or type(error).__name__
