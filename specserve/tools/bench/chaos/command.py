"""`specserve bench --chaos ROLES`: strikes a server that runs on this machine, and judges what its clients saw."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from specserve.errors import SpecserveError
from specserve.tools.bench.address import Address
from specserve.tools.bench.chaos.faults import check_roles, processes
from specserve.tools.bench.chaos.report import lines
from specserve.tools.bench.chaos.run import Siege, processes_of
from specserve.tools.bench.command import served_model
from specserve.tools.bench.options import Options, read_key

DEFAULT_CLIENTS = 16
STOPPING = 0.25  # of the blows at workers: stopped, not killed


def chaos(options: Options, say: Callable[[str], None]) -> None:
    """Raises when any text was lost, truncated or another one."""
    assert options.chaos is not None
    roles = check_roles(options.chaos)
    for role in roles:
        if not processes(role):
            raise SpecserveError(
                f"no process of the role {role} runs on this machine; --chaos strikes servers that are here"
            )
    address = Address.of(options.url, read_key(options.api_key_file))

    async def besiege() -> None:
        siege = Siege(
            address,
            await served_model(address),
            options.concurrency or DEFAULT_CLIENTS,
            options.max_tokens,
        )
        outcome = await siege.run(
            processes_of(roles, stopping=STOPPING),
            num_blows=options.kills,
            seed=options.seed or 0,
            say=say,
        )
        for line in lines(", ".join(roles), outcome):
            say(line)
        if outcome.tally.num_failed:
            raise SpecserveError(f"{outcome.tally.num_failed} requests failed")

    asyncio.run(besiege())
