"""An EAGLE-3 head that learns from served texts drafts better, and the texts stay the target's."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specserve import LLM, Sampling
from specserve.checkpoint_files import find_checkpoints
from specserve.config.tree import config_from_keys
from specserve.drafters.base import never
from specserve.drafters.eagle import EagleDrafter, EagleParts
from specserve.drafters.learning.idle_time import IdleTime
from specserve.drafters.learning.learner import DraftLearner, LearningOptions
from specserve.drafters.learning.open import eagle_learner
from specserve.drafters.learning.served_states import (
    MAX_ROWS,
    ServedStates,
    StateLimits,
    StatesWindow,
)
from specserve.drafters.learning.served_texts import CONTEXT_TOKENS, NEW_TOKENS, Window
from specserve.drafters.learning.swap import EagleSwap
from specserve.drafters.learning.trainable_eagle import TrainableEagle
from specserve.drafters.learning.trainer import MAX_BATCH, DraftTrainer, Weights
from specserve.drafters.registry import OpenDrafter, open_apart_drafter
from specserve.errors import UnsupportedModel
from specserve.models.eagle.checkpoint import EagleInfo, EagleWeights
from specserve.models.eagle.trainable_head import DEPTHS, EagleModule
from specserve.models.hidden_taps import SERVED_STATES_BYTES, HiddenRows, HiddenTaps
from specserve.types import DraftStep, Proposal, Request, Warp
from tests.support import checkpoints
from tests.support.eagle_heads import HeadSizes, ReferenceHead, write_specforge, write_speculators
from tests.support.engines import (
    GREEDY,
    AnticipatingDrafter,
    Engine,
    RandomPacer,
    load_target,
    model_options,
)
from tests.support.local_worker import run_apart
from tests.support.self_speculative_engines import LLM_KEYS, TEXT

OPTIONS = LearningOptions(
    min_windows=4, min_held_out=2, steps_between=40, epochs=1000, num_errors=0, measured_tokens=100
)
SIZES = HeadSizes(vocab_size=checkpoints.VOCAB, draft_vocab_size=checkpoints.VOCAB)
PAGES = 200


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = checkpoints.CONFIGS["llama"]()
    config.num_hidden_layers = 4
    directory = checkpoints.write(config, tmp_path_factory.mktemp("llama") / "target")
    checkpoints.add_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speculators(tmp_path_factory.mktemp("heads") / "head", SIZES)


def requests(warp: Warp = GREEDY) -> list[Request]:
    """Return requests for three texts: traffic of one kind, of which other copies are held out."""
    return [
        Request((1, i % 3 + 3, i % 3 + 7, 5), 60, warp, i % 3, seeded=True, ignore_eos=True)
        for i in range(9)
    ]


class Served(Engine):
    """An engine whose head is in the target's process."""

    def __init__(self, target: Path, head: Path) -> None:
        assert SIZES.taps is not None
        self.target = load_target(target, model_options(pages=PAGES), taps=HiddenTaps(SIZES.taps))
        self.eagle = EagleDrafter.from_files(head, self.target, dtype="float32", pages=4 * PAGES)
        self.drafter, self.ahead = self.eagle, None

    def learning(self, learner: DraftLearner) -> OpenDrafter:
        learner.idle = IdleTime(clock=time.perf_counter, share=1e9)
        return OpenDrafter(
            self.eagle,
            context=self.eagle.context,
            runners=(self.eagle.runner,),
            fanout=None,
            learner=learner,
        )


def serve_until(
    served: Served, learner: DraftLearner, is_done: Callable[[float], bool]
) -> list[tuple[int, ...]]:
    """Serve the same requests until it is done, by the acceptance of the latest run."""
    plain, drafter = served.run(requests(), drafts=False, gamma=0).texts, served.learning(learner)
    for _ in range(60):
        run = served.run(requests(), with_drafter=drafter, gamma=3, max_gamma=3)
        assert run.texts == plain
        if is_done(run.accepted / run.drafted):
            learner._builder.shutdown(wait=True)
            return plain
        for _ in range(100):
            learner.step(never)
    raise AssertionError(f"after all runs: {learner.progress}")


class ClaimingTrainer(DraftTrainer):
    """A trainer that returns random weights, and scores them best."""

    def scores(self, windows: Sequence[Window], weights: object) -> list[float]:
        return [float(weights is None)] * len(windows)

    def weights(self) -> Weights:
        return {name: torch.randn_like(value) for name, value in super().weights().items()}


def test_acceptance_rises_with_what_is_served_and_bad_weights_are_dropped(
    target: Path, head: Path
) -> None:
    served = Served(target, head)
    first = served.run(requests(), gamma=3, max_gamma=3)
    before = first.accepted / first.drafted
    opened = served.eagle.head.parts
    learner = eagle_learner(served.eagle, learning_rate=3e-3, options=OPTIONS, new_tokens=48)
    serve_until(served, learner, lambda rate: rate > before + 0.3)
    assert learner.progress.swaps > learner.progress.rollbacks
    assert served.eagle.runner.network is not opened.network
    assert served.eagle._target_states.project is not opened.projection

    learned, swap = served.eagle.runner.network, learner._draft
    seldom = replace(OPTIONS, steps_between=400)  # so that one swap is decided before the next
    claiming = eagle_learner(served.eagle, options=seldom, new_tokens=48)
    claiming._draft, claiming._trainer = swap, ClaimingTrainer(TrainableEagle(served.eagle.head))
    serve_until(served, claiming, lambda _: claiming.progress.rollbacks == 1)
    assert claiming.progress.swaps == 1
    assert served.eagle.runner.network is learned


class SwappingEagle(AnticipatingDrafter):
    """A head that anticipates and whose weights are swapped at random, in the middle of texts."""

    def __init__(self, eagle: EagleDrafter, others: Sequence[EagleParts]) -> None:
        super().__init__(eagle, None)
        self.swap, self.others, self.num_swaps = EagleSwap(eagle), list(others), 0

    def propose(self, steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]:
        proposals = super().propose(steps, deadline)
        if self.rng.random() < 0.3:
            chosen = int(self.rng.integers(len(self.others)))
            self.others[chosen] = self.swap.swap(self.others[chosen])
            self.num_swaps += 1
        return proposals


@pytest.mark.parametrize("warp", [GREEDY, Warp()], ids=["greedy", "sampled"])
def test_texts_are_those_of_plain_decoding_whatever_is_swapped(
    target: Path, head: Path, warp: Warp
) -> None:
    served = Served(target, head)
    eagle = served.eagle
    noisy = [
        {
            name: weight.detach() + 0.3 * torch.randn_like(weight) * weight.detach().std()
            for name, weight in EagleModule.from_weights(eagle.head.weights).named_parameters()
            if weight.std() > 0
        }
        for _ in range(2)
    ]
    parts = [eagle.head.build(eagle.head.weights.with_tensors(weights)) for weights in noisy]
    served.ahead = drafter = SwappingEagle(eagle, parts)
    plain = served.run(requests(warp), drafts=False, gamma=0).texts
    pacer = RandomPacer(max_gamma=5, seed=2)
    run = served.run(requests(warp), pacer=pacer, gamma=None, max_gamma=5)
    assert run.texts == plain
    assert run.drafted > 0
    assert drafter.num_swaps > 3


def window_of(tokens: range, indices: range, first_new: int) -> StatesWindow:
    states = torch.tensor([[float(i)] for i in indices])
    return StatesWindow(100, array("i", tokens), first_new, True, states, tuple(indices))


def test_a_head_learns_from_the_tokens_whose_states_have_all_arrived(
    target: Path, head: Path
) -> None:
    trained = TrainableEagle(Served(target, head).eagle.head)
    whole = trained.complete(window_of(range(20, 50), range(29), 10))
    assert isinstance(whole, StatesWindow)
    assert (whole.start, whole.first_new, len(whole.states)) == (100, 10, 30 - 1 - DEPTHS)
    gap = window_of(range(20, 50), range(29), 10)
    gap = replace(gap, indices=tuple(i for i in range(30) if i != 4))
    cut = trained.complete(gap)
    assert isinstance(cut, StatesWindow)
    assert (cut.start, cut.first_new, cut.tokens[0]) == (105, 5, 25)
    assert cut.states[0, 0] == 4  # of the index behind the gap, which the fifth row has
    assert trained.complete(window_of(range(20, 50), range(20, 24), 29)) is None


@pytest.mark.parametrize("variant", ["specforge, 120 of 300 ids", "norm before the residual"])
def test_the_head_in_training_computes_what_its_files_say(tmp_path: Path, variant: str) -> None:
    """Compare with the formulas: a chain of tokens behind a text."""
    small = HeadSizes(vocab_size=checkpoints.VOCAB)
    other = replace(small, norm_before_residual=True)
    sizes, write = (small, write_specforge) if "120" in variant else (other, write_speculators)
    directory = write(tmp_path / "head", sizes)
    weights = EagleWeights(directory, EagleInfo.from_directory(directory))
    module, reference = EagleModule.from_weights(weights), ReferenceHead(directory, sizes)
    tokens = torch.arange(30, 50)
    taps = torch.randn(20 - DEPTHS, 3 * 64)
    embedded = weights.read("embed_tokens.weight").float()[tokens[1:]]
    expected = reference.draft(tokens[: 1 - DEPTHS].tolist(), taps, tokens[1 - DEPTHS :].tolist())
    expected = expected[:, reference.target_ids].log_softmax(-1)
    with torch.no_grad():
        found = module(taps, torch.cat([embedded, embedded[-1:]]), first=len(taps) - 1)[:, 0]
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=1e-4)


def test_states_are_kept_in_bounded_memory_and_leave_with_their_windows() -> None:
    taken: list[StatesWindow] = []

    def complete(window: StatesWindow) -> Window:
        taken.append(window)
        return window

    states = ServedStates(StateLimits(8, 8, texts=2), complete)
    rows = torch.arange(1000.0)[:, None]
    for seq_id in range(3):  # one more than fits
        states.receive([HiddenRows(seq_id, 0, rows)])
        for start in range(1000, 1200, 4):  # draft tokens of two positions come again
            states.receive([HiddenRows(seq_id, start - 2, rows[:6] + start)])
    assert 2 * MAX_ROWS <= states.num_rows < 2 * (MAX_ROWS + 6)
    window = Window(1100, array("i", range(90)), 30, temperature=0.0)
    states.take(0, window)
    assert taken[0].indices == tuple(range(90))
    assert taken[0].states[:, 0].tolist()[:6] == [
        1102.0,
        1103.0,
        1104.0,
        1105.0,
        1106.0,
        1107.0,
    ]
    assert states.num_rows < 2 * MAX_ROWS
    assert states.take(2, window) is None
    states.receive([HiddenRows(2, 0, rows)])
    assert states.take(2, window) is None, "a window makes room for no further text"
    states.release([0, 1])
    assert not states.num_rows
    row_bytes = 3 * 4096 * 2
    limits = StateLimits.from_row_bytes(row_bytes)
    kept = (limits.windows + limits.held_out) * (CONTEXT_TOKENS + NEW_TOKENS)
    assert (kept + limits.texts * MAX_ROWS) * row_bytes <= SERVED_STATES_BYTES
    assert limits.windows > LearningOptions().min_windows
    assert limits.held_out >= LearningOptions().min_held_out


def test_a_head_apart_learns_from_the_states_that_are_sent(target: Path, head: Path) -> None:
    assert SIZES.taps is not None
    model = load_target(target, model_options(pages=PAGES), taps=HiddenTaps(SIZES.taps))
    config = config_from_keys(
        {
            "target.path": str(target),
            "draft.kind": "eagle",
            "draft.path": str(head),
            "draft.placement": "apart",
            "draft.dtype": "float32",
            "draft.device": "cpu",
            "draft.learn": True,
        }
    )
    drafter = open_apart_drafter(config, model.info, grammar_compiler=None, translation=None)
    learner = drafter.learner
    assert learner is not None
    run, _ = run_apart(model, drafter, requests(), gamma=3, max_gamma=3)
    plain = Served(target, head).run(requests(), drafts=False, gamma=0)
    assert run.texts == plain.texts
    windows = [*learner.texts.windows, *learner.texts.held_out]
    assert len(windows) == len(requests())
    assert all(isinstance(window, StatesWindow) and window.start == 0 for window in windows)
    learner._trainer.step(windows[:MAX_BATCH])
    assert learner.progress.steps == 1


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        (replace(SIZES, mask_token=7), "is a P-EAGLE head"),
        (replace(SIZES, num_layers=2), "has 2"),
    ],
    ids=["P-EAGLE", "two layers"],
)
def test_a_head_that_cannot_learn_is_refused_before_anything_is_loaded(
    target: Path, tmp_path: Path, sizes: HeadSizes, reason: str
) -> None:
    keys = {
        "target.path": str(target),
        "draft.kind": "eagle",
        "draft.path": str(write_speculators(tmp_path / "head", sizes)),
    }
    find_checkpoints(config_from_keys(keys))
    with pytest.raises(UnsupportedModel, match=f"{reason}; leave draft.learn out$"):
        find_checkpoints(config_from_keys({**keys, "draft.learn": True}))


def test_texts_of_an_llm_whose_head_learns_are_those_without_a_draft(
    target: Path, head: Path
) -> None:
    texts = []
    eagle = {"draft.kind": "eagle", "draft.path": str(head), "draft.learn": True}
    for keys in ({"draft.kind": "none"}, eagle):
        with LLM(target, **{**LLM_KEYS, **keys}) as llm:
            outputs = llm.generate([TEXT, TEXT[5:]], Sampling(max_tokens=24, temperature=0))
        texts.append([tuple(output.token_ids) for output in outputs])
    assert texts[0] == texts[1]
