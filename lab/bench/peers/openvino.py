"""OpenVINO GenAI as a system of the comparison: plain, with a draft model, or with prompt lookup.

Runs in its own environment, which has none of our dependencies except numpy. Converts the
checkpoints when it opens.
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

from lab.bench.peers.turn import System, TurnRequest, serve_turns

DEVICE = "CPU"
PRECISION = {"INFERENCE_PRECISION_HINT": "bf16"}
WEIGHTS = ("fp16", "int8", "int4")
"""Formats of the target's weights; the draft keeps the first."""
MAX_BATCHED_TOKENS = 2048
"""With the default and a draft the first tokens are wrong."""
NGRAM = 3


class OpenVinoSystem:
    """Pipelines by mode, each opened at its first use: its mode is fixed when it is created."""

    def __init__(self, target: Path, draft: Path) -> None:
        self._target, self._draft = target, draft
        self._opened: dict[str, Any] = {}

    def about(self) -> Mapping[str, str]:
        """Return the precision of the compiled model; the hint alone does not prove it."""
        compiled = openvino.Core().compile_model(
            self._target / "openvino_model.xml", DEVICE, PRECISION
        )
        return {
            "version": version("openvino-genai"),
            "threads": str(compiled.get_property("INFERENCE_NUM_THREADS")),
            "precision": _precisions(compiled),
        }

    def run(self, request: TurnRequest) -> int:
        return sum(map(len, self._generate(request)))

    def texts(self, request: TurnRequest) -> Sequence[str]:
        generated = self._generate(request)
        texts: list[str] = self._pipeline(request.mode).get_tokenizer().decode(generated)
        return texts

    def _generate(self, request: TurnRequest) -> list[list[int]]:
        pipeline, config = self._pipeline(request.mode), _generation_config(request)
        generated: list[list[int]] = []
        for batch in request.batches:
            # [prompts, tokens]; prompts have the same length, so nothing is padded
            ids = np.array(batch, dtype=np.int64)
            inputs = openvino_genai.TokenizedInputs(
                openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids))
            )
            generated += pipeline.generate(inputs, config).tokens
        return generated

    def _pipeline(self, mode: str) -> Any:
        if mode not in self._opened:
            self._opened[mode] = openvino_genai.LLMPipeline(
                self._target,
                DEVICE,
                scheduler_config=_scheduler_config(),
                **PRECISION,
                **self._mode_options(mode),
            )
        return self._opened[mode]

    def _mode_options(self, mode: str) -> dict[str, object]:
        if mode == "lookup":
            return {"prompt_lookup": True}
        return (
            {"draft_model": openvino_genai.draft_model(self._draft, DEVICE, **PRECISION)}
            if mode == "draft"
            else {}
        )


def _scheduler_config() -> Any:
    """Return a config without prefix caching, because the prompts repeat in every turn."""
    config = openvino_genai.SchedulerConfig()
    config.max_num_batched_tokens = MAX_BATCHED_TOKENS
    config.enable_prefix_caching = False
    return config


def _generation_config(request: TurnRequest) -> Any:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = request.max_tokens, True, False
    if request.gamma is not None:
        config.num_assistant_tokens = request.gamma
    if request.mode == "lookup":
        config.max_ngram_size = NGRAM
    return config


def _precisions(compiled: Any) -> str:
    """Return the precisions of the linear layers, and how many run in each."""
    kinds: Counter[str] = Counter()
    for node in compiled.get_runtime_model().get_ordered_ops():
        info = node.get_rt_info()
        if _rt_value(info["layerType"]) == "FullyConnected":
            kinds[_rt_value(info["runtimePrecision"])] += 1
    return ", ".join(
        f"{kind} in {count} of {kinds.total()} linear layers" for kind, count in kinds.items()
    )


def _rt_value(value: Any) -> str:
    return str(value.astype(str))


def _convert(checkpoint: str, directory: Path, weights: str) -> Path:
    """Convert to weights of this format; the pipeline decides what the layers compute in."""
    program = Path(sys.executable).parent / "optimum-cli"
    options = [
        "--task",
        "text-generation-with-past",
        "--weight-format",
        weights,
        "--library",
        "transformers",
    ]
    done = subprocess.run(
        [program, "export", "openvino", "-m", checkpoint, *options, directory],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(
            f"the {directory.name} was not converted: "
            f"{(done.stderr.strip() or 'it does not say why').splitlines()[-1]}"
        )
    return directory


@contextmanager
def open_system(target: str, draft: str, work: Path, weights: str) -> Iterator[System]:
    yield OpenVinoSystem(
        _convert(target, work / "target", weights), _convert(draft, work / "draft", WEIGHTS[0])
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument(
        "--work", type=Path, required=True, help="an empty directory for the converted models"
    )
    parser.add_argument("--weights", choices=WEIGHTS, default=WEIGHTS[0], help="of the target")
    args = parser.parse_args()
    serve_turns(lambda: open_system(args.target, args.draft, args.work, args.weights))


if __name__ == "__main__":
    main()
