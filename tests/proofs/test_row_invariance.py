"""Row invariance: a position's logits have the same bits whatever shares its pass.

On CPU in bf16, for every architecture that the tests make, on one rank and on several; and in
float32 for those without experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from specserve.models.cpu.row_invariance import float32_row_step, is_batch_invariant
from specserve.models.model import ModelOptions, open_model
from specserve.models.runner import Runner
from specserve.models.shard import Shard
from specserve.types import Step
from tests.support import checkpoints
from tests.support.forks import run_ranks

LENGTH, NUM_TEXTS = 150, 5
# As in every released model: widths of whole vectors, and no product so small that torch's own
# loops would compute it instead of oneDNN.
WIDTHS = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_local_experts": 64,
    "num_experts": 64,
}
BF16 = ModelOptions(dtype="bfloat16", device="cpu", pages=160, prefix_caching=False)
FLOAT32 = replace(BF16, dtype="float32")
SHAPES = ((16, 256), (32, 256), (256, 16), (256, 32))
"""Inner and outer sizes of the products of attention, by dimensions of heads."""
WITH_EXPERTS = ("mixtral", "qwen3_moe", "gpt_oss")
"""Their experts are the library's own products, which are row-invariant in bf16 alone."""
CASES = {
    **{name: (name, BF16) for name in checkpoints.ARCHITECTURES},
    **{
        f"{name}-float32": (name, FLOAT32)
        for name in checkpoints.ARCHITECTURES
        if name not in WITH_EXPERTS
    },
}


def write(name: str, widths: Mapping[str, int], root: Path) -> Path:
    """Write a checkpoint of these widths into a directory of `root`."""
    config = {**checkpoints.CONFIGS, **checkpoints.ENCODER_DECODERS}[name]()
    for key, value in widths.items():
        if hasattr(config, key):
            setattr(config, key, value)
    return checkpoints.write(config, root / name)


@pytest.fixture(scope="module", params=CASES)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    name, options = CASES[request.param]
    checkpoint = write(name, WIDTHS, tmp_path_factory.mktemp("invariance"))
    skip_without_order(options)
    return open_model(checkpoint, options).runner


def skip_without_order(options: ModelOptions) -> None:
    if options is FLOAT32 and not all(is_batch_invariant(float32_row_step(*s), *s) for s in SHAPES):
        pytest.skip("on this processor MKL has no order of its own in float32, and the log says so")


@pytest.fixture(scope="module")
def texts() -> list[tuple[int, ...]]:
    rng = np.random.default_rng(0)
    return [tuple(rng.integers(3, checkpoints.VOCAB, LENGTH).tolist()) for _ in range(NUM_TEXTS)]


def feed(
    runner: Runner, texts: list[tuple[int, ...]], rng: np.random.Generator, *, largest: int
) -> list[Tensor]:
    """Return the logits of each text, computed in random chunks of up to `largest` tokens.

    Each pass has a random number of the texts. An encoder reads the text backwards.
    """
    parts: list[list[Tensor]] = [[] for _ in texts]
    done, length = [0] * len(texts), len(texts[0])
    encodes = hasattr(runner, "encoder_cache")
    while any(start < length for start in done):
        waiting = [i for i, start in enumerate(done) if start < length]
        chosen = rng.permutation(waiting)[: rng.integers(1, len(waiting) + 1)].tolist()
        counts = [min(int(rng.integers(1, largest + 1)), length - done[i]) for i in chosen]
        logits = runner.run(
            [
                Step(
                    i,
                    done[i],
                    texts[i][done[i] : done[i] + n],
                    texts[i][::-1] if encodes and not done[i] else (),
                )
                for i, n in zip(chosen, counts, strict=True)
            ],
            counts,
        )
        for i, n, part in zip(chosen, counts, torch.split(logits, counts), strict=True):
            parts[i].append(part)
            done[i] += n
    runner.release(range(len(texts)))
    return [torch.cat(own) for own in parts]


@pytest.fixture(scope="module")
def alone(runner: Runner, texts: list[tuple[int, ...]]) -> list[Tensor]:
    """Return the logits of each text, computed alone and token by token."""
    return [feed(runner, [text], np.random.default_rng(0), largest=1)[0] for text in texts]


@pytest.mark.parametrize("largest", [8, LENGTH])
def test_bits_do_not_depend_on_chunks_or_on_other_texts(
    runner: Runner, texts: list[tuple[int, ...]], alone: list[Tensor], largest: int
) -> None:
    mixed = feed(runner, texts, np.random.default_rng(largest), largest=largest)
    differing = sum(int((a != b).any(-1).sum()) for a, b in zip(alone, mixed, strict=True))
    assert differing == 0, f"{differing} of {NUM_TEXTS * LENGTH} positions differ"


# Several ranks

RANKS = 4
RANK_WIDTHS = {
    "vocab_size": 384,
    "hidden_size": 192,
    "num_attention_heads": 12,  # as many as 2, 3 and 4 ranks can share
    "num_key_value_heads": 12,
    "intermediate_size": 768,
    "moe_intermediate_size": 768,
    "d_ff": 768,
    "num_local_experts": 24,
    "num_experts": 24,
}
NUM_COMPANIONS, COMPANY_LENGTH, NUM_ALONE = 64, 5, 3
SHARED: Mapping[int, tuple[str, ...]] = {
    2: ("llama", "qwen3_moe", "llama-float32"),
    3: ("llama", "gpt2", "phi3", "gemma2", "qwen3_moe", "gpt_oss", "t5", "llama-float32"),
    4: ("llama", "gpt2", "qwen3_moe", "t5"),
}
"""Architectures by number of ranks.

Among them are all styles of division: fused, transposed, packed, experts, an encoder.
"""


INVARIANT = ("llama", "gpt2", "phi3", "t5")
"""Architectures whose bits are compared between numbers of ranks."""


def make_company(rng: np.random.Generator) -> list[tuple[int, ...]]:
    return [
        tuple(rng.integers(3, checkpoints.VOCAB, COMPANY_LENGTH).tolist())
        for _ in range(NUM_COMPANIONS)
    ]


def company_logits(directory: Path, shard: Shard | None) -> Tensor:  # [positions, vocab]
    rng = np.random.default_rng(2)
    runner = open_model(directory, BF16, shard=shard).runner
    return torch.cat(feed(runner, make_company(rng)[:12], rng, largest=COMPANY_LENGTH))


def case_of(name: str) -> tuple[str, ModelOptions]:
    return CASES.get(name, (name, BF16))


def num_differing(name: str, root: Path, shard: Shard) -> int:
    """Return how many positions have other bits in company than alone.

    The texts that are looked at share their passes with up to 63 others.
    """
    rng = np.random.default_rng(1)
    texts = make_company(rng)
    architecture, options = case_of(name)
    runner = open_model(root / architecture, options, shard=shard).runner
    alone = [feed(runner, [text], rng, largest=1)[0] for text in texts[:NUM_ALONE]]
    return sum(
        int((a != b).any(-1).sum())
        for largest in (1, COMPANY_LENGTH)
        for a, b in zip(alone, feed(runner, texts, rng, largest=largest)[:NUM_ALONE], strict=True)
    )


def rank_main(rank: int, root: str) -> None:
    """Share each model among two, three and four ranks in turn; rank 0 saves what they find."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{root}/rendezvous",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=120),
    )
    differing: dict[tuple[str, int], int] = {}
    logits: dict[tuple[str, int], Tensor] = {}
    for size, names in SHARED.items():
        group = dist.new_group(list(range(size)))
        for name in names if rank < size else ():
            differing[name, size] = num_differing(name, Path(root), Shard(rank, size, group))
        for name in INVARIANT if rank < size else ():
            shard = Shard(rank, size, group, gathers=True)
            logits[name, size] = company_logits(Path(root) / name, shard)
    if rank == 0:
        torch.save((differing, logits), f"{root}/found.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of the shared models and of what the ranks found."""
    root = tmp_path_factory.mktemp("ranks")
    shared = {case_of(name)[0] for names in SHARED.values() for name in names}
    for name in sorted(shared.union(INVARIANT)):
        write(name, RANK_WIDTHS, root)
    run_ranks(rank_main, root, ranks=RANKS)
    return root


@pytest.fixture(scope="module")
def found(ranks_root: Path) -> tuple[dict[tuple[str, int], int], dict[tuple[str, int], Tensor]]:
    """Return the number of positions that differ, and logits, by architecture and ranks."""
    return torch.load(ranks_root / "found.pt")  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "size"), [(name, size) for size, names in SHARED.items() for name in names]
)
def test_bits_on_several_ranks_do_not_depend_on_other_texts(
    found: tuple[dict[tuple[str, int], int], Any], name: str, size: int
) -> None:
    skip_without_order(case_of(name)[1])
    differing = found[0][name, size]
    assert differing == 0, f"{differing} of {2 * NUM_ALONE * COMPANY_LENGTH} positions differ"


@pytest.mark.parametrize("size", SHARED)
@pytest.mark.parametrize("name", INVARIANT)
def test_ranks_that_gather_have_the_bits_of_one_rank(
    ranks_root: Path, found: tuple[Any, dict[tuple[str, int], Tensor]], name: str, size: int
) -> None:
    whole = company_logits(ranks_root / name, None)
    differing = int((found[1][name, size] != whole).any(-1).sum())
    assert differing == 0, f"{differing} of {len(whole)} positions differ"
