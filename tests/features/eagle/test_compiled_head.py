"""Passes of a head in compiled code: the bits of single operations, and the same states."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from specserve.features.eagle.drafter import EagleDrafter
from specserve.features.eagle.layer import rounded_if_compiled
from specserve.features.eagle.network import EagleNetwork
from specserve.features.eagle.states import OWN, TARGETS
from specserve.models.coded_weight import CodedWeight
from specserve.models.cpu.linear_kernels import missing_for_compiled
from specserve.models.hidden_taps import HiddenTaps
from specserve.models.layers import PrivateWeights, linear_weights
from specserve.models.runner import Runner
from specserve.types import Step
from tests.support import checkpoints
from tests.support.eagle_heads import HeadSizes, write_speculators
from tests.support.engines import load_target, model_options

pytestmark = pytest.mark.skipif(
    missing_for_compiled() is not None, reason=f"it needs {missing_for_compiled()}"
)
VARIANTS = {
    "plain": HeadSizes(vocab_size=checkpoints.VOCAB),
    "norm before the residual": HeadSizes(vocab_size=checkpoints.VOCAB, norm_before_residual=True),
    "other sizes": HeadSizes(
        vocab_size=checkpoints.VOCAB, hidden_size=96, intermediate_size=80, num_heads=3, kv_heads=3
    ),
}
PASSES = (
    ((0, 0, 40), (1, 0, 3)),  # (sequence, start, tokens)
    ((1, 3, 30), (0, 40, 1)),
    ((0, 41, 1), (1, 33, 1)),
    ((0, 38, 5), (2, 0, 1), (1, 20, 14)),
)


@pytest.mark.parametrize("returns_states", [True, False])
@pytest.mark.parametrize("name", VARIANTS)
def test_compiled_passes_leave_what_single_operations_leave(
    name: str, returns_states: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run passes over random states: the target's, the head's own, and unknown ones."""
    compiled = open_head(tmp_path, VARIANTS[name])
    single = open_head(tmp_path, VARIANTS[name])
    for runner in (compiled, single):
        network = runner.network
        assert isinstance(network, EagleNetwork)
        network._returns_states = returns_states
        network._compiled = network._compile() if runner is compiled else None
        assert (network._compiled is None) == (runner is single)
    states = random_states(*compiled.cache.states.shape)
    for runner in (compiled, single):
        runner.cache.states.copy_(states)
    for number, of_pass in enumerate(PASSES):
        steps = [
            Step(seq_id, start, tuple(range(20 + number, 20 + number + count)))
            for seq_id, start, count in of_pass
        ]
        wanted = [min(count, 2) for _, _, count in of_pass]
        logits = [runner.run(steps, wanted) for runner in (compiled, single)]
        assert torch.equal(*logits), f"pass {number}"
        found, expected = (runner.cache.states for runner in (compiled, single))
        unknown = expected[:, 0].isnan()
        assert torch.equal(found[:, 0].isnan(), unknown), f"pass {number}"
        assert torch.equal(found[~unknown], expected[~unknown]), f"pass {number}"
        assert torch.equal(found[:, -1], expected[:, -1]), f"pass {number}"
        assert unknown.any()
    assert not torch.equal(found[:, :-1].nan_to_num(), states[:, :-1].nan_to_num())


def open_head(directory: Path, sizes: HeadSizes) -> Runner:
    head = directory / "head"
    if not head.exists():
        config = checkpoints.CONFIGS["llama"]()
        config.num_hidden_layers = 4
        checkpoints.write(config, directory / "target")
        write_speculators(head, sizes)
    assert sizes.taps is not None
    target = load_target(directory / "target", model_options(pages=10), taps=HiddenTaps(sizes.taps))
    drafter = EagleDrafter.from_files(head, target, dtype="bfloat16")
    drafter.runner.on_written = None  # the states stay as they are
    return drafter.runner


def random_states(slots: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(slots, width, generator=generator).bfloat16()
    chances = torch.rand(slots, generator=generator)
    states[:, -1] = torch.where(chances < 0.5, OWN, TARGETS)
    states[chances > 0.8, :-1] = float("nan")
    return states


def test_only_what_the_compiled_kernel_multiplies_is_rounded() -> None:
    matrix = torch.randn(32, 64).bfloat16()
    assert isinstance(rounded_if_compiled(matrix), CodedWeight)
    on_a_card = SimpleNamespace(device=torch.device("cuda"), dtype=matrix.dtype, shape=matrix.shape)
    for kept in (cast("torch.Tensor", on_a_card), matrix.float(), matrix[:, :40]):
        assert rounded_if_compiled(kept) is kept
    with linear_weights(PrivateWeights("onednn")):
        assert rounded_if_compiled(matrix) is matrix
