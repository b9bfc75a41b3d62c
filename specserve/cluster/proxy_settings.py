"""Settings of Serve and of the HAProxy in front of it, which it reads from the environment."""

from __future__ import annotations

import math
import os
import random
import resource
import socket

from specserve.cluster import haproxy
from specserve.cluster.gateway import header_encoding
from specserve.config.tree import Config
from specserve.errors import ConfigError

HA_PROXY = "RAY_SERVE_ENABLE_HA_PROXY"
SERVE_SETTINGS = {
    # HAProxy takes a sixth of the CPU that Serve's own proxy takes for a streamed chunk.
    HA_PROXY: "1",
    # The only load balancer in front is Serve's own, which needs no time to learn of a removal.
    # With the default of 30 s Ctrl-C would take as long.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
    "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "1",
    # Serve waits a minute for its proxies, but ends one that is not ready within three times this;
    # on a machine that is busy with other work its imports alone take longer than the 5 s set.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    header_encoding.SETTING: header_encoding.IMPORT_PATH,
    **haproxy.settings(),
}
PROXY_PORTS = (
    "RAY_SERVE_HAPROXY_METRICS_PORT",
    "RAY_SERVE_HAPROXY_STATS_PORT",
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
)
# Between the ports of Ray's workers and those that Serve gives to gateways; the system itself
# hands out none of them.
PROXY_PORT_RANGE = range(20000, 30000)
MIN_CONNECTIONS, MAX_CONNECTIONS, SPARE_HANDLES = 1_000, 20_000, 2_000
"""Clients that HAProxy may have, and file handles that it leaves for other ends."""


def serve_settings(config: Config) -> dict[str, str]:
    """Return the environment of Serve, without HAProxy if TLS is configured.

    Serve's HAProxy takes no certificate and would send plain HTTP to gateways that expect TLS.
    Serve's own proxy takes one.
    """
    files = [file for file in (config.http.tls_cert, config.http.tls_key) if file is not None]
    if not files:
        return SERVE_SETTINGS
    for file in files:
        if not os.access(file, os.R_OK):
            raise ConfigError(
                f"{file}, of http.tls_cert and http.tls_key, cannot be read; "
                "both name PEM files that this user may read"
            )
    if os.environ.get(HA_PROXY, "0") == "1":
        raise ConfigError(
            f"Serve's HAProxy cannot speak TLS: unset {HA_PROXY}, "
            "or leave http.tls_cert out and end TLS in a proxy in front"
        )
    return SERVE_SETTINGS | {HA_PROXY: "0"}


def proxy_ports(*, excluded: int) -> dict[str, str]:
    """Return free ports for Serve's proxies, by the variables that set them.

    Their defaults are the same for every Serve of the machine. Those that the environment sets
    are kept. Raises ConfigError when one of these is taken.
    """
    chosen: dict[str, str] = {}
    taken = {str(excluded)}
    for variable in PROXY_PORTS:
        if (given := os.environ.get(variable)) is not None:
            if not _is_free(int(given)):
                raise ConfigError(
                    f"{variable} is {given}, and that port is taken; set it to another, or leave "
                    "it out and a free one is chosen"
                )
            continue
        port = next(
            port
            for port in random.sample(PROXY_PORT_RANGE, len(PROXY_PORT_RANGE))
            if str(port) not in taken and _is_free(port)
        )
        chosen[variable] = str(port)
        taken.add(str(port))
    return chosen


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))  # as HAProxy does with its metrics and statistics
        except OSError:
            return False
    return True


def proxy_settings(config: Config, directory: str) -> dict[str, str]:
    """Return HAProxy's limits, and its files and sockets in `directory`, not under /tmp.

    Limits that the environment sets are kept.
    """
    limits = {
        # Seconds in which a client neither sends nor takes anything; Serve's is an hour.
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "60",
        "RAY_SERVE_HAPROXY_MAXCONN": str(_max_connections()),
        # Each gateway that comes or goes replaces HAProxy's process, and the old one keeps its
        # connections for that many seconds; with Serve's two minutes longer streams would break.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(
            math.ceil(max(part.limits.request_timeout_s for part in config.each_model))
        ),
    }
    return {
        **{name: os.environ.get(name, value) for name, value in limits.items()},
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{directory}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{directory}/admin.sock",
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{directory}/metrics.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": directory,
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{directory}/server-state",
    }


def _max_connections() -> int:
    """Return how many clients HAProxy may have: those that stay idle are among them.

    Each takes two file handles, and HAProxy asks for half as many again for its other ends; it
    does not start with fewer.
    """
    _, handles = resource.getrlimit(resource.RLIMIT_NOFILE)
    if handles == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(MIN_CONNECTIONS, min(MAX_CONNECTIONS, (handles - SPARE_HANDLES) // 3))
