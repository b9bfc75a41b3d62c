"""`specserve serve`: joins or starts Ray, deploys, says when it is ready, and takes everything down again."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from specserve import errors
from specserve.checkpoint_files import find_checkpoints
from specserve.cluster.logs import logging_config
from specserve.cluster.ray_session import ray_here, require_free_port, serve_runs
from specserve.config.tree import Config
from specserve.errors import SpecserveError, Unavailable
from specserve.progress import Bar
from specserve.terminal import Terminal

Say = Callable[[str], None]

LOOPBACK = ("127.0.0.1", "localhost", "::1")
START_TIMEOUT_S = 1800.0
WATCH_EVERY_S = 0.5
STATUS_EVERY_S = 10.0
REDRAW_EVERY_S = 1.0


def serve_until_ended(config: Config, say: Say, terminal: Terminal) -> None:
    """Returns after Ctrl-C or SIGTERM, with everything that it started gone. On a terminal it draws; elsewhere it says a line now and then."""
    find_checkpoints(config)  # mistakes in the paths should not wait for Ray
    with contextlib.ExitStack() as stack:
        with _starting(say, terminal) as told:
            ours = stack.enter_context(ray_here(config, told))
            stack.enter_context(_signals_as_interrupts())
            url = stack.enter_context(deployed(config, told, ours=ours))
        example = _example(url, config.model)
        say(f"ready {url}")
        say(example)
        with contextlib.suppress(KeyboardInterrupt):
            if terminal.draws:
                _watch(
                    terminal,
                    title=f"specserve   {config.model}   {url}",
                    hints=(example, "Ctrl-C ends it"),
                )
            else:
                _follow(say)
        say("stopping")


@contextlib.contextmanager
def _starting(say: Say, terminal: Terminal) -> Iterator[Say]:
    """Where somebody looks, what is said meanwhile becomes one line, beside which the seconds pass."""
    if not terminal.draws:
        yield say
        return
    states: dict[str, str] = {}  # of the deployments, once they are told of
    with Bar(terminal.out) as bar:

        def told(line: str) -> None:
            name, _, state = line.strip().partition(": ")
            states.update({name: state} if state else {})
            bar(", ".join(f"{name} {state}" for name, state in states.items()) or line)

        yield told


@contextlib.contextmanager
def deployed(
    config: Config, say: Say, *, ours: bool = True, engine: type[Any] | None = None
) -> Iterator[str]:
    """The application on the Ray that is joined, for as long as the context lasts; its URL. Serve ends too if it was started here, unless that
    Ray is `ours` and ends as a whole. `engine` may stand in for the real one.
    """
    from ray import serve

    from specserve.cluster.app import APP_NAME, application

    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # what is to be said, we say
    with contextlib.ExitStack() as stack:
        if not serve_runs():
            require_free_port(config)
            _start_serve(config)
            if not ours:
                stack.callback(serve.shutdown)
        stack.callback(serve.delete, APP_NAME)
        _deploy(
            lambda: serve.run(
                application(config, engine=engine),
                name=APP_NAME,
                logging_config=logging_config(config),
            ),
            say,
        )
        yield _url()


def _start_serve(config: Config) -> None:
    """Serve waits for its controller and its proxy, and says little of why they do not come."""
    from ray import serve
    from ray.exceptions import RayError

    try:
        serve.start(
            proxy_location=_proxies(config),
            http_options=_http_options(config),
            logging_config=logging_config(config),
        )
    except (RayError, RuntimeError, TimeoutError) as error:
        why = f"Ray Serve did not start: {errors.first_line(error).rstrip('.')}"
        raise Unavailable(
            f"{why}; see whether the machine is busy or a port is taken (`specserve doctor`), and try again"
        ) from error


def _url() -> str:
    """Where Serve listens: a Serve that ran before us keeps the host and port that it was started with."""
    from ray.serve.context import _get_global_client

    client = _get_global_client()
    assert client is not None
    options = client.http_config
    return f"{'https' if options.ssl_certfile else 'http'}://{options.host}:{options.port}{options.root_path}"


def handle(deployment: str) -> Any:
    """Of a deployment of the application that runs."""
    from ray import serve

    from specserve.cluster.app import APP_NAME

    return serve.get_deployment_handle(deployment, APP_NAME)


@contextlib.contextmanager
def _signals_as_interrupts() -> Iterator[None]:
    """To be entered once Ray has put its own handlers in place. SIGINT too: a shell that starts us in the background has it ignored."""

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
    """A line for each deployment whose state has changed."""
    from ray import serve

    from specserve.cluster.app import APP_NAME

    with contextlib.suppress(
        Exception
    ):  # the controller may be starting still, or be away for a moment
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


def _watch(terminal: Terminal, *, title: str, hints: Sequence[str]) -> None:
    from specserve.cluster.console import Screen

    board, screen = handle("Board"), Screen(terminal, title=title, hints=hints)
    with terminal.page():
        while True:
            try:
                screen.draw(board.status.remote().result(timeout_s=5.0))
            except Exception as error:  # what is wrong is the status then
                screen.draw(None, missing=type(error).__name__)
            time.sleep(REDRAW_EVERY_S)


def _http_options(config: Config) -> dict[str, Any]:
    """The key before the certificate: Serve checks that they come together in that order."""
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


def _proxies(config: Config) -> str:
    """A proxy that listens on the loopback is of use to this node alone."""
    return "HeadOnly" if config.http.host in LOOPBACK else "EveryNode"


def _example(url: str, model: str) -> str:
    body = f'{{"model": "{model}", "prompt": "def read_lines(path):", "max_tokens": 48, "temperature": 0}}'
    return f"curl {url}/v1/completions -H 'Content-Type: application/json' -d '{body}'"
