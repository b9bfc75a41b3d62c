"""Findings about Ray, Serve and HAProxy. Knows no Ray."""

from __future__ import annotations

from collections.abc import Iterator

from specserve.cluster.checkup import Checkup
from specserve.tools.doctor.findings import Finding, bad, ok, warn


def ray(found: Checkup) -> Iterator[Finding]:
    """Check which Ray would serve, and whether the config fits its resources."""
    there = ", ".join(f"{found.resources.get(kind, 0):g} {kind}s" for kind in ("CPU", "GPU"))
    where = (
        f"joins the cluster that runs here ({there})"
        if found.joins
        else f"starts a cluster of its own ({there})"
    )
    yield ok("ray", f"{found.version}; `specserve serve` {where}")
    if found.refusal is not None:
        remedy = (
            "add nodes, or ask for less: target.tensor_parallel, draft.num_gpus, replicas.min, "
            "threads, or a device of cpu"
        )
        yield bad("ray, resources", found.refusal, remedy)
    else:
        yield ok("ray, resources", "the config finds a place")
    if found.serves:
        yield warn(
            "ray, serve",
            "Serve runs on it already",
            "http.host and http.port are those that it was started with; `serve shutdown` ends it",
        )


def proxy(found: Checkup) -> Iterator[Finding]:
    """Check whether Serve can put HAProxy in front."""
    if not found.proxy_ports:
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
    else:
        yield ok("HAProxy", found.proxy)
