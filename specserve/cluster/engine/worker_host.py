"""The actor that holds the resources of a worker, and has the worker's process forked.

Importing this module is cheap, so that a coordinator, which only creates these actors, needs
neither torch nor transformers.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from specserve.cluster.engine import fork_server
from specserve.cluster.transport.endpoint import Address
from specserve.engine.draft_placement import PlacementChoice
from specserve.errors import WorkerLost
from specserve.types import ModelInfo

if TYPE_CHECKING:
    from specserve.config.tree import Config


@dataclass(frozen=True, slots=True)
class WorkerSite:
    """Node, address and GPUs of a worker that is started."""

    node: str  # Ray's id of the node
    address: str  # of the node
    accelerators: tuple[str, ...]  # Ray's ids of the worker's own GPUs


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Place where a worker runs."""

    node: str  # Ray's id of the node
    pid: int
    device: str
    accelerators: tuple[str, ...]  # Ray's ids of the worker's own GPUs

    @property
    def hardware(self) -> str:
        """Name of the device among its node's devices: `device` counts the worker's own GPUs."""
        number = int(self.device.partition(":")[2] or 0)
        if self.device.startswith("cuda") and number < len(self.accelerators):
            return f"GPU {self.accelerators[number]}"
        return self.device


@dataclass(frozen=True, slots=True)
class WorkerHello:
    """First message of a worker, before it loads its weights; from then on silence is noticed."""

    address: Address
    node: str
    pid: int


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """Properties of a worker that has loaded its model and can answer rounds."""

    address: Address
    place: WorkerPlace
    context: int  # most positions of one sequence
    num_pages: int
    info: ModelInfo | None = None  # set by a target rank
    draft_context: int | None = None  # of a drafter in the target's process
    choice: PlacementChoice | None = None  # if the placement of the draft was measured


class WorkerHost:
    """Actor with the resources of one worker, which is a process of its own.

    When the worker is lost, the host starts another one: with the same GPUs, and within
    milliseconds, since the fork server of the node has done the imports. When the host ends, the
    worker ends.
    """

    def __init__(self) -> None:
        self._worker: Connection | None = None

    def start(self, kind: str, config: Config, *arguments: object) -> WorkerHello:
        """Start a worker, `TargetWorker` or `DraftWorker`, in place of the one before."""
        if self._worker is not None:
            self._worker.close()
        context = ray.get_runtime_context()
        site = WorkerSite(
            context.get_node_id(),
            ray.util.get_node_ip_address(),
            tuple(context.get_accelerator_ids().get("GPU", ())),
        )
        key = f"{context.get_session_name()} {site.node} {sys.path}"
        self._worker = fork_server.fork(
            os.environ.get(fork_server.KEY_VARIABLE, key),
            list(modelling_modules(config)),
            parent_pid=int(os.environ["RAY_RAYLET_PID"]),
        )
        hello: WorkerHello = self._call(kind, site, config, *arguments)
        return hello

    def find_checkpoint(self) -> None:
        """Have a rank's checkpoint downloaded, if its node lacks it."""
        self._call("find_checkpoint")

    def open_rendezvous(self) -> tuple[str, int]:
        rendezvous: tuple[str, int] = self._call("open_rendezvous")
        return rendezvous

    def open(self, *arguments: object) -> WorkerReady:
        """Have the worker load its model; see the `open` of TargetWorker and DraftWorker."""
        ready: WorkerReady = self._call("open", *arguments)
        return ready

    def run(self) -> None:
        """Let the worker answer rounds; return when it has ended."""
        try:
            self._call("run")
        except WorkerLost:
            return

    def _call(self, method: str, *arguments: object) -> Any:
        """Return the result of a worker's method, or raise its error."""
        assert self._worker is not None
        try:
            self._worker.send((method, arguments))
            result = self._worker.recv()
        except (EOFError, OSError) as error:
            raise WorkerLost("the process of the worker has ended") from error
        if isinstance(result, Exception):
            raise result
        return result


def modelling_modules(config: Config) -> Iterator[str]:
    """Yield the names of the library's modules with the architectures of local models."""
    for path in (config.target.path, *(draft.path for draft in config.draft.drafter_configs)):
        try:
            kind = json.loads((Path(path or "") / "config.json").read_text())["model_type"]
        except (OSError, ValueError, KeyError):
            continue  # a model of the hub; the worker imports its module itself
        name = str(kind).replace("-", "_")
        yield f"transformers.models.{name}.modeling_{name}"
