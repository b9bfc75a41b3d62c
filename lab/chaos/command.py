"""`specserve bench --chaos ROLES`: inject faults into a local server and check its clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from lab.chaos.faults import find_pids, parse_roles
from lab.chaos.report import lines
from lab.chaos.run import ChaosRun, process_faults
from specserve.errors import SpecserveError
from specserve.tools.bench.address import ServerAddress
from specserve.tools.bench.command import find_model
from specserve.tools.bench.options import BenchOptions, read_key

DEFAULT_CLIENTS = 16
STOP_SHARE = 0.25  # of the faults in workers: SIGSTOP instead of SIGKILL


def chaos(options: BenchOptions, say: Callable[[str], None]) -> None:
    """Run the faults and print what clients saw.

    Raises SpecserveError if a text was lost, truncated or different.
    """
    assert options.chaos is not None
    roles = parse_roles(options.chaos)
    for role in roles:
        if not find_pids(role):
            raise SpecserveError(
                f"no process of the role {role} runs on this machine; "
                "--chaos needs a server that runs here"
            )
    address = ServerAddress.from_url(options.url, read_key(options.api_key_file))

    async def run() -> None:
        chaos_run = ChaosRun(
            address,
            (await find_model(address, options.model)).name,
            options.concurrency or DEFAULT_CLIENTS,
            options.max_tokens,
        )
        outcome = await chaos_run.run(
            process_faults(roles, stop_share=STOP_SHARE),
            num_faults=options.kills,
            seed=options.seed or 0,
            say=say,
        )
        for line in lines(", ".join(roles), outcome):
            say(line)
        if outcome.counts.num_failed:
            raise SpecserveError(f"{outcome.counts.num_failed} requests failed")

    asyncio.run(run())
