"""Relays on all links of a server under test, which then go over TCP as between machines.

`RelayHub` starts a process with the relays. A RelayedEngine has it open one for each address that
it connects to: its workers', and the gateways' that it sends chunks to.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from specserve.cluster.deployments import Engine
from specserve.cluster.engine.remote import RemoteDrafter, RemoteTarget
from specserve.cluster.placement import Bundle
from specserve.cluster.transport import chunk_stream, link
from specserve.cluster.transport.endpoint import Address, LinkTiming, Socket, connect
from specserve.cluster.transport.link import Client
from specserve.config.tree import Config
from tests.support.relay import HOST, Relay, through

HUB_PORT = "SPECSERVE_TEST_RELAY_HUB"
"""Environment variable with the port of the hub; Ray's processes inherit it."""
PAIRS = ("coordinator-target", "coordinator-draft", "engine-gateway")
KINDS = ("cut", "delay", "half-open", "partition")


class RelayHub:
    """Process with the relays of all links, which `inject` breaks."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            (sys.executable, "-m", "tests.chaos.relays"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())

    async def inject(self, pair: str, kind: str, seconds: float) -> int:
        """Break the links of a pair of roles, heal them after so long, and return their number."""
        command = {"do": "break", "pair": pair, "kind": kind, "seconds": seconds}
        answer = await asyncio.to_thread(_ask, self.port, command)
        return int(answer["links"])

    def close(self) -> None:
        with self._process as process:
            assert process.stdin is not None
            process.stdin.close()


class RelayedEngine(Engine):
    """Engine whose links lead through relays of the hub that HUB_PORT names."""

    # Serve awaits the constructor; type checkers do not know that.
    async def __init__(  # type: ignore[misc]
        self, config: Config, bundles: Sequence[Bundle], board: Any
    ) -> None:
        install(int(os.environ[HUB_PORT]))
        await super().__init__(config, bundles, board)


def install(hub: int) -> None:
    """Make the links of this process go through relays, labelled with their pairs of roles."""

    def connect_to_worker(socket: Socket, address: Address, timing: LinkTiming) -> None:
        connect(socket, relayed(hub, address, pair=""), timing)

    def connect_to_gateway(socket: Socket, address: Address, timing: LinkTiming) -> None:
        connect(socket, relayed(hub, address, pair="engine-gateway"), timing)

    vars(link)["connect"], vars(chunk_stream)["connect"] = connect_to_worker, connect_to_gateway
    for kind, pair in ((RemoteTarget, PAIRS[0]), (RemoteDrafter, PAIRS[1])):
        _label_on_attach(kind, hub, pair)


def _label_on_attach(kind: type[RemoteTarget] | type[RemoteDrafter], hub: int, pair: str) -> None:
    attach = kind.attach

    def attach_and_label(self: Any, clients: Sequence[Client]) -> None:
        for client in clients:
            _ask(hub, {"do": "label", "target": client._address.port, "pair": pair})
        attach(self, clients)

    kind.attach = attach_and_label  # type: ignore[method-assign, assignment]


def relayed(hub: int, address: Address, *, pair: str) -> Address:
    command = {"do": "open", "host": address.host, "port": address.port, "pair": pair}
    return through(address, int(_ask(hub, command)["port"]))


def _ask(hub: int, command: dict[str, Any]) -> dict[str, Any]:
    with socket.create_connection((HOST, hub)) as connection, connection.makefile("rw") as lines:
        lines.write(json.dumps(command) + "\n")
        lines.flush()
        answer: dict[str, Any] = json.loads(lines.readline())
    return answer


class _Relays:
    """The relays of the hub's process, by the port that they lead to."""

    def __init__(self) -> None:
        self._relays: dict[int, Relay] = {}
        self._pairs: dict[int, str] = {}

    async def execute(self, command: dict[str, Any]) -> dict[str, Any]:
        name = command.pop("do")
        if name == "open":
            return self._open(**command)
        if name == "label":
            self._pairs[command["target"]] = command["pair"]
            return {}
        return await self._break(**command)

    def close(self) -> None:
        for relay in self._relays.values():
            relay.close()

    def _open(self, *, host: str, port: int, pair: str) -> dict[str, Any]:
        if port not in self._relays:
            self._relays[port] = Relay(host, port)
        if pair:
            self._pairs[port] = pair
        return {"port": self._relays[port].port}

    async def _break(self, *, pair: str, kind: str, seconds: float) -> dict[str, Any]:
        relays = [self._relays[port] for port, label in self._pairs.items() if label == pair]
        for relay in relays:
            _break(relay, kind, seconds)
        if kind != "cut":
            await asyncio.sleep(seconds)
            for relay in relays:
                relay.heal()
        return {"links": len(relays)}


def _break(relay: Relay, kind: str, seconds: float) -> None:
    if kind == "cut":
        relay.cut(reset=True)
    elif kind == "delay":
        relay.delay(seconds)
    elif kind == "half-open":
        relay.half_open()
    elif kind == "partition":
        relay.partition()
    else:
        raise ValueError(f"no such fault of a link: {kind}; there are {', '.join(KINDS)}")


async def _serve_commands() -> None:
    """Execute one command a connection until the input of this process ends."""
    relays = _Relays()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        result = await relays.execute(json.loads(await reader.readline()))
        writer.write(json.dumps(result).encode() + b"\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, HOST, 0) as server:
        print(server.sockets[0].getsockname()[1], flush=True)
        await asyncio.to_thread(sys.stdin.read)
    relays.close()


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    asyncio.run(_serve_commands())
