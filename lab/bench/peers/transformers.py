"""`generate()` of transformers as a system of the comparison.

It decodes plainly, assisted by the draft, or with prompt lookup.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers

from lab.bench.peers.turn import System, TurnRequest, serve_turns


class TransformersSystem:
    """Target and draft in bf16; torch chooses the number of threads."""

    def __init__(self, target: str, draft: str) -> None:
        load: Any = transformers.AutoModelForCausalLM.from_pretrained
        tokenizer: Any = transformers.AutoTokenizer
        self._target, self._draft = (load(path, dtype=torch.bfloat16) for path in (target, draft))
        self._tokenizer = tokenizer.from_pretrained(target)

    def about(self) -> Mapping[str, str]:
        version = f"{transformers.__version__}, torch {torch.__version__}"
        return {
            "version": version,
            "threads": str(torch.get_num_threads()),
            "precision": str(self._target.dtype).removeprefix("torch."),
        }

    def run(self, request: TurnRequest) -> int:
        return sum(map(len, self._generate(request)))

    def texts(self, request: TurnRequest) -> Sequence[str]:
        return [self._tokenizer.decode(ids) for ids in self._generate(request)]

    def _generate(self, request: TurnRequest) -> list[list[int]]:
        options = self._options(request)
        generated: list[list[int]] = []
        for batch in request.batches:
            # [prompts, tokens]; prompts have the same length, so nothing is padded
            ids = torch.tensor(batch)
            out = self._target.generate(ids, attention_mask=torch.ones_like(ids), **options)
            generated += out[:, ids.shape[1] :].tolist()
        return generated

    def _options(self, request: TurnRequest) -> dict[str, Any]:
        common = {
            "max_new_tokens": request.max_tokens,
            "min_new_tokens": request.max_tokens,
            "do_sample": False,
            "pad_token_id": 0,
        }
        if request.mode == "lookup":
            return {**common, "prompt_lookup_num_tokens": request.gamma}
        if request.mode == "draft":
            self._set_gamma(request.gamma)
            return {**common, "assistant_model": self._draft}
        return common

    def _set_gamma(self, gamma: int | None) -> None:
        """Draft `gamma` tokens each time; None restores the library's own schedule."""
        config = self._draft.generation_config
        config.num_assistant_tokens = gamma
        config.num_assistant_tokens_schedule = None if gamma is None else "constant"
        config.assistant_confidence_threshold = None if gamma is None else 0.0


@contextmanager
def open_system(target: str, draft: str) -> Iterator[System]:
    library: Any = transformers.utils.logging
    library.set_verbosity_error()
    library.disable_progress_bar()
    yield TransformersSystem(target, draft)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    args = parser.parse_args()
    serve_turns(lambda: open_system(args.target, args.draft))


if __name__ == "__main__":
    main()
