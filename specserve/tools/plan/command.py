"""Collect the numbers of a pair and compute its plan: `specserve plan`.

Neither parses the command line nor prints.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch

from specserve.api.tokenizer import Tokenizer
from specserve.cluster.placement import FEW_GPUS, with_drafts_that_fit
from specserve.config.tree import config_from_file, config_from_keys
from specserve.demo.corpus import held_out_tokens
from specserve.engine.draft_placement import PlacementChoice
from specserve.errors import BadValue
from specserve.models.checkpoints.find import describe, find_checkpoint
from specserve.models.device_formats import DTYPES
from specserve.models.model import DEFAULT_MEMORY_FRACTION, ModelOptions, open_model
from specserve.progress import ReportProgress, no_progress
from specserve.tools.plan.cascades import best_cascades
from specserve.tools.plan.curves import check_drawable, draw
from specserve.tools.plan.devices import DeviceDemand, device_demands
from specserve.tools.plan.gains import GammaAdvice, ModelPair
from specserve.tools.plan.measure import ModelReader, overlaps, seconds
from specserve.tools.plan.memory import (
    GpuGroup,
    MemoryPlan,
    MemoryShare,
    PlannedFit,
    fits,
    share_here,
    share_on,
    smallest_fit,
    whole_model_share,
    with_pages,
)
from specserve.tools.plan.model_paths import ModelPaths, find_models, parameter_ratio
from specserve.tools.plan.options import PlanOptions
from specserve.tools.plan.panels import panels
from specserve.tools.plan.placement import measure_placement
from specserve.tools.plan.report import PlannedMemory, PlanReport

ALPHAS = (0.5, 0.6, 0.7, 0.8, 0.9)
"""Values of alpha that are shown when none is given."""
PLANNED_CONTEXT = 8192
PAGES = 64
"""Pages of the KV cache that measuring takes."""
UNTIMED = (
    "c is the ratio of the parameters; the time of small models is mostly overhead, so measure it "
    "(--measure) before you rely on it"
)


def plan(options: PlanOptions, report_progress: ReportProgress = no_progress) -> PlanReport:
    """Return the plan and write the requested files.

    Raises a SpecserveError for invalid arguments, models or texts.
    """
    for file in (options.json, options.plot):
        if file is not None and not file.resolve().parent.is_dir():
            raise BadValue(
                f"cannot write {file}: its directory does not exist; make it first", param="out"
            )
    if options.plot is not None:
        check_drawable(options.plot)
    models = find_models(options)
    placement = None
    if options.measure:
        assert models is not None
        notes, pairs, placement = _measured(options, models, report_progress)
    else:
        notes, pairs = _pairs(options, models)
    more, devices = ([], ()) if options.config is None else _devices(options, options.config)
    report = PlanReport(
        (*notes, *more),
        tuple(
            GammaAdvice.from_pair(pair, hit_rate=options.hit_rate, max_gamma=options.max_gamma)
            for pair in pairs
        ),
        None if models is None else _memory(options, models),
        tuple(best_cascades(options.stages, options.max_gamma)) if options.stages else (),
        placement,
        devices,
    )
    if options.json is not None:
        options.json.write_text(json.dumps(report.json(), indent=2) + "\n", encoding="utf-8")
    if options.plot is not None:
        if not report.advice:
            raise BadValue(
                "there is nothing to plot without a draft, or --alpha and --cost", param="plot"
            )
        draw(panels(report.advice), options.plot)
    return report


def _devices(options: PlanOptions, file: Path) -> tuple[list[str], tuple[DeviceDemand, ...]]:
    """Return a note where drafts find no GPU, and what a config asks of Ray.

    `auto` is a GPU if there are some, here or in --gpus.
    """
    named = sum(GpuGroup.parse(text).count for text in options.gpus)
    num_gpus, config = named or torch.cuda.device_count(), config_from_file(file)
    fitted = with_drafts_that_fit(config, num_gpus=num_gpus)
    notes = [] if fitted == config else [f"draft.placement auto means together, {FEW_GPUS}."]
    return notes, device_demands(fitted, has_gpus=num_gpus > 0)


def _pairs(options: PlanOptions, models: ModelPaths | None) -> tuple[list[str], list[ModelPair]]:
    """Return notes about the origin of the numbers, and the pairs."""
    if options.stages and options.alpha is None and options.cost is None:
        return [], []
    if models is None and options.cost is None:
        if options.alpha is None:
            return [], []
        raise BadValue(
            "--alpha alone says nothing of time; give --cost, or --target and --draft", param="cost"
        )
    ratio = None if models is None or models.draft is None else parameter_ratio(models)
    c = ratio if options.cost is None else options.cost
    if c is None:
        return [
            "No draft was named; --draft, or --alpha and --cost, say what speculation would gain."
        ], []
    notes = [UNTIMED + "."] if options.cost is None else []
    if options.alpha is not None:
        return notes, [ModelPair("given", options.alpha, c, c if ratio is None else ratio)]
    notes.append("alpha was not given, so here are several; --measure --text FILE finds it.")
    return notes, [
        ModelPair(f"if alpha is {alpha}", alpha, c, c if ratio is None else ratio)
        for alpha in ALPHAS
    ]


def _measured(
    options: PlanOptions, models: ModelPaths, report_progress: ReportProgress
) -> tuple[list[str], list[ModelPair], PlacementChoice | None]:
    """Return notes, the pairs by temperature, and the placement of the draft if it was timed."""
    if models.draft is None:
        raise BadValue("--measure needs --draft, the model that drafts", param="draft")
    report_progress("reading the text")
    ids = _text(options, models)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    report_progress("loading target and draft")
    target, draft = (
        _reader(models, which, options.draft_quantize) for which in ("target", "draft")
    )
    overlap = overlaps(target, {"draft": draft}, ids, report_progress=report_progress)["draft"]
    taken = seconds(
        {"target": target.pass_seconds(1), "draft": draft.pass_seconds(1)},
        report_progress=report_progress,
    )
    c = taken["draft"] / taken["target"]
    where = f"on {target.runner.device.type}, {torch.get_num_threads()} threads"
    notes = [
        f"Measured on {overlap.num_tokens:,} tokens; a pass of one token takes the target "
        f"{1e3 * taken['target']:.2f} ms, the draft {1e3 * taken['draft']:.2f} ms ({where})."
    ]
    placement = measure_placement(
        target,
        draft,
        alpha=overlap.alphas[1.0],
        max_gamma=options.max_gamma,
        report_progress=report_progress,
    )
    if placement is not None:
        notes.append(f"draft.placement auto would take {placement.reason}.")
    pairs = [
        ModelPair(f"T = {temperature:g}", alpha, c, parameter_ratio(models))
        for temperature, alpha in overlap.alphas.items()
    ]
    return notes, pairs, placement


def _text(options: PlanOptions, models: ModelPaths) -> list[int]:
    target, draft = (
        Tokenizer.load(find_checkpoint(path))
        for path in (models.target, models.draft)
        if path is not None
    )
    target.require_same_vocabulary(draft)
    if options.text is None:
        return held_out_tokens(options.tokens)
    try:
        ids = target.encode(options.text.read_text(encoding="utf-8"), special=False)[
            : options.tokens
        ]
    except (OSError, UnicodeDecodeError) as error:
        raise BadValue(
            f"--text {options.text} cannot be read as UTF-8 text: {error}", param="text"
        ) from error
    if not ids:
        raise BadValue(f"--text {options.text} is empty; name a file with text in it", param="text")
    return list(ids)


def _reader(models: ModelPaths, which: str, draft_quantize: str | None) -> ModelReader:
    config = config_from_keys(
        {
            "target.path": str(models.target),
            "draft.path": str(models.draft),
            "draft.quantize": draft_quantize or "none",
            "cache.pages": PAGES,
        }
    )
    own = config.target if which == "target" else config.draft
    assert own.path is not None
    return ModelReader(
        open_model(find_checkpoint(own.path), ModelOptions.from_config(own, config)),
        support=config.draft.support,
    )


def _memory(options: PlanOptions, models: ModelPaths) -> PlannedMemory:
    described = describe(models.target)
    context = min(described.spec.max_context, options.context or PLANNED_CONTEXT)
    fraction = (
        DEFAULT_MEMORY_FRACTION if options.memory_fraction is None else options.memory_fraction
    )
    memory = MemoryPlan(DTYPES[options.dtype], options.page_size, fraction, context)
    target = MemoryShare.from_description(described, memory.dtype, memory.page_size)
    draft = None if models.draft is None else whole_model_share(models.draft, memory)
    if not options.gpus:
        target = share_here(models.target, target, memory.dtype)
        target = with_pages(models.target, target, memory.dtype)
        if models.draft is not None and draft is not None:
            draft = share_here(
                models.draft,
                draft,
                memory.dtype,
                round_to=options.draft_quantize,
            )
        return PlannedMemory(memory, target, draft)
    groups = [GpuGroup.parse(text) for text in options.gpus]
    target = share_on(groups[0], models.target, target, memory.dtype)
    if models.draft is not None and draft is not None:
        to = options.draft_quantize
        draft = share_on(groups[-1], models.draft, draft, memory.dtype, round_to=to)
    found = fits(models.target, groups[0], memory)
    return PlannedMemory(
        memory,
        target,
        draft,
        tuple(found),
        _draft_fit(models, groups, found, memory, options.draft_quantize),
        groups[0].count,
    )


def _draft_fit(
    models: ModelPaths,
    groups: list[GpuGroup],
    found: list[PlannedFit],
    memory: MemoryPlan,
    round_to: str | None,
) -> PlannedFit | None:
    """Fit the draft on a GPU of the second group, or on one that the target leaves free."""
    best = smallest_fit(found)
    if models.draft is None or best is None or (len(groups) == 1 and best.ranks == groups[0].count):
        return None
    alone = replace(groups[-1], count=1)
    return fits(models.draft, alone, memory, round_to=round_to)[0]
