"""A draft that learns from served texts drafts better, and the texts stay the target's."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specserve import LLM, Sampling
from specserve.checkpoint_files import find_checkpoints
from specserve.config.tree import config_from_keys
from specserve.drafters.learning.idle_time import IdleTime
from specserve.drafters.learning.learner import DraftLearner, LearningOptions
from specserve.drafters.learning.served_texts import ServedTexts, Window
from specserve.drafters.learning.swap import DraftWeights
from specserve.drafters.learning.trainable_model import TrainableModel
from specserve.drafters.learning.trainer import DraftTrainer, TrainableDraft
from specserve.drafters.registry import OpenDrafter
from specserve.errors import ConfigError, UnsupportedModel
from specserve.models.model import Model, open_model
from specserve.types import Request, Step, Warp
from tests.formats.check import MADE
from tests.support import checkpoints
from tests.support.engines import GREEDY, Engine, load_drafter, model_options
from tests.support.self_speculative_engines import LLM_KEYS, TEXT
from tests.support.swapped_drafts import rebuilt

OPTIONS = LearningOptions(
    min_windows=4, min_held_out=1, steps_between=4, epochs=1000, num_errors=0, measured_tokens=50
)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = checkpoints.make("llama", tmp_path_factory.mktemp("target"))
    checkpoints.add_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.perturb(target, tmp_path_factory.mktemp("draft") / "draft", 1.0)


def requests(warp: Warp = GREEDY) -> list[Request]:
    return [
        Request((1, i + 3, i + 7, 5), 60, warp, i, seeded=True, ignore_eos=True) for i in range(16)
    ]


class Served:
    """An engine whose draft learns, with a trainer of any kind."""

    def __init__(
        self, target: Path, draft: Path, make: Callable[[TrainableDraft], DraftTrainer]
    ) -> None:
        self.engine = Engine(target, draft)
        opened = open_model(draft, model_options())
        assert opened.rebuild is not None
        self.neural = load_drafter(opened, self.engine.target.info, support=64)
        self.engine.drafter = self.neural
        self.first_network = self.neural.runner.network
        trainer = make(TrainableModel.from_checkpoint(draft, CPU))
        self.learner = DraftLearner(
            DraftWeights(self.neural),
            trainer,
            opened.rebuild,
            options=OPTIONS,
            texts=ServedTexts(new_tokens=16),
        )
        self.learner.idle = IdleTime(clock=time.perf_counter, share=1e9)
        self.drafter = OpenDrafter(
            self.neural,
            context=self.neural.context,
            runners=(self.neural.runner,),
            fanout=None,
            learner=self.learner,
        )

    def serve(self, is_done: Callable[[float], bool]) -> None:
        """Serve the same requests until it is done, by the acceptance of the latest run."""
        plain = self.engine.run(requests(), drafts=False, gamma=0).texts
        for _ in range(200):
            run = self.engine.run(requests(), with_drafter=self.drafter, gamma=3, max_gamma=3)
            assert run.texts == plain
            if is_done(run.accepted / run.drafted):
                # A network that is built meanwhile would meet the models that the next test loads.
                self.learner._builder.shutdown(wait=True)
                return
        raise AssertionError(f"after all runs: {self.learner.progress}")


def test_acceptance_rises_with_what_is_served(target: Path, draft: Path) -> None:
    served = Served(target, draft, lambda draft: DraftTrainer(draft, learning_rate=3e-3))
    first = served.engine.run(requests(), gamma=3, max_gamma=3)
    before = first.accepted / first.drafted
    served.serve(lambda rate: rate > before + 0.05)
    progress = served.learner.progress
    assert progress.swaps > progress.rollbacks
    assert progress.steps >= OPTIONS.steps_between
    assert served.neural.runner.network is not served.first_network


class ClaimingTrainer(DraftTrainer):
    """A trainer that returns random weights, and scores them best until they are dropped."""

    claims = True

    def scores(
        self, windows: Sequence[Window], weights: Mapping[str, Tensor] | None
    ) -> list[float]:
        return [float(weights is None and self.claims)] * len(windows)

    def reset(self, weights: Mapping[str, Tensor]) -> None:
        self.claims = False
        super().reset(weights)

    def weights(self) -> Mapping[str, Tensor]:
        return {name: torch.randn_like(value) for name, value in super().weights().items()}


def test_weights_that_are_accepted_less_are_rolled_back(target: Path) -> None:
    served = Served(target, target, ClaimingTrainer)
    served.serve(lambda _: served.learner.progress.rollbacks == 1)
    progress = served.learner.progress
    assert progress.swaps == 1
    assert progress.acceptance_before == 1.0
    assert served.neural.runner.network is served.first_network


class ScoredTrainer:
    """A trainer whose weights are better than the served ones by these gains."""

    batch_size, num_steps = 64, 100

    def __init__(self, gains: Sequence[float]) -> None:
        self.gains, self.num_resets = gains, 0

    def scores(self, windows: Sequence[Window], weights: object) -> list[float]:
        return [0.0] * len(windows) if weights is not None else list(self.gains)

    def weights(self) -> dict[str, Tensor]:
        return {}

    def reset(self, weights: object) -> None:
        self.num_resets += 1


@pytest.mark.parametrize(
    ("gains", "is_reset"),
    [
        ([-0.2, 0.1, -0.3, 0.2], False),  # worse, by less than chance
        ([-0.2, -0.3, -0.2, -0.3], True),
        ([float("nan")] * 4, True),
        ([-0.001] * 4, False),
    ],
)
def test_training_starts_again_where_it_has_clearly_made_a_draft_worse(
    gains: list[float], is_reset: bool
) -> None:
    trainer: Any = ScoredTrainer(gains)
    draft: Any = None
    learner = DraftLearner(draft, trainer, lambda weights: None)
    learner.texts.held_out.extend([Window(0, array("i", [1, 2]), 1, 0.0)] * len(gains))
    learner._begin_comparison()
    assert trainer.num_resets == is_reset
    assert learner.progress.swaps == 0


def test_what_is_learned_is_what_was_served_accepted_draft_tokens_included(target: Path) -> None:
    served = Served(target, target, DraftTrainer)
    run = served.engine.run(requests(), with_drafter=served.drafter, gamma=3, max_gamma=3)
    assert run.accepted > 100
    texts = [
        array("i", (*request.prompt, *tokens))
        for request, tokens in zip(requests(), run.texts, strict=True)
    ]
    windows = [*served.learner.texts.windows, *served.learner.texts.held_out]
    for window in windows:
        stop = window.start + len(window.tokens)
        assert any(text[window.start : stop] == window.tokens for text in texts)
    learned = sum(len(window.tokens) - window.first_new for window in windows)
    # The last verdict of a text never reaches the drafter, and the end may be too short.
    assert learned >= 16 * (60 - 4 - 8)


def cached_keys(model: Model, seq_id: int, length: int) -> Tensor:
    cache = model.runner.cache
    slots = cache.slots(seq_id, 0, length)
    return torch.stack([keys[slots] for keys in (*cache.keys, *cache.values)])


def test_a_recomputed_sequence_has_the_keys_of_the_new_weights(target: Path, draft: Path) -> None:
    opened, other = (open_model(path, model_options(pages=16)) for path in (target, draft))
    drafter = load_drafter(opened, Engine(target).target.info, support=8)
    tokens = tuple(range(20, 60))
    for model in (opened, other):
        model.runner.run([Step(1, 0, tokens)], [0])
    weights = DraftWeights(drafter)
    weights.swap(rebuilt(opened, draft))
    expected = cached_keys(other, 1, len(tokens))
    assert (cached_keys(opened, 1, len(tokens)) - expected).abs().max() > 0.1
    assert weights.recompute(1, committed=38, salt=b"")
    torch.testing.assert_close(cached_keys(opened, 1, len(tokens)), expected, rtol=0, atol=1e-4)
    assert drafter.num_cached(1) == len(tokens)
    assert not weights.recompute(2, committed=38, salt=b"")
    opened.runner.cache.check()


def test_new_sequences_share_no_pages_of_earlier_weights(target: Path, draft: Path) -> None:
    engine, opened = Engine(target, draft), open_model(draft, model_options())
    engine.drafter = load_drafter(opened, engine.target.info, support=8)
    weights = DraftWeights(engine.drafter)
    cache = engine.drafter.runner.cache
    engine.run(long := [Request(tuple(range(20, 90)), 4, GREEDY, 0)], gamma=2, max_gamma=2)
    hits = cache.prefix_hits
    engine.run(long, gamma=2, max_gamma=2)
    assert cache.prefix_hits > hits
    hits = cache.prefix_hits
    weights.swap(rebuilt(opened, draft))
    engine.run(long, gamma=2, max_gamma=2)
    assert cache.prefix_hits == hits
    engine.run(long, gamma=2, max_gamma=2)
    assert cache.prefix_hits > hits


def test_texts_of_an_llm_that_learns_are_those_without_a_draft(target: Path, draft: Path) -> None:
    texts = []
    for keys in ({"draft.kind": "none"}, {"draft.path": str(draft), "draft.learn": True}):
        with LLM(target, **{**LLM_KEYS, **keys}) as llm:
            outputs = llm.generate([TEXT, TEXT[5:]], Sampling(max_tokens=24, temperature=0))
        texts.append([tuple(output.token_ids) for output in outputs])
    assert texts[0] == texts[1]


def test_what_cannot_learn_is_refused_before_anything_is_loaded(target: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"draft.learn belongs to the kinds neural, eagle, heads, unigram"
    ):
        config_from_keys({"target.path": "x", "draft.kind": "layer_skip", "draft.learn": True})
    neural = {"target.path": str(target), "draft.path": str(target), "draft.learn": True}
    with pytest.raises(ConfigError, match=r"draft.quantize rounds them; leave one out"):
        config_from_keys({**neural, "draft.quantize": "int8"})
    with pytest.raises(UnsupportedModel, match=r"is quantized \(gptq\); name the checkpoint"):
        find_checkpoints(config_from_keys({**neural, "draft.path": str(MADE / "gptq")}))
