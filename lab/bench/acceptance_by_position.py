"""Acceptance by the length of the context: `python -m lab.bench.acceptance_by_position`.

The engine's acceptance after contexts of 500 to 8,000 tokens, beside what the two models say by
themselves: the `transformers` library computes both on the same text. Texts are greedy, so each
draft token that the engine verified was accepted exactly if the draft's likeliest token is the
target's, and the engine adds no decline of its own if none was decided otherwise.

The demo pair was trained on contexts of 1,024 tokens. Longer ones need a copy of it: `yarn` scales
the rotary embedding, and every token attends to all before it; `window` lets tokens attend to the
last 512. `plain` is the pair as it is, outside of what it was trained for from 1,024 tokens on.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from lab.bench.drafters.alpha import RecordingDrafter
from specserve.api.tokenizer import Tokenizer
from specserve.config.tree import DEMO, config_from_keys
from specserve.demo.corpus import standard_library
from specserve.host import usable_cores
from specserve.llm.inprocess import open_parts
from specserve.llm.llm import LLM, Output
from specserve.sampling_params import Sampling
from specserve.types import Proposal

log = logging.getLogger(__name__)

CONTEXTS = (500, 2000, 8000)
ANCHORS = 24  # places in the held-out text, each after every context
TOKENS = 128  # generated after each context
HELD_OUT = 256  # of the text itself, for the agreement on it
GAMMA = 4
TRAINED = 1024
LONGEST = 9 * TRAINED
RUNNING = 4  # sequences at a time
PAIRS: dict[str, dict[str, object]] = {
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": LONGEST / TRAINED,
            "original_max_position_embeddings": TRAINED,
        }
    },
    "window": {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "sliding_window": 512,
    },
    "plain": {},
}
"""Changes of both checkpoints' config.json."""
Rows = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LongPair:
    """Copies of target and draft for long contexts, as checkpoints and as the library's models."""

    target: Path
    draft: Path
    target_module: Any
    draft_module: Any

    @classmethod
    def write(cls, changes: Mapping[str, object], into: Path) -> LongPair:
        paths = []
        for role in ("target", "draft"):
            path = into / role
            shutil.copytree(DEMO / role, path)
            config = json.loads((path / "config.json").read_text(encoding="utf-8"))
            config |= {**changes, "max_position_embeddings": LONGEST}
            (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
            paths.append(path)
        target, draft = paths
        return cls(target, draft, _load(target), _load(draft))

    def compare(self, text: Rows, *, last: int) -> tuple[Tensor, Tensor]:
        """Return p and q for each of the last tokens of a text, [last, vocab] both."""
        ids = torch.tensor([text])
        with torch.inference_mode():
            p, q = (
                module(input_ids=ids, logits_to_keep=last + 1, use_cache=False).logits[0, :-1]
                for module in (self.target_module, self.draft_module)
            )
        return p.softmax(-1), q.softmax(-1)


@dataclass(slots=True)
class ContextFigures:
    """Counts after all contexts of one length."""

    context: int
    verified: int = 0  # draft tokens that the engine decided on
    accepted: int = 0  # of these, by the engine
    agreeing: int = 0  # of these, tokens on which the library's two models agree
    otherwise: int = 0  # of these, decided otherwise than by the library's models
    held_out: int = 0  # tokens of the held-out text
    held_out_agreeing: int = 0
    held_out_overlap: float = 0.0  # sum of sum min(p, q)

    @property
    def acceptance(self) -> float:
        return self.accepted / self.verified

    @property
    def own(self) -> float:
        """The pair's own agreement on the tokens that the engine decided on."""
        return self.agreeing / self.verified

    @property
    def agreement(self) -> float:
        return self.held_out_agreeing / self.held_out

    @property
    def overlap(self) -> float:
        return self.held_out_overlap / self.held_out

    def add_continuation(
        self, pair: LongPair, output: Output, proposals: Sequence[Proposal]
    ) -> None:
        """Count the verified draft tokens of one text, and those that the library agrees on."""
        text = (*output.prompt_token_ids, *output.token_ids)
        _, q = pair.compare(text, last=len(output.token_ids))
        likeliest = q.argmax(-1).tolist()
        first = len(output.prompt_token_ids)
        for index, accepted in _decided(proposals, text):
            agrees = likeliest[index - first] == text[index]
            self.verified += 1
            self.accepted += accepted
            self.agreeing += agrees
            self.otherwise += accepted != agrees

    def add_held_out(self, pair: LongPair, text: Rows, *, last: int) -> None:
        """Count the tokens of the held-out text on which p and q agree."""
        p, q = pair.compare(text, last=last)
        self.held_out += last
        self.held_out_agreeing += int((p.argmax(-1) == q.argmax(-1)).sum())
        self.held_out_overlap += float(torch.minimum(p, q).sum())


def measure(
    pair: LongPair, text: Rows, *, contexts: Sequence[int], anchors: Sequence[int], tokens: int
) -> Iterator[ContextFigures]:
    """Yield the figures of each length of context; the places in the text are always the same."""
    config = config_from_keys(
        {
            "target.path": str(pair.target),
            "draft.path": str(pair.draft),
            "target.dtype": "float32",
            "draft.dtype": "float32",
            "speculation.gamma": GAMMA,
            "limits.max_running": RUNNING,
            "cache.pages": RUNNING * (2 + (max(contexts) + tokens + GAMMA) // 16),
            "cache.prefix_caching": False,
        }
    )
    parts = open_parts(config)
    assert parts.drafter is not None
    recorder = RecordingDrafter(parts.drafter)
    with LLM.from_parts(replace(parts, drafter=recorder), config) as llm:
        for context in contexts:
            figures = ContextFigures(context)
            recorder.proposals.clear()
            outputs = llm.generate(
                [text[anchor - context : anchor] for anchor in anchors],
                Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True),
            )
            by_sequence = _by_sequence(recorder.proposals)
            for anchor, output, proposals in zip(anchors, outputs, by_sequence, strict=True):
                figures.add_continuation(pair, output, proposals)
                last = min(HELD_OUT, 2 * tokens)
                figures.add_held_out(pair, text[anchor - context : anchor + last], last=last)
            log.info("%d tokens of context: %.3f accepted", context, figures.acceptance)
            yield figures


def _by_sequence(proposals: Sequence[Proposal]) -> list[list[Proposal]]:
    """Return the proposals of each sequence, in the order of the sequences."""
    found: dict[int, list[Proposal]] = {}
    for proposal in proposals:
        found.setdefault(proposal.seq_id, []).append(proposal)
    return [found[seq_id] for seq_id in sorted(found)]


def _decided(proposals: Sequence[Proposal], text: Sequence[int]) -> Iterator[tuple[int, bool]]:
    """Yield the index of each draft token that was decided on, and whether it was accepted.

    A greedy text never has a rejected token as its own correction.
    """
    for proposal in proposals:
        for index, token in enumerate(proposal.tokens, start=proposal.start):
            if index >= len(text):
                break
            yield index, token == text[index]
            if token != text[index]:
                break


def _load(checkpoint: Path) -> Any:
    module: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return module.eval()


def table(measured: Sequence[ContextFigures]) -> Iterator[str]:
    """Yield the table of one pair, and the last context beside the first."""
    yield (
        "| context | draft tokens decided on | the engine's acceptance | the pair's own on these | "
        "decided otherwise | agreement on held-out text | its overlap, sum min(p, q) |"
    )
    yield "|---|---|---|---|---|---|---|"
    for one in measured:
        yield (
            f"| {one.context:,} | {one.verified:,} | {one.acceptance:.3f} | {one.own:.3f} | "
            f"{one.otherwise} | {one.agreement:.3f} | {one.overlap:.3f} |"
        )
    first, last = measured[0], measured[-1]
    yield ""
    yield (
        f"{last.context:,} tokens over {first.context:,}: the engine's acceptance "
        f"{last.acceptance / first.acceptance:.3f}, the pair's own on the same tokens "
        f"{last.own / first.own:.3f}; on held-out text agreement "
        f"{last.agreement / first.agreement:.3f} and overlap {last.overlap / first.overlap:.3f}."
    )


def head(num_anchors: int, tokens: int) -> list[str]:
    return [
        "# Acceptance by the length of the context",
        "",
        "`python -m lab.bench.acceptance_by_position`",
        "",
        f"{date.today()}, {platform.system()} {platform.machine()}, {usable_cores()} cores; the "
        f"demo pair in fp32, gamma {GAMMA}, greedy, {tokens} tokens behind each of {num_anchors} "
        f"places of held-out Python, every place behind each length of context. *The pair's own*: "
        "the share of the same draft tokens on which the library's target and draft agree.",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=list(PAIRS))
    parser.add_argument("--anchors", type=int, default=ANCHORS)
    parser.add_argument("--out", type=Path, help="where the report goes; the terminal by default")
    parser.add_argument("--quick", action="store_true", help="a tiny form, to see that it works")
    options = parser.parse_args(arguments)
    tokens = TOKENS
    if options.quick:
        options.contexts, options.anchors, tokens = [40, 80], 2, 16
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    tokenizer = Tokenizer.load(DEMO / "target")
    text = tuple(
        token for content in standard_library().held_out for token in tokenizer.encode(content)
    )
    longest, behind = max(options.contexts), max(HELD_OUT, tokens)
    step = (len(text) - longest - behind) // options.anchors
    anchors = [longest + i * step for i in range(options.anchors)]
    lines = head(options.anchors, tokens)
    for name in options.pairs:
        with tempfile.TemporaryDirectory() as scratch:
            pair = LongPair.write(PAIRS[name], Path(scratch))
            measured = list(
                measure(pair, text, contexts=options.contexts, anchors=anchors, tokens=tokens)
            )
        lines += ["", f"## {name}", "", *table(measured)]
        if options.out is not None:  # so that a later failure loses no figures
            options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if options.out is None:
        print("\n".join(lines))


if __name__ == "__main__":
    main()
