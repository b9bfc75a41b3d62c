"""Table 3 of arXiv 2211.17192 with the demo family: alpha of n-gram and neural drafts."""

from __future__ import annotations

from collections.abc import Mapping

from lab.papers.family import (
    DRAFT,
    SMALL,
    DemoFamily,
    ReproduceBudget,
    label,
    readers,
)
from lab.papers.page import Section, table
from lab.papers.published import TABLE_3
from specserve.demo.corpus import held_out_tokens
from specserve.progress import ReportProgress
from specserve.tools.plan.measure import Overlap, overlaps


def acceptances(
    family: DemoFamily, budget: ReproduceBudget, report_progress: ReportProgress
) -> Section:
    found = measure_overlaps(family, budget, report_progress)
    rows = [
        ("Python, held out", name, f"{own.alphas[0.0]:.2f}", f"{own.alphas[1.0]:.2f}", "", "")
        for name, own in found.items()
    ]
    rows += [
        (row.task, row.draft, "", "", f"{row.greedy:.2f}", f"{row.sampled:.2f}") for row in TABLE_3
    ]
    tokens = next(iter(found.values())).num_tokens
    text = (
        f"E[sum min(p, q)] on {tokens:,} held-out tokens of Python's standard library, up to 1,024 "
        f"of context, verified by the {label('target')}; tables counted from the text that it "
        "learnt from. Below, the papers' models and tasks: what is to be compared is the order, "
        "and how far apart the kinds lie.\n\n"
    )
    heads = ("task", "draft", "ours, T = 0", "ours, T = 1", "published, T = 0", "published, T = 1")
    return Section("Table 3 of 2211.17192: alpha by draft", text + table(heads, rows))


def measure_overlaps(
    family: DemoFamily, budget: ReproduceBudget, report_progress: ReportProgress
) -> Mapping[str, Overlap]:
    """Return the overlap of each draft with the target, from the smallest draft to the largest."""
    models = readers("target", SMALL, DRAFT)
    drafters = family.table_drafters() | {label(name): models[name] for name in (SMALL, DRAFT)}
    return overlaps(
        models["target"],
        drafters,
        held_out_tokens(budget.text_tokens),
        report_progress=report_progress,
    )
