"""Layers in one call of compiled code compute the bits of their operations one by one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config

from specserve.models.cpu.compiled_layers import CompiledLayers
from specserve.models.cpu.linear_kernels import missing_for_compiled
from specserve.models.llama import FusedNetwork
from specserve.models.model import ModelOptions, open_model
from specserve.models.runner import Runner
from specserve.types import Step
from tests.support import checkpoints

pytestmark = pytest.mark.skipif(
    missing_for_compiled() is not None, reason=f"it needs {missing_for_compiled()}"
)

CONFIGS: Mapping[str, Callable[[], PreTrainedConfig]] = {
    **{name: checkpoints.CONFIGS[name] for name in ("llama", "mistral", "qwen2", "qwen3")},
    "biases": lambda: LlamaConfig(**checkpoints.GROUPED, attention_bias=True),
    "one_kv_head": lambda: LlamaConfig(**checkpoints.SIZES, num_key_value_heads=1),
    "some_windows": lambda: Qwen2Config(
        **checkpoints.GROUPED,
        use_sliding_window=True,
        sliding_window=checkpoints.WINDOW,
        max_window_layers=1,
    ),
}
TEXT = tuple(i * 7 % 60 + 3 for i in range(200))


def open_fused(directory: Path, *, kernel: str = "auto") -> Runner:
    options = ModelOptions(dtype="bfloat16", device="cpu", pages=80, kernel=kernel)
    runner = open_model(directory, options).runner
    assert isinstance(runner.network, FusedNetwork)
    return runner


def is_compiled(runner: Runner) -> bool:
    assert isinstance(runner.network, FusedNetwork)
    return isinstance(runner.network._compiled, CompiledLayers)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_bits_are_those_of_single_operations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, threads: int
) -> None:
    directory = checkpoints.write(CONFIGS[name](), tmp_path)
    whole, single = open_fused(directory), open_fused(directory)
    assert isinstance(single.network, FusedNetwork)
    single.network._compiled = False
    monkeypatch.setattr("specserve.models.cpu.compiled_layers.MAX_SERIAL", 0)  # small, yet a team
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        passes = (
            ([Step(0, 0, TEXT[:150]), Step(1, 0, TEXT[:3]), Step(2, 0, TEXT[:40])], [5, 3, 1]),
            ([Step(0, 150, TEXT[150:155]), Step(2, 40, TEXT[40:41])], [5, 1]),
            ([Step(1, 3, TEXT[3:4])], [1]),
        )
        for steps, num_logits in passes:
            assert torch.equal(whole.run(steps, num_logits), single.run(steps, num_logits))
    finally:
        torch.set_num_threads(before)
    assert is_compiled(whole)
    for ours, theirs in zip(whole.cache.keys, single.cache.keys, strict=True):
        assert torch.equal(ours, theirs)


def test_threads_wait_for_one_another_between_stages(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
    config = LlamaConfig(**{**checkpoints.GROUPED, **sizes, "head_dim": 32})
    whole, single = (open_fused(checkpoints.write(config, tmp_path)) for _ in range(2))
    assert isinstance(single.network, FusedNetwork)
    single.network._compiled = False
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        steps = [Step(i, 0, TEXT[i : i + 30]) for i in range(8)]
        expected = single.run(steps, [1] * 8)
        for _ in range(30):
            whole.release(range(8))
            assert torch.equal(whole.run(steps, [1] * 8), expected)
    finally:
        torch.set_num_threads(before)


def test_a_pass_of_too_many_rows_runs_one_by_one_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = checkpoints.write(CONFIGS["qwen3"](), tmp_path)
    whole, single = open_fused(directory), open_fused(directory)
    monkeypatch.setattr(CompiledLayers, "max_rows", 100)
    parts = [
        whole.run([Step(0, 0, TEXT[:150])], [150]),
        whole.run([Step(0, 150, TEXT[150:])], [50]),
    ]
    monkeypatch.setattr(CompiledLayers, "max_rows", 200)
    assert torch.equal(torch.cat(parts), single.run([Step(0, 0, TEXT)], [200]))


def test_the_layers_that_are_left_are_compiled_again(tmp_path: Path) -> None:
    directory = checkpoints.write(CONFIGS["llama"](), tmp_path)
    whole = open_fused(directory)
    whole.run([Step(0, 0, TEXT[:20])], [1])
    assert isinstance(whole.network, FusedNetwork)
    part = Runner(whole.network.without_layers((1,)), whole.cache, device=whole.device)
    single = open_fused(directory)
    assert isinstance(single.network, FusedNetwork)
    network = single.network.without_layers((1,))
    network._compiled = False
    expected = Runner(network, single.cache, device=single.device)
    ours, theirs = (one.run([Step(5, 0, TEXT[:20])], [20]) for one in (part, expected))
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, whole.run([Step(6, 0, TEXT[:20])], [20]))


@pytest.mark.parametrize(
    ("config", "kernel"),
    [
        (lambda: LlamaConfig(**checkpoints.GROUPED, mlp_bias=True), "auto"),
        (CONFIGS["llama"], "onednn"),
    ],
    ids=["a gate with a bias", "onednn"],
)
def test_layers_that_the_code_does_not_take_run_one_by_one(
    tmp_path: Path, config: Callable[[], PreTrainedConfig], kernel: str
) -> None:
    runner = open_fused(checkpoints.write(config(), tmp_path), kernel=kernel)
    runner.run([Step(0, 0, TEXT[:20])], [1])
    assert not is_compiled(runner)
