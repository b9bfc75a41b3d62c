"""The transformers library: its configs, tokenizers, modules and their attention.

The only module of the models that knows the library. Knows no shards and no pages.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.utils import logging as library_logging

from specserve.errors import ModelError, SpecserveError, UnsupportedModel, first_line
from specserve.json_files import read_object
from specserve.models.checkpoints.decoders import (
    check_decoder,
    is_heterogeneous,
)
from specserve.models.checkpoints.fill import check_complete, wrong_shape
from specserve.models.checkpoints.generation_config import GENERATION_CONFIG
from specserve.models.checkpoints.quantized.formats import read_format
from specserve.models.checkpoints.shapes_only import shapes_only
from specserve.models.checkpoints.sizes import check_numbers, check_sizes
from specserve.models.checkpoints.text_part import DECODERS, is_multimodal

ENCODER_DECODERS = ("mt5", "t5")
UNDECLARED = ("stablelm",)
"""Models that take any registered attention, and do not say so."""


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


def register_attention(name: str, function: Callable[..., Any]) -> None:
    """Register `function` with the library as the attention implementation `name`."""
    AttentionInterface.register(name, function)


def check_attention(config: Any) -> None:
    """Raise UnsupportedModel if the library's module takes no registered attention."""
    modelling: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not modelling._supports_attention_backend and config.model_type not in UNDECLARED:
        raise UnsupportedModel(
            f"{config.model_type} computes its attention itself, so that no other can be put "
            "in its place"
        )


@quiet_library()
def read_config(directory: Path) -> Any:
    """Return the library's config of a checkpoint.

    Raises UnsupportedModel unless it is that of a language model that specserve can run.
    """
    with library_errors(
        directory, "cannot be read as a model that transformers knows", UnsupportedModel
    ):
        stated = read_object(directory / "config.json")
        if (directory / GENERATION_CONFIG).is_file():
            read_object(directory / GENERATION_CONFIG)
        read_format(directory)  # which refuses what it cannot read
        # By which the library would divide.
        check_sizes(directory, {name: value for name, value in stated.items() if value == 0})
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
        check_numbers(directory, config)
        return config


@quiet_library()
def make_config(model_type: str, keys: Mapping[str, Any]) -> Any:
    """Return the library's config of a decoder with these keys. Raises UnsupportedModel."""
    config = AutoConfig.for_model(model_type, **keys)
    check_decoder(config, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type))
    return config


@quiet_library()
def save_gguf_tokenizer(file: Path) -> None:
    """Write a GGUF file's tokenizer beside it, in the files of transformers."""
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(
        file.parent, gguf_file=file.name, local_files_only=True, trust_remote_code=False
    )
    tokenizer.save_pretrained(file.parent)


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


def is_encoder_decoder(config: Any) -> bool:
    """Return whether a config is that of an encoder-decoder which specserve runs.

    Its prompt is then the encoder input, and its text begins with a token of its own.
    """
    known = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    return config.model_type in ENCODER_DECODERS and known in (
        getattr(config, "architectures", None) or [known]
    )


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


def generation_value(directory: Path, name: str) -> Any:
    """Return a value of generation_config.json; None if it has none."""
    if not (directory / GENERATION_CONFIG).is_file():
        return None
    config = GenerationConfig.from_pretrained(
        directory, local_files_only=True, trust_remote_code=False
    )
    return getattr(config, name)


def _library_class(config: Any) -> Any:
    return AutoModelForSeq2SeqLM if is_encoder_decoder(config) else AutoModelForCausalLM


def empty_module(config: Any, *, dtype: torch.dtype, attention: str) -> Any:
    """Return the library's module with shapes instead of weights, which takes no memory."""
    with shapes_only():
        return _library_class(config).from_config(
            copy.deepcopy(config),
            dtype=dtype,
            attn_implementation=attention,
            trust_remote_code=False,
        )


def load_whole(
    directory: Path, config: Any, device: torch.device, *, dtype: torch.dtype, attention: str
) -> Any:
    """Return the library's module with all weights of a checkpoint."""
    loaded: Any = _library_class(config).from_pretrained(
        directory,
        dtype=dtype,
        attn_implementation=attention,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        device_map=None if device.type == "cpu" else {"": device},
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are reported, and refused here
    )
    module, report = loaded
    for name, found, implied in sorted(report["mismatched_keys"]):
        raise wrong_shape(directory, name, found, implied)
    check_complete(directory, missing=report["missing_keys"], unexpected=report["unexpected_keys"])
    return module


def base_model_name(module: Any) -> str:
    """Return the name of the base model in a module; empty if it is the module itself.

    Llama 4 states that of its multimodal model.
    """
    names = (module.base_model_prefix, "model")
    return next((name for name in names if name and hasattr(module, name)), "")
