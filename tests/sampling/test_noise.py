"""Noise: uniform, independent along every axis of its keys, never 0 and never infinite.

It does not depend on what is drawn beside it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from specserve.sampling.noise import Purpose, _hash32, exponential, row_keys, seed_array, uniform

Array = NDArray[Any]
UNLIKELY = 1e-4  # p-values below it fail


def units(keys: torch.Tensor, ids: torch.Tensor) -> Array:
    """Return exponential noise converted back to uniform noise."""
    unit: Array = -np.expm1(-exponential(keys, ids).double().numpy())
    return unit


def as_bits(numbers: torch.Tensor) -> Array:
    """Return the bits of the numbers, [n, 32] of 0 and 1."""
    return np.unpackbits(numbers.numpy().view(np.uint8).reshape(-1, 4), axis=1)


def keys_of(
    count: int, purpose: Purpose = Purpose.NEXT, *, seed: int = 0, first: int = 0
) -> torch.Tensor:
    return row_keys([seed] * count, [7] * count, range(first, first + count), purpose)


def chi_square_p(values: Array, bins: int = 256) -> float:
    return float(stats.chisquare(np.histogram(values, bins, (0, 1))[0]).pvalue)


def correlation_z(a: Array, b: Array) -> float:
    """Return the number of standard deviations from no correlation."""
    return float(abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) * a.size**0.5)


def pair_p(a: Array, b: Array) -> float:
    """Return the p-value of joint uniformity of pairs, on a 32 x 32 grid.

    It finds dependence that no correlation shows.
    """
    return float(
        stats.chisquare(
            np.histogram2d(a.ravel(), b.ravel(), 32, [(0, 1), (0, 1)])[0].ravel()
        ).pvalue
    )


@pytest.mark.parametrize("purpose", Purpose)
def test_uniform_is_uniform_over_positions_and_over_seeds(purpose: Purpose) -> None:
    over_positions = uniform(keys_of(1 << 18, purpose)).numpy()
    over_seeds = uniform(row_keys(range(1 << 18), [3], [5], purpose)).numpy()
    for values in (over_positions, over_seeds):
        assert chi_square_p(values) > UNLIKELY
        assert stats.kstest(values, "uniform").pvalue > UNLIKELY
        assert pair_p(values[:-1], values[1:]) > UNLIKELY


def test_exponential_is_exponential_over_ids_and_over_keys() -> None:
    wide = exponential(keys_of(4), torch.arange(1 << 17)).double().numpy()
    tall = exponential(keys_of(1 << 17), torch.arange(4)).double().numpy()
    for values in (*wide, *tall.T):
        assert stats.kstest(values, "expon").pvalue > UNLIKELY
        assert chi_square_p(-np.expm1(-values), 1024) > UNLIKELY


def test_every_bit_of_the_hash_is_fair_and_flips_with_every_bit_of_key_and_id() -> None:
    keys, ids = keys_of(64), torch.arange(1024, dtype=torch.int32)
    bits = as_bits(_hash32(keys, ids))
    assert np.abs(bits.mean(0) - 0.5).max() * 2 * len(bits) ** 0.5 < 5
    for flipped in range(32):
        mask = torch.tensor(-(2**31) if flipped == 31 else 1 << flipped, dtype=torch.int32)
        zero = torch.zeros((), dtype=torch.int32)
        for other in (_hash32(keys, ids ^ mask), _hash32(keys ^ torch.stack([mask, zero]), ids)):
            assert np.abs((bits ^ as_bits(other)).mean(0) - 0.5).max() < 0.02


@pytest.mark.parametrize("step", [1, 2, 3, 16, 1024])
def test_neighbouring_ids_and_positions_are_independent(step: int) -> None:
    u = units(keys_of(512, seed=11), torch.arange(2048))
    for a, b in ((u[:, :-step], u[:, step:]), (u[: -min(step, 64)], u[min(step, 64) :])):
        assert correlation_z(a, b) < 5
        assert pair_p(a, b) > UNLIKELY


def test_seeds_rounds_and_purposes_are_independent_streams() -> None:
    ids = torch.arange(4096)
    base = row_keys([5] * 64, [9] * 64, range(64), Purpose.NEXT)
    others = [
        row_keys([6] * 64, [9] * 64, range(64), Purpose.NEXT),
        row_keys([5 + (1 << 63)] * 64, [9] * 64, range(64), Purpose.NEXT),
        row_keys([5] * 64, [10] * 64, range(64), Purpose.NEXT),
        *(
            row_keys([5] * 64, [9] * 64, range(64), purpose)
            for purpose in Purpose
            if purpose is not Purpose.NEXT
        ),
    ]
    for other in others:
        assert correlation_z(units(base, ids), units(other, ids)) < 5
        assert pair_p(units(base, ids), units(other, ids)) > UNLIKELY


def test_uniform_and_exponential_noise_of_one_key_are_independent() -> None:
    keys = keys_of(1 << 18)
    assert pair_p(uniform(keys).numpy(), units(keys, torch.tensor([0]))[:, 0]) > UNLIKELY


def test_no_two_keys_of_a_grid_are_equal() -> None:
    seeds, rounds, positions = np.meshgrid(
        seed_array([0, 1, 2**32, -1]), np.arange(30), np.arange(40), indexing="ij"
    )
    keys = torch.cat(
        [
            row_keys(seeds.ravel(), rounds.ravel(), positions.ravel(), purpose)
            for purpose in Purpose
            if purpose is not Purpose.COUPLED
        ]
    )
    assert len(np.unique(keys.numpy().view(np.int64))) == 3 * seeds.size


def test_coupled_noise_ignores_the_round_and_the_others_do_not() -> None:
    for purpose in Purpose:
        same = torch.equal(row_keys([1], [10], [12], purpose), row_keys([1], [11], [12], purpose))
        assert same is (purpose is Purpose.COUPLED)


def test_seeds_count_with_all_their_64_bits() -> None:
    keys = row_keys([0, 1 << 32, 1 << 63, (1 << 64) - 1], [0], [0], Purpose.DRAFT)
    assert len(set(uniform(keys).tolist())) == 4
    assert torch.equal(row_keys([-1], [0], [0], Purpose.DRAFT), keys[3:])


def test_an_element_has_the_same_bits_beside_any_others() -> None:
    keys, ids = keys_of(21), torch.arange(4099)
    whole = exponential(keys, ids)
    assert torch.equal(exponential(keys[13:14], ids)[0], whole[13])
    assert torch.equal(exponential(keys[3:9], ids[1000:1013]), whole[3:9, 1000:1013])
    scattered = torch.stack(
        [
            torch.randperm(4099, generator=torch.Generator().manual_seed(row))[:64]
            for row in range(21)
        ]
    )
    assert torch.equal(exponential(keys, scattered), whole.gather(1, scattered))


def test_the_extremes_of_the_hash_stay_inside() -> None:
    extremes = torch.tensor([[-(2**31), 0], [2**31 - 1, 0], [0, 0], [-1, 0]], dtype=torch.int32)
    u = uniform(extremes)
    assert u.dtype == torch.float32
    assert bool(((u > 0) & (u < 1)).all())
    assert u[0].item() == pytest.approx(2.0**-33, rel=1e-6)
    noise = exponential(keys_of(1024), torch.arange(4096))
    assert noise.dtype == torch.float32
    assert 0 < noise.min().item() < 1e-5
    assert 12 < noise.max().item() < 23


def test_the_noise_is_pinned_so_that_texts_of_a_seed_stay_the_same() -> None:
    keys = row_keys([42], [3], [4], Purpose.COUPLED)
    assert keys.tolist() == [[-716954926, 367195006]]
    assert exponential(keys, torch.tensor([0, 1, 4095]))[0].tolist() == pytest.approx(
        [0.0571557022631, 0.9729985594749, 0.7521391510963], rel=1e-6
    )


@pytest.mark.gpu
def test_noise_is_the_same_bits_on_cuda() -> None:
    keys, ids = keys_of(64), torch.arange(4096)
    assert torch.equal(uniform(keys), uniform(keys.cuda()).cpu())
    assert torch.equal(exponential(keys, ids), exponential(keys.cuda(), ids.cuda()).cpu())
