"""specserve in one process, as `LLM` opens it, as a system of the comparison.

It decodes plainly, with a gamma of its own or a fixed one, or with a forced acceptance.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version

import torch

from lab.bench.peers.forced_drafter import ForcedDrafter
from lab.bench.peers.turn import System, TurnRequest, serve_turns
from specserve import __version__
from specserve.config.tree import Config, config_from_keys, parse_override
from specserve.llm.inprocess import EngineParts, open_parts
from specserve.llm.llm import LLM, Output
from specserve.sampling_params import Sampling

GAMMAS: Mapping[str, int | str | None] = {
    "plain": 0,
    "auto": "auto",
    "draft": None,
    "forced": None,
}
"""Gamma of each mode; None is the one of the request, or the engine's own choice without one."""


class LlmSystem:
    """An engine in this process; both models have all cores in turn."""

    def __init__(self, llm: LLM, config: Config, forced: ForcedDrafter | None) -> None:
        self._llm, self._config, self._forced = llm, config, forced

    def about(self) -> Mapping[str, str]:
        return {
            "version": f"{__version__}, torch {version('torch')}",
            "threads": str(self._config.target.threads or torch.get_num_threads()),
            "precision": self._config.target.dtype,
        }

    def run(self, request: TurnRequest) -> int:
        return sum(len(output.token_ids) for output in self._generate(request))

    def texts(self, request: TurnRequest) -> Sequence[str]:
        return [output.text for output in self._generate(request)]

    def _generate(self, request: TurnRequest) -> list[Output]:
        fixed = GAMMAS[request.mode]
        gamma = (request.gamma or "auto") if fixed is None else fixed
        sampling = Sampling(
            max_tokens=request.max_tokens,
            temperature=0.0,
            ignore_eos=True,
            speculation={"gamma": gamma},
        )
        return [
            output
            for batch in request.batches
            for output in self._llm.generate(list(batch), sampling)
        ]

    def prepare(self, request: TurnRequest) -> None:
        """Decode plainly, for the forced drafter, the prompts whose texts it does not know."""
        if self._forced is None or request.mode != "forced":
            return
        unknown = tuple(
            prompt
            for prompt in request.prompts
            if not self._forced.knows(prompt, request.max_tokens)
        )
        plain = replace(request, mode="plain", prompts=unknown)
        for prompt, output in zip(unknown, self._generate(plain) if unknown else (), strict=True):
            self._forced.learn(prompt, tuple(output.token_ids))


@contextmanager
def open_system(keys: Mapping[str, object], *, alpha: float | None) -> Iterator[System]:
    """Open the engine; prefix caching is off, because the prompts repeat in every turn.

    With `alpha` its drafter is right with that probability.
    """
    config = config_from_keys(
        {
            "cache.prefix_caching": False,
            "target.dtype": "bfloat16",
            "draft.dtype": "bfloat16",
        },
        keys,
    )
    parts, forced = open_parts(config), None
    if alpha is not None:
        parts, forced = _force(parts, alpha)
    with LLM.from_parts(parts, config) as llm:
        yield LlmSystem(llm, config, forced)


def _force(parts: EngineParts, alpha: float) -> tuple[EngineParts, ForcedDrafter]:
    assert parts.drafter is not None, "a forced acceptance needs a draft"
    forced = ForcedDrafter(parts.drafter, alpha, vocab_size=parts.info.vocab_size)
    return replace(parts, drafter=forced), forced


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft")
    parser.add_argument("--alpha", type=float, help="force the acceptance of each draft token")
    parser.add_argument("--set", type=parse_override, action="append", default=[])
    args = parser.parse_args()
    draft = {"draft.path": args.draft} if args.draft else {}
    keys = {"target.path": args.target, **draft, **dict(args.set)}
    serve_turns(lambda: open_system(keys, alpha=args.alpha))


if __name__ == "__main__":
    main()
