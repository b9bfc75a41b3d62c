"""KV caches in FP8 on emulated cards: what pages hold, what attention reads, and whole engines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specserve.config.tree import DEMO, config_from_keys
from specserve.demo.corpus import held_out_prompts
from specserve.errors import ConfigError
from specserve.llm.llm import LLM
from specserve.models.cache import PagedCache
from specserve.models.float8_pages import PageScales, to_float8
from specserve.models.float8_weight import FLOAT8
from specserve.models.gpu import flashinfer_attention
from specserve.models.model import Model, ModelOptions, open_model
from specserve.sampling_params import Sampling
from specserve.tools.doctor import room
from specserve.tools.plan.memory import GIB, GpuGroup, MemoryPlan, fits
from specserve.types import Step
from tests.support import checkpoints
from tests.support.card import Ledger, emulated_cards, flashinfer

TEXT = tuple(range(20, 80))
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
SCALES = ((0.05, 0.04), (0.03, 0.02))
"""Of keys and of values, for each of two layers: about what a calibration of them would give."""


@pytest.fixture
def card() -> Iterator[Ledger]:
    with emulated_cards() as ledger:
        yield ledger


@pytest.fixture(scope="module")
def stated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model whose config states a KV cache in FP8, with scales of its layers."""
    path = checkpoints.make("llama", tmp_path_factory.mktemp("pages") / "llama")
    state_scheme(path, SCALES)
    return path


def state_scheme(path: Path, scales: tuple[tuple[float, float], ...]) -> None:
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "config_groups": {},
        "kv_cache_scheme": SCHEME,
    }
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = load_file(path / "model.safetensors")
    for layer, (keys, values) in enumerate(scales):
        owner = f"model.layers.{layer}.self_attn"
        tensors |= {f"{owner}.k_scale": torch.tensor([keys])}
        tensors |= {f"{owner}.v_scale": torch.tensor([values])}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def options(**changed: Any) -> ModelOptions:
    return replace(ModelOptions("bfloat16", "cuda", attention="sdpa", pages=16), **changed)


def run(model: Model) -> Tensor:
    return model.runner.run([Step(0, 0, TEXT)], [len(TEXT)]).cpu().float()


def held(cache: PagedCache, layer: int) -> list[Tensor]:
    """Return the keys and the values of the text as a layer's pages hold them, widened."""
    slots = cache.slots(0, 0, len(TEXT)).cpu()
    pools = cache.keys[layer], cache.values[layer]
    whole = cache._pools[0].dtype
    return [pool.view(whole).cpu().view(pool.dtype).float()[slots] for pool in pools]


def test_what_is_too_large_is_cut_off() -> None:
    x = torch.tensor([1e4, -1e4, 3.0, 0.0]).bfloat16()
    for scale, expected in ((1.0, [448.0, -448.0, 3.0, 0.0]), (0.5, [448.0, -448.0, 6.0, 0.0])):
        assert to_float8(x, scale).view(FLOAT8).float().tolist() == expected


def test_pages_hold_keys_and_values_over_the_scales_of_their_layer(
    stated: Path, card: Ledger
) -> None:
    plain, small = (open_model(stated, options(page_dtype=name)) for name in ("auto", "fp8"))
    whole = open_model(checkpoint_without_scheme(stated), options())
    for model in (plain, small, whole):
        run(model)
    cache = plain.runner.cache
    assert [(one.keys, one.values) for one in cache.scales] == [pytest.approx(s) for s in SCALES]
    assert cache.keys[0].dtype == FLOAT8
    for found, same, true, scale in zip(
        held(cache, 0),
        held(small.runner.cache, 0),
        held(whole.runner.cache, 0),
        SCALES[0],
        strict=True,
    ):
        assert torch.equal(found, same), "fp8 has the scales that the checkpoint has"
        # Three bits after the first, and the smallest steps near zero.
        assert bool(((found * scale - true).abs() <= true.abs() / 15 + scale / 100).all())
        assert float(found.abs().max()) > 100


def checkpoint_without_scheme(path: Path) -> Path:
    return checkpoints.make("llama", path.parent / "plain")


@pytest.mark.parametrize("attention", ["sdpa", "invariant", "flashinfer"])
@pytest.mark.parametrize("kind", ["llama", "gemma2"])  # fused, and the library's with soft caps
def test_attention_reads_what_pages_hold(
    attention: str, kind: str, card: Ledger, tmp_path: Path
) -> None:
    path = checkpoints.make(kind, tmp_path / kind)
    with flashinfer.installed(graph_rows=(4, 64)):
        whole = run(open_model(path, options(attention=attention)))
        num_layers = 2 if kind == "llama" else 3
        state_scheme(path, (SCALES * 2)[:num_layers])
        model = open_model(path, options(attention=attention))
        found = run(model)
    assert 0 < float((found - whole).abs().mean()) < 0.15 * float(whole.std())
    # Also where results do not show it, pages hold what is divided by the scales.
    assert all(float(pool.abs().max()) > 50 for pool in held(model.runner.cache, 0))
    if attention == "flashinfer":
        assert card.num_replays > 0
        assert card.kernels["batch_prefill"] > 0


def test_all_attentions_read_the_same_pages(stated: Path, card: Ledger) -> None:
    with flashinfer.installed(graph_rows=(4, 64)):
        found = [
            run(open_model(stated, options(attention=name)))
            for name in ("sdpa", "invariant", "flashinfer")
        ]
    for other in found[1:]:
        assert float((other - found[0]).abs().mean()) < 0.05 * float(found[0].std())


def test_flashinfer_that_ignores_a_scale_is_not_used(
    stated: Path, card: Ledger, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with flashinfer.installed():
        find = flashinfer_attention.find_flashinfer

        def without_scale(device: torch.device) -> Any:
            def make_wrapper(*arguments: Any, **options: Any) -> Any:
                wrapper = find(device)(*arguments, **options)
                run = wrapper.run
                wrapper.run = lambda q, pools, **scales: run(
                    q, pools, k_scale=scales.get("k_scale")
                )
                return wrapper

            return make_wrapper

        monkeypatch.setattr(flashinfer_attention, "find_flashinfer", without_scale)
        open_model(stated, options(attention="auto"))
    assert "FlashInfer cannot be used: its results are off by" in caplog.text


def test_twice_as_many_pages_fit(stated: Path, card: Ledger) -> None:
    counts = [
        open_model(path, options(pages=None, memory_fraction=1e-4)).runner.cache.num_pages
        for path in (checkpoint_without_scheme(stated), stated)
    ]
    assert 1.9 * counts[0] < counts[1] < 2.2 * counts[0]


def test_doctor_and_plan_count_the_smaller_pages(stated: Path, card: Ledger) -> None:
    plain = checkpoint_without_scheme(stated)
    needs = {}
    for path, dtype in ((plain, "auto"), (plain, "fp8"), (stated, "auto")):
        keys = {"target.path": str(path), "target.device": "cuda", "target.dtype": "bfloat16"}
        config = config_from_keys({**keys, "cache.dtype": dtype, "draft.kind": "none"})
        needs[path, dtype] = room.memory_need(path, config.target, config).context_bytes
    assert needs[plain, "fp8"] == needs[stated, "auto"] == needs[plain, "auto"] // 2
    memory = MemoryPlan(torch.bfloat16, page_size=16, memory_fraction=0.5, context=64)
    gpus = GpuGroup(1, 2.0**25 / GIB)
    pages = [fits(path, gpus, memory)[0].pages for path in (plain, stated)]
    assert 1.9 * pages[0] < pages[1] < 2.1 * pages[0]


@pytest.mark.parametrize("anticipates", [True, False])
def test_greedy_texts_with_speculation_are_the_plain_ones(anticipates: bool, card: Ledger) -> None:
    prompts = list(held_out_prompts(count=3, length=40))
    sampling = Sampling(max_tokens=16, temperature=0.0, ignore_eos=True)
    keys = {"target.device": "cuda", "draft.device": "cuda", "cache.pages": 200}
    keys |= {"speculation.anticipation.enabled": anticipates}
    texts = []
    for gamma, dtype in ((0, "fp8"), (4, "fp8"), (0, "auto")):
        with LLM(None, None, **keys, **{"speculation.gamma": gamma, "cache.dtype": dtype}) as llm:
            texts.append([output.token_ids for output in llm.generate(prompts, sampling)])
    assert texts[0] == texts[1]
    assert texts[0] != texts[2], "rounded keys and values matter"


# Where pages keep the model's number format


def test_the_key_is_refused_without_a_gpu(stated: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"cache\.dtype: fp8 needs a GPU, and target.device is cpu"
    ):
        config_from_keys({"target.device": "cpu", "cache.dtype": "fp8"})
    with pytest.raises(ConfigError, match="target's device is the CPU, where pages are in the"):
        open_model(stated, options(device="cpu", attention="auto", page_dtype="fp8"))


def test_a_checkpoint_that_states_fp8_runs_on_a_cpu_as_before(
    stated: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    model = open_model(stated, options(device="cpu", attention="auto"))
    assert model.runner.cache.keys[0].dtype == torch.bfloat16
    assert "states a KV cache in FP8; the target's device is the CPU" in caplog.text


def test_encoder_decoders_are_refused(card: Ledger, tmp_path: Path) -> None:
    path = checkpoints.write(checkpoints.ENCODER_DECODERS["t5"](), tmp_path / "t5")
    with pytest.raises(ConfigError, match=r"cannot be had for .*: an encoder-decoder's keys"):
        open_model(path, options(page_dtype="fp8"))


def test_a_draft_has_pages_of_its_own_format() -> None:
    config = config_from_keys({"draft.path": str(DEMO / "draft"), "cache.dtype": "fp8"})
    assert ModelOptions.from_config(config.target, config).page_dtype == "fp8"
    assert ModelOptions.from_config(config.draft, config).page_dtype == "auto"


def test_scales_are_those_of_the_layers_that_are_there(stated: Path, card: Ledger) -> None:
    model = open_model(stated, options(), skip=[0])
    assert model.runner.cache.scales == (PageScales(*map(float, torch.tensor(SCALES[1]))),)
