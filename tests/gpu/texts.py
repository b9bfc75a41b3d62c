"""Third step on a card: whole texts with a real acceptance, with and without drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import perf_counter

from specserve.config.tree import DEMO
from specserve.demo.corpus import held_out_prompts
from specserve.llm.llm import LLM
from specserve.models.checkpoints.widen import inflate
from specserve.sampling_params import Sampling
from tests.gpu.folders import new_folder
from tests.gpu.sections import Results, Scale, Section

PARAMS, SMALL_PARAMS = 1_500_000_000, 7_000_000
GAMMAS: Sequence[int | str] = (0, 3, 7, "auto")


@dataclass(frozen=True, slots=True)
class TextRun:
    """Texts of one setting, and how fast they came."""

    texts: tuple[tuple[int, ...], ...]
    tokens_per_s: float
    accepted: int
    drafted: int


@cache
def widened(params: int) -> Path:
    target = new_folder() / "target"
    inflate(DEMO / "target", params, target)
    return target


def write_texts(
    scale: Scale, gamma: int | str, batch: int, temperature: float, **keys: object
) -> TextRun:
    prompts = held_out_prompts(count=batch, length=100)
    verifier = {} if temperature == 0 else {"speculation.verifier": "coupled"}
    known: dict[str, object] = {
        "speculation.gamma": gamma,
        "target.device": "cuda",
        "draft.device": "cuda",
        "target.dtype": "bfloat16",
        "draft.dtype": "bfloat16",
        "cache.prefix_caching": False,
        **verifier,
        **keys,
    }
    if scale.is_small:
        known["cache.pages"] = 400
    max_tokens = 6 if scale.is_small else 128
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature, seed=7, ignore_eos=True)
    target = widened(SMALL_PARAMS if scale.is_small else PARAMS)
    with LLM(target, DEMO / "draft", **known) as llm:
        llm.generate(list(prompts), sampling)  # captures and compiles
        started = perf_counter()
        outputs = llm.generate(list(prompts), sampling)
        seconds = perf_counter() - started
    stats = [output.stats for output in outputs if output.stats is not None]
    texts = tuple(tuple(output.token_ids) for output in outputs)
    return TextRun(
        texts,
        sum(map(len, texts)) / seconds,
        sum(one.accepted for one in stats),
        sum(one.drafted for one in stats),
    )


def compare_gammas(scale: Scale) -> Results:
    found: dict[str, object] = {}
    for temperature in (0.0, 0.8):
        for batch in (2,) if scale.is_small else (1, 8, 32):
            plain: TextRun | None = None
            for gamma in (0, "auto") if scale.is_small else GAMMAS:
                run = write_texts(scale, gamma, batch, temperature)
                plain = plain or run
                same = sum(a == b for a, b in zip(run.texts, plain.texts, strict=True))
                found[f"T = {temperature}, batch {batch}, gamma {gamma}"] = (
                    f"{run.tokens_per_s:.0f} tokens/s, {run.accepted} of {run.drafted} accepted, "
                    f"{same} of {batch} texts as without drafts"
                )
    return found


def compare_attention(scale: Scale) -> Results:
    found = {}
    for kernel in ("auto", "sdpa", "invariant"):
        run = write_texts(scale, 7, 1, 0.0, **{"target.attention": kernel})
        found[kernel] = f"{run.tokens_per_s:.0f} tokens/s"
    return found


SECTIONS: Mapping[str, Section] = {
    "the demo pair, its target widened": compare_gammas,
    "by attention, gamma 7, one stream": compare_attention,
}
