"""A worker: what its loop answers, which exceptions end it, and the self-test before all that."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specserve.cluster.engine import worker_setup
from specserve.cluster.engine.group import _model_info
from specserve.cluster.engine.supervisor import Worker
from specserve.cluster.engine.worker_host import WorkerPlace, WorkerReady, WorkerSite
from specserve.cluster.engine.workers import DraftWorker, TargetWorker, _serve
from specserve.config.tree import config_from_keys
from specserve.errors import DeviceFault, OutOfPages
from specserve.wire.messages import Failure, Message, Stop, Verdicts, Verify
from tests.support.fakes import model_info


class Server:
    """Server end of a link with prepared messages."""

    def __init__(self, *messages: Message) -> None:
        self.messages, self.sent = list(messages), list[Message]()
        self.is_closed = False

    def receive(self, timeout_s: float | None = None, *, spin_s: float) -> Message:
        return self.messages.pop(0)

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def close(self) -> None:
        self.is_closed = True


def verdicts(message: Message) -> Message:
    assert isinstance(message, Verify)
    return Verdicts(message.number, (), 0.0, 0)


def test_an_exception_is_the_answer_to_its_round_and_the_next_round_is_answered() -> None:
    server: Any = Server(Verify(1, (), ()), Verify(2, (), ()), Verify(3, (), ()), Stop())
    errors: list[Exception] = [KeyError(), OutOfPages("no room")]

    def answer(message: Message) -> Message:
        if errors:
            raise errors.pop()
        return verdicts(message)

    _serve(server, answer, lambda: None, spin_s=0.0)
    assert server.sent == [
        Failure(1, "OutOfPages", "no room"),
        Failure(2, "KeyError", "KeyError"),
        Verdicts(3, (), 0.0, 0),
    ]
    assert server.is_closed


def test_an_exception_between_two_rounds_ends_the_worker_since_no_round_would_show_it() -> None:
    server: Any = Server(Verify(1, (), ()), Verify(2, (), ()), Stop())

    def prepare() -> None:
        raise KeyError("branch 7")

    with pytest.raises(KeyError):
        _serve(server, verdicts, prepare, spin_s=0.0)
    assert server.sent == [Verdicts(1, (), 0.0, 0)], "the answer of the round is not taken back"


@pytest.mark.parametrize("kind", [TargetWorker, DraftWorker])
def test_a_worker_on_a_faulty_device_fails_before_it_reads_weights_and_says_where(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: type[TargetWorker] | type[DraftWorker]
) -> None:
    monkeypatch.setattr(worker_setup, "find_fault", lambda device: "1 of 9 elements are wrong")
    nowhere = str(tmp_path / "no checkpoint")
    worker: Any = object.__new__(kind)
    worker._site = WorkerSite("a1b2", "10.0.0.5", ())
    worker._config = config_from_keys(
        {"target.path": nowhere, "draft.path": nowhere, "target.device": "cpu"}
    )
    worker._config = replace(
        worker._config, draft=replace(worker._config.draft, device="cpu", placement="apart")
    )
    with pytest.raises(DeviceFault) as raised:
        worker.open(*((None, None) if kind is TargetWorker else (model_info(),)))
    error = pickle.loads(pickle.dumps(raised.value))  # as it reaches the coordinator
    assert str(error) == "cpu of node 10.0.0.5 is faulty: 1 of 9 elements are wrong"
    assert (error.node, error.device) == ("a1b2", "cpu")


def test_one_rank_that_is_not_reproducible_makes_the_engine_so() -> None:
    address: Any = None
    infos = (model_info(), replace(model_info(), irreproducible="experts"))
    readies = [WorkerReady(address, address, 8, 8, info) for info in infos]
    ranks: list[Any] = [Worker("target", address, ready, address) for ready in readies]
    assert _model_info((ranks[0], ranks[1])) == infos[1]
    assert _model_info((ranks[0],)).irreproducible is None


def test_a_device_is_named_as_its_node_counts_it() -> None:
    assert WorkerPlace("a1b2", 1, "cuda:1", ("4", "6")).hardware == "GPU 6"
    assert WorkerPlace("a1b2", 1, "cuda:0", ()).hardware == "cuda:0"
    assert WorkerPlace("a1b2", 1, "cpu", ("4",)).hardware == "cpu"


def test_each_worker_takes_its_share_of_the_cores_that_its_container_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_setup, "usable_cores", lambda: 6)
    before = torch.get_num_threads()
    try:
        worker_setup.set_num_threads(None, sharers=2)
        assert torch.get_num_threads() == 3
        worker_setup.set_num_threads(None, sharers=8)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
