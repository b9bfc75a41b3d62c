"""Checks with lm-evaluation-harness: generation, likelihoods of choices and of whole texts.

Its tasks and their data lie in lm_eval_tasks/, since no hub is reachable.
"""

from __future__ import annotations

import json
import math
import urllib.request
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.tasks import TaskManager

from tests.conformance.checks import MODEL, CheckList, Endpoint

check = CheckList(("lm_eval",))
TASKS = Path(__file__).with_name("lm_eval_tasks")
TOKENIZER = Path(__file__).parents[3] / "specserve" / "demo" / "target"


def evaluate(endpoint: Endpoint, task: str, **arguments: Any) -> tuple[dict[str, Any], Any]:
    """Return the metrics of a task, and its samples in their order."""
    found = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": MODEL,
            "base_url": f"{endpoint.url}/completions",
            "tokenizer": str(TOKENIZER),
            "tokenizer_backend": "huggingface",
            "max_length": 512,
            "max_retries": 1,
            **arguments,
        },
        tasks=[task],
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
        bootstrap_iters=0,
    )
    assert found is not None
    samples = sorted(found["samples"][task], key=lambda sample: sample["doc_id"])
    assert len(samples) == len((TASKS / "questions.jsonl").read_text().splitlines())
    return found["results"][task], samples


def complete(endpoint: Endpoint, prompt: str) -> str:
    """Return what the server writes greedily, called without any client."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 24, "temperature": 0, "stop": "\n\n"}
    request = urllib.request.Request(
        f"{endpoint.url}/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        text: str = json.load(reply)["choices"][0]["text"]
    return text


@check
def texts_are_generated(endpoint: Endpoint) -> None:
    _, samples = evaluate(endpoint, "specserve_generate")
    for sample in samples:
        (text,) = sample["filtered_resps"]
        assert text == complete(endpoint, sample["doc"]["prompt"])


@check
def texts_are_generated_from_prompts_as_text_and_at_once(endpoint: Endpoint) -> None:
    _, samples = evaluate(
        endpoint, "specserve_generate", tokenized_requests=False, num_concurrent=4
    )
    for sample in samples:
        (text,) = sample["filtered_resps"]
        assert text == complete(endpoint, sample["doc"]["prompt"])


@check
def the_likelier_choice_has_the_higher_likelihood(endpoint: Endpoint) -> None:
    metrics, samples = evaluate(endpoint, "specserve_choice")
    assert metrics["acc,none"] == 1.0
    for sample in samples:
        assert all(float(likelihood) < 0 for likelihood, _ in sample["filtered_resps"])


@check
def likelihoods_are_equal_alone_and_in_batches(endpoint: Endpoint) -> None:
    _, alone = evaluate(endpoint, "specserve_choice")
    _, batched = evaluate(endpoint, "specserve_choice", batch_size=4)
    for one, other in zip(alone, batched, strict=True):
        for left, right in zip(one["filtered_resps"], other["filtered_resps"], strict=True):
            assert math.isclose(float(left[0]), float(right[0]), abs_tol=1e-3)
            assert left[1] == right[1]


@check
def whole_texts_have_a_perplexity(endpoint: Endpoint) -> None:
    metrics, _ = evaluate(endpoint, "specserve_rolling")
    assert 1.0 < metrics["byte_perplexity,none"] < 256.0


if __name__ == "__main__":
    check.main()
