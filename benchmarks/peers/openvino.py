"""OpenVINO GenAI as a system of the contest: plain, with a draft model, or looking up the prompt.

Runs in an environment of its own, which has none of our dependencies but numpy. Converts the checkpoints when it opens.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.peers.turn import Ask, System, answer_turns

DEVICE = "CPU"
PRECISION = {"INFERENCE_PRECISION_HINT": "bf16"}
MAX_BATCHED = 2048  # with the default and a draft the first tokens are wrong
NGRAM = 3


class Pipelines:
    """One for each mode, opened when first asked for: a pipeline's kind is settled when it is built."""

    def __init__(self, target: Path, draft: Path) -> None:
        self._target, self._draft = target, draft
        self._opened: dict[str, Any] = {}

    def about(self) -> Mapping[str, str]:
        """What the target runs in is read from the compiled model; the hint alone proves nothing."""
        compiled = openvino.Core().compile_model(
            self._target / "openvino_model.xml", DEVICE, PRECISION
        )
        return {
            "version": version("openvino-genai"),
            "threads": str(compiled.get_property("INFERENCE_NUM_THREADS")),
            "precision": _precisions(compiled),
        }

    def run(self, ask: Ask) -> int:
        return sum(map(len, self._written(ask)))

    def texts(self, ask: Ask) -> Sequence[str]:
        written = self._written(ask)
        texts: list[str] = self._pipeline(ask.mode).get_tokenizer().decode(written)
        return texts

    def _written(self, ask: Ask) -> list[list[int]]:
        pipeline, config = self._pipeline(ask.mode), _config(ask)
        written: list[list[int]] = []
        for batch in ask.batches:
            ids = np.array(
                batch, dtype=np.int64
            )  # [prompts, tokens]; they are equally long, so nothing is padded
            inputs = openvino_genai.TokenizedInputs(
                openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids))
            )
            written += pipeline.generate(inputs, config).tokens
        return written

    def _pipeline(self, mode: str) -> Any:
        if mode not in self._opened:
            self._opened[mode] = openvino_genai.LLMPipeline(
                self._target, DEVICE, scheduler_config=_scheduler(), **PRECISION, **self._more(mode)
            )
        return self._opened[mode]

    def _more(self, mode: str) -> dict[str, object]:
        if mode == "lookup":
            return {"prompt_lookup": True}
        return (
            {"draft_model": openvino_genai.draft_model(self._draft, DEVICE, **PRECISION)}
            if mode == "draft"
            else {}
        )


def _scheduler() -> Any:
    """Nothing is kept from one turn to the next: the prompts come again."""
    config = openvino_genai.SchedulerConfig()
    config.max_num_batched_tokens = MAX_BATCHED
    config.enable_prefix_caching = False
    return config


def _config(ask: Ask) -> Any:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = ask.max_tokens, True, False
    if ask.gamma is not None:
        config.num_assistant_tokens = ask.gamma
    if ask.mode == "lookup":
        config.max_ngram_size = NGRAM
    return config


def _precisions(compiled: Any) -> str:
    """In what the linear layers run, and how many of them."""
    kinds: Counter[str] = Counter()
    for node in compiled.get_runtime_model().get_ordered_ops():
        info = node.get_rt_info()
        if _said(info["layerType"]) == "FullyConnected":
            kinds[_said(info["runtimePrecision"])] += 1
    return ", ".join(
        f"{kind} in {count} of {kinds.total()} linear layers" for kind, count in kinds.items()
    )


def _said(value: Any) -> str:
    return str(value.astype(str))


def _converted(checkpoint: str, into: Path) -> Path:
    """16-bit weights; what the layers compute in is for the pipeline to say."""
    program = Path(sys.executable).parent / "optimum-cli"
    options = [
        "--task",
        "text-generation-with-past",
        "--weight-format",
        "fp16",
        "--library",
        "transformers",
    ]
    done = subprocess.run(
        [program, "export", "openvino", "-m", checkpoint, *options, into],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(
            f"the {into.name} was not converted: {(done.stderr.strip() or 'it does not say why').splitlines()[-1]}"
        )
    return into


@contextmanager
def opened(target: str, draft: str, work: Path) -> Iterator[System]:
    yield Pipelines(_converted(target, work / "target"), _converted(draft, work / "draft"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument(
        "--work", type=Path, required=True, help="an empty directory for the converted models"
    )
    args = parser.parse_args()
    answer_turns(lambda: opened(args.target, args.draft, args.work))


if __name__ == "__main__":
    main()
