"""One Triton kernel for a draw from a row of weights: the noise, the division and the argmax.

Its noise has the bits of `noise.exponential`, which takes some sixteen kernels and writes the row
five times. Triton comes with torch's builds for CUDA.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,attr-defined,untyped-decorator"
# Triton infers the types of its kernels.

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def exponential_noise(ids, first_key, second_key):
    """Return the noise of these tokens under a key, float32."""
    bits = (ids ^ first_key).to(tl.uint32, bitcast=True)
    bits ^= bits >> 16
    bits *= 0x21F0AAAD
    bits ^= bits >> 15
    bits += second_key.to(tl.uint32, bitcast=True)
    bits *= 0x735A2D97
    bits ^= bits >> 15
    hashed = bits.to(tl.int32, bitcast=True).to(tl.float64)
    # 1 - u, exact: 0.5 - 2**-33 - hashed * 2**-32
    rest = 0.5 - 1.1641532182693481e-10 - hashed * 2.3283064365386963e-10
    return (-tl.log(rest)).to(tl.float32)


@triton.jit(do_not_specialize=["first_id"])  # one build for all ranks
def draw_kernel(
    weights,
    rows,
    keys,
    scores,
    tokens,
    stride,
    first_id,
    vocab: tl.constexpr,
    block: tl.constexpr,
):
    draw = tl.program_id(0)
    row = tl.load(rows + draw)
    first_key, second_key = tl.load(keys + 2 * draw), tl.load(keys + 2 * draw + 1)
    best, token = -1.0, 0
    for first in range(0, vocab, block):
        ids = first + tl.arange(0, block)
        is_token = ids < vocab
        noise = exponential_noise(first_id + ids, first_key, second_key)
        score = tl.load(weights + row * stride + ids, is_token, 0.0) / noise
        score = tl.where(is_token, score, -1.0)
        highest = tl.max(score, 0)
        place = first + tl.argmax(score, 0, tie_break_left=True)
        token = tl.where(highest > best, place, token)
        best = tl.maximum(best, highest)
    tl.store(scores + draw, best)
    tl.store(tokens + draw, (first_id + token).to(tl.int64))


def draw_rows(
    weights: Tensor, keys: Tensor, rows: Tensor | None, first_id: int
) -> tuple[Tensor, Tensor]:
    """Return scores and tokens of a draw from each of these rows: see `best_of_rows`."""
    num = len(keys)
    if rows is None:
        rows = torch.arange(num, device=weights.device)
    tokens = torch.empty(num, dtype=torch.int64, device=weights.device)
    scores = torch.empty(num, device=weights.device)
    with torch.cuda.device(weights.device):  # kernels go to the current one
        draw_kernel[(num,)](
            weights,
            rows,
            keys.contiguous(),
            scores,
            tokens,
            weights.stride(0),
            first_id,
            vocab=weights.shape[1],
            block=BLOCK,
        )
    return scores, tokens
