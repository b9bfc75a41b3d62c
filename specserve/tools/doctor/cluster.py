"""Findings about Ray, Serve and HAProxy. Knows no Ray."""

from __future__ import annotations

from collections.abc import Iterator

from specserve.cluster import haproxy
from specserve.cluster.checkup import Checkup
from specserve.cluster.placement import FEW_GPUS
from specserve.tools.doctor.findings import Finding, bad, ok, warn


def ray(found: Checkup) -> Iterator[Finding]:
    """Check which Ray would serve, and whether the config finds a place on it."""
    there = ", ".join(f"{found.resources.get(kind, 0):g} {kind}s" for kind in ("CPU", "GPU"))
    where = (
        f"starts a Ray of its own ({there})"
        if found.joins is None
        else f"joins the Ray cluster at {found.joins} ({there})"
    )
    if found.joins is None and found.running:
        where += f", beside {', '.join(found.running)}; --join would join one of them"
    yield ok("ray", f"{found.version}; `specserve serve` {where}")
    if found.refusal is not None:
        remedy = "change what the sentence names, or take a Ray of its own (--own-ray)"
        yield bad("ray, place", found.refusal, remedy)
    else:
        moved = f"; draft.placement auto means together, {FEW_GPUS}" if found.moves_draft else ""
        yield ok("ray, place", f"the config finds a place{moved}")


def proxy(found: Checkup) -> Iterator[Finding]:
    """Check whether Serve can put HAProxy in front."""
    if not found.uses_proxy:
        yield ok(
            "HAProxy",
            "is not used: TLS, or RAY_SERVE_ENABLE_HA_PROXY=0; Serve's own proxy takes more CPU "
            "a chunk",
        )
    elif found.proxy is None:
        yield bad(
            "HAProxy",
            found.proxy_trouble,
            "install `ray[serve]`, which brings it, or set RAY_SERVE_ENABLE_HA_PROXY=0 and do with "
            "Serve's own proxy",
        )
    elif found.splices:
        yield warn(
            "HAProxy",
            f"{found.proxy}; {haproxy.COMMAND} is missing, so a client that leaves before an "
            "answer in one piece may not be noticed",
            "install specserve with pip, which brings the command",
        )
    else:
        yield ok("HAProxy", found.proxy)
