"""Graphs of FlashInfer's passes: captured at start, for any sequences of their number of rows."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specserve.models.gpu import flashinfer_attention
from specserve.models.gpu.row_graphs import RowGraphs, runs_sizes
from specserve.models.llama import FusedLayer
from specserve.models.model import ModelOptions, open_model
from specserve.models.runner import Runner
from specserve.models.shard import Shard
from specserve.types import Step
from tests.support import checkpoints
from tests.support.card import emulated_cards, flashinfer
from tests.support.card.ranks import card_ranks

TEXT = tuple(range(3, 203))
PASSES = (
    ([Step(0, 0, TEXT[:40]), Step(1, 0, TEXT[:7])], [1, 1]),  # too many rows for a graph
    ([Step(0, 40, TEXT[40:45]), Step(1, 7, TEXT[7:8])], [5, 1]),
    ([Step(1, 8, TEXT[8:11])], [3]),
    ([Step(2, 0, TEXT[50:63])], [1]),  # a prompt of which one row has logits
    ([Step(0, 42, TEXT[42:43]), Step(1, 9, TEXT[9:10]), Step(2, 13, TEXT[63:64])], [1, 1, 1]),
    ([Step(0, 40, TEXT[40:44]), Step(1, 8, TEXT[8:11]), Step(2, 12, TEXT[62:65])], [4, 3, 3]),
)


@pytest.fixture(autouse=True)
def fp32(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compare in fp32, which FlashInfer lacks, so that no rounding hides a fault."""
    monkeypatch.setattr(flashinfer_attention, "TYPES", (torch.float32,))
    with flashinfer.installed(dtypes=(torch.float32, torch.bfloat16)):
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("llama", tmp_path_factory.mktemp("row_graphs") / "llama")


def open_runner(path: Path, device: str, shard: Shard | None = None) -> Runner:
    options = ModelOptions(dtype="float32", device=device, pages=60, prefix_caching=False)
    return open_model(path, options, shard=shard).runner


def logits(runner: Runner) -> Tensor:
    return torch.cat([runner.run(steps, counts) for steps, counts in PASSES]).cpu()


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


def test_a_graph_has_room_for_few_long_runs_or_for_many_short_ones() -> None:
    assert [(size.rows, size.seqs) for size in runs_sizes(9)] == [(16, 8), (16, 16)]
    assert runs_sizes(17) == [], "more than the largest graph"


def test_passes_of_any_rows_replay_what_was_captured_at_the_start(checkpoint: Path) -> None:
    expected = logits(open_runner(checkpoint, "cpu"))
    with emulated_cards() as ledger:
        runner = open_runner(checkpoint, "cuda")
        ledger.clear()
        found = logits(runner)
        assert (ledger.num_graphs, ledger.num_replays) == (0, len(PASSES) - 1)
        runner.cache.check()
    assert_close(found, expected)


def test_network_without_some_layers_has_graphs_of_its_own(checkpoint: Path) -> None:
    whole = open_runner(checkpoint, "cpu")
    expected = logits(_skipping(whole))
    with emulated_cards() as ledger:
        runner = open_runner(checkpoint, "cuda")
        assert_close(logits(_skipping(runner)), expected)
        ledger.clear()
        assert_close(logits(runner), logits(whole))
        assert ledger.num_replays == len(PASSES) - 1


def _skipping(runner: Runner) -> Runner:
    network: Any = runner.network
    return Runner(network.without_layers([0]), runner.cache, device=runner.device)


def test_ranks_sum_inside_their_graphs(checkpoint: Path) -> None:
    expected = logits(open_runner(checkpoint, "cpu"))
    with emulated_cards(2) as ledger, card_ranks(2) as ranks:

        def work(rank: int) -> Tensor:
            runner = open_runner(checkpoint, f"cuda:{rank}", Shard(rank, 2))
            ranks.exchange("all ranks have opened", torch.zeros(1, device=f"cuda:{rank}"))
            ledger.clear()
            return logits(runner)

        found = ranks.run(work)
    assert ranks.calls[0] == ranks.calls[1]
    assert ledger.num_replays == 2 * (len(PASSES) - 1)
    assert_close(found[0], expected)


def test_all_ranks_run_their_passes_where_one_cannot_capture_them(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise one rank would replay a sum that the others never join."""
    expected, forward = logits(open_runner(checkpoint, "cpu")), FusedLayer.forward

    def reads_on_the_host(self: FusedLayer, x: Tensor, *given: Any) -> Tensor:
        if x.device.index == 1:
            x.sum().item()
        return forward(self, x, *given)

    monkeypatch.setattr(FusedLayer, "forward", reads_on_the_host)
    with emulated_cards(2) as ledger, card_ranks(2) as ranks:
        found = ranks.run(
            lambda rank: logits(open_runner(checkpoint, f"cuda:{rank}", Shard(rank, 2)))
        )
    assert ledger.num_replays == 0
    assert "a pass cannot be captured: _local_scalar_dense" in caplog.text
    assert "a pass cannot be captured: another rank cannot capture the pass" in caplog.text
    assert_close(found[0], expected)


def test_wrong_replay_turns_graphs_off(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A pass that is captured on another stream than its kernels run on leaves the graph empty."""
    expected = logits(open_runner(checkpoint, "cpu"))
    with emulated_cards() as ledger, caplog.at_level(logging.WARNING):
        monkeypatch.setattr("tests.support.card.CardGraph.replay", lambda self: None)
        found = logits(open_runner(checkpoint, "cuda"))
        assert ledger.num_replays == 0
    assert "a replay gives other results than the pass" in caplog.text
    assert_close(found, expected)


def test_pass_of_more_pages_than_were_made_room_for_has_no_graph(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = logits(open_runner(checkpoint, "cpu"))
    monkeypatch.setattr("specserve.models.gpu.row_graphs.MAX_LISTED_PAGES", 16)
    with emulated_cards() as ledger:
        runner = open_runner(checkpoint, "cuda")
        assert isinstance(runner.network, RowGraphs)
        ledger.clear()
        assert_close(logits(runner), expected)
        assert ledger.num_replays == 2, "passes of one sequence, whose table has 16 pages"
