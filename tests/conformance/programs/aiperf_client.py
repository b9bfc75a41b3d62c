"""Checks with aiperf, a load generator: every protocol, streamed and whole, several at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.conformance.checks import MODEL, CheckList, Endpoint

check = CheckList(("aiperf",))
TOKENIZER = Path(__file__).parents[3] / "specserve" / "demo" / "target"
NUM_REQUESTS = 8
NUM_TOKENS = 16


def run(endpoint: Endpoint, protocol: str, *options: str) -> None:
    """Send requests, two at a time; all must succeed and have all their tokens."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(Path(sys.executable).with_name("aiperf")), "profile", *options]
        command += ["--model", MODEL, "--url", endpoint.root, "--endpoint-type", protocol]
        command += ["--tokenizer", str(TOKENIZER), "--isl", "32", "--osl", str(NUM_TOKENS)]
        command += ["--request-count", str(NUM_REQUESTS), "--concurrency", "2"]
        command += ["--ui", "none", "--use-server-token-count", "--artifact-dir", folder]
        # Without the hub it would look for the folder of the tokenizer in the hub's cache.
        env = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == 0, (done.stderr or done.stdout)[-200:]
        report = json.loads((Path(folder) / "profile_export_aiperf.json").read_text("utf-8"))
    assert report["is_complete"]
    assert report["error_summary"] == []
    assert report["request_count"]["avg"] == NUM_REQUESTS
    if protocol != "responses":  # whose usage it does not read where a text ends at its length
        assert report["total_usage_completion_tokens"]["avg"] == NUM_REQUESTS * NUM_TOKENS


@check
def chats_stream(endpoint: Endpoint) -> None:
    run(endpoint, "chat", "--streaming")


@check
def chats_come_whole(endpoint: Endpoint) -> None:
    run(endpoint, "chat")


@check
def completions_stream(endpoint: Endpoint) -> None:
    run(endpoint, "completions", "--streaming")


@check
def responses_stream(endpoint: Endpoint) -> None:
    run(endpoint, "responses", "--streaming")


@check
def messages_stream(endpoint: Endpoint) -> None:
    run(endpoint, "messages", "--streaming")


if __name__ == "__main__":
    check.main()
