"""`make chaos`: every role of a server of its own is struck again and again under load; the table of what clients saw. Slow: an hour or more.

Not a test by itself, like proofs.py: tests/tools/bench/test_chaos.py tries who strikes and who judges.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import math
import os
import platform
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster

from specserve.cluster.app import APP_NAME, application
from specserve.cluster.logs import logging_config
from specserve.cluster.placement import bundles, has_room
from specserve.config.tree import parse
from specserve.tools.bench.address import Address
from specserve.tools.bench.chaos.faults import KILLED, Blow
from specserve.tools.bench.chaos.report import HEAD, lines, row
from specserve.tools.bench.chaos.run import Outcome, Siege, Strike, processes_of
from tests.support.ray_server import served

CLIENTS, TOKENS = 16, 400
BLOWS = {
    "draft": 100,
    "target": 100,
    "coordinator": 100,
    "controller": 20,
    "update": 50,
    "node": 20,
}
STOPPING = 0.2
KEYS = {"target.threads": 1, "draft.threads": 1, "cache.pages": 4096}
CPUS = {"head": 4, "node": 8}  # what Ray is told; the machine has what it has


class Nodes:
    """A head with Serve's own actors, and nodes that hold the engines: each can vanish, and another comes in its place."""

    def __init__(self, count: int) -> None:
        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": CPUS["head"],
                "labels": {"pool": "gateways"},
                "include_dashboard": False,
            },
        )
        self._nodes = [self._fresh() for _ in range(count)]

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    async def strike(self, chance: random.Random) -> Blow | None:
        node = self._nodes.pop(chance.randrange(len(self._nodes)))
        blow = Blow(asyncio.get_running_loop().time(), "node", KILLED, 0)
        await asyncio.to_thread(self._cluster.remove_node, node, False)
        self._nodes.append(await asyncio.to_thread(self._fresh))
        return blow

    def _fresh(self) -> object:
        return self._cluster.add_node(num_cpus=CPUS["node"], labels={"pool": "engines"})

    def shutdown(self) -> None:
        self._cluster.shutdown()


@contextmanager
def on_nodes() -> Iterator[Nodes]:
    nodes = Nodes(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", nodes.address)
        patch.setattr(
            "ray._private.utils.set_sigterm_handler", lambda handler: None
        )  # nodes are started from a thread, which may set none
        yield nodes
    nodes.shutdown()


class Updates:
    """Deploys another config: engines and gateway are replaced. What changes makes no difference to the texts.

    Each comes when the one before is over, and what it replaced has left: until then there is no room for new ones beside the old.
    """

    def __init__(self, keys: dict[str, object]) -> None:
        self._keys, self._count = keys, 0

    async def strike(self, chance: random.Random) -> Blow | None:
        self._count += 1
        config = parse({**self._keys, "limits.max_queued": 1024 + self._count})
        while not has_room(bundles(config, has_gpus=False), ray.available_resources()):
            await asyncio.sleep(0.5)
        loop = asyncio.get_running_loop()
        begun = loop.time()
        await asyncio.to_thread(
            serve.run, application(config), name=APP_NAME, logging_config=logging_config(config)
        )
        return Blow(begun, "update", "deployed anew", 0, until=loop.time())


def besiege(url: str, strike: Strike, *, blows: int, seed: int, seconds: float) -> Outcome:
    siege = Siege(Address.of(url), "demo", CLIENTS, TOKENS, seconds)
    return asyncio.run(
        siege.run(strike, num_blows=blows, seed=seed, say=lambda line: print(line, flush=True))
    )


def sieges(wanted: dict[str, int], **how: Any) -> Iterator[tuple[str, Outcome]]:
    """Processes first, on two replicas in one place; then nodes, with a replica each."""
    roles = {
        role: blows for role, blows in wanted.items() if role not in ("node", "update") and blows
    }
    if roles:
        with served({**KEYS, "replicas.min": 2, "replicas.max": 2}) as (url, _):
            for role, blows in roles.items():
                yield (
                    role,
                    besiege(url, processes_of([role], stopping=STOPPING), blows=blows, **how),
                )
    if wanted.get("update"):
        roomy = {
            **KEYS,
            "replicas.max": 2,
        }  # of which one is asked for: what an update needs beside it
        with served(roomy) as (url, config):
            yield (
                "update",
                besiege(
                    url,
                    Updates({**roomy, "http.port": config.http.port}).strike,
                    blows=wanted["update"],
                    **how,
                ),
            )
    if wanted.get("node"):
        places = {
            "http": "gateways",
            "target": "engines",
            "draft": "engines",
        }  # a gateway that dies takes its clients' connections with it
        labels = {f"{part}.label_selector": {"pool": pool} for part, pool in places.items()}
        with (
            on_nodes() as nodes,
            served({**KEYS, **labels, "replicas.min": 2, "replicas.max": 2}, join=True) as (url, _),
        ):
            yield "node", besiege(url, nodes.strike, blows=wanted["node"], **how)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for role, blows in BLOWS.items():
        parser.add_argument(
            f"--{role}", type=int, default=blows, metavar="N", help=f"blows; {blows} by default"
        )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="of each role: what has not been struck by then is not struck",
    )
    parser.add_argument(
        "--out", type=Path, help="where the table goes, after each role; the terminal by default"
    )
    given = parser.parse_args()
    rows = []
    for role, outcome in sieges(
        {role: getattr(given, role) for role in BLOWS}, seed=given.seed, seconds=60 * given.minutes
    ):
        print("\n".join(lines(role, outcome)), flush=True)
        rows.append(row(role, outcome))
        machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
        about = f"{datetime.date.today()}, {machine}; seed {given.seed}, {CLIENTS} streams of {TOKENS} tokens."
        told = "\n".join((about, "", HEAD, *rows, ""))
        if given.out is None:
            print(told)
        else:
            given.out.write_text(told, encoding="utf-8")


if __name__ == "__main__":
    main()
