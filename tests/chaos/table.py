"""`python -m tests.chaos.table`: repeated faults in every role of a server under load.

Slow: an hour or more. tests/lab/chaos/test_chaos.py tests the faults and checks that it uses.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import math
import platform
import random
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster

from lab.chaos.faults import KILLED, Fault, find_pids
from lab.chaos.report import TABLE_HEAD, ChaosOutcome, lines, table_row
from lab.chaos.run import ChaosRun, FaultInjector, process_faults
from specserve.cluster.app import application
from specserve.cluster.logs import logging_config
from specserve.cluster.placement import bundles, has_room
from specserve.config.tree import config_from_keys
from specserve.host import usable_cores
from specserve.tools.bench.address import ServerAddress
from tests.chaos.outcomes import OutcomeFile
from tests.support.ray_server import served

CLIENTS, TOKENS = 16, 400
NUM_FAULTS = {
    "draft": 500,
    "target": 500,
    "target-tp2": 500,
    "target-early": 50,
    "coordinator": 300,
    "coordinator-early": 20,
    "controller": 20,
    "update": 50,
    "node": 50,
}
TWO_REPLICAS: dict[str, object] = {"replicas.min": 2, "replicas.max": 2}
PROCESSES: tuple[tuple[dict[str, object], tuple[str, ...]], ...] = (
    ({}, ("draft", "target", "target-early")),
    ({"target.tensor_parallel": 2}, ("target-tp2",)),
    (TWO_REPLICAS, ("coordinator", "coordinator-early", "controller")),
)
"""Settings of a server, and the roles whose processes get faults there.

The next fault comes once all streams have gone on. After the loss of a coordinator or a node both
engines must serve again, too, since a second loss in the meantime leaves none. The roles in EARLY
wait for neither: only for a server that says that it is healthy.
"""
EARLY = ("target-early", "coordinator-early")
STOP_SHARE = 0.2
KEYS = {"target.dtype": "bfloat16", "target.threads": 1, "draft.threads": 1, "cache.pages": 4096}
# For Ray's scheduler; the machine may have fewer. An engine needs three: with room for two of them
# on a node, its loss could take both.
CPUS = {"head": 4, "node": 4}


class Nodes:
    """A head with Serve's own actors, and nodes with the engines.

    A fault removes a node and adds another in its place.
    """

    def __init__(self, count: int) -> None:
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": CPUS["head"],
                "labels": {"pool": "gateways"},
                "include_dashboard": False,
            },
        )
        self._nodes = [self._add_node() for _ in range(count)]

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    async def inject(self, rng: random.Random) -> Fault | None:
        node = self._nodes.pop(rng.randrange(len(self._nodes)))
        fault = Fault(asyncio.get_running_loop().time(), "node", KILLED, 0)
        await asyncio.to_thread(self._cluster.remove_node, node, False)
        self._nodes.append(await asyncio.to_thread(self._add_node))
        return fault

    def _add_node(self) -> Any:
        return self._cluster.add_node(num_cpus=CPUS["node"], labels={"pool": "engines"})

    def shutdown(self) -> None:
        self._cluster.shutdown()


async def whole(name: str, before: Collection[int] = ()) -> None:
    """Wait until both engines of an application serve, as many new ones as ended since `before`.

    Serve may count an engine as running for many seconds after its node is gone. It starts another
    once it no longer does.
    """
    while not (
        len(pids := find_pids("coordinator")) >= 2
        and len(set(pids) - set(before)) >= len(set(before) - set(pids))
        and await asyncio.to_thread(_has_both, name)
    ):
        await asyncio.sleep(0.1)


def _has_both(name: str) -> bool:
    engines = serve.status().applications[name].deployments["Engine"]
    return engines.replica_states == {"RUNNING": 2}


def when_whole(name: str, inject: FaultInjector) -> FaultInjector:
    """Return an injector that waits until both engines of an application serve, after a loss."""
    before: list[int] = []  # processes of the engines at the last fault

    async def inject_later(rng: random.Random) -> Fault | None:
        nonlocal before
        await whole(name, before)
        before = find_pids("coordinator")
        return await inject(rng)

    return inject_later


@contextmanager
def on_nodes() -> Iterator[Nodes]:
    nodes = Nodes(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", nodes.address)
        # Nodes are started from a thread, which must not set signal handlers.
        patch.setattr("ray._private.utils.set_sigterm_handler", lambda handler: None)
        yield nodes
    nodes.shutdown()


class Updates:
    """Deployments of another config, which replace engines and gateway but change no text.

    An update begins when the one before is over and the replaced actors have left, because until
    then there is no room for new ones.
    """

    def __init__(self, keys: dict[str, object]) -> None:
        self._keys, self._count = keys, 0

    async def inject(self, rng: random.Random) -> Fault | None:
        self._count += 1
        config = config_from_keys({**self._keys, "limits.max_queued": 1024 + self._count})
        while not has_room(bundles(config, has_gpus=False), ray.available_resources()):
            await asyncio.sleep(0.5)
        loop = asyncio.get_running_loop()
        started = loop.time()
        await asyncio.to_thread(
            serve.run, application(config), name=config.name, logging_config=logging_config(config)
        )
        return Fault(started, "update", "redeployed", 0, until=loop.time())


def machine() -> str:
    """Return the machine's description for the head of a table."""
    return (
        f"{platform.system()} {platform.machine()}, {usable_cores()} cores, "
        f"Python {platform.python_version()}"
    )


def run_chaos(
    url: str,
    inject: FaultInjector,
    *,
    num_faults: int,
    seed: int,
    seconds: float,
    early: bool = False,
) -> ChaosOutcome:
    address = ServerAddress.from_url(url)
    chaos = ChaosRun(address, "demo", CLIENTS, TOKENS, seconds, waits_for_streams=not early)

    def say(line: str) -> None:
        print(line, flush=True)

    return asyncio.run(chaos.run(inject, num_faults=num_faults, seed=seed, say=say))


def all_outcomes(
    num_faults: dict[str, int], *, seed: int, seconds: float
) -> Iterator[tuple[str, ChaosOutcome]]:
    """Yield the outcome of each role.

    Processes come first, on one node; then updates, and nodes with a replica each.
    """
    for keys, names in PROCESSES:
        roles = {name: num_faults[name] for name in names if num_faults.get(name)}
        if roles:
            with served({**KEYS, **keys}) as (url, config):
                for name, number in roles.items():
                    inject = process_faults([name.partition("-")[0]], stop_share=STOP_SHARE)
                    if name == "coordinator":
                        inject = when_whole(config.name, inject)
                    yield (
                        name,
                        run_chaos(
                            url,
                            inject,
                            num_faults=number,
                            seed=seed,
                            seconds=seconds,
                            early=name in EARLY,
                        ),
                    )
    if number := num_faults.get("update", 0):
        # An update needs room for a second replica.
        roomy = {**KEYS, "replicas.max": 2}
        with served(roomy) as (url, config):
            inject = Updates({**roomy, "http.port": config.http.port}).inject
            yield (
                "update",
                run_chaos(url, inject, num_faults=number, seed=seed, seconds=seconds),
            )
    if number := num_faults.get("node", 0):
        # A gateway that dies closes its clients' connections, so no gateway is on these nodes.
        pools = {"http": "gateways", "target": "engines", "draft": "engines"}
        labels = {f"{part}.label_selector": {"pool": pool} for part, pool in pools.items()}
        with (
            on_nodes() as nodes,
            served({**KEYS, **labels, **TWO_REPLICAS}, join=True) as (url, config),
        ):
            inject = when_whole(config.name, nodes.inject)
            yield (
                "node",
                run_chaos(url, inject, num_faults=number, seed=seed, seconds=seconds),
            )


def add_outcomes_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--outcomes",
        type=Path,
        metavar="FILE",
        help="keeps the outcomes; the table is of all that are in it, of earlier runs too",
    )


def added(rows: list[str], name: str, outcome: ChaosOutcome, kept_in: Path | None) -> list[str]:
    """Return the rows with one for the outcome, or a file's rows with the outcome added."""
    if kept_in is None:
        return [*rows, table_row(name, outcome)]
    file = OutcomeFile(kept_in)
    file.append(name, outcome)
    return file.rows()


def page(rows: Sequence[str], seed: int) -> str:
    """Return the table, with the date, the machine and the load above it."""
    about = (
        f"{datetime.date.today()}, {machine()}; seed {seed}, {CLIENTS} streams of {TOKENS} tokens."
    )
    return "\n".join((about, "", TABLE_HEAD, *rows, ""))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for role, number in NUM_FAULTS.items():
        parser.add_argument(
            f"--{role}", type=int, default=number, metavar="N", help=f"faults; {number} by default"
        )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="for each role, after which no more faults are injected",
    )
    parser.add_argument(
        "--out", type=Path, help="where the table goes, after each role; the terminal by default"
    )
    add_outcomes_option(parser)
    options = parser.parse_args()
    num_faults = {role: getattr(options, role.replace("-", "_")) for role in NUM_FAULTS}
    rows: list[str] = []
    for role, outcome in all_outcomes(num_faults, seed=options.seed, seconds=60 * options.minutes):
        print("\n".join(lines(role, outcome)), flush=True)
        rows = added(rows, role, outcome, options.outcomes)
        if options.out is None:
            print(page(rows, options.seed))
        else:
            options.out.write_text(page(rows, options.seed), encoding="utf-8")


if __name__ == "__main__":
    main()
