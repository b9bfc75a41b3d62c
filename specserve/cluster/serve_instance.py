"""The Serve of a Ray cluster: its address, its applications, and which of them is ours.

One Serve has one HTTP address; its applications differ by name and by the path they begin with.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from specserve.config.tree import Config
from specserve.errors import ConfigError

OWNER_NAMESPACE = b"specserve"
LAST_ANSWERS_S = 2.0
"""Time for the last answers of an application that is deleted."""
POLL_S = 0.1
OTHER_RAY = "or take a Ray of your own (--own-ray and another --port)"


@dataclass(frozen=True, slots=True)
class ServeInstance:
    """Address of a Serve that runs, and the paths of its applications by their names."""

    host: str
    port: int
    has_tls: bool = False
    paths: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def find(cls) -> ServeInstance | None:
        """Return the Serve of the cluster that was joined, or None if none runs there."""
        from ray.serve.context import _get_global_client

        if not is_serve_running():
            return None
        client = _get_global_client()
        assert client is not None, "the controller lives"
        options, details = client.http_config, client.get_serve_details()
        paths = {
            name: app["route_prefix"] or ""
            for name, app in details["applications"].items()
            if app["status"] != "DELETING"
        }
        return cls(options.host, options.port, bool(options.ssl_certfile), paths)

    def require_place(self, config: Config, *, replace: bool) -> None:
        """Raise ConfigError if the application cannot be added to the others."""
        self._require_address(config)
        name, path = config.name, path_prefix(config)
        if name in self.paths and not replace:
            raise ConfigError(
                f"an application {name} runs on this cluster already; give another name (--name) "
                f"and path (--set http.root_path=/PATH), --replace to replace it, {OTHER_RAY}"
            )
        if replace and name not in self.paths:
            raise ConfigError(
                f"--replace: no application {name} runs on this cluster, which has "
                f"{', '.join(sorted(self.paths)) or 'none'}; name one with --name, "
                "or leave --replace out"
            )
        for other, taken in self.paths.items():
            if taken == path and other != name:
                raise ConfigError(
                    f"the application {other} answers at {path} of {self.url} already; give "
                    f"another path (--set http.root_path=/{name}), {OTHER_RAY}"
                )

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.has_tls else 'http'}://{host}:{self.port}"

    def _require_address(self, config: Config) -> None:
        http = config.http
        if (self.host, self.port) != (http.host, http.port):
            raise ConfigError(
                f"Serve runs on this cluster already and listens on {self.host}:{self.port}, not "
                f"on {http.host}:{http.port}; give --host {self.host} --port {self.port}, "
                f"{OTHER_RAY}"
            )
        if self.has_tls != (http.tls_cert is not None):
            raise ConfigError(
                f"Serve runs on this cluster already, {'with' if self.has_tls else 'without'} "
                f"TLS; give http.tls_cert and http.tls_key as it has them, {OTHER_RAY}"
            )


def is_serve_running() -> bool:
    """Return whether Serve runs on the cluster, started here or elsewhere."""
    import ray
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    try:
        ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    except ValueError:
        return False
    return True


def path_prefix(config: Config) -> str:
    """Return the path by which Serve routes requests to the application."""
    return config.http.root_path or "/"


@contextlib.contextmanager
def application_ownership(name: str, say: Callable[[str], None]) -> Iterator[None]:
    """Take the application over from its last owner, and delete it at the end.

    It is left alone when somebody else has taken it over since.
    """
    from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

    key, mark = name.encode(), uuid.uuid4().bytes
    _internal_kv_put(key, mark, overwrite=True, namespace=OWNER_NAMESPACE)
    try:
        yield
    finally:
        if _internal_kv_get(key, namespace=OWNER_NAMESPACE) == mark:
            delete_application(name)
        else:
            say(f"{name} has been replaced by another `specserve serve`, and is left to it")


def delete_application(name: str, *, clock: Callable[[], float] = time.monotonic) -> None:
    """Delete an application, and return once it has gone or has had time for its last answers.

    A gateway that is deleted waits for its requests, which may wait for an engine that was lost.
    Serve goes on deleting what is left, and a Ray of our own ends with it.
    """
    from ray import serve

    serve.delete(name, _blocking=False)
    until = clock() + LAST_ANSWERS_S
    while (left_s := until - clock()) > 0 and _exists(name, timeout_s=left_s):
        time.sleep(POLL_S)


def _exists(name: str, *, timeout_s: float) -> bool:
    """Return whether Serve has the application, or does not say so in time.

    `serve.status` would wait without end for a controller that Ray cannot restart.
    """
    import ray
    from ray.exceptions import RayError
    from ray.serve.context import _get_global_client

    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return False
    try:
        details = ray.get(client._controller.get_serve_instance_details.remote(), timeout=timeout_s)
    except RayError:  # the controller is away for a moment, and goes on with it afterwards
        return True
    return name in details["applications"]


def wait_for_proxies() -> None:
    """Wait until the proxies know the applications that run."""
    from ray.serve.context import _get_global_client

    client = _get_global_client()
    assert client is not None, "Serve runs"
    client.wait_for_proxies_serving()


def shut_down_if_empty() -> None:
    """Shut Serve down unless it has applications."""
    from ray import serve

    found = ServeInstance.find()
    if found is not None and not found.paths:
        serve.shutdown()
