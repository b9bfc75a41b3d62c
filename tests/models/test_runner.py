"""Passes that are laid out at once give, to the bit, what they give one by one, and leave a cache in which everything is accounted for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from specserve.errors import OutOfPages
from specserve.models.graphs import round_up
from specserve.models.model import Placement, open_model
from specserve.models.runner import Runner
from specserve.types import Step
from tests.support import checkpoints

LENGTHS = (
    300,
    250,
    60,
    17,
    1,
)  # groups of long and short contexts; pages and blocks end within the passes
COUNTS = (8, 8, 5, 5, 2)
TEXTS = [
    tuple(np.random.default_rng(i).integers(3, checkpoints.VOCAB, 320).tolist())
    for i in range(len(LENGTHS))
]


@pytest.fixture(
    scope="module", params=["llama", "mistral", "gemma2"]
)  # fused, fused with a window, the library's own code
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make(request.param, tmp_path_factory.mktemp("runner") / request.param)


def opened(
    checkpoint: Path, *, pages: int = 100, read: Sequence[int] = (), dtype: str = "bfloat16"
) -> Runner:
    """A runner that has read the beginnings of these texts."""
    runner = open_model(checkpoint, Placement(dtype=dtype, device="cpu", pages=pages)).runner
    for seq_id in read:
        runner.run([Step(seq_id, 0, TEXTS[seq_id][: LENGTHS[seq_id]])], [1])
    return runner


def next_ids(seq_ids: Sequence[int], depth: int) -> Tensor:
    return torch.tensor([TEXTS[seq_id][LENGTHS[seq_id] + depth] for seq_id in seq_ids])


def unrolled(runner: Runner, seq_ids: Sequence[int], counts: Sequence[int]) -> list[Tensor]:
    """Logits of every pass; the cache is told at the end."""
    passes, out = runner.unroll(seq_ids, counts), []
    for depth in range(max(counts)):
        going_on = [seq_id for seq_id, count in zip(seq_ids, counts, strict=True) if count > depth]
        with torch.inference_mode():
            out.append(passes.logits(next_ids(going_on, depth)))
    for seq_id, count in zip(seq_ids, counts, strict=True):
        runner.cache.append(seq_id, TEXTS[seq_id][LENGTHS[seq_id] : LENGTHS[seq_id] + count])
    return out


def one_by_one(runner: Runner, seq_ids: Sequence[int], counts: Sequence[int]) -> list[Tensor]:
    out = []
    for depth in range(max(counts)):
        going_on = [seq_id for seq_id, count in zip(seq_ids, counts, strict=True) if count > depth]
        starts = {seq_id: LENGTHS[seq_id] + depth for seq_id in going_on}
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
def test_unrolled_passes_are_those_one_by_one_while_sequences_drop_out(
    checkpoint: Path, seq_ids: tuple[int, ...]
) -> None:
    at_once, in_turn = opened(checkpoint, read=seq_ids), opened(checkpoint, read=seq_ids)
    counts = [COUNTS[i] for i in seq_ids]
    assert same_bits(unrolled(at_once, seq_ids, counts), one_by_one(in_turn, seq_ids, counts))
    assert [at_once.cache.length(i) for i in seq_ids] == [in_turn.cache.length(i) for i in seq_ids]
    at_once.cache.check()


def test_what_they_wrote_is_there_for_the_next_step(checkpoint: Path) -> None:
    at_once, fresh = opened(checkpoint, read=(0,)), opened(checkpoint)
    unrolled(at_once, (0,), (8,))
    text = TEXTS[0][:312]
    assert torch.equal(
        at_once.run([Step(0, 308, text[308:])], [4]), fresh.run([Step(0, 0, text)], [4])
    )


def test_room_that_was_not_used_is_given_back_by_the_next_step(checkpoint: Path) -> None:
    runner = opened(checkpoint, read=(0,))
    used = runner.cache.num_used
    runner.unroll((0,), (64,))
    assert runner.cache.num_used > used
    runner.run([Step(0, LENGTHS[0], TEXTS[0][LENGTHS[0] : LENGTHS[0] + 1])], [1])
    assert runner.cache.num_used == used
    runner.cache.check()


def test_too_few_pages_are_noticed_before_the_first_pass(checkpoint: Path) -> None:
    runner = opened(checkpoint, pages=20, read=(0,))
    with pytest.raises(OutOfPages):
        runner.unroll((0,), (64,))


def test_pages_that_have_gone_to_another_sequence_are_not_read_again(checkpoint: Path) -> None:
    """The layout remembers a sequence's pages; here the last of them is taken by another sequence between two passes."""
    runner, fresh = opened(checkpoint, read=(3,)), opened(checkpoint)
    unrolled(runner, (3,), (16,))  # into a new page
    runner.run([Step(3, 17, TEXTS[3][17:18])], [1])
    runner.run([Step(9, 0, TEXTS[0][:1])], [1])  # which is now this one's
    text = TEXTS[3][:40]
    assert torch.equal(
        runner.run([Step(3, 18, text[18:])], [22]), fresh.run([Step(3, 0, text)], [22])
    )
    assert torch.equal(
        runner.run([Step(9, 1, TEXTS[0][1:2])], [1]), fresh.run([Step(9, 0, TEXTS[0][:2])], [1])
    )


def test_passes_rounded_up_to_recurring_shapes_give_the_same(checkpoint: Path) -> None:
    exact, rounded = (
        opened(checkpoint, read=range(5), dtype="float32"),
        opened(checkpoint, read=range(5), dtype="float32"),
    )
    rounded.round_up = round_up
    for got, want in zip(
        unrolled(rounded, range(5), COUNTS), one_by_one(exact, range(5), COUNTS), strict=True
    ):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    rounded.cache.check()
