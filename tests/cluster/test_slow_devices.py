"""A slow device of either role is in the trace, with its node, and avoided past the limit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from specserve.cluster.engine.device_failures import DeviceId
from specserve.cluster.engine.group import DRAFT, TARGET, WorkerGroup
from specserve.cluster.engine.worker_host import WorkerPlace
from specserve.cluster.placement import bundles
from specserve.cluster.transport.endpoint import KeyPair
from specserve.config.tree import Config
from specserve.engine.stragglers import SlowPass
from specserve.engine.trace import AVOIDED_DEVICE, SLOW_PASS, DeviceEvent


def worker(role: str, node: str) -> Any:
    place = WorkerPlace(node, 1, "cpu", ())
    return SimpleNamespace(role=role, ready=SimpleNamespace(place=place))


@pytest.mark.parametrize(("role", "node"), [(TARGET, "one"), (DRAFT, "other")])
def test_a_slow_pass_is_reported_for_its_role_and_a_lasting_one_avoids_its_device(
    role: str, node: str
) -> None:
    events: list[DeviceEvent] = []
    config = Config()
    group = WorkerGroup(
        config, bundles(config, has_gpus=False), KeyPair.generate(), None, events.append
    )
    roles: Any = [(TARGET, "one"), (DRAFT, "other")]
    supervisors: Any = tuple(SimpleNamespace(workers=(worker(*each),)) for each in roles)
    group.supervisors = supervisors
    options = group._watch_options(role)
    options["on_slow_pass"](SlowPass(4, 1.0, 0.01))
    options["on_too_slow"]()
    assert [(event.name, event.role, event.about["node"]) for event in events] == [
        (SLOW_PASS, role, node),
        (AVOIDED_DEVICE, role, node),
    ]
    place = worker(role, node).ready.place
    assert list(group._hosts.avoided) == [DeviceId(node, place.hardware)]
