"""The shape of a checkpoint's model, and of one rank's part of it. Reads no weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specserve.errors import UnsupportedModel
from specserve.models.checkpoints.decoders import (
    decoder_context,
    is_heterogeneous,
)
from specserve.models.checkpoints.generation_config import GENERATION_CONFIG
from specserve.models.checkpoints.library import (
    generation_value,
    is_encoder_decoder,
)
from specserve.models.plans import HeadCounts

DEFAULT_POSITIONS = 512
"""Positions that T5s were trained with, where a checkpoint does not say."""


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
        num_layers=num_layers_of(config),
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


def num_layers_of(config: Any) -> int:
    """Return the number of layers; an encoder-decoder's are its decoder's."""
    number: int = (
        config.num_decoder_layers if is_encoder_decoder(config) else config.num_hidden_layers
    )
    return number


def _decoder_start(directory: Path, config: Any) -> int:
    """Return the token that a text begins with.

    generation_config.json has precedence over config.json; T5's default is the padding token.
    """
    stated = generation_value(directory, "decoder_start_token_id")
    candidates = (stated, getattr(config, "decoder_start_token_id", None), config.pad_token_id)
    start: int | None = next((token for token in candidates if token is not None), None)
    if start is None:
        raise UnsupportedModel(
            f"{directory} does not say which token a text begins with (decoder_start_token_id)"
        )
    return start


def longest_context(config: Any) -> int:
    """Return the positions that a config states, or T5's default."""
    if is_encoder_decoder(config):
        return getattr(config, "n_positions", None) or DEFAULT_POSITIONS
    return decoder_context(config)


def _end_ids(directory: Path, config: Any) -> frozenset[int]:
    """Return the tokens that end a text.

    generation_config.json has precedence over config.json, as in the library's generate().
    """
    stated = generation_value(directory, "eos_token_id")
    ids: Any = config.eos_token_id if stated is None else stated
    end_ids = frozenset[int](() if ids is None else [ids] if isinstance(ids, int) else ids)
    for token in end_ids:
        if not 0 <= token < config.vocab_size:
            file = "config.json" if stated is None else GENERATION_CONFIG
            raise UnsupportedModel(
                f"{directory} has the eos_token_id {token} in {file}, and its vocabulary ends at "
                f"{config.vocab_size - 1}"
            )
    return end_ids
