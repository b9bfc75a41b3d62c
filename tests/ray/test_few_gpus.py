"""A cluster whose declared GPUs do for the ranks alone: the draft is in the process of rank 0."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.request import urlopen

import openai
import pytest
from ray.cluster_utils import Cluster

from specserve import LLM, Sampling
from specserve.cluster.checkup import check
from specserve.cluster.launch import handle
from specserve.config.tree import config_from_keys
from specserve.errors import ConfigError
from tests.support.ray_server import served

PROMPT = "import os\n"
KEYS: dict[str, object] = {
    "target.threads": 1,
    "target.dtype": "float32",
    "draft.dtype": "float32",
    "draft.placement": "auto",
    "speculation.gamma": 3,
    "cache.pages": 256,
}


@pytest.fixture(scope="module", params=[1, 2])
def num_gpus(request: pytest.FixtureRequest) -> Iterator[int]:
    """Start a Ray with that many GPUs, which are declared and not there."""
    gpus: int = request.param
    head: dict[str, Any] = {"num_cpus": 8, "num_gpus": gpus, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield gpus
    cluster.shutdown()


def test_a_draft_without_a_gpu_of_its_own_is_served_together_and_health_says_why(
    num_gpus: int,
) -> None:
    keys = {**KEYS, "target.tensor_parallel": num_gpus}
    apart = config_from_keys({**keys, "draft.placement": "apart"})
    refusal = check(apart, num_gpus=num_gpus, join="auto").refusal
    assert refusal is not None
    assert f"+ draft 1), the cluster has {num_gpus};" in refusal
    assert check(config_from_keys(keys), num_gpus=num_gpus, join="auto").moves_draft
    with served(keys, join=True) as (url, config):
        places = handle(config, "Engine").places.remote().result()
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        answer = client.completions.create(
            model="demo", prompt=PROMPT, max_tokens=24, temperature=0
        )
        with urlopen(f"{url}/health") as response:
            health = json.load(response)
    assert set(places) == {f"target-{rank}" for rank in range(num_gpus)}
    assert health["draft_placement"] == "together, as the cluster has no GPU for a draft apart"
    with LLM(**{"target.dtype": "float32", "draft.kind": "none"}) as llm:
        (alone,) = llm.generate([PROMPT], Sampling(max_tokens=24, temperature=0))
    assert answer.choices[0].text == alone.text


def test_a_draft_that_is_to_be_apart_is_refused(num_gpus: int) -> None:
    keys = {**KEYS, "target.tensor_parallel": num_gpus, "draft.placement": "apart"}
    with (
        pytest.raises(ConfigError, match=r"needs . GPUs .*the cluster has"),
        served(keys, join=True),
    ):
        pass
