"""transformers' own generate() as a system of the contest: plain, assisted by the draft, or looking up the prompt."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import transformers

from benchmarks.peers.turn import Ask, System, answer_turns


class Library:
    """Both models in bf16; torch chooses the threads."""

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

    def run(self, ask: Ask) -> int:
        return sum(map(len, self._written(ask)))

    def texts(self, ask: Ask) -> Sequence[str]:
        return [self._tokenizer.decode(ids) for ids in self._written(ask)]

    def _written(self, ask: Ask) -> list[list[int]]:
        options = self._options(ask)
        written: list[list[int]] = []
        for batch in ask.batches:
            ids = torch.tensor(
                batch
            )  # [prompts, tokens]; they are equally long, so nothing is padded
            out = self._target.generate(ids, attention_mask=torch.ones_like(ids), **options)
            written += out[:, ids.shape[1] :].tolist()
        return written

    def _options(self, ask: Ask) -> dict[str, Any]:
        common = {
            "max_new_tokens": ask.max_tokens,
            "min_new_tokens": ask.max_tokens,
            "do_sample": False,
            "pad_token_id": 0,
        }
        if ask.mode == "lookup":
            return {**common, "prompt_lookup_num_tokens": ask.gamma}
        if ask.mode == "draft":
            self._let_draft(ask.gamma)
            return {**common, "assistant_model": self._draft}
        return common

    def _let_draft(self, gamma: int | None) -> None:
        """So many each time, or, for None, as the library would by itself."""
        config = self._draft.generation_config
        config.num_assistant_tokens = gamma
        config.num_assistant_tokens_schedule = None if gamma is None else "constant"
        config.assistant_confidence_threshold = None if gamma is None else 0.0


@contextmanager
def opened(target: str, draft: str) -> Iterator[System]:
    library: Any = transformers.utils.logging
    library.set_verbosity_error()
    library.disable_progress_bar()
    yield Library(target, draft)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--draft", required=True)
    args = parser.parse_args()
    answer_turns(lambda: opened(args.target, args.draft))


if __name__ == "__main__":
    main()
