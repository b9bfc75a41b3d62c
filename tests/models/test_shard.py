"""Tensor parallelism on gloo: ranks together compute the whole model, and each holds its share."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    Olmo2Config,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from specserve.errors import NoShardingPlan
from specserve.models.checkpoints.load import LoadedModel, load_model
from specserve.models.checkpoints.weights import Weights
from specserve.models.plans import check_plan
from specserve.models.shard import Shard
from tests.support import checkpoints

PROMPT_LENGTH = 20  # longer than the sliding window
RANKS = 4


@dataclass(frozen=True, slots=True)
class Case:
    """One model, shared by `size` ranks."""

    name: str
    size: int
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return f"{self.name}-tp{self.size}-{str(self.dtype).removeprefix('torch.')}"


PAIRS = [*(Case(name, 2) for name in checkpoints.ARCHITECTURES), Case("llama", 2, torch.bfloat16)]
# All but the first repeat kv heads.
FOURS = [
    Case("llama_four_kv_heads", 4),
    Case("llama", 4),
    Case("qwen2", 4),
    Case("phi3", 4),
]


def load(root: Path, case: Case, shard: Shard | None) -> LoadedModel:
    return load_model(
        root / case.name, dtype=case.dtype, device="cpu", shard=shard, attention="eager"
    )


def logits(loaded: LoadedModel) -> Tensor:
    ids = torch.arange(3, 3 + PROMPT_LENGTH)[None] * 7 % checkpoints.VOCAB
    with torch.inference_mode():
        out: Tensor = loaded.module(input_ids=ids, use_cache=False).logits[0]  # [tokens, vocab]
    return out


def rank_main(rank: int, root: str) -> None:
    """Compute the cases of one rank and save their logits to a file.

    Two pairs of ranks share the two-rank cases between them, then all four do the rest.
    """
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{root}/rendezvous",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=120),
    )
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = rank // 2
    seen = {
        str(case): logits(load(Path(root), case, Shard(rank % 2, 2, groups[pair])))
        for case in PAIRS[pair::2]
    }
    seen |= {str(case): logits(load(Path(root), case, Shard(rank, RANKS))) for case in FOURS}
    torch.save(seen, f"{root}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("shard")
    for name in checkpoints.CONFIGS:
        checkpoints.make(name, root / name)
    return root


@pytest.fixture(scope="module")
def shared_logits(root: Path) -> dict[str, Tensor]:
    """Logits by case, from rank 0 of the ranks that shared it."""
    cast(Any, mp).spawn(rank_main, args=(str(root),), nprocs=RANKS)
    saved: dict[str, Tensor] = torch.load(root / "2.pt") | torch.load(root / "0.pt")
    return saved


@pytest.mark.parametrize("case", [*PAIRS, *FOURS], ids=str)
def test_ranks_together_give_the_logits_of_the_whole_model(
    case: Case, root: Path, shared_logits: dict[str, Tensor]
) -> None:
    whole = logits(load(root, case, None))
    tolerance = 1e-4 if case.dtype == torch.float32 else 0.1 * float(whole.float().std())
    assert whole.std() > 1
    assert (shared_logits[str(case)] - whole).abs().max() < tolerance


@pytest.mark.parametrize("name", checkpoints.ARCHITECTURES)
def test_a_rank_reads_and_holds_its_share_only(
    name: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole: Any = load(root, Case(name, 1), None).module
    embeddings = [part.weight for part in whole.modules() if isinstance(part, nn.Embedding)]
    matrices = [
        p
        for p in whole.parameters()
        if p.ndim > 1 and all(p is not embedding for embedding in embeddings)
    ]
    if whole.config.tie_word_embeddings:
        # Replicated as the embedding, divided as the head.
        matrices.append(whole.get_output_embeddings().weight)
    vectors = [p for p in whole.parameters() if p.ndim == 1]
    # Routers are replicated too.
    bound = sum(p.nbytes for p in [*embeddings, *vectors]) + 0.52 * sum(p.nbytes for p in matrices)
    read = count_reads(monkeypatch)
    for rank in range(2):
        read.clear()
        held = sum(
            parameter.nbytes
            for parameter in load(root, Case(name, 2), Shard(rank, 2)).module.parameters()
        )
        assert held < bound
        assert sum(read) < bound


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    sizes: list[int] = []
    original = Weights.read

    def read(self: Weights, name: str, **where: Any) -> Tensor:
        tensor = original(self, name, **where)
        sizes.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(Weights, "read", read)
    return sizes


def test_heads_are_counted_per_rank_and_kv_heads_repeated_when_there_are_too_few(
    root: Path,
) -> None:
    two, four = (load(root, Case("llama", size), Shard(size - 1, size)).spec for size in (2, 4))
    assert (two.num_heads, two.kv_heads) == (2, 1)
    assert (four.num_heads, four.kv_heads) == (1, 1)
    assert load(root, Case("gpt2", 2), Shard(0, 2)).spec.kv_heads == 2


def test_ranks_hold_every_row_of_the_vocabulary_head_once(root: Path) -> None:
    whole: Any = load(root, Case("qwen3", 1), None).module
    heads = [
        cast(Any, load(root, Case("qwen3", 4), Shard(rank, 4)).module).lm_head.inner.weight
        for rank in range(4)
    ]
    assert torch.equal(torch.cat(heads), whole.lm_head.weight)


@pytest.mark.parametrize(
    ("config", "size", "why"),
    [
        (LlamaConfig(num_attention_heads=4, num_key_value_heads=4), 3, "4 attention heads"),
        (
            LlamaConfig(num_attention_heads=12, num_key_value_heads=3, hidden_size=96),
            2,
            "3 key and value heads",
        ),
        (
            LlamaConfig(intermediate_size=130, num_attention_heads=4, hidden_size=64),
            4,
            "intermediate_size 130",
        ),
        (
            Qwen3MoeConfig(moe_intermediate_size=31, num_attention_heads=4, num_key_value_heads=2),
            2,
            "moe_intermediate_size 31",
        ),
        (GPT2Config(n_head=4, n_embd=64), 8, "4 attention heads"),
        (Olmo2Config(), 2, "colwise_gather_output"),
        (DeepseekV3Config(), 2, "leaves attention whole"),
        (MambaConfig(), 2, "no tensor-parallel plan"),
    ],
)
def test_what_cannot_be_divided_is_refused_by_its_config_alone(
    config: PreTrainedConfig, size: int, why: str
) -> None:
    with pytest.raises(NoShardingPlan, match=why):
        check_plan(config, size)


def test_one_rank_needs_no_plan() -> None:
    check_plan(MambaConfig(), 1)


def test_a_refusal_comes_before_any_weight_is_read(tmp_path: Path) -> None:
    checkpoints.CONFIGS["llama"]().save_pretrained(tmp_path)  # no weights at all
    with pytest.raises(
        NoShardingPlan, match="4 attention heads cannot be shared evenly by 3 ranks"
    ):
        load_model(tmp_path, dtype=torch.float32, device="cpu", shard=Shard(0, 3))
