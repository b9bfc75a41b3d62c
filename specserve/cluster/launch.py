"""Deploy the application on the Ray that was joined, and delete it at the end."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from specserve import errors
from specserve.cluster.logs import logging_config
from specserve.cluster.ray_session import require_free_port
from specserve.cluster.serve_instance import (
    ServeInstance,
    application_ownership,
    path_prefix,
    shut_down_if_empty,
    wait_for_proxies,
)
from specserve.config.tree import Config
from specserve.errors import ConfigError, SpecserveError, Unavailable

Say = Callable[[str], None]

LOOPBACK = ("127.0.0.1", "localhost", "::1")
START_TIMEOUT_S = 1800.0
POLL_EVERY_S = 0.2
HEALTHY = "healthy"  # state of a deployment whose replicas all run
RUNNING, FAILED = "RUNNING", "DEPLOY_FAILED"  # Serve's names for states of an application
INDENT = "  "  # of lines about one deployment


@contextlib.contextmanager
def deploy(
    config: Config,
    say: Say,
    *,
    owns_ray: bool = True,
    replace: bool = False,
    may_wait: bool = False,
    engine: type[Any] | None = None,
    require: Callable[[], None] | None = None,
) -> Iterator[str]:
    """Deploy the application on the Ray that was joined, yield its URL, and delete it at the end.

    Other applications stay as they are. Serve is shut down too if it was started here and has no
    application left, except on a Ray that we own, which ends as a whole. `engine` replaces the
    Engine class. `require` is called once Serve runs, and raises to prevent the deployment.
    """
    import ray.serve  # which sets the level of its logger

    logging.getLogger(ray.serve.__name__).setLevel(logging.ERROR)  # we report what matters
    with contextlib.ExitStack() as stack:
        found = ServeInstance.find()
        if found is None:
            require_free_port(config)
            _start_serve(config)
            if not owns_ray:
                stack.callback(shut_down_if_empty)
        else:
            found.require_place(config, replace=replace)
        url = _url(config)
        if not owns_ray:
            say(_announcement(config, found, url))
        if require is not None:
            require()
        stack.enter_context(application_ownership(config.name, say))
        _deploy_application(config, engine, owns_ray=owns_ray)
        _report_until_running(say, config, may_wait=may_wait)
        wait_for_proxies()
        yield url


def _announcement(config: Config, found: ServeInstance | None, url: str) -> str:
    """Say what will be done to the cluster that was joined."""
    paths = {} if found is None else found.paths
    others = ", ".join(sorted(set(paths) - {config.name}))
    verb = "replacing" if config.name in paths else "deploying"
    return f"{verb} the application {config.name} at {url}{f', beside {others}' if others else ''}"


def _start_serve(config: Config) -> None:
    """Start Serve, whose own errors say little about why its controller or proxy did not start."""
    from ray import serve
    from ray.exceptions import RayError

    try:
        serve.start(
            proxy_location=_proxy_location(config),
            http_options=_http_options(config),
            logging_config=logging_config(config),
        )
    except (RayError, RuntimeError, TimeoutError) as error:
        why = f"Ray Serve did not start: {errors.first_line(error).rstrip('.')}"
        raise Unavailable(
            f"{why}; see whether the machine is busy or a port is taken (`specserve doctor`), "
            "and try again"
        ) from error


def _url(config: Config) -> str:
    found = ServeInstance.find()
    assert found is not None, "it has been started"
    return found.url + config.http.root_path


def handle(config: Config, deployment: str) -> Any:
    """Return the handle of a deployment of the running application."""
    from ray import serve

    return serve.get_deployment_handle(deployment, config.name)


def _deploy_application(config: Config, engine: type[Any] | None, *, owns_ray: bool) -> None:
    """Ask Serve for the application, without waiting until it runs.

    Waiting is done here, not by Serve in a thread: a thread that outlived the connection to Ray
    would open another with its next call.
    """
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    from specserve.cluster.app import application

    target = serve.RunTarget(
        application(config, engine=engine),
        name=config.name,
        # On a Serve of our own every path is ours, with or without http.root_path.
        route_prefix="/" if owns_ray else path_prefix(config),
        logging_config=logging_config(config),
    )
    try:
        serve.run_many(
            [target],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )
    except (RayError, RayServeException, TimeoutError) as error:
        raise _first_error(str(error).splitlines()) from error


def _report_until_running(say: Say, config: Config, *, may_wait: bool) -> None:
    """Report the states of the deployments until the application runs.

    Raises the error for which it failed. Raises ConfigError if a bundle finds no node, which is
    only reported if it `may_wait`.
    """
    from specserve.cluster.board.placement_watch import PlacementWatch
    from specserve.cluster.node_resources import cluster_resources
    from specserve.cluster.placement import with_drafts_that_fit

    fitted = with_drafts_that_fit(config, num_gpus=cluster_resources().num_gpus)
    watch, reported = PlacementWatch(fitted), ""
    states: dict[str, str] = {}
    begun = time.monotonic()
    while not _is_running(config.name, states, say):
        why = watch.check(gateway_runs=states.get("Gateway") == HEALTHY)
        if why is not None and not may_wait:
            raise ConfigError(why)
        if why is not None and why != reported:
            say(f"waiting for nodes: {why}")
            reported = why
        if time.monotonic() - begun > START_TIMEOUT_S:
            raise Unavailable(f"the deployment was not ready within {START_TIMEOUT_S:g} s")
        time.sleep(POLL_EVERY_S)


def _is_running(app_name: str, states: dict[str, str], say: Say) -> bool:
    """Return whether the application runs; print a line for each deployment that has changed.

    Raises the first error in Serve's messages, which include tracebacks of ours, if it failed.
    """
    from ray import serve
    from ray.exceptions import RayError

    try:
        app = serve.status().applications.get(app_name)
    except RayError:  # the controller is away for a moment
        return False
    if app is None:
        return False
    for name, deployment in sorted(app.deployments.items()):
        state = deployment.status.value.lower().replace("_", " ")
        if states.get(name) != state:
            states[name] = state
            say(f"{INDENT}{name.lower()}: {state}")
    if app.status == FAILED:
        raise _first_error([*(each.message for each in app.deployments.values()), app.message])
    return bool(app.status == RUNNING)


def _first_error(messages: Sequence[str]) -> SpecserveError:
    """Return the first error of errors.py in Serve's tracebacks, or else an Unavailable.

    The latter quotes the last line of all messages.
    """
    lines = [line.strip() for message in messages for line in message.splitlines() if line.strip()]
    for line in lines:
        kind, _, message = line.partition(": ")
        error = getattr(errors, kind.removeprefix("specserve.errors."), None)
        if message and isinstance(error, type) and issubclass(error, SpecserveError):
            return error(message)
    return Unavailable(f"the deployment failed: {lines[-1] if lines else 'Serve does not say why'}")


def _http_options(config: Config) -> dict[str, Any]:
    """Return Serve's HTTP options. The key precedes the certificate, as Serve's check demands."""
    tls = (
        {"ssl_keyfile": config.http.tls_key, "ssl_certfile": config.http.tls_cert}
        if config.http.tls_cert
        else {}
    )
    return {
        "host": config.http.host,
        "port": config.http.port,
        **tls,
    }


def _proxy_location(config: Config) -> str:
    """Return the nodes with a proxy; one that listens on the loopback serves only its own node."""
    return "HeadOnly" if config.http.host in LOOPBACK else "EveryNode"
