"""The distribution of short continuations, exactly: logits of the library's own model in float64, every continuation enumerated.

Nothing here comes from the code under test but the names of the parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from specserve.types import Warp

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Conditionals:
    """For each number d of tokens already written: a row for each of the vocab**d ways to write them, in lexicographic order."""

    rows: tuple[Floats, ...]  # each [vocab**d, vocab]

    def joint(self) -> Floats:  # [vocab**length]
        """The probability of every continuation, in lexicographic order."""
        joint = np.ones(1)
        for rows in self.rows:
            joint = (joint[:, None] * rows).reshape(-1)
        return joint


class Library:
    """A checkpoint, run by the library in float64."""

    def __init__(self, directory: Path, *, vocab: int) -> None:
        encodes = AutoConfig.from_pretrained(directory).is_encoder_decoder
        library: Any = AutoModelForSeq2SeqLM if encodes else AutoModelForCausalLM
        self.model: Any = library.from_pretrained(
            directory, dtype=torch.float64, attn_implementation="eager"
        )
        self.vocab = vocab  # of the texts; ids that the model itself does not have it reads as 0

    def conditionals(self, prompt: Sequence[int], length: int, warp: Warp) -> Conditionals:
        """p of the next token after the prompt and up to length - 1 more; an encoder-decoder writes them after its first token."""
        if self.model.config.is_encoder_decoder:
            source, prompt = prompt, (self.model.config.decoder_start_token_id,)
            texts = texts_of(prompt, length - 1, self.vocab)
            logits = self._logits_from(source, texts)
        else:
            texts = texts_of(prompt, length - 1, self.vocab)
            logits = self._logits(texts, last=length)  # [texts, length, model's vocab]
        rows = []
        for depth in range(length):
            repeats = self.vocab ** (
                length - 1 - depth
            )  # texts that begin with the same `depth` tokens
            prefixes = texts[::repeats, : len(prompt) + depth]
            rows.append(warped(logits[::repeats, depth], prefixes, len(prompt), warp))
        return Conditionals(tuple(rows))

    @torch.inference_mode()
    def _logits(self, texts: Ints, *, last: int) -> Floats:
        known = torch.from_numpy(np.where(texts < self.model.config.vocab_size, texts, 0))
        parts = [
            self.model(part, use_cache=False, logits_to_keep=last).logits
            for part in known.split(512)
        ]
        return torch.cat(parts).numpy()  # type: ignore[no-any-return]

    @torch.inference_mode()
    def _logits_from(self, source: Sequence[int], texts: Ints) -> Floats:
        read, known = (
            torch.from_numpy(np.where(ids < self.model.config.vocab_size, ids, 0))
            for ids in (np.array([source]), texts)
        )
        parts = [
            self.model(read.expand(len(part), -1), decoder_input_ids=part, use_cache=False).logits
            for part in known.split(512)
        ]
        return torch.cat(parts).numpy()  # type: ignore[no-any-return]


def texts_of(
    prompt: Sequence[int], length: int, vocab: int
) -> Ints:  # [vocab**length, len(prompt) + length]
    """The prompt with every continuation, in lexicographic order."""
    written = np.indices((vocab,) * length).reshape(length, vocab**length).T
    return np.concatenate(
        [np.tile(np.array(prompt, dtype=np.int64), (len(written), 1)), written], axis=1
    )


def warped(logits: Floats, texts: Ints, prompt_length: int, warp: Warp) -> Floats:
    """p as the parameters of the API define it: penalties, bias, then greedy, or temperature, top-k, top-p and min-p. [rows, vocab]"""
    vocab = logits.shape[1]
    seen = (texts[:, :, None] == np.arange(vocab)).sum(1)  # [rows, vocab]
    written = (texts[:, prompt_length:, None] == np.arange(vocab)).sum(1)
    x = np.where(
        seen > 0,
        np.where(logits < 0, logits * warp.repetition_penalty, logits / warp.repetition_penalty),
        logits,
    )
    x = x - warp.presence_penalty * (written > 0) - warp.frequency_penalty * written
    for token, bias in warp.logit_bias:
        x[:, token] += bias
    if warp.temperature == 0:
        return np.eye(vocab)[x.argmax(1)]
    p = _softmax(x / warp.temperature)
    order = np.argsort(-p, axis=1)
    ranks = np.argsort(order, axis=1)
    if warp.top_k:
        p = _normalised(np.where(ranks < warp.top_k, p, 0))
    likelier = np.take_along_axis(np.take_along_axis(p, order, 1).cumsum(1), ranks, 1) - p
    p = np.where(likelier < warp.top_p, p, 0) if warp.top_p < 1 else p
    p = np.where(p < warp.min_p * p.max(1, keepdims=True), 0, p)
    return _normalised(p)


def supported(q: Conditionals, support: int, vocab: int) -> Conditionals:
    """What a drafter draws from at temperature 1: the `support` likeliest tokens, renormalised; 0 for the ids that it does not know."""
    rows = [np.pad(row, ((0, 0), (0, vocab - row.shape[1]))) for row in q.rows]
    return Conditionals(
        tuple(
            _normalised(np.where(np.argsort(np.argsort(-row, axis=1), axis=1) < support, row, 0))
            for row in rows
        )
    )


def overlap(p: Floats, q: Floats) -> Floats:  # [rows]
    """The probability that Algorithm 1 accepts a token drawn from q: sum min(p, q)."""
    return np.minimum(p, q).sum(1)  # type: ignore[no-any-return]


def agreement(p: Floats, q: Floats) -> Floats:  # [rows]
    """The probability that draws from p and q under the same Gumbel noise agree (2408.07978): sum_v 1 / sum_w max(p_w / p_v, q_w / q_v)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.maximum(
            p[:, None, :] / p[:, :, None], q[:, None, :] / q[:, :, None]
        )  # [rows, v, w]
        return np.where((p > 0) & (q > 0), 1 / ratios.sum(2), 0).sum(1)  # type: ignore[no-any-return]


def _softmax(x: Floats) -> Floats:
    return _normalised(np.exp(x - x.max(1, keepdims=True)))


def _normalised(p: Floats) -> Floats:
    return p / p.sum(1, keepdims=True)  # type: ignore[no-any-return]
