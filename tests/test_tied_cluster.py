"""Heads draft where the target judges, on the cluster: no draft worker, the same text, and proposals that are there before they are asked for."""

from __future__ import annotations

import openai
import pytest
from serving import served

from specserve import LLM, Sampling
from specserve.cluster.launch import handle
from specserve.cluster.placement import bundles
from specserve.config import parse

KEYS: dict[str, object] = {"target.threads": 1, "draft.threads": 1, "cache.pages": 256, "speculation.gamma": 3}
PROMPTS = ["def add(a, b):\n", "class Stack:\n    def __init__(self):\n"]


def test_only_drafters_with_a_device_of_their_own_get_a_bundle() -> None:
    kinds = {
        kind: len(bundles(parse({"draft.kind": kind, "draft.path": None}), has_gpus=False)) for kind in ("none", "heads", "layer_skip", "bigram")
    }
    assert kinds == {"none": 2, "heads": 2, "layer_skip": 3, "bigram": 3}


@pytest.mark.ray
@pytest.mark.slow
def test_served_texts_are_those_of_plain_decoding_and_proposals_are_there_before_they_are_asked_for() -> None:
    with LLM(**KEYS | {"draft.kind": "none"}) as plain:
        expected = [output.text for output in plain.generate(PROMPTS, Sampling(max_tokens=40, temperature=0))]
    with served({**KEYS, "draft.kind": "heads"}) as (url, _):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        answers = [client.completions.create(model="demo", prompt=prompt, max_tokens=40, temperature=0) for prompt in PROMPTS]
        places = handle("Engine").places.remote().result()
    assert [answer.choices[0].text for answer in answers] == expected
    assert set(places) == {"target-0"}
    stats = [answer.model_extra["specserve"] for answer in answers if answer.model_extra]
    assert all(one["anticipated"] > 0 and one["lossless"] for one in stats)
    assert sum(one["accepted"] for one in stats) > 0
