"""The server as clients see it: the official client, and a real gateway, engine and workers."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import ray
import torch
from prometheus_client.parser import text_string_to_metric_families
from transformers import AutoModelForCausalLM

from specserve.api.tokenizer import Tokenizer
from specserve.cluster.launch import deploy, handle
from specserve.config.tree import DEMO, config_from_keys
from tests.ray.breakable_engine import BreakableEngine
from tests.support.processes import command_of, own_processes_named
from tests.support.ray_server import SharedServe

KEY = "a-key-of-the-tests"
PROMPTS = [
    "def read_lines(path):\n",
    "import os\n",
    "class Queue:\n",
    "for i in range(",
    "# A comment\n",
    "x = [",
    "def main():\n    ",
    "try:\n",
]


HEADERS = (
    "x-request-id",
    "x-request-timeout-seconds",
    "x-request-disconnect-disabled",
    "x-session-id",
    "serve_multiplexed_model_id",
    "user-agent",
    "authorization",
)
"""Headers that Serve reads before the gateway does, and two that it leaves alone."""
ROUND_DEADLINE_S = 10.0
"""Time after which a worker that stands still is replaced; it is 30 s unless set."""
VALID_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


EXTENSIONS = (
    *("speculation", "ignore_eos", "top_k"),
    *("min_tokens", "bad_words", "allowed_token_ids", "priority"),
)
"""Parameters that the official client sends in `extra_body`."""


@dataclass(frozen=True)
class Server:
    url: str
    port: int
    client: openai.OpenAI

    def complete(self, prompt: str, **options: Any) -> Any:
        extra = {name: options.pop(name) for name in EXTENSIONS if name in options}
        return self.client.completions.create(
            model="demo", prompt=prompt, extra_body=extra, **options
        )

    def metrics(self) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
        text = self.get("/metrics")[1].decode()
        return {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def status(self, path: str) -> int:
        return self.get(path)[0]

    def get(self, path: str, **headers: str) -> tuple[int, bytes]:
        with contextlib.closing(
            http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        ) as connection:
            connection.request("GET", path, headers=headers)
            response = connection.getresponse()
            return response.status, response.read()


@pytest.fixture(scope="module")
def server(shared_serve: SharedServe, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"# for the tests\n{KEY}\n")
    config = {
        "http.api_keys_file": str(keys),
        "target.threads": 1,
        "draft.threads": 1,
        "faults.round_deadline_s": ROUND_DEADLINE_S,
    }
    with (
        shared_serve.served(config, engine=BreakableEngine) as (url, parsed),
        openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=120) as client,
    ):
        yield Server(url, parsed.http.port, client)


def until(condition: Callable[[], bool], seconds: float) -> float:
    """Wait until the condition is true, and return how long it took; fail after `seconds`."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < seconds, f"not within {seconds} s"
        time.sleep(0.05)
    return time.monotonic() - begun


def test_text_is_the_same_whole_and_streamed_and_says_what_speculation_did(server: Server) -> None:
    whole = server.complete(PROMPTS[0], max_tokens=48, temperature=0, speculation={"gamma": 5})
    stream = server.complete(
        PROMPTS[0],
        max_tokens=48,
        temperature=0,
        speculation={"gamma": 5},
        stream=True,
        stream_options={"include_usage": True},
    )
    events = list(stream)
    assert (
        "".join(event.choices[0].text for event in events if event.choices) == whole.choices[0].text
    )
    assert [event.choices[0].finish_reason for event in events if event.choices].count(
        "length"
    ) == 1
    assert events[-1].usage.completion_tokens == whole.usage.completion_tokens == 48
    assert len(events) < 48, "the tokens of one round belong into one chunk"
    assert whole.specserve["drafted"] > whole.specserve["accepted"] > 0
    assert whole.specserve["lossless"] is True


def test_chat_streams_a_role_first_and_one_finish_reason(server: Server) -> None:
    messages: list[Any] = [{"role": "user", "content": "Write a loop."}]
    events = list(
        server.client.chat.completions.create(
            model="demo", messages=messages, max_tokens=16, seed=5, stream=True
        )
    )
    assert events[0].choices[0].delta.role == "assistant"
    assert sum(event.choices[0].finish_reason is not None for event in events) == 1
    whole = server.client.chat.completions.create(
        model="demo", messages=messages, max_tokens=16, seed=5
    )
    assert (
        "".join(event.choices[0].delta.content or "" for event in events)
        == whole.choices[0].message.content
    )


def test_the_asynchronous_client_is_served_as_well(server: Server) -> None:
    async def main() -> str:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY) as client:
            stream = await client.completions.create(
                model="demo", prompt=PROMPTS[1], max_tokens=20, temperature=0, stream=True
            )
            return "".join([event.choices[0].text async for event in stream])

    assert (
        asyncio.run(main())
        == server.complete(PROMPTS[1], max_tokens=20, temperature=0).choices[0].text
    )


def test_loglikelihoods_of_a_batch_come_through_the_workers_as_lm_evaluation_harness_asks(
    server: Server,
) -> None:
    model = AutoModelForCausalLM.from_pretrained(DEMO / "target", dtype=torch.float32)
    tokenizer = Tokenizer.load(DEMO / "target")
    prompts = [list(tokenizer.encode(prompt)) for prompt in PROMPTS[:3]]
    answer: Any = server.client.completions.create(
        model="demo",
        prompt=prompts,
        temperature=0,
        max_tokens=1,
        logprobs=1,
        seed=1234,
        echo=True,
        extra_body={"prompt_logprobs": 0},
    )
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        with torch.inference_mode():
            rows = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
        own = choice.logprobs.token_logprobs[1:-1]
        assert own == [
            entry[str(token)]["logprob"]
            for token, entry in zip(prompt[1:], choice.prompt_logprobs[1:], strict=True)
        ]
        expected = rows.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
        # The server computes in bf16 where that is fast.
        assert (torch.tensor(own) - expected).abs().mean() < 0.1


@pytest.mark.parametrize(
    "how", [{"temperature": 0}, {"temperature": 1, "seed": 11}], ids=["greedy", "seeded"]
)
def test_eight_clients_at_once_get_the_bits_that_each_gets_alone_and_without_speculation(
    server: Server, how: dict[str, Any]
) -> None:
    lengths = [16 + 6 * i for i in range(len(PROMPTS))]

    def text(i: int, **options: Any) -> str:
        completion = server.complete(
            PROMPTS[i], max_tokens=lengths[i], ignore_eos=True, **how, **options
        )
        text: str = completion.choices[0].text
        return text

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        together = list(pool.map(text, range(len(PROMPTS))))
    assert together == [text(i) for i in range(len(PROMPTS))]
    assert together == [text(i, speculation={"gamma": 0}) for i in range(len(PROMPTS))]


def test_every_parameter_of_the_contract_is_taken(server: Server) -> None:
    answer = server.complete(
        PROMPTS[0],
        max_tokens=12,
        temperature=0.8,
        top_p=0.9,
        top_k=40,
        n=2,
        stop=["\n\n"],
        seed=3,
        logprobs=2,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias={"300": -5},
        min_tokens=3,
        bad_words=["lambda", "for x in"],
        allowed_token_ids=list(range(1, 900)),
        priority=-1,
        user="someone",
        speculation={"gamma": 3, "verifier": "coupled"},
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert all(
        len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs)
        for choice in answer.choices
    )
    assert answer.specserve["verifier"] == "coupled"


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (openai.BadRequestError, {"temperature": -1}),
        (openai.BadRequestError, {"max_tokens": 0}),
        (openai.BadRequestError, {"prompt": "x " * 5000}),
        (openai.BadRequestError, {"prompt": [[4096]]}),
        # Token 0 ends texts, which the engine knows and the gateway does not.
        (
            openai.BadRequestError,
            {"extra_body": {"allowed_token_ids": [0], "min_tokens": 1}},
        ),
        (openai.BadRequestError, {"n": 2, "best_of": 1}),
        (openai.NotFoundError, {"model": "another"}),
    ],
)
def test_each_refusal_is_the_client_s_own_kind_of_error(
    server: Server, kind: type[openai.APIStatusError], options: dict[str, Any]
) -> None:
    with pytest.raises(kind) as refused:
        server.client.completions.create(
            **{"model": "demo", "prompt": "x", "max_tokens": 4, **options}
        )
    assert isinstance(refused.value.body, dict)
    assert refused.value.body["message"]


def test_without_a_key_there_is_no_text_but_health(server: Server) -> None:
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as wrong_client,
        pytest.raises(openai.AuthenticationError),
    ):
        wrong_client.models.list()
    assert (server.status("/health"), server.status("/ready"), server.status("/v1/models")) == (
        200,
        200,
        401,
    )


def test_metrics_count_what_was_served(server: Server) -> None:
    written, drafts = (
        ("specserve_generation_tokens_total", ()),
        ("specserve_spec_decode_num_draft_tokens_total", ()),
    )
    before = server.metrics()
    server.complete(
        PROMPTS[2], max_tokens=40, temperature=0, ignore_eos=True, speculation={"gamma": 4}
    )
    until(lambda: server.metrics()[written] == before[written] + 40, 5)

    def drafted() -> bool:
        """Serve a request, and return whether it had draft tokens.

        On a busy machine the drafter may be late for a whole request, and no round waits for it.
        """
        server.complete(
            PROMPTS[2], max_tokens=8, temperature=0, ignore_eos=True, speculation={"gamma": 4}
        )
        return server.metrics()[drafts] > before[drafts]

    until(drafted, 30)
    assert server.metrics()["specserve_replicas", ()] == 1
    (cpu,) = (value for (name, _), value in server.metrics().items() if name.endswith("_cpu_share"))
    assert cpu > 0, "its gateway has worked since it started"
    (rank,) = (
        dict(labels) for name, labels in server.metrics() if name == "specserve_rank_pass_seconds"
    )
    assert (rank["rank"], set(rank)) == ("0", {"replica", "rank"})


def test_the_trace_shows_rounds(server: Server) -> None:
    def shown() -> bool:
        server.complete(
            PROMPTS[2], max_tokens=8, temperature=0, ignore_eos=True, speculation={"gamma": 4}
        )
        events = json.loads(server.get("/trace", Authorization=f"Bearer {KEY}")[1])["traceEvents"]
        return {"verify", "draft", "round"} <= {event["name"] for event in events}

    until(shown, 30)


@pytest.mark.parametrize("stream", [True, False])
def test_the_pages_of_a_client_that_leaves_are_freed_before_its_end(
    server: Server, stream: bool
) -> None:
    """Check that the engine cancels what a client that left has requested.

    The engine waits for all four texts, which come to it one by one, and for the news: on a busy
    machine the client might leave before the last has come, and texts end before the news arrives.
    This client sends the body after the head, as many do: a body that HAProxy splices would keep it
    from seeing that a client has left which waits for its answer in one piece.
    """
    engine = handle(config_from_keys({"http.port": server.port}), "Engine")

    def used() -> int:
        pages: int = engine.pages_used.remote().result()
        return pages

    def cancelled() -> int:
        count: int = engine.num_cancelled.remote().result()
        return count

    until(lambda: used() == 0, 300)
    before = cancelled()
    engine.await_submitted_and_cancelled.remote(4).result()
    body = {
        "model": "demo",
        "prompt": PROMPTS[0],
        "max_tokens": 1000,
        "ignore_eos": True,
        "stream": stream,
        "n": 4,
    }
    content = json.dumps(body).encode()
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port)) as connection:
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", str(len(content)))
        connection.putheader("Authorization", f"Bearer {KEY}")
        connection.endheaders()
        time.sleep(0.1)  # so that HAProxy reads the head alone
        connection.send(content)
        if stream:
            connection.getresponse().read(100)
        else:
            until(lambda: used() > 0, 300)
    until(lambda: used() == 0, 300)
    until(lambda: cancelled() == before + 4, 300)  # chunks follow the release of pages


def malformed() -> Iterator[bytes]:
    """Yield two hundred bodies that no client should send."""
    good = json.dumps({"model": "demo", "prompt": "x", "max_tokens": 4}).encode()
    for end in range(1, len(good), 2):
        yield good[:end]
    for value in (
        "null",
        "[]",
        "true",
        '"x"',
        "1e999",
        "-1",
        "{}",
        "1" * 400,
        '"' + "x" * 10**6 + '"',
        '{"a":' * 500 + "1" + "}" * 500,
    ):
        for name in (
            "model",
            "prompt",
            "max_tokens",
            "temperature",
            "stop",
            "seed",
            "n",
            "logit_bias",
            "stream",
            "speculation",
            "top_p",
        ):
            yield f'{{"model": "demo", "prompt": "x", "max_tokens": 4, "{name}": {value}}}'.encode()
    yield from (
        b"",
        b"\xff\xfe",
        b"\x00" * 100,
        b"[" * 100_000,
        b'{"prompt": "\xc3\x28"}',
        b'{"prompt": "\\ud800"}',
        b"{" + b'"a":1,' * 50_000 + b'"b":1}',
    )
    random = b"".join(os.urandom(64) for _ in range(60))
    for start in range(0, len(random), 64):
        yield random[start : start + 64]


def post(server: Server, body: Any, path: str = "/v1/completions") -> int:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    with contextlib.closing(
        http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    ) as connection:
        try:
            connection.request("POST", path, body, headers)
        except (BrokenPipeError, ConnectionResetError):  # refused before it had all been sent
            assert len(bytes(body) if isinstance(body, bytes) else b"") == 0, (
                "a small body was not read to its end"
            )
        return connection.getresponse().status


def worker(kind: str) -> psutil.Process:
    (found,) = own_processes_named(kind)
    return found


def test_the_gateway_does_without_torch(server: Server) -> None:
    maps = Path(f"/proc/{worker(':Gateway').pid}/maps").read_text(encoding="utf-8")
    assert "tokenizers" in maps
    assert "libtorch" not in maps


def gateway_memory() -> int:
    memory: int = worker(":Gateway").memory_info().rss
    return memory


def test_two_hundred_malformed_requests_and_a_huge_body_do_no_harm(server: Server) -> None:
    bodies = list(malformed())
    assert len(bodies) >= 200
    growth = []
    for _ in range(4):  # the allocator may keep more once, or twice; what leaks grows every time
        before = gateway_memory()
        statuses = [post(server, body) for body in bodies]
        statuses.append(post(server, (b"x" * 2**20 for _ in range(100))))
        assert {status for status in statuses if status >= 500} == set(), (
            "bad input is never the server's failure"
        )
        assert statuses[-1] == 413
        growth.append(gateway_memory() - before)
    assert min(growth[1:]) < 10 * 2**20, f"the gateway grows by {growth} bytes"
    assert server.complete(PROMPTS[0], max_tokens=4, ignore_eos=True).usage.completion_tokens == 4


@pytest.mark.parametrize("value", [b"caf\xe9", b"\xff\xfe", "caf\u00e9".encode(), b"\x80" * 3000])
@pytest.mark.parametrize("name", HEADERS)
def test_a_header_with_bytes_beyond_ascii_is_no_failure_of_the_server(
    server: Server, name: str, value: bytes
) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(
            b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            + (b"" if name == "authorization" else b"Authorization: Bearer %b\r\n" % KEY.encode())
            + b"%b: %b\r\n\r\n" % (name.encode(), value)
        )
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert response.status == (401 if name == "authorization" else 200)
        given = response.headers.get_all("X-Request-Id", [])
    assert len(given) == 1
    assert VALID_ID.fullmatch(given[0]), "the id is replaced"


LONG: dict[str, Any] = {"max_tokens": 300, "ignore_eos": True}
SAMPLINGS: list[dict[str, Any]] = [{"temperature": 0}, {"temperature": 1, "seed": 3}]


@pytest.fixture(scope="module")
def uninterrupted(server: Server) -> list[str]:
    """Return the texts of the first prompts, one for each sampling, without any failure."""
    return [
        server.complete(PROMPTS[i], **LONG, **sampling).choices[0].text
        for i, sampling in enumerate(SAMPLINGS)
    ]


def open_streams(server: Server) -> tuple[list[Any], list[str]]:
    """Return streams of the same texts, and what each has sent first."""
    streams = [
        server.complete(PROMPTS[i], stream=True, **LONG, **sampling)
        for i, sampling in enumerate(SAMPLINGS)
    ]
    return streams, [next(iter(stream)).choices[0].text for stream in streams]


@pytest.mark.parametrize(
    ("role", "how"),
    [
        ("DraftWorker", signal.SIGKILL),
        ("DraftWorker", signal.SIGSTOP),
        ("TargetWorker", signal.SIGKILL),
        ("TargetWorker", signal.SIGSTOP),
    ],
    ids=["draft killed", "draft stopped", "target killed", "target stopped"],
)
def test_a_killed_or_stopped_worker_costs_its_streams_a_pause_and_nothing_else(
    server: Server, uninterrupted: list[str], role: str, how: signal.Signals
) -> None:
    process = worker(role)
    streams, texts = open_streams(server)
    process.send_signal(how)
    for i, stream in enumerate(streams):
        texts[i] += "".join(chunk.choices[0].text for chunk in stream)
    assert texts == uninterrupted
    until(
        lambda: server.status("/health") == 200 and not process.is_running() and count(role) == 1,
        120,
    )


def test_a_draft_that_is_stopped_while_it_loads_its_weights_is_replaced_too(server: Server) -> None:
    stopped: list[psutil.Process] = []

    def stop_while_it_loads() -> bool:
        """Stop a draft that loads; kill those that run already, which are then loaded again."""
        for process in own_processes_named("DraftWorker"):
            title = command_of(process)
            with contextlib.suppress(psutil.NoSuchProcess):
                if "DraftWorker.open" in title:
                    process.suspend()
                    if "DraftWorker.open" in command_of(process):
                        stopped.append(process)
                        return True
                if "DraftWorker.open" in title or "DraftWorker.run" in title:
                    process.kill()
        return False

    until(stop_while_it_loads, 120)
    until(lambda: count("DraftWorker.run") == 1 and not stopped[0].is_running(), 120)
    # Its device may be named as well: the tests have ended several workers in the last minutes.
    health = json.loads(server.get("/health")[1])
    assert (health["status"], health["draft_placement"]) == ("healthy", "apart")
    answer = server.complete("import os", max_tokens=2)
    assert answer.specserve["reproducible"] is health["reproducible"]


def count(kind: str) -> int:
    return len(own_processes_named(kind))


def test_the_streams_of_a_killed_coordinator_resume_on_the_next_one(
    server: Server, uninterrupted: list[str]
) -> None:
    engine = worker(":Engine")
    stream = server.complete(PROMPTS[0], stream=True, **LONG, **SAMPLINGS[0])
    text = next(iter(stream)).choices[0].text
    engine.kill()
    *chunks, last = stream
    assert text + "".join(chunk.choices[0].text for chunk in (*chunks, last)) == uninterrupted[0]
    assert last.model_extra["specserve"]["resumed"] == 1
    until(lambda: server.status("/health") == 200, 120)
    assert server.metrics()["specserve_requests_resumed_total", ()] >= 1


def test_a_replica_that_makes_no_progress_is_replaced_and_its_streams_go_on(
    server: Server, uninterrupted: list[str]
) -> None:
    engine = handle(config_from_keys({"http.port": server.port}), "Engine")
    engine.replica.remote().result()  # a handle's first call waits until it knows the replicas
    streams, texts = open_streams(server)
    broken = engine.break_target.remote().result()
    resumed = []
    for i, stream in enumerate(streams):
        *chunks, last = stream
        texts[i] += "".join(chunk.choices[0].text for chunk in (*chunks, last))
        resumed.append(last.model_extra["specserve"]["resumed"])
    assert texts == uninterrupted
    assert min(resumed) >= 1, "the engine was broken too late"
    until(lambda: server.status("/health") == 200, 120)
    assert engine.replica.remote().result() != broken


def test_what_is_too_much_or_too_slow_is_refused_and_a_stuck_worker_is_replaced(
    server: Server,
) -> None:
    """Redeploy on the same cluster with narrow limits."""
    config = config_from_keys(
        {
            "http.port": server.port,
            "limits": {"max_running": 1, "max_queued": 1, "request_timeout_s": 2.0},
            "faults.round_deadline_s": 2.5,  # a stuck worker is replaced after the request's limit
            "target.threads": 1,
        }
    )
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(deploy(config, lambda line: None, replace=True))
        client = stack.enter_context(
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        )
        pool = stack.enter_context(ThreadPoolExecutor(6))

        def long() -> Exception | None:
            try:
                client.completions.create(
                    model="demo",
                    prompt="x",
                    max_tokens=1000,
                    extra_body={"ignore_eos": True, "speculation": {"gamma": 0}},
                    n=1,
                )
            except openai.APIError as error:
                return error
            return None

        errors = [future.result() for future in [pool.submit(long) for _ in range(6)]]
        refused = [error for error in errors if isinstance(error, openai.RateLimitError)]
        assert refused
        assert int(refused[0].response.headers["retry-after"]) >= 1
        seen = {error.status_code for error in errors if isinstance(error, openai.APIStatusError)}
        # 504: on a slow machine no token came in time.
        assert 429 in seen
        assert seen - {429} in ({408}, {504}, {408, 504})

        # The requests that were given up have left the queue.
        client.with_options(max_retries=9).completions.create(
            model="demo", prompt="x", max_tokens=1
        )
        stuck = worker("TargetWorker")
        stuck.suspend()
        # It goes on with another worker, unless that takes longer than its time limit.
        late = pool.submit(
            client.completions.create, model="demo", prompt="x", max_tokens=4
        ).exception()
        assert late is None or getattr(late, "status_code", None) in (408, 504)
        until(lambda: not psutil.pid_exists(stuck.pid), 30)
        until(lambda: server.status("/health") == 200, 120)
        usage = client.completions.create(
            model="demo", prompt="x", max_tokens=4, extra_body={"ignore_eos": True}
        ).usage
        assert usage is not None
        assert usage.completion_tokens == 4
    until(
        lambda: all(
            group["state"] == "REMOVED" for group in ray.util.placement_group_table().values()
        ),
        20,
    )
