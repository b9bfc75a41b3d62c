"""Run `specserve serve`: join or start Ray, deploy, show the status, and take everything down."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console

from specserve import errors
from specserve.checkpoint_files import find_checkpoints
from specserve.cluster.logs import logging_config
from specserve.cluster.ray_session import is_serve_running, ray_session, require_free_port
from specserve.config.tree import Config
from specserve.errors import SpecserveError, Unavailable
from specserve.progress import ProgressBar

Say = Callable[[str], None]

LOOPBACK = ("127.0.0.1", "localhost", "::1")
START_TIMEOUT_S = 1800.0
POLL_EVERY_S = 0.5
STATUS_EVERY_S = 10.0
REDRAW_EVERY_S = 1.0


def serve_until_ended(config: Config, say: Say, console: Console) -> None:
    """Serve until Ctrl-C or SIGTERM, then remove everything that was started.

    On a terminal it draws a page of status; elsewhere it prints a line now and then.
    """
    find_checkpoints(config)  # mistakes in the paths should not wait for Ray
    with contextlib.ExitStack() as stack:
        with _start_progress(say, console) as report:
            owns_ray = stack.enter_context(ray_session(config, report))
            stack.enter_context(_signals_as_interrupts())
            url = stack.enter_context(deploy(config, report, owns_ray=owns_ray))
        example = _example(url, config.model)
        say(f"ready {url}")
        say(example)
        with contextlib.suppress(KeyboardInterrupt):
            if console.is_interactive:
                _draw_status(
                    console,
                    title=f"specserve   {config.model}   {url}",
                    hints=(example, "Ctrl-C ends it"),
                )
            else:
                _print_status(say)
        say("stopping")


@contextlib.contextmanager
def _start_progress(say: Say, console: Console) -> Iterator[Say]:
    """Yield a function that reports progress: on a terminal in one line, with the seconds."""
    if not console.is_interactive:
        yield say
        return
    states: dict[str, str] = {}  # of the deployments that have been reported
    with ProgressBar(console.file) as bar:

        def report(line: str) -> None:
            name, _, state = line.strip().partition(": ")
            states.update({name: state} if state else {})
            bar(", ".join(f"{name} {state}" for name, state in states.items()) or line)

        yield report


@contextlib.contextmanager
def deploy(
    config: Config, say: Say, *, owns_ray: bool = True, engine: type[Any] | None = None
) -> Iterator[str]:
    """Deploy the application on the Ray that was joined, yield its URL, and delete it at the end.

    Serve is shut down too if it was started here, except on a Ray that we own, which ends as a
    whole. `engine` replaces the Engine class.
    """
    from ray import serve

    from specserve.cluster.app import APP_NAME, application

    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # we report what matters
    with contextlib.ExitStack() as stack:
        if not is_serve_running():
            require_free_port(config)
            _start_serve(config)
            if not owns_ray:
                stack.callback(serve.shutdown)
        stack.callback(serve.delete, APP_NAME)
        _run_and_report(
            lambda: serve.run(
                application(config, engine=engine),
                name=APP_NAME,
                logging_config=logging_config(config),
            ),
            say,
        )
        yield _url()


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


def _url() -> str:
    """Return the URL of Serve; one that ran before us keeps the host and port of its start."""
    from ray.serve.context import _get_global_client

    client = _get_global_client()
    assert client is not None
    options = client.http_config
    scheme = "https" if options.ssl_certfile else "http"
    return f"{scheme}://{options.host}:{options.port}{options.root_path}"


def handle(deployment: str) -> Any:
    """Return the handle of a deployment of the running application."""
    from ray import serve

    from specserve.cluster.app import APP_NAME

    return serve.get_deployment_handle(deployment, APP_NAME)


@contextlib.contextmanager
def _signals_as_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGINT and SIGTERM.

    Enter this once Ray has installed its own handlers. SIGINT is included because a shell that
    starts us in the background ignores it.
    """

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {
        number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run_and_report(run: Callable[[], object], say: Say) -> None:
    """Call `run` in a thread and report the states of the deployments meanwhile.

    Raises the first error as one line.
    """
    failures: list[BaseException] = []

    def attempt() -> None:
        try:
            run()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=attempt, name="deploy", daemon=True)
    thread.start()
    states: dict[str, str] = {}
    begun = time.monotonic()
    while thread.is_alive():
        thread.join(POLL_EVERY_S)
        _report_states(states, say)
        if time.monotonic() - begun > START_TIMEOUT_S:
            raise Unavailable(f"the deployment was not ready within {START_TIMEOUT_S:g} s")
    if failures:
        raise _first_error([*_messages(), str(failures[0])])


def _messages() -> list[str]:
    """Return Serve's messages about the deployments, which include tracebacks of ours."""
    from ray import serve

    from specserve.cluster.app import APP_NAME

    with contextlib.suppress(Exception):  # the messages only improve the error
        app = serve.status().applications[APP_NAME]
        return [deployment.message for deployment in app.deployments.values()]
    return []


def _report_states(states: dict[str, str], say: Say) -> None:
    """Print a line for each deployment whose state has changed."""
    from ray import serve

    from specserve.cluster.app import APP_NAME

    # The controller may still be starting, or be away for a moment.
    with contextlib.suppress(Exception):
        app = serve.status().applications.get(APP_NAME)
        for name, deployment in sorted(app.deployments.items()) if app else ():
            state = deployment.status.value.lower().replace("_", " ")
            if states.get(name) != state:
                states[name] = state
                say(f"  {name.lower()}: {state}")


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


def _print_status(say: Say) -> None:
    """Print a line of status now and then, when it has something new."""
    from specserve.cluster.console import StatusLine

    board, status_line = handle("Board"), StatusLine()
    while True:
        time.sleep(STATUS_EVERY_S)
        try:
            line = status_line.next(board.status.remote().result(timeout_s=5.0), time.monotonic())
        except Exception as error:  # the error is the status then
            line = f"no status: {type(error).__name__}"
        if line is not None:
            say(line)


def _draw_status(console: Console, *, title: str, hints: Sequence[str]) -> None:
    from rich.live import Live

    from specserve.cluster.console import StatusScreen

    board, screen = handle("Board"), StatusScreen(title=title, hints=hints)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                page = screen.render(board.status.remote().result(timeout_s=5.0))
            except Exception as error:  # the error is the status then
                page = screen.render(None, missing=type(error).__name__)
            live.update(page, refresh=True)
            time.sleep(REDRAW_EVERY_S)


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
        "root_path": config.http.root_path,
        **tls,
    }


def _proxy_location(config: Config) -> str:
    """Return the nodes with a proxy; one that listens on the loopback serves only its own node."""
    return "HeadOnly" if config.http.host in LOOPBACK else "EveryNode"


def _example(url: str, model: str) -> str:
    body = (
        f'{{"model": "{model}", "prompt": "def read_lines(path):", '
        '"max_tokens": 48, "temperature": 0}'
    )
    return f"curl {url}/v1/completions -H 'Content-Type: application/json' -d '{body}'"
