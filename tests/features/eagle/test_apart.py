"""EAGLE-3 heads on a device of their own, whose states of the target arrive with messages."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from specserve.checkpoint_files import find_checkpoints
from specserve.cluster.engine.hidden_relay import HiddenRelay, newest_states
from specserve.config.tree import Config, config_from_keys
from specserve.drafters.registry import OpenDrafter, open_apart_drafter
from specserve.errors import ModelError
from specserve.features.eagle.drafter import EagleDrafter
from specserve.hidden_states import HiddenStates
from specserve.models.checkpoints.embedding import load_embedding
from specserve.models.hidden_taps import HiddenRows, HiddenTaps, pack_hidden, unpack_hidden
from specserve.models.target import TargetModel
from specserve.types import Request, Speculation, Warp
from tests.support import checkpoints
from tests.support.eagle_heads import HeadSizes, write_speculators
from tests.support.engines import GREEDY, Engine, RandomPacer, load_target, model_options
from tests.support.local_worker import run_apart, run_together

SIZES = HeadSizes(vocab_size=checkpoints.VOCAB)
PAGES = 60


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = checkpoints.CONFIGS["llama"]()
    config.num_hidden_layers = 4
    return checkpoints.write(config, tmp_path_factory.mktemp("llama") / "target")


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speculators(tmp_path_factory.mktemp("heads") / "head", SIZES)


def open_target(directory: Path, dtype: str = "float32") -> TargetModel:
    assert SIZES.taps is not None
    options = model_options(pages=PAGES, dtype=dtype)
    return load_target(directory, options, taps=HiddenTaps(SIZES.taps))


def config(target: Path, head: Path, **keys: Any) -> Config:
    return config_from_keys(
        {
            "target.path": str(target),
            "draft.kind": "eagle",
            "draft.path": str(head),
            "draft.placement": "apart",
            "draft.dtype": "float32",
            "draft.device": "cpu",
            **keys,
        }
    )


def open_apart(target: Path, head: Path, model: TargetModel, **keys: Any) -> OpenDrafter:
    return open_apart_drafter(
        config(target, head, **keys), model.info, grammar_compiler=None, translation=None
    )


def requests_for(*, warp: Warp = GREEDY, verifier: str = "speculative") -> list[Request]:
    return [
        Request(
            tuple(range(20 + 7 * i, 60 + 9 * i)),
            30 - 3 * i,
            warp,
            i,
            seeded=verifier == "coupled",
            ignore_eos=True,
            speculation=Speculation(verifier=None if verifier == "coupled" else verifier),
        )
        for i in range(4)
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_survive_the_way_over_the_wire_bit_for_bit(dtype: str) -> None:
    rows = [torch.randn(n, 6).to(getattr(torch, dtype)) for n in (3, 0, 1)]
    packed = pack_hidden([HiddenRows(i, 10 * i, each) for i, each in enumerate(rows)])
    assert [(each.seq_id, each.start, each.num_positions) for each in packed] == [
        (0, 0, 3),
        (2, 20, 1),
    ]
    for each, want in zip(unpack_hidden(packed), (rows[0], rows[2]), strict=True):
        assert torch.equal(each.rows, want)
        assert each.rows.dtype == want.dtype


def test_apart_a_head_drafts_what_it_drafts_together_with_one_message_a_round(
    llama: Path, head: Path
) -> None:
    """Any other state at T = 3 would give other draft tokens, and others would be accepted."""
    requests = requests_for(warp=Warp(temperature=3.0))
    together = open_target(llama)
    beside = EagleDrafter.from_files(head, together, dtype="float32")
    own = OpenDrafter(beside, context=beside.context, runners=(beside.runner,), fanout=None)
    expected = run_together(together, own, requests, gamma=4, max_gamma=4)
    model = open_target(llama)
    keys = {"speculation.anticipation.enabled": False}
    run, worker = run_apart(
        model, open_apart(llama, head, model, **keys), requests, gamma=4, max_gamma=4
    )
    assert run.texts == expected.texts
    assert run.accepted > 0
    assert run.drafted / run.num_rounds > 0.9 * expected.drafted / expected.num_rounds
    assert worker.num_calls <= run.num_rounds + 1, "one request a round, and one of releases"
    prompt = len(requests[0].prompt)
    first = [each for each in worker.received if each.seq_id == 0]
    assert (first[0].start, first[0].num_positions) == (0, prompt)
    assert [each.start for each in first[1:]] == [
        before.start + before.num_positions for before, _ in itertools.pairwise(first)
    ], "each committed position is sent once"


@pytest.mark.parametrize("verifier", ["speculative", "block", "coupled"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_texts_are_the_targets_own(llama: Path, head: Path, verifier: str, dtype: str) -> None:
    requests = requests_for(warp=Warp() if verifier == "coupled" else GREEDY, verifier=verifier)
    plain = Engine(llama, pages=PAGES, dtype=dtype).run(requests, gamma=0)
    model = open_target(llama, dtype)
    drafter = open_apart(llama, head, model, **{"draft.dtype": dtype})
    run, _ = run_apart(
        model,
        drafter,
        requests,
        pacer=RandomPacer(max_gamma=5, seed=1),
        rng=np.random.default_rng(0),
        gamma=None,
        max_gamma=5,
    )
    assert run.texts == plain.texts
    assert run.drafted > 0
    assert drafter.num_pages_used == model.runner.cache.num_used == 0


class LossyRelay(HiddenRelay):
    """A relay that loses every second lot of states."""

    def __init__(self) -> None:
        super().__init__()
        self.num_taken = 0

    def take(self) -> tuple[HiddenStates, ...]:
        self.num_taken += 1
        return super().take() if self.num_taken % 2 else super().take()[:0]


def test_lost_states_cost_acceptance_and_never_the_text(llama: Path, head: Path) -> None:
    requests = requests_for()
    plain = Engine(llama, pages=PAGES).run(requests, gamma=0)
    model = open_target(llama)
    run, worker = run_apart(
        model, open_apart(llama, head, model), requests, relay=LossyRelay(), gamma=3, max_gamma=4
    )
    assert run.texts == plain.texts
    assert run.drafted > 0
    assert worker.received


def test_what_waits_is_bounded_and_dropped_with_its_sequence() -> None:
    states = [HiddenStates(i % 3, i, 1, "float32", bytes(8)) for i in range(9)]
    assert [each.start for each in newest_states(states, 31)] == [6, 7, 8]
    assert newest_states(states, 7) == ()
    relay = HiddenRelay()
    relay.add(states)
    relay.release([0, 2])
    assert [each.start for each in relay.take()] == [1, 4, 7]
    assert relay.take() == ()


def test_a_head_without_an_embedding_reads_the_targets_from_its_files(
    llama: Path, tmp_path: Path
) -> None:
    sizes = HeadSizes(vocab_size=checkpoints.VOCAB, has_embedding=False)
    head = write_speculators(tmp_path / "head", sizes)
    stored = load_file(llama / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(load_embedding(llama, dtype=torch.float32), stored.float())
    model = open_target(llama)
    requests = requests_for()
    run, _ = run_apart(model, open_apart(llama, head, model), requests, gamma=3, max_gamma=3)
    assert run.texts == Engine(llama, pages=PAGES).run(requests, gamma=0).texts
    assert run.drafted > 0


@pytest.mark.parametrize("family", ["gpt2", "phi3", "gemma3"])
def test_the_embedding_of_a_family_is_found(family: str, tmp_path: Path) -> None:
    target = checkpoints.make(family, tmp_path / family)
    found = load_embedding(target, dtype=torch.float32)
    model = load_target(target, model_options(pages=8))
    assert model.network is not None
    assert torch.equal(found, model.network.embedding)


@pytest.mark.parametrize(
    ("sizes", "named"),
    [
        (HeadSizes(vocab_size=checkpoints.VOCAB, target_hidden_size=32), "hidden states of 32"),
        (HeadSizes(vocab_size=90, draft_vocab_size=50), "vocabulary of 90"),
        (HeadSizes(vocab_size=checkpoints.VOCAB, taps=(1, 2, 9)), "inputs of layers 1, 2, 9"),
    ],
    ids=["hidden size", "vocabulary", "layers"],
)
def test_a_head_of_another_target_is_one_sentence_before_weights_are_read(
    llama: Path, tmp_path: Path, sizes: HeadSizes, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints.add_tokenizer(llama)
    head = write_speculators(tmp_path / "head", sizes)

    def fail(*_: object, **__: object) -> None:
        pytest.fail("weights were read")

    monkeypatch.setattr("specserve.models.checkpoints.tensors.StoredTensors.read", fail)
    with pytest.raises(ModelError, match=named) as raised:
        find_checkpoints(config(llama, head))
    assert "\n" not in str(raised.value)


def test_a_relay_keeps_the_newest_of_what_nothing_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specserve.cluster.engine.hidden_relay.MAX_SENT_BYTES", 31)
    relay = HiddenRelay()
    for i in range(9):
        relay.add([HiddenStates(i % 3, i, 1, "float32", bytes(8))])
    assert [each.start for each in relay.take()] == [6, 7, 8]
    relay.add([HiddenStates(0, 9, 1, "float32", bytes(8)), HiddenStates(0, 10, 1, "float32", b"")])
    assert [each.start for each in relay.take()] == [9, 10]
