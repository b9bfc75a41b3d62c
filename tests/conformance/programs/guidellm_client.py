"""Checks with guidellm, a benchmark of servers: every path, streamed and whole, many at once."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.conformance.checks import MODEL, CheckList, Endpoint

check = CheckList(("guidellm",))
TOKENIZER = Path(__file__).parents[3] / "specserve" / "demo" / "target"
NUM_REQUESTS = 8
NUM_TOKENS = 16


def run(endpoint: Endpoint, *, path: str, profile: str, **backend: str) -> None:
    """Run one benchmark; its requests must all succeed and have all their tokens."""
    options = {"target": endpoint.root, "model": MODEL, "request_format": path, **backend}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        arguments = {
            "backend": ",".join(
                ["kind=openai_http", *(f"{name}={value}" for name, value in options.items())]
            ),
            "profile": profile,
            "constraint": f"kind=max_requests,count={NUM_REQUESTS}",
            "tokenizer": f"kind=hf_auto,model={TOKENIZER}",
            "data": f"kind=synthetic_text,prompt_tokens=32,output_tokens={NUM_TOKENS}",
            "output": f"kind=json,path={report}",
        }
        command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-progress"]
        command += [f"--{name}={value}" for name, value in arguments.items()]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, (done.stderr or done.stdout)[-200:]
        _check_report(json.loads(report.read_text(encoding="utf-8")))


def _check_report(report: dict[str, Any]) -> None:
    (benchmark,) = report["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (NUM_REQUESTS, 0), totals
    for request in benchmark["requests"]["successful"]:
        assert request["output_tokens"] == NUM_TOKENS
        assert request["prompt_tokens"] >= 32


@check
def chats_stream(endpoint: Endpoint) -> None:
    run(endpoint, path="/v1/chat/completions", profile="kind=synchronous")


@check
def chats_stream_several_at_once(endpoint: Endpoint) -> None:
    run(endpoint, path="/v1/chat/completions", profile="kind=concurrent,streams=4")


@check
def chats_come_whole(endpoint: Endpoint) -> None:
    run(
        endpoint,
        path="/v1/chat/completions",
        profile="kind=throughput,max_concurrency=4",
        stream="false",
    )


@check
def completions_stream(endpoint: Endpoint) -> None:
    run(endpoint, path="/v1/completions", profile="kind=concurrent,streams=2")


@check
def completions_come_at_a_rate(endpoint: Endpoint) -> None:
    run(endpoint, path="/v1/completions", profile="kind=poisson,rate=4")


@check
def responses_stream(endpoint: Endpoint) -> None:
    run(endpoint, path="/v1/responses", profile="kind=concurrent,streams=2")


if __name__ == "__main__":
    check.main()
