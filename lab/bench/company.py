"""Texts alone and in company, by every kind of drafter, in bf16: `python -m lab.bench.company`.

Half of the prompts are continued greedily, half at a temperature with a seed of their own. A text
counts as the same if every token is the one that the target writes alone, without drafts.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from lab.bench import without_amx
from lab.bench.drafters.configs import drafter_configs
from lab.bench.drafters.eagle_rounds import TrainedHeads
from lab.bench.drafters.proposal_time import ProposalCorpus
from lab.bench.tasks import drafter_keys, read_tasks
from specserve.demo.corpus import held_out_prompts
from specserve.llm.llm import LLM, Prompt
from specserve.sampling_params import Sampling
from specserve.tools.bench.report import machine

GAMMA = 4
TEMPERATURE = 0.8
LENGTH = 60
"""Tokens of a prompt of the demo, and less by up to seven."""
NUM_FILES = 40
"""Files that the demo's EAGLE head and DFlash draft are trained on."""
NUM_KINDS = 8  # of tasks
PLAIN = "none"
KEYS = {"target.dtype": "bfloat16", "cache.pages": 1500, "speculation.gamma": GAMMA}
Texts = list[tuple[int, ...]]


def write_texts(llm: LLM, prompts: Sequence[Prompt], *, tokens: int, at_once: int) -> Texts:
    samplings = [
        Sampling(max_tokens=tokens, temperature=TEMPERATURE * (i % 2), seed=i, ignore_eos=True)
        for i in range(len(prompts))
    ]
    texts: Texts = []
    for first in range(0, len(prompts), at_once):
        some = slice(first, first + at_once)
        texts += [tuple(one.token_ids) for one in llm.generate(prompts[some], samplings[some])]
    return texts


def rows(
    options: argparse.Namespace,
    prompts: Sequence[Prompt],
    drafters: Mapping[str, Mapping[str, Any]],
) -> Iterator[str]:
    """Yield how many texts are the same, alone and in company, by drafter."""
    plain: Texts = []
    for name, keys in drafters.items():
        same = []
        with LLM(options.target, **{**KEYS, **keys}) as llm:
            for at_once in (1, options.company):
                texts = write_texts(llm, prompts, tokens=options.tokens, at_once=at_once)
                plain = plain or texts
                same.append(sum(a == b for a, b in zip(plain, texts, strict=True)))
        yield f"| {name} | {same[0]} | {same[1]} |"


def page(options: argparse.Namespace) -> Iterator[str]:
    without = " --without-amx" if options.without_amx else ""
    yield f"`python -m lab.bench.company{without}`, {date.today()}, {machine()}, of "
    yield f"{options.target or 'the demo target'}. Of {options.prompts} texts of {options.tokens} "
    yield "tokens in bf16, half greedy and half seeded at temperature "
    yield f"{TEMPERATURE}, these have the tokens of the target alone without drafts:\n"
    yield f"| drafter | alone | among {options.company} |"
    yield "|---|---|---|"
    plain = {PLAIN: {"draft.kind": "none"}}
    with tempfile.TemporaryDirectory() as scratch:
        if options.target:
            tasks = read_tasks(per_kind=-(-options.prompts // NUM_KINDS))
            asked = [task.prompt for some in tasks.values() for task in some]
            prompts: Sequence[Prompt] = asked[: options.prompts]
            options.draft = options.tables = options.only = None
            drafters: Mapping[str, Any] = plain | drafter_keys(options)
        else:
            heads = TrainedHeads(Path(scratch), options.minutes, NUM_FILES)
            tables = ProposalCorpus.from_standard_library(Path(scratch)).tables
            drafters = plain | dict(drafter_configs(tables, heads.eagle, heads.dflash))
            beginnings = held_out_prompts(count=options.prompts, length=LENGTH)
            prompts = [prompt[: LENGTH - i % 8] for i, prompt in enumerate(beginnings)]
        yield from rows(options, prompts, drafters)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", help="a model that is asked the tasks; the demo by default")
    parser.add_argument("--eagle", help="an EAGLE head of that model")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--company", type=int, default=32, help="prompts at once")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--minutes", type=float, default=1.0, help="that a head is trained")
    without_amx.add_option(parser)
    parser.add_argument("--quick", action="store_true", help="a tiny form, to see that it works")
    options = parser.parse_args()
    if options.quick:
        options.prompts, options.company, options.tokens, options.minutes = 4, 4, 4, 0.01
    without_amx.obey(options)
    for line in page(options):
        print(line, flush=True)


if __name__ == "__main__":
    main()
