"""Measure each section of the page, word it, and write the page.

A section that is not measured keeps its text on the page.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from statistics import median

import torch

from lab.bench.drafters import alpha, copy_speed, eagle_rounds, heads_overhead
from lab.bench.drafters.configs import drafter_configs
from lab.bench.drafters.copy_model import CopyModel
from lab.bench.drafters.options import Budget
from lab.bench.drafters.proposal_time import (
    GAMMA,
    SUPPORT,
    ProposalCorpus,
    confirmation_table,
    time_table,
)
from lab.bench.drafters.rewriting import REPEAT_LENGTH
from lab.papers.family import DemoFamily
from lab.papers.page import Section, table
from specserve.config.tree import DEMO
from specserve.demo.corpus import held_out_prompts
from specserve.models.checkpoints.load import load_model
from specserve.models.checkpoints.widen import inflate

TITLE = "# What each kind of drafter is worth"
ABOUT = (
    "`python -m lab.bench.drafters` writes this page, `python -m lab.bench.drafters --only NAME` a "
    "section of it. How each kind\nworks is in [design/drafters.md](../design/drafters.md); how "
    "the papers' figures compare, in [reproduction.md](reproduction.md)."
)
PROMPT_TOKENS = 128
ACCURACY_TEXTS = 40
"""Texts on which the copying model's accuracy is computed, without generating."""
ALPHA, GOOD_FOR, COPY, SPEED, HEADS, EAGLE = (
    "alpha, measured and by p and q",
    "What each is good for",
    "Prompt copy, rewriting a text",
    "What proposals without a model take",
    "What heads add to a pass",
    "An EAGLE-3 head beside a draft model and heads",
)
TITLES = (GOOD_FOR, ALPHA, COPY, SPEED, HEADS, EAGLE)
REMARKS = {
    "neural, draft": (
        "the usual choice: a model of the target's family, a tenth of its size or less, on a "
        "device of its own."
    ),
    "neural, small": (
        "where drafting shares the target's device, or the target is quick: what it loses in alpha "
        "it may win in c."
    ),
    "unigram": (
        "a floor to compare with: it knows which tokens are frequent, and nothing of the text."
    ),
    "bigram": (
        "no model at hand, or the last stage of a cascade: it costs microseconds, and is right now "
        "and then."
    ),
    "max_gram": (
        "no model at hand, and texts that repeat themselves: it copies where it can and counts "
        "where it cannot."
    ),
    "prompt_copy": (
        "answers that repeat their prompt: rewriting, edits of code, extracts. Where nothing "
        "repeats it stays silent, which is free."
    ),
    "vertical, draft > bigram": (
        "where the draft's own passes are what costs: smaller stages save some of them, and alpha "
        "is the draft's."
    ),
    "horizontal, draft > bigram": (
        "long proposals, whose late places are seldom reached and not worth a pass of the draft."
    ),
    "cascade, draft > small > bigram": (
        "both, where the sizes lie far apart; `specserve plan` finds k."
    ),
    "layer_skip": (
        "no second model, and no memory for one, in return for a c of the share of layers that are "
        "kept."
    ),
    "layer_skip, without 3": (
        "the same with a single layer left out: accepted more, and saving hardly anything."
    ),
    "heads": (
        "no second model, and a c near 0: all places of all sequences in one product. They are to "
        "be fitted to the target first."
    ),
    "eagle": (
        "targets whose head is published, or trained with `specserve eagle`: a layer a token, and "
        "later places are accepted nearly as often as the first."
    ),
    "dflash": (
        "targets whose draft is published, or trained for hours with `specserve dflash`: one pass "
        "for a whole proposal, however long."
    ),
}
Measurements = Mapping[str, alpha.DrafterMeasurement]


def write_page(file: Path, measured: Sequence[Section], titles: Sequence[str]) -> None:
    """Write the measured sections and the existing page's others, in the order of `titles`."""
    sections = read_sections(file) | {section.title: section.markdown() for section in measured}
    file.write_text(
        "\n\n".join((TITLE, ABOUT, *(sections[title] for title in titles if title in sections)))
        + "\n",
        encoding="utf-8",
    )


def read_sections(file: Path) -> dict[str, str]:
    """Return the sections of an existing page by title."""
    if not file.is_file():
        return {}
    parts = re.split(r"^(?=## )", file.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    return {part.partition("\n")[0].removeprefix("## "): part.strip() for part in parts}


def conditions(threads: int) -> str:
    """Return the date, machine and library of a measurement."""
    return (
        f"{date.today()}, {platform.machine()}, {threads} thread{'s' * (threads > 1)}, torch "
        f"{torch.__version__}"
    )


def measure_alphas(
    family: DemoFamily, heads: eagle_rounds.TrainedHeads, budget: Budget
) -> tuple[Section, ...]:
    module = load_model(DEMO / "target", dtype=torch.float32, device="cpu").module
    prompts = held_out_prompts(count=budget.prompts, length=PROMPT_TOKENS)
    measurements = {
        name: alpha.measure_drafter(keys, prompts, module, tokens=budget.tokens)
        for name, keys in drafter_configs(family.tables, heads.eagle, heads.dflash).items()
    }
    return recommendations(measurements), alpha_section(measurements, budget)


def alpha_section(measurements: Measurements, budget: Budget) -> Section:
    text = (
        f"{conditions(1)}. The demo target in fp32 continues {budget.prompts} held-out prompts of "
        f"{PROMPT_TOKENS} tokens by {budget.tokens} tokens each, at temperature 1 under "
        f"`speculative`, gamma {alpha.GAMMA}. Verified are the draft tokens up to the first "
        "rejection of a round; sum min(p, q) is taken at the same places, p from the library's own "
        "forward pass, q from the proposals (of a copied token it is p). alpha counts the rounds "
        "in which it drafts; tokens a round counts the rounds without drafts, too.\n\n"
    )
    places = [f"place {i + 1}" for i in range(alpha.GAMMA)]
    heads = (
        "drafter",
        "rounds with drafts",
        "verified",
        "alpha",
        "sum min(p, q)",
        "standard errors off",
        *places,
        "tokens a round",
    )
    return Section(
        ALPHA, text + table(heads, [_row(name, one) for name, one in measurements.items()])
    )


def _row(name: str, measurement: alpha.DrafterMeasurement) -> tuple[str, ...]:
    estimate = measurement.estimate
    by_position = map(measurement.estimate_at, range(alpha.GAMMA))
    return (
        name,
        f"{measurement.rounds_with_drafts / measurement.rounds:.0%}",
        f"{estimate.verified:,}",
        f"{estimate.alpha:.3f}" if estimate.verified else "",
        f"{estimate.overlap:.3f} ± {estimate.error / estimate.verified:.3f}"
        if estimate.verified
        else "",
        f"{estimate.standard_errors_off:+.1f}",
        *(f"{one.alpha:.2f}" if one.verified else "" for one in by_position),
        f"{measurement.tokens_per_round:.2f}",
    )


def recommendations(measurements: Measurements) -> Section:
    """Return the section that says what each drafter is good for."""
    lines = [
        f"- **{name}** ({_summary(one)}): {REMARKS[name]}" for name, one in measurements.items()
    ]
    return Section(
        GOOD_FOR,
        "The figures are those of the next section: held-out Python, which no model was trained "
        "on.\n\n" + "\n".join(lines),
    )


def _summary(measurement: alpha.DrafterMeasurement) -> str:
    if not measurement.tokens:
        return "no drafts"
    share = (
        f" in the {measurement.rounds_with_drafts / measurement.rounds:.0%} of rounds in which it "
        "drafts"
        if measurement.rounds_with_drafts < measurement.rounds
        else ""
    )
    return (
        f"alpha {measurement.estimate.alpha:.2f}{share}, {measurement.tokens_per_round:.2f} tokens "
        "a round"
    )


def measure_copying(model: CopyModel, directory: Path, budget: Budget) -> Section:
    """Measure `prompt_copy` with the model widened into the new `directory`."""
    params = inflate(model.directory, budget.params, directory)
    tasks = copy_speed.held_out_tasks(model.corpus, count=budget.texts, length=budget.length)
    results = copy_speed.compare_copying(
        directory, tasks, turns=budget.turns, threads=budget.threads
    )
    plain, prompt_copy = results["plain"], results["prompt_copy"]
    tokens, whole = model.accuracy(
        copy_speed.held_out_tasks(model.corpus, count=ACCURACY_TEXTS, length=budget.length, seed=2)
    )
    correct = copy_speed.share_correct(plain.answers, tasks)
    factor = prompt_copy.sample.ratio_to(plain.sample)
    text = (
        f"{conditions(budget.threads)}. Held-out Python of {budget.length} tokens, no "
        f"{REPEAT_LENGTH} of which come twice in a row, is to be repeated with one name changed. "
        f"The target is a Llama of {model.description} (`lab/bench/drafters/copy_model.py`): of "
        f"{ACCURACY_TEXTS} texts it has {tokens:.2%} of the tokens likeliest in their place, and "
        f"{whole:.0%} from end to end. It is widened to {params / 1e6:.0f}M parameters, which "
        "computes the same, and writes one text after the other, in bf16, greedily; "
        f"{budget.turns} turns of {budget.texts} texts, the reading of the prompts included; gamma "
        f"{copy_speed.GAMMA}. Both ways write the same, and {correct:.0%} of it is right to the "
        f"last token. Goal: 3 times plain decoding. **{factor:.2f} times.**\n\n"
    )
    rows = [
        (
            name,
            f"{one.sample.median_rate:.1f}",
            f"{min(one.sample.rates):.1f} to {max(one.sample.rates):.1f}",
            f"{one.rounds_per_text:.1f}",
        )
        for name, one in results.items()
    ]
    return Section(COPY, text + table(("", "tokens a second", "spread", "rounds a text"), rows))


def measure_proposals(directory: Path, budget: Budget) -> Section:
    """Measure the drafters without a model, whose tables are kept in `directory`."""
    corpus = ProposalCorpus.from_standard_library(directory)
    times = time_table(corpus, context=budget.context, rounds=budget.rounds)
    confirmed = confirmation_table(corpus)
    text = (
        f"{conditions(1)}. Microseconds a sequence at {budget.context:,} tokens of context, gamma "
        f"{GAMMA}, support {SUPPORT}; each gets one more token first. Goal: 20. `greedy` is "
        f"one-hot; `block` and `coupled` draw at temperature 1.\n\n{times}\n\nHow much of it real "
        "text confirms, by greedy agreement with one file in ten of Python's standard library; "
        f"tables are counted from the others:\n\n{confirmed}"
    )
    return Section(SPEED, text)


def measure_heads(family: DemoFamily, budget: Budget) -> Section:
    sizes = {"as shipped": DEMO / "target", f"widened to {family.params / 1e6:.0f}M": family.target}
    overheads = {
        name: heads_overhead.measure_overhead(
            path, sequences=(1, 8, 32), turns=budget.turns, rounds=budget.passes
        )
        for name, path in sizes.items()
    }
    text = (
        f"{conditions(budget.threads)}. A round that verifies one token a sequence, "
        f"{heads_overhead.LENGTH} behind it, bf16, without heads and with {heads_overhead.GAMMA} "
        f"drafts of heads behind it; medians of {budget.turns} turns of {budget.passes} rounds. "
        "Goal: 1.2.\n\n"
    )
    rows = [
        (name, str(num), *_times(one))
        for name, by_num in overheads.items()
        for num, one in by_num.items()
    ]
    return Section(
        HEADS,
        text + table(("target", "sequences", "pass alone, ms", "with heads, ms", "ratio"), rows),
    )


def measure_eagle(trained: eagle_rounds.TrainedHeads, budget: Budget) -> Section:
    """Measure trained heads in turns with the other drafters that know the target well."""
    prompts = held_out_prompts(count=budget.prompts, length=PROMPT_TOKENS)
    rows = []
    for temperature in (0.0, 1.0):
        found: dict[str, list[eagle_rounds.RoundsMeasurement]] = {}
        for _ in range(budget.turns):
            for name, keys in eagle_rounds.configs(trained).items():
                found.setdefault(name, []).append(
                    eagle_rounds.measure_rounds(
                        name,
                        keys,
                        prompts,
                        tokens=budget.tokens,
                        temperature=temperature,
                        threads=budget.threads,
                    )
                )
        rows += [(f"{temperature:g}", name, *_rounds(each)) for name, each in found.items()]
    text = (
        f"{conditions(budget.threads)}. The demo target continues {len(prompts)} held-out prompts "
        f"by {budget.tokens} tokens each, one after the other, gamma {eagle_rounds.GAMMA}; "
        f"{budget.turns} turns. The EAGLE-3 head and the DFlash draft of two layers were trained "
        f"for {budget.minutes:g} minutes each, or found in --cache. Seconds are those of the "
        "target's passes and of the answers that rounds waited for. What the last row prepares "
        "behind its answers is not counted, as on a device of its own, and never interrupted; its "
        "prepared proposals come from the head's own states.\n\n"
    )
    heads = ("T", "drafter", "tokens a round", "prepared", "tokens a second", "spread")
    return Section(EAGLE, text + table(heads, rows))


def _rounds(turns: Sequence[eagle_rounds.RoundsMeasurement]) -> tuple[str, ...]:
    rates = sorted(one.rate for one in turns)
    tokens, rounds, prepared = (
        sum(getattr(one, name) for one in turns) for name in ("tokens", "rounds", "prepared")
    )
    return (
        f"{tokens / rounds:.2f}",
        f"{prepared / rounds:.0%}" if prepared else "",
        f"{median(rates):.0f}",
        f"{rates[0]:.0f} to {rates[-1]:.0f}",
    )


def _times(overhead: heads_overhead.HeadsOverhead) -> Sequence[str]:
    ratios = overhead.ratios
    return (
        f"{1e3 * median(overhead.without_heads):.2f}",
        f"{1e3 * median(overhead.with_heads):.2f}",
        f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
    )
