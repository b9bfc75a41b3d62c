"""What was measured, in sections: tables, and what they mean. Measures by calling the rooms beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import torch

from benchmarks.drafters import alpha
from benchmarks.drafters import copy_speed as copying
from benchmarks.drafters import heads_overhead as telling
from benchmarks.drafters.configs import ways
from benchmarks.drafters.copy_model import Copyist
from benchmarks.drafters.options import Budget
from benchmarks.drafters.page import circumstances
from benchmarks.drafters.proposal_time import GAMMA, SUPPORT, Corpus, speed, use
from benchmarks.drafters.rewriting import ALIKE
from specserve.config.tree import DEMO
from specserve.demo.corpus import held_out_prompts
from specserve.models.checkpoints.load import load_model
from specserve.tools.inflate import inflate
from specserve.tools.reproduce.family import Family
from specserve.tools.reproduce.page import Section, table

PROMPT = 128  # tokens
EXAMINED = 40  # texts that are only read, to see how right the copying model is
ALPHA, GOOD_FOR, COPY, SPEED, HEADS = (
    "alpha, measured and by p and q",
    "What each is good for",
    "Prompt copy, rewriting a text",
    "What proposals without a model take",
    "What heads add to a pass",
)
TITLES = (GOOD_FOR, ALPHA, COPY, SPEED, HEADS)
REMARKS = {
    "neural, draft": "the usual choice: a model of the target's family, a tenth of its size or less, on a device of its own.",
    "neural, small": "where drafting shares the target's device, or the target is quick: what it loses in alpha it may win in c.",
    "unigram": "a floor to compare with: it knows which tokens are frequent, and nothing of the text.",
    "bigram": "no model at hand, or the last stage of a cascade: it costs microseconds, and is right now and then.",
    "max_gram": "no model at hand, and texts that repeat themselves: it copies where it can and counts where it cannot.",
    "prompt_copy": "answers that repeat their prompt: rewriting, edits of code, extracts. Where nothing repeats it stays silent, which is free.",
    "vertical, draft > bigram": "where the draft's own passes are what costs: guesses save some of them, and alpha is the draft's.",
    "horizontal, draft > bigram": "long proposals, whose late places are seldom reached and not worth a pass of the draft.",
    "cascade, draft > small > bigram": "both, where the sizes lie far apart; `specserve plan` finds k.",
    "layer_skip": "no second model, and no memory for one, in return for a c of the share of layers that are kept.",
    "layer_skip, without 3": "the same with a single layer left out: accepted more, and saving hardly anything.",
    "heads": "no second model, and a c near 0: all places of all sequences in one product. They are to be fitted to the target first.",
}
Found = Mapping[str, alpha.Found]


def alphas(family: Family, budget: Budget) -> tuple[Section, ...]:
    module = load_model(DEMO / "target", dtype=torch.float32, device="cpu").module
    prompts = held_out_prompts(count=budget.prompts, length=PROMPT)
    found = {
        name: alpha.measured(keys, prompts, module, tokens=budget.tokens)
        for name, keys in ways(family.tables).items()
    }
    return good_for(found), overlaps(found, budget)


def overlaps(found: Found, budget: Budget) -> Section:
    text = (
        f"{circumstances(1)}. The demo target in fp32 continues {budget.prompts} held-out prompts of {PROMPT} tokens by {budget.tokens} tokens each, "
        f"at temperature 1 under `speculative`, gamma {alpha.GAMMA}. Judged are the drafts up to the first refusal of a round; sum min(p, q) is "
        "taken at the same places, p from the library's own forward pass, q from the proposals (of a copied token it is p). alpha is what drafts are "
        "worth where it drafts; tokens a round counts the rounds without drafts, too.\n\n"
    )
    places = [f"place {i + 1}" for i in range(alpha.GAMMA)]
    heads = (
        "drafter",
        "rounds with drafts",
        "judged",
        "alpha",
        "sum min(p, q)",
        "standard errors off",
        *places,
        "tokens a round",
    )
    return Section(ALPHA, text + table(heads, [_row(name, one) for name, one in found.items()]))


def _row(name: str, found: alpha.Found) -> tuple[str, ...]:
    share = found.share
    return (
        name,
        f"{found.proposed / found.rounds:.0%}",
        f"{share.judged:,}",
        f"{share.alpha:.3f}" if share.judged else "",
        f"{share.overlap:.3f} ± {share.error / share.judged:.3f}" if share.judged else "",
        f"{share.errors_off:+.1f}",
        *(f"{at.alpha:.2f}" if at.judged else "" for at in map(found.at, range(alpha.GAMMA))),
        f"{found.tokens_per_round:.2f}",
    )


def good_for(found: Found) -> Section:
    lines = [f"- **{name}** ({_worth(one)}): {REMARKS[name]}" for name, one in found.items()]
    return Section(
        GOOD_FOR,
        "The figures are those of the next section: Python that nobody was trained on.\n\n"
        + "\n".join(lines),
    )


def _worth(found: alpha.Found) -> str:
    if not found.drafts:
        return "no drafts"
    seldom = (
        f" in the {found.proposed / found.rounds:.0%} of rounds in which it drafts"
        if found.proposed < found.rounds
        else ""
    )
    return f"alpha {found.share.alpha:.2f}{seldom}, {found.tokens_per_round:.2f} tokens a round"


def copy(copyist: Copyist, directory: Path, budget: Budget) -> Section:
    params = inflate(copyist.directory, budget.params, directory)
    tasks = copying.tasks(copyist.rewriting, count=budget.texts, length=budget.length)
    found = copying.copied(directory, tasks, turns=budget.turns, threads=budget.threads)
    plain, copied = found["plain"], found["prompt_copy"]
    tokens, whole = copyist.right(
        copying.tasks(copyist.rewriting, count=EXAMINED, length=budget.length, seed=2)
    )
    right, factor = copying.share_right(plain.answers, tasks), copied.sample.against(plain.sample)
    text = (
        f"{circumstances(budget.threads)}. Held-out Python of {budget.length} tokens, no {ALIKE} of which come twice in a row, is to be repeated "
        f"with one name changed. The target is a Llama of {copyist.described} (`benchmarks/drafters/copy_model.py`): of {EXAMINED} texts it has "
        f"{tokens:.2%} of the tokens likeliest in their place, and {whole:.0%} from end to end. It is widened to {params / 1e6:.0f}M parameters, "
        f"which computes the same, and writes one text after the other, in bf16, greedily; {budget.turns} turns of {budget.texts} texts, the reading "
        f"of the prompts included; gamma {copying.GAMMA}. Both ways write the same, and {right:.0%} of it is right to the last token. Goal: 3 times "
        f"plain decoding. **{factor:.2f} times.**\n\n"
    )
    rows = [
        (
            name,
            f"{one.sample.middle:.1f}",
            f"{min(one.sample.rates):.1f} to {max(one.sample.rates):.1f}",
            f"{one.passes:.1f}",
        )
        for name, one in found.items()
    ]
    return Section(COPY, text + table(("", "tokens a second", "spread", "rounds a text"), rows))


def proposals(directory: Path, budget: Budget) -> Section:
    corpus = Corpus.of_library(directory)
    taken, borne_out = speed(corpus, context=budget.context, rounds=budget.rounds), use(corpus)
    text = (
        f"{circumstances(1)}. Microseconds a sequence at {budget.context:,} tokens of context, gamma {GAMMA}, support {SUPPORT}; each is told one "
        f"more token first. Goal: 20. `greedy` is one-hot; `block` and `coupled` draw at temperature 1.\n\n{taken}\n\n"
        "How much of it real text bears out, by greedy agreement with one file in ten of Python's standard library; tables are counted from the "
        f"others:\n\n{borne_out}"
    )
    return Section(SPEED, text)


def heads(family: Family, budget: Budget) -> Section:
    sizes = {"as shipped": DEMO / "target", f"widened to {family.params / 1e6:.0f}M": family.target}
    found = {
        name: telling.added(path, sequences=(1, 8, 32), turns=budget.turns, number=budget.passes)
        for name, path in sizes.items()
    }
    text = (
        f"{circumstances(budget.threads)}. A round that judges one token a sequence, {telling.LENGTH} behind it, bf16, without heads and "
        f"with {telling.GAMMA} drafts of heads behind it; medians of {budget.turns} turns of {budget.passes} rounds. Goal: 1.2.\n\n"
    )
    rows = [
        (name, str(num), *_times(one)) for name, own in found.items() for num, one in own.items()
    ]
    return Section(
        HEADS,
        text + table(("target", "sequences", "pass alone, ms", "with heads, ms", "ratio"), rows),
    )


def _times(added: telling.Added) -> Sequence[str]:
    ratios = added.ratios
    return (
        f"{1e3 * median(added.alone):.2f}",
        f"{1e3 * median(added.telling):.2f}",
        f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
    )
