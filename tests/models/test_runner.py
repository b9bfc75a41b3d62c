"""Decode passes laid out at once give the bits of single passes and leave a sound cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from specserve.errors import OutOfPages
from specserve.models.gpu.graphs import pad_to_bucket
from specserve.models.model import ModelOptions, open_model
from specserve.models.runner import Runner
from specserve.types import Step
from tests.support import checkpoints

# Groups of long and short contexts; pages and blocks end within the passes.
LENGTHS = (300, 250, 60, 17, 1)
COUNTS = (8, 8, 5, 5, 2)
TEXTS = [
    tuple(np.random.default_rng(i).integers(3, checkpoints.VOCAB, 320).tolist())
    for i in range(len(LENGTHS))
]


# Fused, fused with a window, the library's own code.
@pytest.fixture(scope="module", params=["llama", "mistral", "gemma2"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make(request.param, tmp_path_factory.mktemp("runner") / request.param)


def open_runner(
    checkpoint: Path, *, pages: int = 100, prefill: Sequence[int] = (), dtype: str = "bfloat16"
) -> Runner:
    """Return a runner after the prefill of these texts' beginnings."""
    runner = open_model(checkpoint, ModelOptions(dtype=dtype, device="cpu", pages=pages)).runner
    for seq_id in prefill:
        runner.run([Step(seq_id, 0, TEXTS[seq_id][: LENGTHS[seq_id]])], [1])
    return runner


def next_ids(seq_ids: Sequence[int], depth: int) -> Tensor:
    return torch.tensor([TEXTS[seq_id][LENGTHS[seq_id] + depth] for seq_id in seq_ids])


def all_at_once(runner: Runner, seq_ids: Sequence[int], counts: Sequence[int]) -> list[Tensor]:
    """Return the logits of every pass; the tokens are appended to the cache at the end."""
    passes, out = runner.decode_passes(seq_ids, counts), []
    for depth in range(max(counts)):
        running = [seq_id for seq_id, count in zip(seq_ids, counts, strict=True) if count > depth]
        with torch.inference_mode():
            out.append(passes.logits(next_ids(running, depth)))
    for seq_id, count in zip(seq_ids, counts, strict=True):
        runner.cache.append(seq_id, TEXTS[seq_id][LENGTHS[seq_id] : LENGTHS[seq_id] + count])
    return out


def one_by_one(runner: Runner, seq_ids: Sequence[int], counts: Sequence[int]) -> list[Tensor]:
    out = []
    for depth in range(max(counts)):
        running = [seq_id for seq_id, count in zip(seq_ids, counts, strict=True) if count > depth]
        starts = {seq_id: LENGTHS[seq_id] + depth for seq_id in running}
        out.append(
            runner.run(
                [Step(i, start, TEXTS[i][start : start + 1]) for i, start in starts.items()],
                [1] * len(starts),
            )
        )
    return out


def same_bits(got: Sequence[Tensor], want: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("seq_ids", [(0,), (1,), (3, 4), (0, 1, 2, 3, 4)], ids=str)
def test_decode_passes_are_those_one_by_one_while_sequences_drop_out(
    checkpoint: Path, seq_ids: tuple[int, ...]
) -> None:
    at_once, in_turn = (
        open_runner(checkpoint, prefill=seq_ids),
        open_runner(checkpoint, prefill=seq_ids),
    )
    counts = [COUNTS[i] for i in seq_ids]
    assert same_bits(all_at_once(at_once, seq_ids, counts), one_by_one(in_turn, seq_ids, counts))
    assert [at_once.cache.length(i) for i in seq_ids] == [in_turn.cache.length(i) for i in seq_ids]
    at_once.cache.check()


def test_tokens_of_decode_passes_are_cached_for_the_next_step(checkpoint: Path) -> None:
    at_once, fresh = open_runner(checkpoint, prefill=(0,)), open_runner(checkpoint)
    all_at_once(at_once, (0,), (8,))
    text = TEXTS[0][:312]
    assert torch.equal(
        at_once.run([Step(0, 308, text[308:])], [4]), fresh.run([Step(0, 0, text)], [4])
    )


def test_reserved_pages_that_were_not_used_are_released_by_the_next_step(checkpoint: Path) -> None:
    runner = open_runner(checkpoint, prefill=(0,))
    used = runner.cache.num_used
    runner.decode_passes((0,), (64,))
    assert runner.cache.num_used > used
    runner.run([Step(0, LENGTHS[0], TEXTS[0][LENGTHS[0] : LENGTHS[0] + 1])], [1])
    assert runner.cache.num_used == used
    runner.cache.check()


def test_too_few_pages_are_noticed_before_the_first_pass(checkpoint: Path) -> None:
    runner = open_runner(checkpoint, pages=20, prefill=(0,))
    with pytest.raises(OutOfPages):
        runner.decode_passes((0,), (64,))


def test_pages_that_another_sequence_has_taken_are_not_read_again(checkpoint: Path) -> None:
    """The planner reuses a sequence's pages; here another sequence takes the last in between."""
    runner, fresh = open_runner(checkpoint, prefill=(3,)), open_runner(checkpoint)
    all_at_once(runner, (3,), (16,))  # into a new page
    runner.run([Step(3, 17, TEXTS[3][17:18])], [1])
    runner.run([Step(9, 0, TEXTS[0][:1])], [1])  # which this sequence has now
    text = TEXTS[3][:40]
    assert torch.equal(
        runner.run([Step(3, 18, text[18:])], [22]), fresh.run([Step(3, 0, text)], [22])
    )
    assert torch.equal(
        runner.run([Step(9, 1, TEXTS[0][1:2])], [1]), fresh.run([Step(9, 0, TEXTS[0][:2])], [1])
    )


def test_passes_padded_to_bucketed_shapes_give_the_same_logits(checkpoint: Path) -> None:
    exact, padded = (
        open_runner(checkpoint, prefill=range(5), dtype="float32"),
        open_runner(checkpoint, prefill=range(5), dtype="float32"),
    )
    padded.pad_to_bucket = pad_to_bucket
    for got, want in zip(
        all_at_once(padded, range(5), COUNTS), one_by_one(exact, range(5), COUNTS), strict=True
    ):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    padded.cache.check()
