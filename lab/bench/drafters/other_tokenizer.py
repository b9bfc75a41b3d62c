"""A draft of the demo target with another tokenizer, and what it is worth beside the demo draft.

`python -m lab.bench.drafters.other_tokenizer --out DIR --minutes 10` makes the draft in DIR, if it
is not there, and measures both in turns. Its tokenizer splits text by the pattern of Llama 3, not
GPT-2's, and has half as many tokens again. Its layers begin as the demo draft's, each embedding as
the mean of the demo draft's embeddings of that text, and it learns the text of the library.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lab.bench.engine import ThroughputSample, run_in_turns
from lab.bench.train_demo import (
    DRAFTS,
    TrainingSchedule,
    encode,
    load_model,
    new_model,
    next_token_loss,
    save,
    train,
    train_tokenizer,
)
from specserve.api.tokenizer import Tokenizer
from specserve.config.tree import DEMO
from specserve.demo.corpus import held_out_prompts, standard_library
from specserve.features.other_tokenizer.runner import TranslatedRunner
from specserve.features.other_tokenizer.shared_vocabulary import SharedVocabulary, make_translation
from specserve.llm.llm import LLM
from specserve.models.model import ModelOptions, open_model
from specserve.models.runner import Runner
from specserve.progress import ProgressBar
from specserve.sampling_params import Sampling
from specserve.types import Step

VOCAB = 6144
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3 splits a text before it merges."""
GAMMA = 4
PROMPT_LENGTH = 64


def make_draft(out: Path, *, minutes: float, vocab: int, threads: int) -> None:
    """Train the tokenizer, and the draft from the demo draft's weights."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    texts = standard_library().train
    tokenizer = train_tokenizer(texts, vocab=vocab, pattern=PATTERN)
    draft: Any = new_model(DRAFTS["draft"], tokenizer.eos_token_id, vocab=len(tokenizer))
    demo = load_model(DEMO / "draft")
    draft.model.layers.load_state_dict(demo.model.layers.state_dict())
    draft.model.norm.load_state_dict(demo.model.norm.state_dict())
    save(draft, tokenizer, out)
    draft.get_input_embeddings().weight.data.copy_(
        _embeddings(demo.get_input_embeddings().weight.detach(), Tokenizer.load(out))
    )
    with ProgressBar(sys.stderr) as bar:
        train(
            draft,
            encode(tokenizer, texts),
            next_token_loss,
            TrainingSchedule("draft", minutes, peak=0.5, compile=False, seed=5),
            save=lambda: save(draft, tokenizer, out),
            report_progress=bar,
        )


def _embeddings(demo: torch.Tensor, own: Tokenizer) -> torch.Tensor:  # [vocab, hidden]
    """Return for each token the mean embedding of the demo draft's tokens for its text."""
    target = Tokenizer.load(DEMO / "draft")
    rows = torch.zeros(own.vocab_size, demo.shape[1])
    for token in own.token_ids:
        spelt = target.encode(own.token_bytes(token).decode(errors="replace"), special=False)
        rows[token] = demo[list(spelt)].mean(0) if spelt else demo[0]
    return rows


@dataclass(slots=True)
class DraftEngine:
    """The demo target with one draft, or none, and what its draft tokens have been worth."""

    llm: LLM
    prompts: tuple[tuple[int, ...], ...]
    sampling: Sampling
    drafted: int = 0
    accepted: int = 0
    rounds: int = 0
    tokens: int = 0

    def run(self, _turn: int) -> int:
        """Continue all prompts, one after the other, and return the number of tokens."""
        before = self.tokens
        for prompt in self.prompts:
            output = self.llm.generate([prompt], self.sampling)[0]
            assert output.stats is not None
            self.drafted += output.stats.drafted
            self.accepted += output.stats.accepted
            self.rounds += output.stats.rounds
            self.tokens += len(output.token_ids)
        return self.tokens - before


def measure(
    drafts: Mapping[str, Path | None],
    *,
    size: str,
    temperature: float,
    turns: int,
    prompts: int,
    max_tokens: int,
) -> dict[str, tuple[DraftEngine, ThroughputSample]]:
    """Run an engine for each draft in turns, over the same prompts."""
    engines = {
        name: DraftEngine(
            LLM(
                None,
                None if path is None else str(path),
                **{
                    "demo.size": size,
                    "draft.kind": "none" if path is None else "neural",
                    "speculation.gamma": 0 if path is None else GAMMA,
                    "cache.pages": 128,
                },
            ),
            held_out_prompts(count=prompts, length=PROMPT_LENGTH),
            Sampling(temperature=temperature, max_tokens=max_tokens, seed=1, ignore_eos=True),
        )
        for name, path in drafts.items()
    }
    samples = run_in_turns({name: engine.run for name, engine in engines.items()}, turns=turns)
    return {name: (engine, samples[name]) for name, engine in engines.items()}


def overlaps(out: Path, *, prompts: int, length: int) -> dict[str, float]:
    """Return alpha of both drafts at T = 1, the sum of min(p, q) on the same held-out prefixes."""
    options = ModelOptions(
        dtype="float32", device="cpu", page_size=16, pages=256, prefix_caching=False
    )
    target, own = Tokenizer.load(DEMO / "target"), Tokenizer.load(out)
    shared = SharedVocabulary.from_tokenizers(target, own)
    opened = {
        name: open_model(path, options)
        for name, path in (("target", DEMO / "target"), ("demo draft", DEMO / "draft"), ("o", out))
    }
    vocab = opened["target"].spec.vocab_size
    translation = make_translation(shared, target, own).limited_to(
        target_vocab=vocab, draft_vocab=opened["o"].spec.vocab_size
    )
    drafts: dict[str, Runner | TranslatedRunner] = {
        "demo draft": opened["demo draft"].runner,
        "other tokenizer": TranslatedRunner(opened["o"].runner, translation, target_vocab=vocab),
    }
    sums, count = dict.fromkeys(drafts, 0.0), 0
    for prompt in held_out_prompts(count=prompts, length=length):
        step = Step(1, 0, prompt)
        p = opened["target"].runner.run([step], [len(prompt)]).float().softmax(-1)
        count += len(prompt)
        for name, draft in drafts.items():
            q = draft.run([step], [len(prompt)]).float().softmax(-1)
            sums[name] += float(torch.minimum(p, q).sum())
    return {name: total / count for name, total in sums.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--vocab", type=int, default=VOCAB)
    parser.add_argument("--threads", type=int, default=1, help="of the training")
    parser.add_argument("--size", default="200M", help="of the demo target, or none")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--only-make", action="store_true", help="measure nothing")
    parser.add_argument("--only-alpha", action="store_true", help="write no texts")
    args = parser.parse_args()
    if not (args.out / "model.safetensors").is_file():
        make_draft(args.out, minutes=args.minutes, vocab=args.vocab, threads=args.threads)
    if args.only_make:
        return
    alphas = overlaps(args.out, prompts=args.prompts, length=300)
    print(f"alpha by p and q: {', '.join(f'{name} {a:.2f}' for name, a in alphas.items())}")
    if args.only_alpha:
        return
    drafts = {"none": None, "demo draft": DEMO / "draft", "other tokenizer": args.out}
    print(
        f"| T | draft | accepted of drafted (gamma {GAMMA}) | tokens a pass | tokens/s | of none |"
    )
    print("|---|---|---|---|---|---|")
    for temperature in (0.0, 1.0):
        results = measure(
            drafts,
            size=args.size,
            temperature=temperature,
            turns=args.turns,
            prompts=args.prompts,
            max_tokens=args.max_tokens,
        )
        plain = results["none"][1]
        for name, (engine, sample) in results.items():
            share = f"{engine.accepted / engine.drafted:.2f}" if engine.drafted else "-"
            print(
                f"| {temperature:.0f} | {name} | {share} | {engine.tokens / engine.rounds:.2f} | "
                f"{sample.median_rate:.0f} | {sample.ratio_to(plain):.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
