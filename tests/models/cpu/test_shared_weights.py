"""Shared weights: the same bits as private ones, and nothing of the checkpoint is read again."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

from specserve.models.checkpoints import store as store_module
from specserve.models.checkpoints.store import default_directory
from specserve.models.cpu.mapped_file import can_map
from specserve.models.model import Model, ModelOptions, open_model
from specserve.models.shard import Shard
from specserve.types import Step
from tests.support import checkpoints
from tests.support.weight_reads import recorded_reads

CONFIGS: dict[str, Callable[[], Any]] = {
    **checkpoints.CONFIGS,
    "biases": lambda: LlamaConfig(**checkpoints.GROUPED, attention_bias=True, mlp_bias=True),
    "tied": lambda: LlamaConfig(**checkpoints.GROUPED, tie_word_embeddings=True),
}
DTYPES = ["float32"] + ["bfloat16"] * torch.ops.mkldnn._is_mkldnn_bf16_supported()
TEXT = tuple(range(4, 44))

pytestmark = pytest.mark.skipif(not can_map(), reason="weights cannot be mapped here")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    for name, config in CONFIGS.items():
        checkpoints.write(config(), root / name)
    return root


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    checkpoints.make("llama", tmp_path / "llama")
    return tmp_path / "llama"


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the default directory elsewhere."""
    path = tmp_path / "shared"
    monkeypatch.setattr(store_module, "default_directory", lambda: path)
    return path


def open_shared(directory: Path, dtype: str = "float32", **parts: Any) -> Model:
    return open_model(
        directory, ModelOptions(dtype=dtype, device="cpu", pages=40, shares_weights=True), **parts
    )


def open_private(directory: Path, dtype: str = "float32", **parts: Any) -> Model:
    return open_model(directory, ModelOptions(dtype=dtype, device="cpu", pages=40), **parts)


def logits(model: Model) -> Tensor:  # [rows, vocab]
    return model.runner.run([Step(0, 0, TEXT)], [len(TEXT)])


def files(store: Path) -> list[Path]:
    return sorted(store.glob("*.weights"))


@pytest.fixture
def reads() -> Iterator[list[object]]:
    with recorded_reads() as opened:
        yield opened


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, DTYPES[-1]) for name in CONFIGS), ("tied", DTYPES[0])],
)
def test_shared_weights_give_the_bits_of_private_ones(
    root: Path, reads: list[object], name: str, dtype: str
) -> None:
    expected = logits(open_private(root / name, dtype))
    assert torch.equal(logits(open_shared(root / name, dtype)), expected)
    assert reads
    reads.clear()
    assert torch.equal(logits(open_shared(root / name, dtype)), expected)
    assert not reads


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fused_model_run_by_the_library_s_code_shares_too(root: Path, dtype: str) -> None:
    with patch("specserve.models.network.can_fuse", return_value=False):
        expected = logits(open_private(root / "tied", dtype))
        for _ in range(2):
            assert torch.equal(logits(open_shared(root / "tied", dtype)), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["tied", "gpt2"])
def test_each_rank_has_a_file_of_its_own_part(
    root: Path, store: Path, reads: list[object], name: str, dtype: str
) -> None:
    with (
        patch.object(Shard, "sum", lambda _, partial: partial),
        patch.object(Shard, "gather", lambda shard, part: [part] * shard.size),
    ):
        for rank in range(2):
            expected = logits(open_private(root / name, dtype, shard=Shard(rank, 2)))
            for _ in range(2):
                reads.clear()
                shared = open_shared(root / name, dtype, shard=Shard(rank, 2))
                assert torch.equal(logits(shared), expected)
            assert not reads
    assert len(files(store)) == 2


@pytest.mark.parametrize("skip", [(1,), ()])
def test_layers_that_are_skipped_are_not_in_the_file(
    root: Path, store: Path, skip: Collection[int]
) -> None:
    expected = logits(open_private(root / "llama", skip=skip))
    for _ in range(2):
        assert torch.equal(logits(open_shared(root / "llama", skip=skip)), expected)
    open_shared(root / "llama")
    assert len({file.stat().st_size for file in files(store)}) == (2 if skip else 1)


def test_a_checkpoint_that_changed_is_packed_again(llama: Path, store: Path) -> None:
    before = logits(open_shared(llama))
    checkpoints.make("llama", llama, seed=1)
    after = logits(open_shared(llama))
    assert not torch.equal(before, after)
    assert torch.equal(after, logits(open_private(llama)))
    os.utime(llama / "model.safetensors")
    open_shared(llama)
    assert len(files(store)) == 3


@pytest.mark.parametrize("damage", ["truncated", "index", "preamble", "empty"])
def test_a_damaged_file_is_packed_again(llama: Path, store: Path, damage: str) -> None:
    expected = logits(open_shared(llama))
    [file] = files(store)
    contents = file.read_bytes()
    file.unlink()  # what is mapped must stay as it is
    file.write_bytes(
        {
            "truncated": contents[:-1],
            "index": contents[:-9] + b"x" + contents[-8:],
            "preamble": b"x" + contents[1:],
            "empty": b"",
        }[damage]
    )
    assert torch.equal(logits(open_shared(llama)), expected)
    [file] = files(store)
    assert file.read_bytes() == contents


def test_without_room_weights_stay_private_and_one_line_says_so(
    llama: Path, store: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store_module.WeightStore, "free_bytes", lambda _: 1000)
    assert torch.equal(logits(open_shared(llama)), logits(open_private(llama)))
    assert not files(store)
    [line] = caplog.messages
    assert "not shared" in line
    assert "weights.directory" in line


def test_a_directory_that_others_can_use_is_not_trusted(
    llama: Path, store: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.mkdir()
    store.chmod(0o777)
    assert torch.equal(logits(open_shared(llama)), logits(open_private(llama)))
    assert not files(store)
    assert "that you alone can use" in caplog.text


@pytest.mark.parametrize("kernel", ["auto", "onednn"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_that_are_mapped_hold_their_file(
    llama: Path, store: Path, dtype: str, kernel: str
) -> None:
    options = ModelOptions(dtype=dtype, device="cpu", pages=40, shares_weights=True, kernel=kernel)
    model = open_model(llama, options)
    store_module.remove_unused_weights()
    assert len(files(store)) == 1
    del model
    store_module.remove_unused_weights()
    assert not files(store)


def test_the_default_directory_is_memory_and_the_user_s_own() -> None:
    assert str(default_directory()).startswith("/dev/shm/")
    assert str(os.geteuid()) in default_directory().name
