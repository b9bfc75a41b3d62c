"""The exact distribution of short continuations, by enumeration of all of them.

Logits are from the library's own model in float64. Nothing here comes from the code under test
but the names of the parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from specserve.types import TokenRule, Warp

if TYPE_CHECKING:
    from specserve.features.other_tokenizer.translation import TokenTranslation

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Conditionals:
    """Distributions of the next token after every prefix.

    rows[d] has a row for each of the vocab**d continuations of length d, in lexicographic order.
    """

    rows: tuple[Floats, ...]  # each [vocab**d, vocab]

    def joint(self) -> Floats:  # [vocab**length]
        """Return the probability of every continuation, in lexicographic order."""
        joint = np.ones(1)
        for rows in self.rows:
            joint = (joint[:, None] * rows).reshape(-1)
        return joint

    def score_towards(self, other: Conditionals) -> Floats:  # [vocab**length]
        """Return each continuation's sum over its tokens of other / self - 1.

        It is the derivative of the log-likelihood in the direction of `other`, so that no
        test of a mixture with `other` against self is stronger than its mean over continuations.
        Its expectation is 0, unless `other` gives mass to tokens that self excludes.
        """
        score = np.zeros(1)
        for own, others in zip(self.rows, other.rows, strict=True):
            ratio = np.divide(others, own, out=np.ones_like(own), where=own > 0)
            score = (score[:, None] + ratio - 1).reshape(-1)
        return score


class LibraryModel:
    """A checkpoint, run by the library in float64."""

    def __init__(self, directory: Path, *, vocab: int) -> None:
        encodes = AutoConfig.from_pretrained(directory).is_encoder_decoder
        library: Any = AutoModelForSeq2SeqLM if encodes else AutoModelForCausalLM
        self.model: Any = library.from_pretrained(
            directory, dtype=torch.float64, attn_implementation="eager"
        )
        self.vocab = vocab  # of the texts; ids that the model does not have are fed to it as 0
        self._logits_after = cache(self._compute_logits)  # the same for every warp

    def conditionals(self, prompt: Sequence[int], length: int, warp: Warp) -> Conditionals:
        """Return p of the next token after the prompt and up to length - 1 more tokens.

        An encoder-decoder generates them after its first token.
        """
        texts, logits = self._logits_after(tuple(prompt), length)
        if self.model.config.is_encoder_decoder:
            prompt = (self.model.config.decoder_start_token_id,)
        rows = []
        for depth in range(length):
            # texts that begin with the same `depth` tokens
            repeats = self.vocab ** (length - 1 - depth)
            prefixes = texts[::repeats, : len(prompt) + depth]
            rows.append(warp_logits(logits[::repeats, depth], prefixes, len(prompt), warp))
        return Conditionals(tuple(rows))

    def _compute_logits(self, prompt: tuple[int, ...], length: int) -> tuple[Ints, Floats]:
        """Return all texts of length - 1 more tokens, and logits [texts, length, model's vocab]."""
        if self.model.config.is_encoder_decoder:
            start = (self.model.config.decoder_start_token_id,)
            texts = all_continuations(start, length - 1, self.vocab)
            return texts, self._logits_from(prompt, texts)
        texts = all_continuations(prompt, length - 1, self.vocab)
        return texts, self._logits(texts, last=length)

    @torch.inference_mode()
    def _logits(self, texts: Ints, *, last: int) -> Floats:
        known = torch.from_numpy(np.where(texts < self.model.config.vocab_size, texts, 0))
        parts = [
            self.model(part, use_cache=False, logits_to_keep=last).logits
            for part in torch.split(known, 512)
        ]
        return torch.cat(parts).numpy()

    @torch.inference_mode()
    def _logits_from(self, encoder_input: Sequence[int], texts: Ints) -> Floats:
        encoded, known = (
            torch.from_numpy(np.where(ids < self.model.config.vocab_size, ids, 0))
            for ids in (np.array([encoder_input]), texts)
        )
        parts = [
            self.model(
                encoded.expand(len(part), -1), decoder_input_ids=part, use_cache=False
            ).logits
            for part in torch.split(known, 512)
        ]
        return torch.cat(parts).numpy()


class TranslatedModel(LibraryModel):
    """A checkpoint of another vocabulary, whose distributions are of the target's tokens.

    Those that both share are as likely as its logits say, the others are impossible.
    """

    def __init__(self, directory: Path, translation: TokenTranslation, *, vocab: int) -> None:
        super().__init__(directory, vocab=vocab)
        self.translation = translation

    @torch.inference_mode()
    def _logits(self, texts: Ints, *, last: int) -> Floats:
        rows = []
        for text in texts.tolist():
            ids, stops = list(self.translation.prefix), []
            for token in text:
                ids += self.translation.spellings[token]
                stops.append(len(ids))
            rows.append((ids, stops[-last:]))
        longest = max(len(ids) for ids, _ in rows)
        padded = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in rows])
        own = torch.cat(
            [self.model(part, use_cache=False).logits for part in torch.split(padded, 512)]
        )
        wanted = torch.tensor([stops for _, stops in rows]) - 1  # [texts, last]
        kept = own[torch.arange(len(rows))[:, None], wanted].numpy()
        found = np.full((*kept.shape[:2], self.vocab), -np.inf)
        found[:, :, self.translation.target_ids] = kept[:, :, self.translation.draft_ids]
        return found


def all_continuations(
    prompt: Sequence[int], length: int, vocab: int
) -> Ints:  # [vocab**length, len(prompt) + length]
    """Return the prompt with every continuation, in lexicographic order."""
    continuations = np.indices((vocab,) * length).reshape(length, vocab**length).T
    return np.concatenate(
        [np.tile(np.array(prompt, dtype=np.int64), (len(continuations), 1)), continuations],
        axis=1,
    )


def warp_logits(logits: Floats, texts: Ints, prompt_length: int, warp: Warp) -> Floats:
    """Return p as the parameters of the API define it, [rows, vocab].

    The order is: penalties, bias, token rule, then greedy, or temperature, top-k, top-p and min-p.
    """
    vocab = logits.shape[1]
    seen = (texts[:, :, None] == np.arange(vocab)).sum(1)  # [rows, vocab]
    generated = (texts[:, prompt_length:, None] == np.arange(vocab)).sum(1)
    x = np.where(
        seen > 0,
        np.where(logits < 0, logits * warp.repetition_penalty, logits / warp.repetition_penalty),
        logits,
    )
    x = x - warp.presence_penalty * (generated > 0) - warp.frequency_penalty * generated
    for token, bias in warp.logit_bias:
        x[:, token] += bias
    if warp.rule is not None:
        x = _forbid(x, texts[:, prompt_length:], warp.rule)
    if warp.temperature == 0:
        one_hot: Floats = np.eye(vocab)[x.argmax(1)]
        return one_hot
    p = _softmax(x / warp.temperature)
    order = np.argsort(-p, axis=1)
    ranks = np.argsort(order, axis=1)
    if warp.top_k:
        p = _normalise(np.where(ranks < warp.top_k, p, 0))
    likelier = np.take_along_axis(np.take_along_axis(p, order, 1).cumsum(1), ranks, 1) - p
    p = np.where(likelier < warp.top_p, p, 0) if warp.top_p < 1 else p
    p = np.where(p < warp.min_p * p.max(1, keepdims=True), 0, p)
    return _normalise(p)


def _forbid(x: Floats, texts: Ints, rule: TokenRule) -> Floats:
    """Return the logits with -inf for what the rule forbids after each text, row by row."""
    x = x.copy()
    for row, text in zip(x, texts.tolist(), strict=True):
        tokens = range(len(row))
        is_early = len(text) < rule.min_tokens
        for forbidden in (
            [token for token in tokens if rule.allowed_ids and token not in rule.allowed_ids],
            [token for token in rule.end_ids if is_early],
            [word[-1] for word in rule.bad_words if (*text, word[-1])[-len(word) :] == word],
        ):
            left = row.copy()
            left[forbidden] = -np.inf
            row[:] = left if np.isfinite(left).any() else row
    return x


def lenient(p: Conditionals, q: Conditionals, lenience: float) -> Conditionals:
    """Return the next token's distributions where each token is drafted and `lenient` verifies it.

    A draft token is accepted with min(1, lenience p / q), else the correction is drawn from
    norm(max(0, p - q)) (2211.17192, appendix A.5, whose l is our 1 / lenience).
    """
    return Conditionals(
        tuple(
            _lenient(p_rows, q_rows, lenience)
            for p_rows, q_rows in zip(p.rows, q.rows, strict=True)
        )
    )


def _lenient(p: Floats, q: Floats, lenience: float) -> Floats:  # [rows, vocab] each
    accepted = np.minimum(q, lenience * p)
    residual = np.maximum(p - q, 0)
    mass = residual.sum(1, keepdims=True)
    corrections = np.divide(residual, mass, out=p.copy(), where=mass > 0)
    verified: Floats = accepted + (1 - accepted.sum(1, keepdims=True)) * corrections
    return verified


def on_support(q: Conditionals, support: int, vocab: int) -> Conditionals:
    """Return q of a drafter at temperature 1: the `support` likeliest tokens, renormalised.

    q is 0 for the ids that the drafter does not know.
    """
    rows = [np.pad(row, ((0, 0), (0, vocab - row.shape[1]))) for row in q.rows]
    return Conditionals(
        tuple(
            _normalise(np.where(np.argsort(np.argsort(-row, axis=1), axis=1) < support, row, 0))
            for row in rows
        )
    )


def overlap(p: Floats, q: Floats) -> Floats:  # [rows]
    """Return sum min(p, q), the probability that a token drawn from q is accepted.

    This is alpha of 2211.17192, Algorithm 1.
    """
    return np.minimum(p, q).sum(1)  # type: ignore[no-any-return]


def agreement(p: Floats, q: Floats) -> Floats:  # [rows]
    """Return the probability that draws from p and q with the same Gumbel noise agree.

    It is sum_v 1 / sum_w max(p_w / p_v, q_w / q_v) (2408.07978).
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.maximum(
            p[:, None, :] / p[:, :, None], q[:, None, :] / q[:, :, None]
        )  # [rows, v, w]
        agreed: Floats = np.where((p > 0) & (q > 0), 1 / ratios.sum(2), 0).sum(1)
    return agreed


def _softmax(x: Floats) -> Floats:
    return _normalise(np.exp(x - x.max(1, keepdims=True)))


def _normalise(p: Floats) -> Floats:
    return p / p.sum(1, keepdims=True)  # type: ignore[no-any-return]
