"""`specserve serve`: joins or starts Ray, deploys, says when it is ready, and takes everything down again."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from specserve import errors
from specserve.checkpoints import find_checkpoints
from specserve.cluster.placement import bundles, check_fits
from specserve.config import Config
from specserve.errors import ConfigError, SpecserveError, Unavailable

Say = Callable[[str], None]

SERVE_SETTINGS = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",  # a sixth of the CPU a streamed chunk that Serve's own proxy takes
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",  # the only balancer in front is Serve's own, which knows at once;
    "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "1",  # with the default of 30 s Ctrl-C would take as long
}
QUIET: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
LOOPBACK = ("127.0.0.1", "localhost", "::1")
GATEWAY_CPUS = 1.0
START_TIMEOUT_S = 1800.0
WATCH_EVERY_S = 0.5
STATUS_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """The Ray that we use, and whether it is ours to take down."""

    ours: bool
    serves_already: bool


def serve_until_ended(config: Config, say: Say) -> None:
    """Returns after Ctrl-C or SIGTERM, with everything that it started gone."""
    find_checkpoints(config)  # mistakes in the paths should not wait for Ray
    with _signals_as_interrupts(), running(config, say) as url:
        say(f"ready {url}")
        say(_example(url, config.model))
        try:
            _follow(say)
        except KeyboardInterrupt:
            say("stopping")


@contextlib.contextmanager
def running(config: Config, say: Say, *, engine: type[Any] | None = None) -> Iterator[str]:
    """The application, for as long as the context lasts; its URL. `engine` takes the place of the real one in measurements."""
    with _cluster(config, say) as cluster, _deployed(config, cluster, say, engine=engine):
        yield f"http://{config.http.host}:{config.http.port}{config.http.root_path}"


def handle(deployment: str) -> Any:
    """Of a deployment of the application that runs."""
    from ray import serve

    from specserve.cluster.app import APP_NAME

    return serve.get_deployment_handle(deployment, APP_NAME)


@contextlib.contextmanager
def _signals_as_interrupts() -> Iterator[None]:
    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _cluster(config: Config, say: Say) -> Iterator[Cluster]:
    """Joins the Ray that runs here; else starts one of our own, and ends it at the end."""
    for name, value in SERVE_SETTINGS.items():  # read where Serve starts, and when it is imported
        os.environ.setdefault(name, value)
    import ray

    with contextlib.ExitStack() as stack:
        try:
            ray.init(address="auto", **QUIET)
            say("joined the Ray cluster that runs here")
            ours = False
        except ConnectionError:
            _require_free_port(config)
            say("starting Ray")
            _keep_proxy_files_in(stack.enter_context(tempfile.TemporaryDirectory(prefix="specserve-")))
            ray.init(num_cpus=_cpus(config), include_dashboard=False, **QUIET)
            ours = True
        stack.callback(ray.shutdown)
        check_fits(_bundles(config), ray.cluster_resources(), replicas=max(1, config.replicas.min))
        yield Cluster(ours, serves_already=not ours and _serve_runs())


def _keep_proxy_files_in(directory: str) -> None:
    """Serve would leave its HAProxy's socket and files behind under /tmp."""
    os.environ["RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"] = f"{directory}/haproxy.cfg"
    os.environ["RAY_SERVE_HAPROXY_SOCKET_PATH"] = f"{directory}/admin.sock"
    os.environ["RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH"] = f"{directory}/metrics.sock"
    os.environ["RAY_SERVE_HAPROXY_SERVER_STATE_BASE"] = directory
    os.environ["RAY_SERVE_HAPROXY_SERVER_STATE_FILE"] = f"{directory}/server-state"


@contextlib.contextmanager
def _deployed(config: Config, cluster: Cluster, say: Say, *, engine: type[Any] | None) -> Iterator[None]:
    from ray import serve

    from specserve.cluster.app import APP_NAME, application

    if not cluster.serves_already:
        if not cluster.ours:
            _require_free_port(config)
        serve.start(proxy_location=_proxies(config), http_options=_http_options(config), logging_config=_quiet())
    try:
        _deploy(lambda: serve.run(application(config, engine=engine), name=APP_NAME, logging_config=_quiet()), say)
        yield
    finally:
        serve.delete(APP_NAME)
        if not cluster.ours and not cluster.serves_already:
            serve.shutdown()  # a Ray of our own ends as a whole


def _deploy(run: Callable[[], object], say: Say) -> None:
    """Runs it in a thread, and says meanwhile how far the deployments are. Raises the first error as one line."""
    failures: list[BaseException] = []

    def attempt() -> None:
        try:
            run()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=attempt, name="deploy", daemon=True)
    thread.start()
    told: dict[str, str] = {}
    begun = time.monotonic()
    while thread.is_alive():
        thread.join(WATCH_EVERY_S)
        _tell_progress(told, say)
        if time.monotonic() - begun > START_TIMEOUT_S:
            raise Unavailable(f"the deployment was not ready within {START_TIMEOUT_S:g} s")
    if failures:
        raise _first_refusal([*_messages(), str(failures[0])])


def _messages() -> list[str]:
    """What Serve has to say of the deployments, traces of ours included."""
    from ray import serve

    from specserve.cluster.app import APP_NAME

    with contextlib.suppress(Exception):  # then there is less to go by
        app = serve.status().applications[APP_NAME]
        return [deployment.message for deployment in app.deployments.values()]
    return []


def _tell_progress(told: dict[str, str], say: Say) -> None:
    """A line for each deployment whose state has changed; raises when one of them has failed for good."""
    from ray import serve

    from specserve.cluster.app import APP_NAME

    with contextlib.suppress(Exception):  # the controller may be starting still, or be away for a moment
        app = serve.status().applications.get(APP_NAME)
        for name, deployment in sorted(app.deployments.items()) if app else ():
            state = deployment.status.value.lower().replace("_", " ")
            if told.get(name) != state:
                told[name] = state
                say(f"  {name.lower()}: {state}")


def _first_refusal(messages: Sequence[str]) -> SpecserveError:
    """Serve reports traces. The first line of ours in them, else the last line of all, is what the user must know."""
    lines = [line.strip() for message in messages for line in message.splitlines() if line.strip()]
    for line in lines:
        kind, _, message = line.partition(": ")
        refusal = getattr(errors, kind.removeprefix("specserve.errors."), None)
        if message and isinstance(refusal, type) and issubclass(refusal, SpecserveError):
            return refusal(message)
    return Unavailable(f"the deployment failed: {lines[-1] if lines else 'Serve does not say why'}")


def _follow(say: Say) -> None:
    """A line of status now and then, when there is something to say."""
    from specserve.cluster.status import Pulse

    board, pulse = handle("Board"), Pulse()
    while True:
        time.sleep(STATUS_EVERY_S)
        try:
            line = pulse.line(board.status.remote().result(timeout_s=5.0), time.monotonic())
        except Exception as error:  # what is wrong is the status line then
            line = f"no status: {type(error).__name__}"
        if line is not None:
            say(line)


def _require_free_port(config: Config) -> None:
    host, port = config.http.host, config.http.port
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; choose another with --port") from error


def _bundles(config: Config) -> Any:
    import ray

    return bundles(config, has_gpus=ray.cluster_resources().get("GPU", 0) > 0)


def _cpus(config: Config) -> int:
    """Ray counts CPUs, it does not divide them: on a small machine we declare as many as our parts ask for."""
    each = sum(bundle.resources["CPU"] for bundle in bundles(config, has_gpus=False))
    return max(os.cpu_count() or 1, int(config.replicas.max * each + GATEWAY_CPUS) + 1)


def _serve_runs() -> bool:
    import ray
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    try:
        ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    except ValueError:
        return False
    return True


def _http_options(config: Config) -> dict[str, Any]:
    return {"host": config.http.host, "port": config.http.port, "root_path": config.http.root_path}


def _proxies(config: Config) -> str:
    """A proxy that listens on the loopback is of use to this node alone."""
    return "HeadOnly" if config.http.host in LOOPBACK else "EveryNode"


def _quiet() -> dict[str, Any]:
    return {"log_level": "WARNING", "enable_access_log": False}


def _example(url: str, model: str) -> str:
    body = f'{{"model": "{model}", "prompt": "def read_lines(path):", "max_tokens": 48, "temperature": 0}}'
    return f"curl {url}/v1/completions -H 'Content-Type: application/json' -d '{body}'"
