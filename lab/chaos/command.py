"""`python -m lab.chaos`: inject faults into a local server and check its clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lab.chaos.faults import find_pids, parse_roles
from lab.chaos.report import lines
from lab.chaos.run import ChaosRun, process_faults
from specserve.errors import BadValue, SpecserveError
from specserve.tools.bench.address import ServerAddress
from specserve.tools.bench.command import find_model
from specserve.tools.bench.options import read_key

STOP_SHARE = 0.25  # of the faults in workers: SIGSTOP instead of SIGKILL


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """Checked options. Raises BadValue naming the option that makes no sense."""

    url: str
    roles: str
    kills: int
    model: str | None  # the server's first
    concurrency: int
    max_tokens: int
    seed: int
    api_key_file: Path | None

    def __post_init__(self) -> None:
        for name in ("kills", "concurrency", "max_tokens"):
            if (value := getattr(self, name)) < 1:
                option = "--" + name.replace("_", "-")
                raise BadValue(f"{option} must be 1 or more, not {value}", param=name)


def chaos(options: ChaosOptions, say: Callable[[str], None]) -> None:
    """Run the faults and print what clients saw.

    Raises SpecserveError if a text was lost, truncated or different.
    """
    roles = parse_roles(options.roles)
    for role in roles:
        if not find_pids(role):
            raise SpecserveError(
                f"no process of the role {role} runs on this machine; "
                "lab.chaos needs a server that runs here"
            )
    address = ServerAddress.from_url(options.url, read_key(options.api_key_file))

    async def run() -> None:
        chaos_run = ChaosRun(
            address,
            (await find_model(address, options.model)).name,
            options.concurrency,
            options.max_tokens,
        )
        outcome = await chaos_run.run(
            process_faults(roles, stop_share=STOP_SHARE),
            num_faults=options.kills,
            seed=options.seed,
            say=say,
        )
        for line in lines(", ".join(roles), outcome):
            say(line)
        if outcome.counts.num_failed:
            raise SpecserveError(f"{outcome.counts.num_failed} requests failed")

    asyncio.run(run())
