"""Systems of the comparison: their processes, servers and commands, and forced acceptance."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from lab.bench.peers import llama, vllm
from lab.bench.peers.__main__ import taken_by_auto
from lab.bench.peers.comparison import OURS
from lab.bench.peers.forced_drafter import ForcedDrafter
from lab.bench.peers.process import PeerFailed, SystemProcess
from lab.bench.peers.section import SystemState
from lab.bench.peers.server_pool import ServerCommand, ServerPool
from lab.bench.peers.turn import TurnRequest
from lab.bench.shapes import PROPORTIONAL, LlamaShape, write_random
from specserve.api.tokenizer import Tokenizer
from specserve.types import DraftStep, Policy, Proposal, Warp
from tests.support.peer_systems import fake, process, turn

__all__ = ("fake", "process")


def test_what_a_library_prints_does_not_disturb_the_answers(process: SystemProcess) -> None:
    assert process.about() == {"version": "7"}
    assert 12 / 2 < process.rate(turn("plain", 5)) < 12 / 0.02


def test_prompts_go_together_or_one_after_the_other(process: SystemProcess) -> None:
    assert process.texts(turn("plain", 3)) == ("3 [1, 2] 3", "3 [3, 4] 3", "3 [5, 6] 3")
    assert process.texts(turn("plain", together=False)) == (
        "1 [1, 2] None",
        "1 [3, 4] None",
        "1 [5, 6] None",
    )


def test_a_refused_turn_and_one_with_too_few_tokens_leave_the_system_running(
    process: SystemProcess,
) -> None:
    for mode, why in (("refused", "ValueError: no such mode"), ("short", "11 tokens came of 12")):
        with pytest.raises(PeerFailed, match=why):
            process.rate(turn(mode))
    assert process.rate(turn("plain")) > 0


def test_a_dead_system_reports_its_last_stderr_line_for_every_question(
    process: SystemProcess,
) -> None:
    for _ in range(2):
        with pytest.raises(PeerFailed, match="ended with 3: out of luck"):
            process.rate(turn("dying"))


def test_a_stuck_system_is_killed_after_the_timeout(fake: Sequence[str]) -> None:
    with (
        SystemProcess(fake, timeout_s=2.0) as process,
        pytest.raises(PeerFailed, match="ended with -9"),
    ):
        process.rate(turn("stuck"))


def test_a_system_that_does_not_open_reports_the_reason(fake: Sequence[str]) -> None:
    with (
        SystemProcess([*fake, "closed"]) as process,
        pytest.raises(PeerFailed, match="RuntimeError: there is no model"),
    ):
        process.about()
    with pytest.raises(PeerFailed, match="No such file"):
        SystemProcess(["/nowhere/python"])


def test_a_system_ends_by_itself_when_its_stdin_closes(fake: Sequence[str]) -> None:
    with SystemProcess(fake) as process:
        process.about()
    assert Path(fake[-1]).read_text() == "gone\n"


PARENT = """
import subprocess, sys
from contextlib import contextmanager
from lab.bench.peers.turn import serve_turns

class Parent:
    def about(self):
        return {"child": str(child.pid)}
    def run(self, request):
        return len(request.prompts) * request.max_tokens
    def texts(self, request):
        return []

@contextmanager
def open_system():
    yield Parent()
    child.kill()

child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
serve_turns(open_system)
"""


def test_a_system_at_rest_computes_nothing_with_any_of_its_processes(tmp_path: Path) -> None:
    program = tmp_path / "parent.py"
    program.write_text(PARENT)
    with SystemProcess([sys.executable, str(program)]) as process:
        child = psutil.Process(int(process.about()["child"]))
        parent = child.parent()
        assert parent is not None
        for _ in range(2):
            process.rest()
            _wait_until_stopped(parent, child)
            assert not process.wake()
            assert process.rate(turn("plain")) > 0, "awake for its turn"
        process.rest()
    assert not psutil.pid_exists(parent.pid), "it was awake to end"


def test_a_system_whose_rest_ends_it_is_restarted(fake: Sequence[str]) -> None:
    with SystemProcess(fake, rest_ends=True) as process:
        assert not process.wake(), "it has just started"
        process.rest()
        assert Path(fake[-1]).read_text() == "gone\n"
        assert process.wake()
        assert process.about() == {"version": "7"}
        process.rest()


def _wait_until_stopped(*processes: psutil.Process) -> None:
    while any(process.status() != psutil.STATUS_STOPPED for process in processes):
        time.sleep(0.01)


SERVER = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *arguments):
        pass

if sys.argv[2] == "refused":
    sys.exit("ValueError: no such mode")
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


PREPARED = """
import time
from contextlib import contextmanager
from lab.bench.peers.turn import serve_turns

class Prepared:
    def about(self):
        return {}
    def prepare(self, request):
        time.sleep(0.5)
        self.mode = request.mode
    def run(self, request):
        assert self.mode == request.mode
        return len(request.prompts) * request.max_tokens
    def texts(self, request):
        return []

@contextmanager
def open_system():
    yield Prepared()

serve_turns(open_system)
"""


def test_what_a_system_does_before_a_request_is_not_timed(tmp_path: Path) -> None:
    program = tmp_path / "prepared.py"
    program.write_text(PREPARED)
    with SystemProcess([sys.executable, str(program)]) as process:
        assert process.rate(turn("plain")) > 12 / 0.5


def test_a_pool_ends_the_server_that_was_not_used_for_longest(tmp_path: Path) -> None:
    program = tmp_path / "server.py"
    program.write_text(SERVER)

    def command(request: TurnRequest, port: int) -> ServerCommand:
        started.append(request.mode)
        return ServerCommand([sys.executable, str(program), str(port), request.mode])

    started: list[str] = []
    with ServerPool(command, limit=2) as pool:
        first = pool.client(turn("plain")).url
        pool.client(turn("draft"))
        assert pool.client(turn("plain")).url == first, "it is still there"
        pool.client(turn("lookup"))
        pool.client(turn("plain"))
        assert started == ["plain", "draft", "lookup"]
        pool.client(turn("draft"))
        assert started == ["plain", "draft", "lookup", "draft"]
        for _ in range(2):
            with pytest.raises(RuntimeError, match="ValueError: no such mode"):
                pool.client(turn("refused"))
        assert started.count("refused") == 1, "a failure is remembered"
        children = psutil.Process().children()
    assert not any(child.is_running() for child in children if str(program) in _command(child))


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def test_a_servers_mode_becomes_its_command() -> None:
    draft = turn("draft", 5)
    arguments = vllm.server_command(draft, 1, python=Path("p"), target="t", draft="d").arguments
    assert json.loads(arguments[-1]) == {
        "method": "draft_model",
        "model": "d",
        "num_speculative_tokens": 5,
    }
    paths = {"server": Path("s"), "target": Path("t"), "draft": Path("d")}
    arguments = llama.server_command(draft, 1, **paths).arguments
    assert arguments[arguments.index("--spec-draft-n-max") + 1] == "5"
    for plain in (
        llama.server_command(turn("plain"), 1, **paths).arguments,
        vllm.server_command(turn("plain"), 1, python=Path("p"), target="t", draft="d").arguments,
    ):
        assert not any("spec" in argument for argument in plain)


class EchoDrafter:
    """Drafter that proposes zeros, and counts its calls."""

    calls = 0

    async def propose(self, steps: Sequence[DraftStep], deadline: float) -> Sequence[Proposal]:
        self.calls += 1
        return [Proposal(step.seq_id, step.stop, (0,) * step.gamma, None, 0) for step in steps]

    async def release(self, seq_ids: Sequence[int]) -> None: ...


def test_a_forced_drafter_is_right_as_often_as_stated_wherever_a_round_begins() -> None:
    text, inner = tuple(range(1, 2001)), EchoDrafter()
    forced = ForcedDrafter(inner, 0.8, vocab_size=5000)
    forced.learn((7, 7), text)
    policy = Policy(Warp(temperature=0.0), "block", 0, 2)

    def draft(start: int, tokens: tuple[int, ...]) -> tuple[int, ...]:
        step = DraftStep(3, start, tokens, 1000, policy)
        return asyncio.run(forced.propose([step], 1.0))[0].tokens

    first = draft(0, (7, 7))
    second = draft(2, text[:1000])
    right = [a == b for a, b in zip(first + second, text, strict=True)]
    assert 0.75 < sum(right) / len(right) < 0.85
    assert draft(2, text[:500])[:500] == first[500:], "a rollback changes no draw"
    assert inner.calls == 3, "the drafter computes as it would"
    asyncio.run(forced.release([3]))
    assert draft(0, (8, 8)) == (), "of another prompt nothing is known"


def test_a_random_checkpoint_has_its_shape_and_a_tokenizer_for_every_token(
    tmp_path: Path,
) -> None:
    shape = LlamaShape(2, 64, 192, 4, 2, vocab_size=5000)
    size = write_random(shape, tmp_path / "random")
    layer = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 192 + 2 * 64
    assert size == 5000 * 64 + 64 + 2 * layer
    tokenizer = Tokenizer.load(tmp_path / "random")
    assert tokenizer.decode([4999]) == "<unused4999>"
    assert tokenizer.encode("def f(): pass") == Tokenizer.load(
        Path(__file__).parents[3] / "specserve" / "demo" / "target"
    ).encode("def f(): pass")
    millions = sum(
        sizes[0] * (sizes[1] if len(sizes) == 2 else 1)
        for sizes in PROPORTIONAL.tensor_shapes().values()
    )
    assert 200e6 < millions < 240e6


def test_the_placement_that_auto_has_taken_is_not_measured_twice() -> None:
    state = SystemState(
        {"settings": "draft together, expected to be faster (draft.placement auto)"}
    )
    assert taken_by_auto({OURS: state}) == "specserve together"
    assert taken_by_auto({OURS: SystemState({"settings": "draft none"})}) is None
    assert taken_by_auto({}) is None
