"""Load a checkpoint into a module with weights, whole or one rank's share.

The only module of the models that knows the transformers library.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.utils import logging as library_logging

from specserve.errors import ModelError, SpecserveError, UnsupportedModel, first_line
from specserve.models.checkpoints.decoders import (
    PADDED,
    check_decoder,
    decoder_context,
    is_heterogeneous,
)
from specserve.models.checkpoints.fill import check_complete, fill, fill_shapes, float8_weights
from specserve.models.checkpoints.quantized.float8 import StoredFloat8
from specserve.models.checkpoints.quantized.formats import method_of, read_format
from specserve.models.checkpoints.rounding import Rounding
from specserve.models.checkpoints.shapes_only import shapes_only
from specserve.models.checkpoints.sizes import check_sizes
from specserve.models.checkpoints.text_part import DECODERS, is_multimodal
from specserve.models.checkpoints.weights import (
    Codes,
    StoredSize,
    Weights,
    num_weight_bytes,
    weight_files,
)
from specserve.models.gpu.float8_kernels import float8_fault
from specserve.models.plans import HeadCounts, check_plan
from specserve.models.shard import Division, Shard
from specserve.models.skip import layers_of, without_layers

log = logging.getLogger(__name__)

ENCODER_DECODERS = ("mt5", "t5")
DEFAULT_POSITIONS = 512
"""Positions that T5s were trained with, where a checkpoint does not say."""
LIBRARY_ATTENTION = {"eager", "sdpa"}
"""The library's own attention, which every model supports without registering."""
UNDECLARED = ("stablelm",)
"""Models that take any registered attention, and do not say so."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """The shape of a model, and of this rank's part of it."""

    model_type: str
    num_layers: int
    num_heads: int  # on this rank
    kv_heads: int  # on this rank
    head_dim: int  # of queries and keys
    v_head_dim: int
    hidden_size: int
    vocab_size: int  # width of the logits; a tokenizer may know fewer ids
    max_context: int
    end_ids: frozenset[int]
    tied: bool  # the vocabulary head is the embedding
    decoder_start: int | None = None  # the token that every text of an encoder-decoder begins with

    @property
    def is_encoder_decoder(self) -> bool:
        return self.decoder_start is not None


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


@contextmanager
def quiet_library() -> Iterator[None]:
    """Turn the library's progress bars and warnings off; loading reports by exceptions."""
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
    """Register `function` with the library as the attention implementation `name`."""
    AttentionInterface.register(name, function)


@quiet_library()
def read_config(directory: Path) -> Any:
    """Return the library's config of a checkpoint.

    Raises UnsupportedModel unless it is that of a language model that specserve can run.
    """
    with library_errors(
        directory, "cannot be read as a model that transformers knows", UnsupportedModel
    ):
        read_format(directory)  # which refuses what it cannot read
        config = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
        if is_multimodal(directory):
            config = _decoder_config(config)
        if hasattr(config, "quantization_config"):
            del config.quantization_config  # weights are widened as they are read
        if not is_encoder_decoder(config):
            check_decoder(config, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type))
        if is_heterogeneous(config):
            # `architecture` and `HeadCounts` read the layers' own.
            config.allow_global_per_layer_attribute_access = True
        check_sizes(directory, config)
        return config


def _decoder_config(config: Any) -> Any:
    """Return the config of the decoder that computes what a multimodal text model does."""
    text = config.get_text_config()
    kind = DECODERS[config.model_type]
    if text.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        stated = {name: value for name, value in text.to_dict().items() if name != "model_type"}
        if kind == "qwen3_moe":
            stated["norm_topk_prob"] = True  # as the multimodal router does, whatever is stated
        text = AutoConfig.for_model(kind, **stated)
        text.rope_parameters.pop("mrope_section", None)
        text.rope_parameters.pop("mrope_interleaved", None)
    text.architectures = None
    text.tie_word_embeddings = config.tie_word_embeddings
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if getattr(text, name, None) is None:
            setattr(text, name, getattr(config, name, None))
    return text


@quiet_library()
def llama_config(keys: Mapping[str, Any]) -> Any:
    """Return the library's config of a Llama with these keys, whatever release they are of."""
    return LlamaConfig(**keys)


@quiet_library()
def llama_rotary(config: Any) -> nn.Module:
    """Return the module that computes the rotary angles of a Llama."""
    return LlamaRotaryEmbedding(config)


@quiet_library()
def load_tokenizer(directory: Path) -> str:
    """Return the checkpoint's tokenizer in the format of the tokenizers library.

    What only the config files of transformers say of it is included. Raises ModelError.
    """
    with library_errors(directory, "has no tokenizer of the tokenizers library that can be loaded"):
        backend: Any = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        ).backend_tokenizer
        backend.no_padding()
        backend.no_truncation()
        text: str = backend.to_str()
        return text


def is_encoder_decoder(config: Any) -> bool:
    """Return whether a config is that of an encoder-decoder which specserve runs.

    Its prompt is then the encoder input, and its text begins with a token of its own.
    """
    known = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    return config.model_type in ENCODER_DECODERS and known in (
        getattr(config, "architectures", None) or [known]
    )


def check_fits_files(directory: Path, config: Any) -> None:
    """Raise ModelError if config.json implies far more parameters than the files hold.

    The library would allocate and draw those that are missing, before it says so.
    """
    stored = StoredSize.of_files(directory)
    if _num_layers(config) > stored.tensors:
        raise ModelError(
            f"{directory} has {_num_layers(config)} layers by its config.json, and only "
            f"{stored.tensors} tensors"
        )
    module = empty_module(config, dtype=torch.float32, attention="eager")
    implied = sum(parameter.numel() for parameter in module.parameters())
    if implied > 2 * stored.numbers:  # tied weights may be counted twice
        raise ModelError(
            f"{directory} has {implied:,} parameters by its config.json, and "
            f"{stored.numbers:,} in its files"
        )


def _num_layers(config: Any) -> int:
    number: int = (
        config.num_decoder_layers if is_encoder_decoder(config) else config.num_hidden_layers
    )
    return number


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
    if is_encoder_decoder(config):
        attention = "eager"  # nothing of it is used: the forward pass is ours
        if dtype == torch.float16:
            raise UnsupportedModel(
                f"{config.model_type} models overflow in float16; use dtype bfloat16 or float32"
            )
    elif config.model_type == "falcon":
        attention = "eager"  # which `falcon` replaces
        if skip:
            raise UnsupportedModel("falcon models cannot leave layers out; use another draft.kind")
    elif config.model_type in PADDED and skip:
        raise UnsupportedModel(
            f"{config.model_type} models cannot leave layers out: later ones share keys and values "
            "with earlier ones; use another draft.kind"
        )
    elif attention not in LIBRARY_ATTENTION:
        _check_attention(config)
    with quiet_library(), library_errors(directory):
        if packed is None:
            check_fits_files(directory, config)
            _report_quantized(directory, config, dtype, device, size, keeps=keeps)
            if is_multimodal(directory):
                log.warning(
                    "%s: the text model alone is opened; what sees images or hears is left out",
                    directory.name,
                )
        if packed is not None:
            module = _empty_part(config, shard, skip, dtype=dtype, attention=attention)
            packed.fill(module)
        elif (
            skip
            or size > 1
            or round_to
            or read_format(directory) is not None
            or is_multimodal(directory)
        ):
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
            module = _load_whole(directory, config, device, dtype=dtype, attention=attention)
        if packed is None:
            module.to(device)  # the buffers, and what a checkpoint does not hold
        module.eval().requires_grad_(False)
        spec = architecture(directory, config, size)
        layers = tuple(layer for layer in range(spec.num_layers) if layer not in skip)
        return LoadedModel(module, config, replace(spec, num_layers=len(layers)), layers)


def check_can_round(directory: Path, config: Any) -> None:
    """Raise UnsupportedModel for a checkpoint whose weights cannot be quantised here."""
    if read_format(directory) is not None:
        raise UnsupportedModel(
            f"{directory} is quantized already ({method_of(directory)}); name the checkpoint that "
            "it was made from"
        )
    if is_encoder_decoder(config):
        raise UnsupportedModel(f"{directory} is an encoder-decoder; only decoders can be quantized")


def num_held_bytes(
    directory: Path,
    dtype: torch.dtype,
    *,
    keeps: Codes | None,
    round_to: str | None = None,
    ranks: int = 1,
) -> int:
    """Return the bytes of a checkpoint's weights in the memory of all ranks that share it.

    Linear layers hold what they keep of a quantised checkpoint, or what they are rounded to.
    """
    num_bytes = num_weight_bytes(directory, dtype, keeps_codes=keeps is Codes.INTEGERS)
    if keeps is not None and round_to is not None:
        return num_bytes - num_bytes_saved_by_rounding(directory, dtype, round_to)
    if keeps is not Codes.FLOAT8:
        return num_bytes
    kept = _kept_float8(directory, read_config(directory), ranks)
    return num_bytes - sum(part.num_numbers * dtype.itemsize - part.num_bytes for part in kept)


def _kept_float8(directory: Path, config: Any, ranks: int) -> list[StoredFloat8]:
    """Return the matrices of a checkpoint that GPUs multiply by as they are."""
    with quiet_library(), library_errors(directory):
        module = empty_module(config, dtype=torch.bfloat16, attention="eager")
        weights = Weights(directory, prefix=base_model_name(module))
        return list(_float8_weights(module, weights, ranks).values())


def _float8_weights(module: Any, weights: Weights, ranks: int) -> dict[str, StoredFloat8]:
    """Return the weights that stay as they are, by the names of a module's parameters."""
    if is_encoder_decoder(module.config):
        return {}
    found = float8_weights(module, weights)
    return {name: part for name, part in found.items() if part.refusal(ranks) is None}


def num_bytes_saved_by_rounding(directory: Path, dtype: torch.dtype, to: str) -> int:
    """Return how many bytes fewer a checkpoint's weights take once they are rounded.

    Reads config.json only. Raises UnsupportedModel for a checkpoint that cannot be rounded.
    """
    config = read_config(directory)
    check_can_round(directory, config)
    with quiet_library(), library_errors(directory):
        module = empty_module(config, dtype=dtype, attention="eager")
    return Rounding.from_module(module, to).num_saved_bytes(module, dtype)


def _report_quantized(
    directory: Path,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    size: int,
    *,
    keeps: Codes | None,
) -> None:
    """Log what the weights of a quantised checkpoint take, and why if they are widened."""
    if read_format(directory) is None:
        return
    name, method = directory.name, method_of(directory)
    stored = sum(path.stat().st_size for path in weight_files(directory)) / size / 1e9
    kept = num_held_bytes(directory, dtype, keeps=keeps, ranks=size) / size / 1e9
    widened = num_weight_bytes(directory, dtype) / size / 1e9
    ranks = "" if size == 1 else f" on each of {size} ranks"
    if kept < widened:
        log.info(
            "%s is quantized (%s): its weights take %.1f GB%s, and would take %.1f GB in %s",
            *(name, method, kept, ranks, widened, _dtype_name(dtype)),
        )
        return
    reason = _why_float8_is_widened(directory, config, dtype, device, size)
    log.warning(
        "%s is quantized (%s): its weights are widened to %s and take %.1f GB instead of %.1f GB"
        "%s%s",
        *(name, method, _dtype_name(dtype), widened, stored, ranks),
        "" if reason is None else f"; FP8 is not multiplied as it is, since {reason}",
    )


def _why_float8_is_widened(
    directory: Path, config: Any, dtype: torch.dtype, device: torch.device, ranks: int
) -> str | None:
    """Return why a GPU holds no FP8 matrix of a checkpoint as it is; None if it has none."""
    if device.type != "cuda":
        return None
    module = empty_module(config, dtype=dtype, attention="eager")
    found = float8_weights(module, Weights(directory, prefix=base_model_name(module)))
    if not found:
        return None
    if is_encoder_decoder(config):
        return "it is an encoder-decoder"
    reasons = {part.refusal(ranks) for part in found.values()}
    return float8_fault(device, dtype) if None in reasons else min(map(str, reasons))


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_attention(config: Any) -> None:
    modelling: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not modelling._supports_attention_backend and config.model_type not in UNDECLARED:
        raise UnsupportedModel(
            f"{config.model_type} computes its attention itself, so that no other can be put "
            "in its place"
        )


def architecture(directory: Path, config: Any, size: int) -> Architecture:
    """Return the shape of one of `size` ranks."""
    heads = HeadCounts.from_config(config).local(size)
    head_dim = (
        getattr(config, "qk_head_dim", None)
        or getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads
    )
    if is_heterogeneous(config):
        head_dim = max(layer.head_dim for layer in config.per_layer_config)
    return Architecture(
        model_type=config.model_type,
        num_layers=_num_layers(config),
        num_heads=heads.query,
        kv_heads=heads.kv,
        head_dim=head_dim,
        v_head_dim=getattr(config, "v_head_dim", None) or head_dim,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_context=longest_context(config),
        end_ids=_end_ids(directory, config),
        tied=bool(config.tie_word_embeddings),
        decoder_start=_decoder_start(directory, config) if is_encoder_decoder(config) else None,
    )


def _decoder_start(directory: Path, config: Any) -> int:
    """Return the token that a text begins with.

    generation_config.json has precedence over config.json; T5's default is the padding token.
    """
    stated = _from_generation_config(directory, "decoder_start_token_id")
    candidates = (stated, getattr(config, "decoder_start_token_id", None), config.pad_token_id)
    start: int | None = next((token for token in candidates if token is not None), None)
    if start is None:
        raise UnsupportedModel(
            f"{directory} does not say which token a text begins with (decoder_start_token_id)"
        )
    return start


def longest_context(config: Any) -> int:
    if is_encoder_decoder(config):
        return getattr(config, "n_positions", None) or DEFAULT_POSITIONS
    return decoder_context(config)


def _end_ids(directory: Path, config: Any) -> frozenset[int]:
    """Return the tokens that end a text.

    generation_config.json has precedence over config.json, as in the library's generate().
    """
    stated = _from_generation_config(directory, "eos_token_id")
    ids: Any = config.eos_token_id if stated is None else stated
    return frozenset() if ids is None else frozenset([ids] if isinstance(ids, int) else ids)


def _from_generation_config(directory: Path, name: str) -> Any:
    """Return a value of generation_config.json; None if it has none."""
    if not (directory / "generation_config.json").is_file():
        return None
    config = GenerationConfig.from_pretrained(
        directory, local_files_only=True, trust_remote_code=False
    )
    return getattr(config, name)


def _library_class(config: Any) -> Any:
    return AutoModelForSeq2SeqLM if is_encoder_decoder(config) else AutoModelForCausalLM


def _load_whole(
    directory: Path, config: Any, device: torch.device, *, dtype: torch.dtype, attention: str
) -> Any:
    loaded: Any = _library_class(config).from_pretrained(
        directory,
        dtype=dtype,
        attn_implementation=attention,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        device_map=None if device.type == "cpu" else {"": device},
        output_loading_info=True,
    )
    module, report = loaded
    check_complete(directory, missing=report["missing_keys"], unexpected=report["unexpected_keys"])
    return module


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
        float8 = _float8_weights(whole, weights, 1 if shard is None else shard.size)
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
    if division is None:
        module.tie_weights()
    else:
        division.narrow(module)
    return module


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


def empty_module(config: Any, *, dtype: torch.dtype, attention: str) -> Any:
    """Return the library's module with shapes instead of weights, which takes no memory."""
    with shapes_only():
        return _library_class(config).from_config(
            copy.deepcopy(config),
            dtype=dtype,
            attn_implementation=attention,
            trust_remote_code=False,
        )


def make_division(module: Any, shard: Shard) -> Division:
    head = next(
        name for name, part in module.named_modules() if part is module.get_output_embeddings()
    )
    return Division(module, shard, prefix=base_model_name(module), head=head)


def base_model_name(module: Any) -> str:
    """Return the name of the base model in a module; empty if it is the module itself.

    Llama 4 states that of its multimodal model.
    """
    names = (module.base_model_prefix, "model")
    return next((name for name in names if name and hasattr(module, name)), "")


@contextmanager
def library_errors(
    directory: Path, failure: str = "cannot be loaded", kind: type[ModelError] = ModelError
) -> Iterator[None]:
    """Turn what the libraries raise for a broken checkpoint into a ModelError."""
    try:
        yield
    except SpecserveError:
        raise
    # They check little of what a file says, so that a wrong value may raise anything.
    except Exception as error:
        raise kind(f"{directory} {failure}: {first_line(error)}") from error
