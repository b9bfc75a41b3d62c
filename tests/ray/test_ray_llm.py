"""An `LLM` over workers on Ray: ranks that share a target give the text of one process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import psutil
import pytest

from specserve import LLM, AsyncLLM, Sampling, open_ray_llm
from specserve.errors import ConfigError, ModelNotFound
from tests.support import checkpoints
from tests.support.eagle_heads import HeadSizes, write_speculators
from tests.support.processes import own_processes_named

KEYS: dict[str, Any] = {
    "target.threads": 1,
    "draft.threads": 1,
    "cache.pages": 64,
    "speculation.gamma": 3,
    "target.dtype": "float32",
}
GREEDY = Sampling(max_tokens=24, temperature=0)


@pytest.mark.long
def test_two_ranks_write_the_text_of_one_process_and_leave_nothing_behind() -> None:
    with LLM(**KEYS) as alone:
        expected = [output.text for output in alone.generate(["import os", "class A:"], GREEDY)]
    with open_ray_llm(**KEYS | {"target.tensor_parallel": 2}) as llm:
        ranks = own_processes_named("ray::TargetWorker")
        assert len(ranks) == 2
        outputs = llm.generate(["import os", "class A:"], GREEDY)
        assert [output.text for output in outputs] == expected
        stats = outputs[0].stats
        assert stats is not None
        assert stats.drafted > 0, "the draft takes part, in a process of its own"
        assert "".join(delta.text for delta in llm.stream("import os", GREEDY)) == expected[0]
        psutil.Process(ranks[0].pid).kill()
        (again,) = llm.generate("import os", GREEDY)
        assert again.text == expected[0], "ranks are restarted below an LLM, too"

        async def together() -> list[str]:
            served = AsyncLLM.from_llm(llm)
            asked = (served.generate(prompt, GREEDY) for prompt in ("import os", "class A:"))
            texts = [output.text for output in await asyncio.gather(*asked)]
            await served.close()
            return texts

        assert asyncio.run(together()) == expected
    psutil.wait_procs(own_processes_named("ray::TargetWorker"), timeout=30)
    assert not own_processes_named("ray::TargetWorker")


def test_a_head_apart_from_two_ranks_drafts_from_the_states_that_the_first_one_sends(
    tmp_path: Path,
) -> None:
    config = checkpoints.CONFIGS["llama"]()
    config.num_hidden_layers = 4
    target = checkpoints.write(config, tmp_path / "target")
    checkpoints.add_tokenizer(target)
    head = write_speculators(tmp_path / "head", HeadSizes(vocab_size=checkpoints.VOCAB))
    prompts = [tuple(range(20, 60)), tuple(range(90, 99))]
    eagle: dict[str, Any] = {
        "draft.kind": "eagle",
        "draft.path": str(head),
        "draft.placement": "apart",
        "draft.dtype": "float32",
        "target.tensor_parallel": 2,
    }
    wanted = Sampling(max_tokens=24, temperature=0, ignore_eos=True)
    with LLM(target, **KEYS) as alone:
        expected = [output.token_ids for output in alone.generate(prompts, wanted)]
    with open_ray_llm(target, **KEYS | eagle) as llm:
        assert len(own_processes_named("ray::DraftWorker")) == 1
        outputs = llm.generate(prompts, wanted)
    assert [output.token_ids for output in outputs] == expected
    assert all(output.stats and output.stats.drafted for output in outputs)


def test_mistakes_are_raised_before_ray_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        pytest.fail("Ray was started before the mistake was found")

    monkeypatch.setattr("specserve.llm.ray_parts.local_ray", fail)
    with pytest.raises(ModelNotFound):
        open_ray_llm("/nowhere")
    misspelt: Any = {"target.tensor_paralel": 2}
    with pytest.raises(ConfigError, match=r"target\.tensor_paralel"):
        open_ray_llm(**misspelt)
