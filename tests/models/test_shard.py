"""Tensor parallelism on gloo: ranks together compute the whole model, and each holds its share."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import (
    FalconConfig,
    Gemma4TextConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MiniMaxM2Config,
    PhimoeConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from specserve.errors import NoShardingPlan
from specserve.models.checkpoints.load import LoadedModel, load_model
from specserve.models.checkpoints.weights import Weights
from specserve.models.plans import check_plan
from specserve.models.shard import EXCHANGED_BYTES, Shard
from tests.support import checkpoints
from tests.support.forks import run_ranks

PROMPT_LENGTH = 20  # longer than the sliding window
RANKS = 4


@dataclass(frozen=True, slots=True)
class Case:
    """One model, shared by `size` ranks."""

    name: str
    size: int
    dtype: torch.dtype = torch.float32
    gathers: bool = False

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.name}-tp{self.size}-{dtype}{'-gathers' * self.gathers}"


EXPERTS = ("mixtral", "qwen3_moe", "gpt_oss")
PAIRS = [
    *(Case(name, 2) for name in checkpoints.ARCHITECTURES),
    *(Case(name, 2, gathers=True) for name in checkpoints.ARCHITECTURES if name not in EXPERTS),
    Case("llama", 2, torch.bfloat16),
]
# All but the first repeat kv heads.
FOURS = [
    Case("llama_four_kv_heads", 4),
    Case("llama", 4),
    Case("qwen2", 4),
    Case("phi3", 4),
]


# Sums over the ranks


def sums(parts: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Return the sums of the first `counts` rows of all ranks' parts [ranks, rows, width].

    The ranks are threads. All of them must arrive at the same bits.
    """
    size = len(parts)
    store: Any = cast(Any, dist).HashStore()

    def rank_sums(rank: int) -> list[Tensor]:
        backend = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))
        group: Any = dist.ProcessGroup(store, rank, size)
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
        shard = Shard(rank, size, group)
        return [shard.sum(parts[rank, :count].clone()) for count in counts]

    with ThreadPoolExecutor(size) as threads:
        first, *others = threads.map(rank_sums, range(size))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    return first


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_row_s_sum_has_the_same_bits_whatever_rows_come_with_it(
    size: int, dtype: torch.dtype
) -> None:
    # The last is exchanged in shares, which no number of ranks but 2 and 4 divides evenly.
    counts, width = (1, 2, 3, 5, 8, 17, 33, 64, 580), 1000
    assert counts[-1] * width * dtype.itemsize > EXCHANGED_BYTES
    generator = torch.Generator().manual_seed(0)
    parts = torch.randn(size, counts[-1], width, generator=generator).to(dtype)
    whole = functools.reduce(torch.add, parts.float()).to(dtype)
    for count, total in zip(counts, sums(parts, counts), strict=True):
        assert torch.equal(total, whole[:count]), f"{count} rows"


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
        str(case): logits(load(Path(root), case, Shard(rank % 2, 2, groups[pair], case.gathers)))
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
    run_ranks(rank_main, root, ranks=RANKS)
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
        (MiniMaxM2Config(), 2, "colwise_gather_output"),
        (Gemma4TextConfig(), 2, "differ in their numbers of heads"),
        (PhimoeConfig(), 2, "leaves attention whole"),
        (FalconConfig(num_attention_heads=71, hidden_size=4544), 2, "71 attention heads"),
        (
            FalconConfig(num_attention_heads=8, num_kv_heads=2, new_decoder_architecture=True),
            4,
            "2 key and value heads can be neither shared",
        ),
        (
            FalconConfig(num_attention_heads=4, hidden_size=64, ffn_hidden_size=255),
            2,
            "ffn_hidden_size 255",
        ),
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


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_are_refused_where_bits_may_not_depend_on_the_number_of_ranks(
    root: Path, name: str
) -> None:
    with pytest.raises(NoShardingPlan, match="have experts"):
        load(root, Case(name, 2), Shard(0, 2, gathers=True))
