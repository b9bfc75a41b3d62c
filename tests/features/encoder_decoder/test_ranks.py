"""Encoder-decoders that two ranks share give the logits of one rank."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from specserve.models.model import open_model
from specserve.models.shard import Shard
from specserve.types import Step
from tests.support import checkpoints
from tests.support.engines import model_options
from tests.support.forks import run_ranks

RANKS = 2
LENGTHS = (1, 40, 150)
TEXTS = [
    tuple(np.random.default_rng(length).integers(3, checkpoints.VOCAB, length).tolist())
    for length in LENGTHS
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ranks")
    for name, config in checkpoints.ENCODER_DECODERS.items():
        checkpoints.write(config(), root / name)
    return root


def encoder_decoder_logits(directory: Path, shard: Shard | None = None) -> Tensor:  # [rows, vocab]
    """Return an encoder-decoder's logits: of texts with their encoder inputs, then a token more."""
    runner = open_model(directory, model_options(pages=40), shard=shard).runner
    steps = [Step(i, 0, (0, *range(5, 5 + 3 * i)), text) for i, text in enumerate(TEXTS)]
    return torch.cat(
        [
            runner.run(steps, [len(step.tokens) for step in steps]),
            runner.run([Step(step.seq_id, step.stop, (9,)) for step in steps], [1] * 3),
        ]
    )


def rank_main(rank: int, root: str) -> None:
    """Share each model with the other rank in turn; rank 0 saves its logits to a file."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{root}/rendezvous",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=120),
    )
    seen = {
        name: encoder_decoder_logits(Path(root) / name, Shard(rank, RANKS))
        for name in checkpoints.ENCODER_DECODERS
    }
    if rank == 0:
        torch.save(seen, f"{root}/logits.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def logits_of_two_ranks(root: Path) -> Mapping[str, Tensor]:
    run_ranks(rank_main, root, ranks=RANKS)
    return torch.load(root / "logits.pt")  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", checkpoints.ENCODER_DECODERS)
def test_two_ranks_encode_inputs_as_one_does(
    root: Path, logits_of_two_ranks: Mapping[str, Tensor], name: str
) -> None:
    whole = encoder_decoder_logits(root / name)
    assert (logits_of_two_ranks[name] - whole).abs().max() < 1e-4 * whole.std()
