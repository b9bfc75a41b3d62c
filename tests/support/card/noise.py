"""Compare the noise of the draw kernel with that of the CPU, number by number.

`python -m tests.support.card.noise` has Triton's interpreter compute 25 million numbers.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,attr-defined,untyped-decorator"
# Triton infers the types of its kernels.

from __future__ import annotations

import argparse

import numpy as np
import torch
import triton
import triton.language as tl

from specserve.sampling.noise import Purpose, exponential, row_keys
from specserve.sampling.triton_draw import exponential_noise
from tests.support.card.kernels import interpret

VOCAB, BLOCK = 128_256, 2**17


@triton.jit
def noise_kernel(keys, out, vocab: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0)
    ids = tl.arange(0, block)
    noise = exponential_noise(ids, tl.load(keys + 2 * row), tl.load(keys + 2 * row + 1))
    tl.store(out + row * vocab + ids, noise, ids < vocab)


def count_unequal(num_rows: int) -> int:
    """Return how many numbers of these rows differ."""
    places = np.arange(num_rows)
    keys = row_keys(range(len(places)), [0], places, Purpose.COUPLED)
    found = torch.empty(num_rows, VOCAB)
    interpret(noise_kernel, keys, found, grid=(num_rows,), vocab=VOCAB, block=BLOCK)
    expected = exponential(keys, torch.arange(VOCAB, dtype=torch.int32))
    return int((found != expected).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="two rows")
    args = parser.parse_args()
    num_rows = 2 if args.quick else args.rows
    print(f"| numbers | unequal |\n|---|---|\n| {num_rows * VOCAB:,} | {count_unequal(num_rows)} |")


if __name__ == "__main__":
    main()
