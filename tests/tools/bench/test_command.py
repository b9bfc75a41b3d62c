"""`specserve bench` as a whole, against the real HTTP server and against a scripted one."""

from __future__ import annotations

import asyncio
import io
import json
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from specserve.api.tokenizer import Tokenizer
from specserve.cli.main import main
from specserve.config.tree import DEMO
from specserve.errors import BadValue, Overloaded, SpecserveError
from specserve.metrics import Registry
from specserve.progress import no_progress
from specserve.tools.bench.address import ServerAddress
from specserve.tools.bench.command import bench, measure
from specserve.tools.bench.options import BenchOptions, read_key
from specserve.tools.bench.prompts import CODE_PROMPTS, QUESTIONS
from specserve.tools.bench.report import BenchReport
from specserve.types import Chunk, Request
from tests.support.http_server import FakeService, serving, serving_several
from tests.support.scripted_server import Script, scripted_server

WRITTEN = "def f():\n    return 1\n" * 20


@dataclass
class Counting(FakeService):
    """A fake service that counts rounds of 30 ms, as an engine does."""

    written: str = WRITTEN
    registry: Registry | None = None

    def _chunks(self, request: Request) -> Iterator[Chunk]:
        for chunk in super()._chunks(request):
            if self.registry is not None:
                self.registry.histogram("round_seconds").observe(0.03)
                self.registry.counter("spec_decode_num_draft_tokens_total").add(4)
            yield chunk


def _bench(url: str, **keys: Any) -> tuple[list[str], str]:
    lines: list[str] = []
    progress = io.StringIO()
    bench(
        BenchOptions(
            url, **{"requests": 6, "max_tokens": 20, "concurrency": 2, "warm_up": 1, **keys}
        ),
        lines.append,
        progress,
        stable_s=0.0,
    )
    return lines, progress.getvalue()


def test_a_run_reports_its_measurement_and_the_servers_counters(tmp_path: Path) -> None:
    service = Counting()
    with serving(service) as running:
        service.registry = running.registry
        lines, progress = _bench(running.url, json=tmp_path / "report.json")
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(service.requests) == 7  # including the warm-up
    assert len(report["requests"]) == 6  # without the warm-up
    measured = report["measured"]
    assert measured["outcomes"] == {"ok": 6}
    assert measured["tokens"] == 6 * 20
    rounds = sum(request["specserve"]["rounds"] for request in report["requests"])
    assert (
        measured["speculation"]["rounds"]
        == measured["acceptance"]["plain"] + measured["acceptance"]["drafting"]
        == rounds
    )
    assert measured["server"]["rounds"] == rounds
    assert measured["server"]["round_s"] == pytest.approx(0.03)
    tpot = next(figure for figure in report["predicted"]["figures"] if figure["name"] == "TPOT")
    tokens = next(
        figure for figure in report["predicted"]["figures"] if figure["name"] == "tokens a round"
    )
    assert tokens["measured"] == 120 / rounds
    assert tpot["predicted"] == pytest.approx(0.03 / tokens["predicted"])
    assert tpot["ratio"] == pytest.approx(tpot["measured"] / tpot["predicted"])
    assert lines[1].startswith("requests: 6 ok in ")
    assert any(line.startswith("TTFT") for line in lines)
    assert progress.endswith("s\n")
    assert progress.splitlines()[-1].startswith("requests, 100%, 6 of 6, ")


def test_the_report_holds_the_options_of_its_run(tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_text("one\ntwo\n")
    with serving() as running:
        _bench(
            running.url,
            json=tmp_path / "r.json",
            prompts=file,
            temperature=0.5,
            seed=3,
            gamma=2,
            ignore_eos=False,
            requests=2,
        )
    command = json.loads((tmp_path / "r.json").read_text())["command"]
    assert command["prompts"] == str(file)
    assert (command["temperature"], command["seed"], command["gamma"], command["ignore_eos"]) == (
        0.5,
        3,
        2,
        False,
    )
    seeds = sorted(request.seed for request in running.service.requests)
    assert seeds == [3, 4, 5]
    assert all(
        request.speculation.gamma == 2 and not request.ignore_eos
        for request in running.service.requests
    )


def test_an_open_loop_reports_too(tmp_path: Path) -> None:
    with serving() as running:
        lines, _ = _bench(running.url, concurrency=None, rate=200.0)
    assert "200 requests/s arriving" in lines[0]
    assert lines[1].startswith("requests: 6 ok")


def test_one_of_several_models_is_loaded_and_its_counters_are_reported(tmp_path: Path) -> None:
    services = {"small": Counting(), "large": Counting()}
    config = {"models": [{"name": name} for name in services]}
    with serving_several(services, config) as running:
        _bench(running.url, json=tmp_path / "small.json", requests=2)
        lines, _ = _bench(running.url, model="large", requests=3)
        with pytest.raises(BadValue, match=r"--model tiny is not served .* small, large"):
            _bench(running.url, model="tiny")
    assert json.loads((tmp_path / "small.json").read_text())["model"] == "small", "the first"
    assert len(services["small"].requests) == 1 + 2
    assert len(services["large"].requests) == 1 + 3
    assert lines[0].startswith("large at ")


def test_failed_requests_are_reported_and_end_the_command_with_a_failure(tmp_path: Path) -> None:
    with serving(FakeService(refusal=Overloaded("the queue is full"))) as running:
        lines: list[str] = []
        with pytest.raises(SpecserveError, match="6 of 6 requests failed"):
            bench(
                BenchOptions(running.url, requests=6, html=tmp_path / "r.html"),
                lines.append,
                io.StringIO(),
                stable_s=0.0,
            )
    assert "6 429" in lines[1]
    assert "the queue is full" in lines[2]
    assert "the queue is full" in (tmp_path / "r.html").read_text()


def test_a_server_that_dies_under_the_load_leaves_a_report() -> None:
    script = Script(((0.0, ("plain",)), (0.0, ("plain",))), breaks_after=1)
    with scripted_server(script) as url:
        lines: list[str] = []
        with pytest.raises(SpecserveError, match="3 of 3"):
            bench(
                BenchOptions(url, requests=3, warm_up=0), lines.append, io.StringIO(), stable_s=0.0
            )
    assert "3 broken off" in lines[1]


def test_the_html_report_is_well_formed_and_self_contained(tmp_path: Path) -> None:
    service = Counting()
    with serving(service) as running:
        service.registry = running.registry
        _bench(running.url, html=tmp_path / "report.html", requests=12)
    text = (tmp_path / "report.html").read_text()
    root = ET.fromstring(text)
    assert len(root.findall(".//svg")) == 5
    assert root.findall(".//svg//rect")
    assert [heading.text for heading in root.iter("h2")] == [
        "Requests", "Rates", "Times", "Speculation", "Measured and predicted",
        "Time to first token", "Time per output token, of each request",
        "Gaps between events of a stream", "Tokens over time", "Acceptance by position",
    ]  # fmt: skip
    for element in root.iter():
        assert element.tag not in ("script", "link", "img", "iframe", "object", "use", "image")
        assert not {name.split("}")[-1] for name in element.attrib} & {
            "src",
            "href",
            "data",
            "action",
            "style",
        }
    assert not re.search(r"url\(|@import", text)
    for box in root.iter("rect"):
        assert float(box.attrib["height"]) >= 0
        assert 0 <= float(box.attrib["x"]) <= 480


def test_server_messages_are_escaped_in_the_html_report(tmp_path: Path) -> None:
    with (
        serving(FakeService(refusal=Overloaded("<b>&full</b>"))) as running,
        pytest.raises(SpecserveError),
    ):
        _bench(running.url, html=tmp_path / "r.html")
    cells = [cell.text for cell in ET.fromstring((tmp_path / "r.html").read_text()).iter("td")]
    assert any("<b>&full</b>" in (cell or "") for cell in cells)


@pytest.mark.parametrize(
    ("has_template", "chat", "prompt"),
    [
        (True, None, "[user] # 0\n{question}[assistant]"),
        (True, False, "# 0\n{code}"),
        (False, None, "# 0\n{code}"),
        (False, True, "user: # 0\n{question}\nassistant:"),
    ],
)
def test_a_model_with_a_chat_template_is_loaded_with_questions_in_chats(
    has_template: bool, chat: bool | None, prompt: str
) -> None:
    tokenizer = Tokenizer.load(DEMO / "target")
    if has_template:
        tokenizer._tokenizer.chat_template = (
            "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}[assistant]"
        )
    service = FakeService(tokenizer=tokenizer)
    with serving(service, tokenizer=tokenizer, max_context=1024) as running:
        _bench(running.url, requests=1, warm_up=0, chat=chat)
    (request,) = service.requests
    expected = prompt.format(question=QUESTIONS[0], code=CODE_PROMPTS[0])
    assert tokenizer.decode(request.prompt) == expected


def test_an_interrupted_load_reports_what_was_measured_until_then() -> None:
    script = Script(
        ((0.0, ("plain",)), (0.0, ("accepted", "bonus"))), hangs_after=1, num_before_hang=3
    )

    async def interrupt(url: str) -> BenchReport:
        options = BenchOptions(url, requests=10, concurrency=1, warm_up=0)
        address = ServerAddress.from_url(url)
        task = asyncio.create_task(measure(options, address, ["abc"], no_progress, stable_s=0.0))
        while script.num_streams < 4:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.1)
        task.cancel()
        return await task

    with scripted_server(script) as url:
        report = asyncio.run(interrupt(url))
    assert report.interrupted
    assert report.measurement.outcomes == {"ok": 3, "interrupted": 1}
    assert report.measurement.tokens == 3 * 3 + 1
    assert report.num_failed == 0


def test_ctrl_c_prints_the_report_and_ends_the_command() -> None:
    script = Script(((0.0, ("plain",)), (0.0, ("plain",))), hangs_after=1)
    with scripted_server(script) as url:
        command = [
            sys.executable,
            "-m",
            "specserve",
            "bench",
            "--url",
            url,
            "--warm-up",
            "0",
            "--concurrency",
            "3",
        ]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        while script.num_streams < 3 and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(
            timeout=90  # the command waits for its probes of a server that hangs
        )
    assert "requests: 3 interrupted" in out
    assert err.splitlines()[0].startswith("requests, 5%, 3 of 64, ")
    assert err.splitlines()[-1] == "specserve: interrupted"
    assert process.returncode == 130


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--concurrency", "2", "--rate", "3"], "not allowed with"),
        (["--rate", "0"], "--rate must be above 0"),
        (["--rate", "nan"], "--rate must be above 0"),
        (["--concurrency", "0"], "--concurrency must be 1 or more"),
        (["--requests", "0"], "--requests must be 1 or more"),
        (["--max-tokens", "0"], "--max-tokens must be 1 or more"),
        (["--gamma", "-1"], "--gamma must be 0 or more"),
        (["--gamma", "many"], "whole number or auto"),
        (["--temperature", "-1"], "--temperature must be 0 or more"),
        (["--timeout", "0"], "--timeout must be above 0"),
        (["--prompts", "/nowhere/prompts"], "--prompts /nowhere/prompts cannot be read"),
        (["--api-key-file", "/nowhere/key"], "--api-key-file /nowhere/key cannot be read"),
        (["--json", "/nowhere/report.json"], "/nowhere/report.json cannot be written"),
        (["--url", "localhost:8000"], "--url is written"),
    ],
)
def test_bad_usage_is_one_line_before_any_request(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--url", "http://127.0.0.1:1", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_server_behind_a_path_and_without_metrics_is_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = Script()
    with scripted_server(script) as url:
        assert main(["bench", "--url", url + "/behind/", "--requests", "2", "--warm-up", "0"]) == 0
    assert [path for path, _, _ in script.requests].count("/behind/v1/completions") == 2
    assert "2 ok" in capsys.readouterr().out


def test_a_server_that_cannot_be_reached_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--url", "http://127.0.0.1:1/there"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("specserve: no server answers at http://127.0.0.1:1/there: ")
    assert error.count("\n") == 1


def test_https_where_only_http_is_spoken_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as running:
        assert main(["bench", "--url", running.url.replace("http:", "https:")]) == 1
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .startswith("specserve: no server answers at https://127.0.0.1:")
    )


def test_a_server_with_another_api_is_named_as_such(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as running:
        assert main(["bench", "--url", running.url + "/nowhere"]) == 1
    assert "is no OpenAI-compatible server" in capsys.readouterr().err


def test_a_key_opens_a_server_that_wants_one_and_is_not_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\nsecret-7\n")
    config: dict[str, Any] = {"http.api_keys_file": str(keys)}
    with serving(config=config) as running:
        assert main(["bench", "--url", running.url]) == 1
        assert "--api-key-file" in capsys.readouterr().err
        _bench(running.url, api_key_file=keys, json=tmp_path / "r.json", html=tmp_path / "r.html")
    assert "secret-7" not in (tmp_path / "r.json").read_text() + (tmp_path / "r.html").read_text()


def test_a_key_file_without_a_key_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("# none\n")
    with pytest.raises(BadValue, match="no key"):
        read_key(file)
