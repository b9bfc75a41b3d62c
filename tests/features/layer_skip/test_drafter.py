"""Layer skipping: the layers that are left out, loaded or shared, on tiny checkpoints."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from specserve import LLM, Sampling
from specserve.config.tree import config_from_keys
from specserve.drafters.registry import open_drafter
from specserve.errors import ConfigError
from specserve.features.layer_skip.drafter import LayerSkipDrafter
from specserve.models.checkpoints.load import load_model
from specserve.models.checkpoints.weights import Weights
from specserve.models.model import ModelOptions, open_model
from specserve.models.runner import Runner
from specserve.models.skip import skipped_layers
from specserve.types import DraftStep, Policy, Step, VerifyStep
from tests.support import checkpoints
from tests.support.engines import GREEDY, load_target, model_options
from tests.support.self_speculative_engines import LLM_KEYS, TEXT, small_gemma3


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_gemma3(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [(2, (1,)), (3, (1,)), (4, (1,)), (8, (1, 3, 5)), (9, (1, 3, 5, 7))],
    ids=lambda value: str(value).replace(" ", ""),
)
def test_by_default_about_every_second_layer_is_left_out_and_never_the_first_or_the_last_of_three(
    num_layers: int, expected: tuple[int, ...]
) -> None:
    assert skipped_layers(num_layers, None) == expected


@pytest.mark.parametrize(
    ("num_layers", "wanted"),
    [(2, (0, 1)), (1, None), (4, (1, 4))],
    ids=["all", "of a single one", "unknown"],
)
def test_a_skip_list_that_leaves_no_layer_or_names_one_that_is_not_there_is_refused(
    num_layers: int, wanted: tuple[int, ...] | None
) -> None:
    with pytest.raises(ConfigError, match=r"draft\.skip"):
        skipped_layers(num_layers, wanted)


@pytest.mark.parametrize("name", checkpoints.ARCHITECTURES)
def test_a_model_without_a_layer_is_the_same_loaded_partly_or_shared_by_the_whole(
    name: str, tmp_path: Path
) -> None:
    """Compare with the library's code without the layer; the other layers keep their own pages."""
    directory = checkpoints.make(name, tmp_path / name)
    where = ModelOptions(dtype="float32", device="cpu", pages=40)
    whole, part = open_model(directory, where), open_model(directory, where, skip=(1,))
    assert whole.network is not None
    assert (part.spec.num_layers, len(part.runner.cache.keys)) == (whole.spec.num_layers - 1,) * 2
    shared = Runner(
        whole.network.without_layers((1,)), whole.runner.cache, device=whole.runner.device
    )
    own = part.runner.run([Step(0, 0, TEXT)], [len(TEXT)])
    assert torch.allclose(shared.run([Step(0, 0, TEXT)], [len(TEXT)]), own, atol=1e-4)
    assert not torch.allclose(whole.runner.run([Step(0, 0, TEXT)], [len(TEXT)]), own, atol=1e-2)


def test_weights_of_skipped_layers_are_not_read(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    kept = Weights.read

    def recorded(self: Weights, name: str, **ranges: object) -> torch.Tensor:
        read.append(name)
        return kept(self, name, **ranges)  # type: ignore[arg-type]

    monkeypatch.setattr(Weights, "read", recorded)
    load_model(target, dtype=torch.float32, device="cpu", skip=(0, 2))
    assert any(".layers.1." in name for name in read)
    assert not any(".layers.0." in name or ".layers.2." in name for name in read)


def test_with_no_layer_left_out_every_draft_is_accepted(target: Path) -> None:
    """Draft with all layers: the drafter then attends to the shared pages as the target does."""
    with LLM(target, **LLM_KEYS | {"draft.kind": "layer_skip", "draft.skip": []}) as llm:
        (output,) = llm.generate(
            [TEXT],
            Sampling(max_tokens=40, seed=1, ignore_eos=True, speculation={"verifier": "coupled"}),
        )
    assert output.stats is not None
    assert output.stats.accepted == output.stats.drafted > 20


def test_on_its_own_device_layer_skip_loads_the_targets_layers_and_anticipates(
    target: Path,
) -> None:
    config = config_from_keys(
        {**LLM_KEYS, "target.path": str(target), "draft.kind": "layer_skip", "draft.skip": [1]}
    )
    drafter = open_drafter(config, target_vocab_size=checkpoints.VOCAB, has_own_device=True)
    policy = Policy(GREEDY, "block", 1, len(TEXT))
    (first,) = drafter.propose([DraftStep(1, 0, TEXT, 4, policy)], math.inf)
    drafter.prepare(bool)
    (second,) = drafter.propose(
        [DraftStep(1, first.num_cached, (*first.tokens[3:], 9), 4, policy)], math.inf
    )
    assert (len(first.tokens), len(second.tokens)) == (4, 4)
    assert second.anticipated is not None, "nothing was prepared"
    part = open_model(target, model_options(), skip=(1,)).runner
    assert part.run([Step(0, 0, TEXT)], [1]).argmax().item() == first.tokens[0]


def test_layer_skip_neither_keeps_pages_nor_puts_them_into_the_prefix_cache(target: Path) -> None:
    model = load_target(target, model_options(pages=20))
    drafter, cache = LayerSkipDrafter(model, (1,), support=8), model.runner.cache
    policy = Policy(GREEDY, "block", 1, 15)
    (verdict,) = model.verify([VerifyStep(1, 0, TEXT[:15], (), None, policy)])
    names = dict(cache._allocator._hashes)
    (proposal,) = drafter.propose(
        [DraftStep(1, 0, (*TEXT[:15], verdict.next_token), 12, policy)], math.inf
    )
    assert len(proposal.tokens) == 12
    drafter.propose([DraftStep(1, 15, (verdict.next_token,), 14, policy)], math.inf)
    assert cache._allocator._hashes == names, "the prefix cache contains a page with draft tokens"
    model.verify([VerifyStep(1, 15, (verdict.next_token,), proposal.tokens, None, policy)])
    cache.check()
    model.release([1])
    assert cache.num_used == 0
