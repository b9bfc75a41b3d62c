"""`python -m tests.chaos.network`: broken links between the roles of a server under load.

Head, target and drafter are nodes (raylets) of their own, and every link goes over TCP through a
relay (relays.py) that cuts, delays, half-opens and partitions it. Slow: an hour or more.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from lab.chaos.faults import Fault
from lab.chaos.report import lines
from tests.chaos.relays import HUB_PORT, KINDS, PAIRS, RelayedEngine, RelayHub
from tests.chaos.table import KEYS, add_outcomes_option, added, page, run_chaos
from tests.support.ray_server import served

NUM_FAULTS = {"cut": 200, "delay": 100, "half-open": 50, "partition": 50}
SECONDS = {"cut": (0.0, 0.0), "delay": (2.0, 2.0), "half-open": (1.0, 8.0), "partition": (1.0, 8.0)}
"""How long a fault lasts, drawn between two bounds. A delay is how much later everything comes."""


@contextmanager
def relayed_server() -> Iterator[tuple[str, RelayHub]]:
    """Serve the demo pair on three nodes with a relay on every link; yield the URL and the hub."""
    hub = RelayHub()
    labels = {"http": "head", "target": "target", "draft": "draft"}
    keys = {f"{part}.label_selector": {"node": node} for part, node in labels.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HUB_PORT, str(hub.port))
        cluster = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 4, "labels": {"node": "head"}, "include_dashboard": False},
        )
        for node in ("target", "draft"):
            cluster.add_node(num_cpus=4, labels={"node": node})
        patch.setenv("RAY_ADDRESS", cluster.address)
        try:
            with served({**KEYS, **keys}, join=True, engine=RelayedEngine) as (url, _):
                yield url, hub
        finally:
            cluster.shutdown()
            hub.close()


async def break_links(hub: RelayHub, pair: str, kind: str, rng: random.Random) -> Fault | None:
    """Break the links of a pair, and return when they are whole again."""
    loop = asyncio.get_running_loop()
    at, seconds = loop.time(), rng.uniform(*SECONDS[kind])
    if not await hub.inject(pair, kind, seconds):
        return None
    return Fault(at, pair, kind, 0, until=loop.time())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for kind, number in NUM_FAULTS.items():
        parser.add_argument(
            f"--{kind}",
            type=int,
            default=number,
            metavar="N",
            help=f"of each pair; {number} by default",
        )
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=PAIRS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--minutes",
        type=float,
        default=math.inf,
        help="for each kind of fault of each pair, after which no more faults are injected",
    )
    parser.add_argument("--out", type=Path, help="where the table goes; the terminal by default")
    add_outcomes_option(parser)
    options = parser.parse_args()
    rows: list[str] = []
    with relayed_server() as (url, hub):
        for pair, kind in itertools.product(options.pairs, KINDS):
            if not (number := getattr(options, kind.replace("-", "_"))):
                continue
            inject = partial(break_links, hub, pair, kind)
            outcome = run_chaos(
                url, inject, num_faults=number, seed=options.seed, seconds=60 * options.minutes
            )
            name = f"{pair}: {kind}"
            print("\n".join(lines(name, outcome)), flush=True)
            rows = added(rows, name, outcome, options.outcomes)
            if options.out is not None:
                options.out.write_text(page(rows, options.seed), encoding="utf-8")
    if options.out is None:
        print(page(rows, options.seed))


if __name__ == "__main__":
    main()
