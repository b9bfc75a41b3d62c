"""Counter-based noise: every draw is a pure function of its key.

Nothing depends on the composition of the batch or on earlier draws. It knows neither distributions
nor verifiers.

A key is made of seed, round, position and purpose. Draft draws, acceptance uniforms and corrections
must come from disjoint streams: reusing the draft's noise for the residual is a bias. The round is
in the key because under `block` the number of accepted tokens depends on noise at positions past
the stop, which the next round must not reuse. `coupled` noise may omit it: what is committed
depends only on noise up to the first disagreement.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specserve.transfers import to_device

_MASK64 = (1 << 64) - 1
_SCRATCH = 1 << 15  # numbers
_ALMOST_ONE = 1.0 - 2.0**-24  # the largest float32 below 1


class Purpose(IntEnum):
    """Use of a draw. Draws for different purposes come from disjoint streams."""

    DRAFT = 0
    ACCEPT = 1
    NEXT = 2
    COUPLED = 3


def seed_array(seeds: Sequence[int]) -> NDArray[np.uint64]:
    """Return the seeds as 64 bits each; negative ones wrap."""
    return np.fromiter((seed & _MASK64 for seed in seeds), dtype=np.uint64, count=len(seeds))


def row_keys(
    seeds: NDArray[np.uint64] | Sequence[int],
    rounds: NDArray[np.int64] | Sequence[int],
    positions: NDArray[np.int64] | Sequence[int],
    purpose: Purpose,
    *,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return 64-bit keys as two columns of int32, [..., 2]; the arguments broadcast.

    Rounds and positions lie below 2**31. Coupled noise ignores the round: drafter and target must
    draw with the same noise at a position, in whichever round each of them reaches it.
    """
    seed = seeds if isinstance(seeds, np.ndarray) else seed_array(seeds)
    round_bits = (
        np.zeros(1, np.uint64)
        if purpose is Purpose.COUPLED
        else np.asarray(rounds, dtype=np.uint64)
    )
    counter = (
        (round_bits << np.uint64(31))
        | np.asarray(positions, dtype=np.uint64)
        | np.uint64(purpose << 62)
    )
    key = _mix64(_mix64(seed) ^ counter)
    return to_device(key[..., None].view(np.int32), device)


def stage_seed(seed: int, round: int, stage: int) -> int:
    """Return the seed of one cascade stage in one round.

    Its purposes and positions are then disjoint from every other stage's.
    """
    key = _mix64(_mix64(seed_array([seed])) ^ np.uint64(round))
    return int(_mix64(key ^ np.uint64(stage + 1))[0])


def uniform(keys: Tensor) -> Tensor:
    """Return a float32 for each key, strictly inside (0, 1), fine near 0: [..., 2] -> [...]."""
    unit = keys[..., 0].double().mul_(2.0**-32).add_(0.5 + 2.0**-33)
    return unit.float().clamp_(max=_ALMOST_ONE)


def exponential(keys: Tensor, ids: Tensor) -> Tensor:
    """Return standard exponential noise E(key, token id), float32.

    keys [rows, 2], ids [n] or [rows, n] -> [rows, n]. argmax(w / E) is then a draw from the weights
    w: the Gumbel-max trick with g = -log E. The logarithm is taken in float64, so that devices
    whose logarithms differ in the last bit round to the same float32, and E is neither 0 nor
    infinite (2**-33 to 23).
    """
    noise = torch.empty((keys.shape[0], ids.shape[-1]), device=keys.device)
    ids = ids.to(torch.int32).expand(noise.shape)
    step = rows_per_chunk(noise)
    for first in range(0, len(noise), step):
        rows = slice(first, first + step)
        hashed = _hash32_on_cpu if noise.device.type == "cpu" else _hash32
        minus_unit = (
            hashed(keys[rows], ids[rows]).double().mul_(-(2.0**-32)).sub_(0.5 + 2.0**-33)
        )  # exact, in (-1, 0)
        noise[rows] = minus_unit.log1p_().neg_()
    return noise


def rows_per_chunk(like: Tensor) -> int:
    """Return how many rows of such a tensor to process at once.

    The rows on a CPU are so few that the chunk stays in a core's cache.
    """
    rows, width = like.shape
    return max(1, _SCRATCH // width if like.device.type == "cpu" else rows)


def _mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the splitmix64 step, a bijection in which every bit of x affects every result bit."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return cast("NDArray[np.uint64]", x ^ (x >> np.uint64(31)))


def _hash32(keys: Tensor, ids: Tensor) -> Tensor:
    """Return 32 bits for each (key, id).

    This is the two-round multiply-xorshift of hash-prospector, with half of the key put in before
    each round.
    """
    x = ids ^ keys[:, :1]  # [rows, n], int32, wrapping
    shifted = torch.empty_like(x)
    _xor_shift(x, 16, shifted)
    x.mul_(0x21F0AAAD)
    _xor_shift(x, 15, shifted)
    x.add_(keys[:, 1:]).mul_(0x735A2D97)
    _xor_shift(x, 15, shifted)
    return x


def _hash32_on_cpu(keys: Tensor, ids: Tensor) -> Tensor:
    """Return the bits of `_hash32`, computed with numpy.

    numpy shifts unsigned numbers directly, and takes a third of the time on few tokens.
    """
    key = keys.numpy().view(np.uint32)
    x = ids.numpy().view(np.uint32) ^ key[:, :1]
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x21F0AAAD)
    x ^= x >> np.uint32(15)
    x += key[:, 1:]
    x *= np.uint32(0x735A2D97)
    x ^= x >> np.uint32(15)
    return torch.from_numpy(x.view(np.int32))


def _xor_shift(x: Tensor, count: int, shifted: Tensor) -> None:
    """Compute x ^= x >> count in place.

    The shift is logical, which torch's int32 does not have; therefore the mask.
    """
    torch.bitwise_right_shift(x, count, out=shifted)
    x.bitwise_xor_(shifted.bitwise_and_((1 << (32 - count)) - 1))
