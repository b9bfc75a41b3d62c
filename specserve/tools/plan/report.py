"""Plan as tables for a terminal and as values for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from specserve.engine.draft_placement import PlacementChoice
from specserve.tools.plan.cascades import CascadeChoice
from specserve.tools.plan.devices import DeviceDemand, device_rows
from specserve.tools.plan.gains import GammaAdvice
from specserve.tools.plan.memory import GIB, MemoryPlan, MemoryShare, PlannedFit, smallest_fit
from specserve.tools.plan.pools import ENGINES, MAX_BUSY, pool_advice, pool_rows

MAX_DETAILED = 2
"""Number of pairs up to which every gamma is shown."""


@dataclass(frozen=True, slots=True)
class PlannedMemory:
    """Memory of target and draft.

    `fits` is that of the target on the GPUs, `draft_fit` that of the draft on a device of its own.
    """

    plan: MemoryPlan
    target: MemoryShare
    draft: MemoryShare | None
    fits: tuple[PlannedFit, ...] = ()
    draft_fit: PlannedFit | None = None
    num_gpus: int = 0


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Plan with notes about the origin of its numbers."""

    notes: tuple[str, ...]
    advice: tuple[GammaAdvice, ...] = ()
    memory: PlannedMemory | None = None
    cascades: tuple[CascadeChoice, ...] = ()
    placement: PlacementChoice | None = None  # None: not measured
    devices: tuple[DeviceDemand, ...] = ()  # that a server's config asks for

    def text(self) -> str:
        parts = [
            "\n".join(self.notes),
            *_gains(self.advice),
            *_pools(self.advice),
            *_cascades(self.cascades),
            *_memory(self.memory),
            *_devices(self.devices),
        ]
        return "\n\n".join(part for part in parts if part)

    def json(self) -> dict[str, object]:
        memory = self.memory
        return {
            "notes": list(self.notes),
            "speculation": [_advice(one) for one in self.advice],
            "pools": [asdict(one) for one in pool_advice(self.advice)],
            "cascades": [asdict(choice) for choice in self.cascades],
            "memory": None if memory is None else _memory_json(memory),
            "placement": None if self.placement is None else asdict(self.placement),
            "devices": [asdict(one) for one in self.devices],
        }


def _devices(demands: Sequence[DeviceDemand]) -> Iterator[str]:
    if demands:
        heads = ("model", "replicas", "CPUs each", "GPUs each", "CPUs", "GPUs")
        yield table(heads, list(device_rows(demands)))


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return aligned columns: numbers to the right, words to the left."""
    columns = [_aligned(column) for column in zip(heads, *rows, strict=True)]
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def _aligned(column: Sequence[str]) -> list[str]:
    width = max(map(len, column))
    numbers = all(cell[:1].isdigit() or cell in ("-", "") for cell in column[1:])
    return [cell.rjust(width) if numbers else cell.ljust(width) for cell in column]


def gib(num_bytes: float) -> str:
    """Return a size in GiB, or in MiB if it is small."""
    return (
        f"{num_bytes / GIB:.1f} GiB" if num_bytes >= 0.95 * GIB else f"{num_bytes / 2**20:.1f} MiB"
    )


def _gains(advice: Sequence[GammaAdvice]) -> Iterator[str]:
    if not advice:
        return
    hit = advice[0].hit_rate
    heads = (
        "draft",
        "alpha",
        "c",
        "gamma",
        "tokens a round",
        "factor",
        "operations",
        f"gamma, {hit:.0%} hidden",
        "factor",
        "operations",
    )
    rows: list[tuple[str, ...]] = [
        (
            f"{one.pair.name}",
            f"{one.pair.alpha:.3f}",
            f"{one.pair.c:.3f}",
            str(one.best_serial),
            f"{one.serial.tokens:.2f}",
            f"{one.serial.serial:.2f}",
            f"{one.serial.operations:.2f}",
            str(one.best_hidden),
            f"{one.hidden.hidden:.2f}",
            f"{one.hidden.operations:.2f}",
        )
        for one in advice
    ]
    yield table(heads, rows)
    if len(advice) <= MAX_DETAILED:
        yield from map(_by_gamma, advice)


def _pools(advice: Sequence[GammaAdvice]) -> Iterator[str]:
    if pools := pool_advice(advice):
        heads = (
            "draft.pool",
            "gamma",
            "busy, one engine",
            f"engines a draft, below {MAX_BUSY:.0%}",
            *(f"devices for {engines}" for engines in ENGINES),
        )
        yield table(heads, list(pool_rows(pools)))


def _by_gamma(one: GammaAdvice) -> str:
    gains = one.by_gamma[1:]
    rows = {
        "factor": [gain.serial for gain in gains],
        f"factor, {one.hit_rate:.0%} hidden": [gain.hidden for gain in gains],
        "operations": [gain.operations for gain in gains],
    }
    return table(
        (f"{one.pair.name}: gamma", *(str(gain.gamma) for gain in gains)),
        [(name, *(f"{x:.2f}" for x in row)) for name, row in rows.items()],
    )


def _cascades(choices: Sequence[CascadeChoice]) -> Iterator[str]:
    if choices:
        yield table(
            ("cascade, best k", "factor", "k"),
            [(choice.kind, f"{choice.factor:.2f}", choice.k) for choice in choices],
        )


def _memory(memory: PlannedMemory | None) -> Iterator[str]:
    if memory is None:
        return
    shares = {"target": memory.target} | ({} if memory.draft is None else {"draft": memory.draft})
    rows = [
        (
            name,
            f"{share.num_parameters / 1e6:,.1f}M",
            gib(share.weight_bytes),
            f"{share.kv_bytes / 1024:,.1f} KiB",
            gib(share.kv_bytes * memory.plan.context),
        )
        for name, share in shares.items()
    ]
    dtype = str(memory.plan.dtype).removeprefix("torch.")
    yield table(
        (
            f"memory, {dtype}",
            "parameters",
            "weights",
            "keys and values, a token",
            f"of {memory.plan.context:,} tokens",
        ),
        rows,
    )
    if memory.fits:
        yield table(
            (
                "tensor parallel",
                "weights, a GPU",
                f"pages of {memory.plan.page_size}",
                f"sequences of {memory.plan.context:,}",
                "",
            ),
            [_fit_row(fit) for fit in memory.fits],
        )
        yield _recommendation(memory)


def _fit_row(fit: PlannedFit) -> tuple[str, ...]:
    weights = "-" if fit.share is None else gib(fit.share.weight_bytes)
    return (
        str(fit.ranks),
        weights,
        f"{fit.pages:,}" if fit.pages else "-",
        f"{fit.sequences:,}" if fit.sequences else "-",
        fit.reason,
    )


def _recommendation(memory: PlannedMemory) -> str:
    """Return the recommendation for the config."""
    best = smallest_fit(memory.fits)
    if best is None:
        return f"The target does not fit on {memory.num_gpus} of these GPUs."
    lines = [
        f"The smallest degree that fits is target.tensor_parallel {best.ranks}: {best.pages:,} "
        f"pages, {best.sequences:,} sequences of {memory.plan.context:,} tokens at "
        f"cache.memory_fraction {memory.plan.memory_fraction:g}."
    ]
    if memory.draft is not None:
        lines.append(_draft_recommendation(memory))
    return "\n".join(lines)


def _draft_recommendation(memory: PlannedMemory) -> str:
    fit = memory.draft_fit
    if fit is None:
        return (
            "No GPU is left for the draft: it must share one (draft.num_gpus below 1), or run on a "
            "CPU (draft.device cpu)."
        )
    if not fit.works:
        return f"On a GPU of its own the draft does not work: {fit.reason}."
    return (
        f"The draft, on a GPU of its own: {fit.pages:,} pages, {fit.sequences:,} sequences of "
        f"{memory.plan.context:,} tokens."
    )


def _advice(one: GammaAdvice) -> dict[str, object]:
    return {
        **asdict(one.pair),
        "hit_rate": one.hit_rate,
        "best_serial": asdict(one.serial),
        "best_hidden": asdict(one.hidden),
        "by_gamma": [asdict(gain) for gain in one.by_gamma],
    }


def _memory_json(memory: PlannedMemory) -> dict[str, object]:
    best = smallest_fit(memory.fits)
    return {
        "dtype": str(memory.plan.dtype).removeprefix("torch."),
        "page_size": memory.plan.page_size,
        "memory_fraction": memory.plan.memory_fraction,
        "context": memory.plan.context,
        "target": asdict(memory.target),
        "draft": None if memory.draft is None else asdict(memory.draft),
        "degrees": [asdict(fit) for fit in memory.fits],
        "tensor_parallel": None if best is None else best.ranks,
        "draft_alone": None if memory.draft_fit is None else asdict(memory.draft_fit),
    }
