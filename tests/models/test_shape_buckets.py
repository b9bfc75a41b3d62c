"""Bucketed shapes, so that a server of many lengths does not compile and keep a kernel for each."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys

import numpy as np
import pytest
import torch

from specserve.models.attention import AttentionVariant
from specserve.models.attention_kernels import invariant_kernel
from specserve.models.layout import Geometry, Writes
from specserve.models.planner import Planner
from specserve.models.shape_buckets import BATCH_PIECES, QUERY_PIECES, bucket_size, pieces

# Prompts of forty lengths, one after the other and batched with the rounds of others.
PROGRAM = """
import random
from specserve import LLM, Sampling
keys = {"target.dtype": "bfloat16", "cache.pages": 256, "weights.kernel": "onednn"}
llm, rng = LLM(**keys), random.Random(1)
for lengths in ([[n] for n in range(17, 57)] + [[4, 5, n] for n in range(17, 57)]):
    prompts = [[rng.randrange(3, 4000) for _ in range(n)] for n in lengths]
    llm.generate(prompts, [Sampling(max_tokens=1 + n % 3, temperature=0) for n in lengths])
"""


def test_every_size_up_to_sixteen_is_a_bucket_and_few_beyond_it() -> None:
    assert [bucket_size(rows) for rows in range(17)] == list(range(17))
    assert [bucket_size(rows) for rows in (17, 18, 31, 33, 36, 65, 100, 129, 511, 512)] == [
        18,
        18,
        32,
        36,
        36,
        72,
        104,
        144,
        512,
        512,
    ]
    assert all(rows <= bucket_size(rows) <= rows * 1.125 for rows in range(1, 3000))
    assert len({bucket_size(rows) for rows in range(1, 513)}) == 16 + 5 * 8
    assert sorted({bucket_size(size, exact=4) for size in range(1, 33)}) == [
        1,
        2,
        3,
        4,
        6,
        8,
        12,
        16,
        24,
        32,
    ]


def test_mixed_groups_have_few_shapes_and_each_row_once() -> None:
    rng, shapes = random.Random(1), set()
    planner = Planner(Geometry(page_size=16, kv_heads=2, key_block=256, device=torch.device("cpu")))
    for _ in range(400):
        counts = np.array(
            [rng.choice((1, 2, 5, 9, rng.randint(1, 80))) for _ in range(rng.randint(2, 24))]
        )
        starts = np.array([rng.randrange(170) for _ in counts])
        block_table = np.arange(32 * len(counts)).reshape(len(counts), 32)
        groups = planner.lay_out(Writes(starts, counts, block_table)).groups
        rows = [
            group.rows if group.valid is None else group.rows[group.valid]
            for group in groups
            if group.rows is not None
        ]
        if rows:  # else all run alike, and keep their own shape
            assert sorted(torch.cat(rows).tolist()) == list(range(counts.sum()))
            shapes |= {(group.seqs, group.queries) for group in groups}
    seqs = {seqs for seqs, _ in shapes}
    assert seqs <= {bucket_size(seqs) for seqs in range(1, 25)}
    assert max(seqs) > 16
    assert {queries for _, queries in shapes} <= {
        bucket_size(queries, exact=4) for queries in range(1, 33)
    } | {bucket_size(n) for n in range(33, 81)}


def test_a_size_is_cut_into_few_pieces_of_known_sizes() -> None:
    assert pieces(8, BATCH_PIECES) == ((0, 8),)
    assert pieces(13, BATCH_PIECES) == ((0, 12), (12, 13))
    for sizes in (BATCH_PIECES, QUERY_PIECES):
        for size in range(1, 600):
            ranges = pieces(size, sizes)
            assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
            assert ranges[-1][1] == size
            assert {stop - start for start, stop in ranges} <= set(sizes)
    assert max(len(pieces(size, BATCH_PIECES)) for size in range(1, 65)) == 3


def test_attention_gives_its_kernels_shapes_that_are_known_at_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Random rounds meet no shape outside a set that does not grow with the contexts."""
    kv_heads, shared, dim, block = 2, 2, 32, 256
    seen: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
    product = torch.bmm

    def record(a: torch.Tensor, b: torch.Tensor, **out: torch.Tensor) -> torch.Tensor:
        seen.add((tuple(a.shape), tuple(b.shape)))
        return product(a, b, **out)

    monkeypatch.setattr(torch, "bmm", record)
    rng = random.Random(1)
    planner = Planner(Geometry(16, kv_heads, block, torch.device("cpu")))
    pool = torch.zeros(64 * 16, kv_heads, dim, dtype=torch.bfloat16)
    for _ in range(60):
        counts = np.array(
            [rng.choice((1, 2, 5, rng.randint(1, 600))) for _ in range(rng.randint(1, 30))]
        )
        if rng.random() < 0.5:
            counts[:] = rng.randint(1, 9)
        starts = np.array([rng.randrange(420) for _ in counts])
        block_table = np.zeros((len(counts), 64), dtype=np.int64)
        for group in planner.lay_out(Writes(starts, counts, block_table)).groups:
            q = torch.zeros(group.seqs * group.queries, kv_heads * shared, dim, dtype=pool.dtype)
            invariant_kernel(group, pool, pool, q, AttentionVariant(1.0))
    known = {
        ((kv_heads * batch, shared * queries, *inner), (kv_heads * batch, *inner, *outer))
        for batch in BATCH_PIECES
        for queries in QUERY_PIECES
        for inner, outer in (((dim,), (block,)), ((block,), (dim,)))
    }
    assert len(seen) > 60
    assert seen <= known


def test_kernels_are_compiled_for_bucket_sizes_only() -> None:
    """The number of rows is read from oneDNN's own log."""
    environment = {**os.environ, "ONEDNN_VERBOSE": "profile_create"}
    log = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    ).stdout
    compiled = [line for line in log.splitlines() if "create:cache_miss" in line]
    linear = {int(match[1]) for line in compiled if (match := re.search(r",mb(\d+)ic", line))}
    # Two heads share keys.
    attention = {
        int(match[1]) // 2
        for line in compiled
        if (match := re.search(r",\d+x(\d+)x\d+:\d+x\d+x\d+,", line))
    }
    assert max(linear) > 56, "as many rows as the prompts have tokens"
    assert linear == {bucket_size(rows) for rows in linear}
    assert not [
        queries for queries in attention if queries > 32 and queries != bucket_size(queries)
    ], "where products of attention are this library's too"
