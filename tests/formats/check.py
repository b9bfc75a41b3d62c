"""Compare what a quantised checkpoint says here with what its library's matrices say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from specserve.models.checkpoints.load import load_model
from specserve.models.shard import Shard
from tests.formats.make import EXPECTED, NEW_TOKENS, PROMPT

MADE = Path(__file__).parent / "made"
RANKS = 2


@dataclass(frozen=True, slots=True)
class Said:
    """The logits after a prompt, and the greedy text that follows it."""

    logits: Tensor  # [vocab]
    tokens: tuple[int, ...]

    @classmethod
    def expected(cls, directory: Path) -> Said:
        stated = json.loads((directory / EXPECTED).read_text(encoding="utf-8"))
        return cls(torch.tensor(stated["logits"]), tuple(stated["tokens"]))

    def difference(self, other: Said) -> float:
        return float((self.logits - other.logits).abs().max())


def say(directory: Path, shard: Shard | None = None) -> Said:
    loaded = load_model(
        directory, dtype=torch.float32, device="cpu", shard=shard, attention="eager"
    )
    module = cast(Any, loaded.module)
    ids = list(PROMPT)
    with torch.inference_mode():
        logits: Tensor = module(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        newest = logits
        for _ in range(NEW_TOKENS):
            ids.append(_agree(newest.argmax(), shard))
            newest = module(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
    return Said(logits, tuple(ids[len(PROMPT) :]))


def _agree(token: Tensor, shard: Shard | None) -> int:
    """Return rank 0's token: no other rank has the whole vocabulary's logits."""
    if shard is not None:
        dist.broadcast(token, src=0)
    return int(token)


def say_on_ranks(directories: Sequence[Path], scratch: Path) -> list[Said]:
    """Return what two ranks that share each model say."""
    arguments = [str(directory) for directory in directories], str(scratch)
    cast(Any, mp).spawn(_rank_main, args=arguments, nprocs=RANKS)
    said: list[Said] = torch.load(scratch / "said.pt", weights_only=False)
    return said


def _rank_main(rank: int, directories: Sequence[str], scratch: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{scratch}/rendezvous",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=120),
    )
    said = [say(Path(directory), Shard(rank, RANKS)) for directory in directories]
    if rank == 0:
        torch.save(said, f"{scratch}/said.pt")
    dist.destroy_process_group()
