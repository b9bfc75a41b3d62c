"""Set-up of a process with a model before it serves: its device, threads and first passes."""

from __future__ import annotations

import os

import torch

from specserve.checkpoint_files import draft_translation
from specserve.claimed_memory import ClaimedMemory
from specserve.cluster.engine.long_lived import freeze_objects
from specserve.cluster.engine.worker_host import WorkerPlace, WorkerSite
from specserve.config.kinds import NGRAM_KINDS
from specserve.config.tree import Config
from specserve.drafters.registry import OpenDrafter, open_apart_drafter
from specserve.errors import DeviceFault
from specserve.grammar.matcher import GrammarCompiler
from specserve.host import usable_cores
from specserve.models.checkpoints.find import TOKENIZER_FILES, find_config
from specserve.models.checkpoints.library import load_tokenizer
from specserve.models.device_formats import resolve_device
from specserve.models.self_test import find_fault
from specserve.models.warmup import WARMUP_SEQ_ID
from specserve.types import DraftStep, ModelInfo, Policy, Warp

# Niceness of a drafter on CPUs. It works all the time, whereas the processes that share its cores
# (coordinator, gateway) have little to do, but must do it at once.
NICENESS = 5
WARM_UP_LENGTHS = (64, 8, 1)
"""Prompt lengths of a drafter's first passes."""


def set_drafter_up(config: Config, site: WorkerSite, target: ModelInfo) -> OpenDrafter:
    """Load a drafter that has a device of its own, in the thread that will run it, and warm up."""
    draft = config.draft
    for device in {one.device for one in draft.drafter_configs if one.kind not in NGRAM_KINDS}:
        check_device(site, device)
    set_num_threads(draft.threads, sharers=config.target.tensor_parallel + 1)
    drafter = open_apart_drafter(
        config,
        target,
        grammar_compiler=GrammarCompiler.from_tokenizer(
            lambda: target_tokenizer(config), vocab_size=target.vocab_size, end_ids=target.end_ids
        ),
        translation=draft_translation(config),
    )
    warm_up_alone(drafter, target)
    freeze_objects()
    ClaimedMemory.claim_all()
    if drafter.device.type == "cpu":
        os.nice(NICENESS)  # of this thread, and of those that it starts
    return drafter


def target_tokenizer(config: Config) -> str:
    """Return the target's tokenizer, which a draft model shares if it has one at all."""
    target = config.target
    return load_tokenizer(
        find_config(target.path, revision=target.revision, patterns=TOKENIZER_FILES)
    )


def warm_up_alone(drafter: OpenDrafter, target: ModelInfo) -> None:
    """Run the drafter's first passes, and those that prepare proposals if it anticipates."""
    encoder_input = () if target.decoder_start is None else (0,)
    for length in WARM_UP_LENGTHS:
        step = _draft_step(min(length, drafter.context - 2), encoder_input)
        drafter.propose([step], float("inf"))
        drafter.prepare(bool)
        drafter.release([WARMUP_SEQ_ID])


def set_num_threads(num_threads: int | None, *, sharers: int) -> None:
    """Set torch's CPU threads: the config's number, or else a fair share of this node's cores.

    The share is counted as if all `sharers` ran on this node.
    """
    torch.set_num_threads(num_threads or max(1, usable_cores() // sharers))


def check_device(site: WorkerSite, name: str) -> None:
    """Raise DeviceFault if the worker's device of that name fails its self-test."""
    torch.set_num_threads(1)  # threads would wait for each other longer than the test takes
    device = resolve_device(name)
    if (fault := find_fault(device)) is not None:
        place = worker_place(site, device)
        raise DeviceFault(
            f"{place.hardware} of node {site.address} is faulty: {fault}",
            node=place.node,
            device=place.hardware,
        )


def worker_place(site: WorkerSite, device: torch.device) -> WorkerPlace:
    """Return where this process and its device are."""
    return WorkerPlace(site.node, os.getpid(), str(device), site.accelerators)


def _draft_step(length: int, encoder_input: tuple[int, ...]) -> DraftStep:
    return DraftStep(
        WARMUP_SEQ_ID,
        0,
        (0,) * max(1, length),
        2,
        Policy(Warp(), "block", seed=0, prompt_length=length),
        encoder_input,
    )
