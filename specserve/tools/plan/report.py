"""A plan as tables for a terminal, and as keys and values for programs. Text only; decides nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

from specserve.tools.plan.cascades import Choice
from specserve.tools.plan.gains import Advice
from specserve.tools.plan.memory import GIB, Fit, Plan, Share, smallest

FEW = 2  # pairs whose every gamma is shown


@dataclass(frozen=True, slots=True)
class Memory:
    """Of target and draft."""

    plan: Plan
    target: Share
    draft: Share | None
    fits: tuple[Fit, ...] = ()  # the target on the GPUs; () if none were named
    draft_fit: Fit | None = None  # on a device of its own; None if there is none
    num_gpus: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """All that was asked for."""

    notes: tuple[str, ...]  # where the numbers come from
    advice: tuple[Advice, ...] = ()
    memory: Memory | None = None
    cascades: tuple[Choice, ...] = ()

    def text(self) -> str:
        parts = [
            "\n".join(self.notes),
            *_gains(self.advice),
            *_cascades(self.cascades),
            *_memory(self.memory),
        ]
        return "\n\n".join(part for part in parts if part)

    def json(self) -> dict[str, object]:
        memory = self.memory
        return {
            "notes": list(self.notes),
            "speculation": [_advice(one) for one in self.advice],
            "cascades": [asdict(choice) for choice in self.cascades],
            "memory": None if memory is None else _memory_json(memory),
        }


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned by columns: numbers to the right, words to the left."""
    columns = [_aligned(column) for column in zip(heads, *rows, strict=True)]
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def _aligned(column: Sequence[str]) -> list[str]:
    width = max(map(len, column))
    numbers = all(cell[:1].isdigit() or cell in ("-", "") for cell in column[1:])
    return [cell.rjust(width) if numbers else cell.ljust(width) for cell in column]


def gib(num_bytes: float) -> str:
    """As people say it."""
    return (
        f"{num_bytes / GIB:.1f} GiB" if num_bytes >= 0.95 * GIB else f"{num_bytes / 2**20:.1f} MiB"
    )


def _gains(advice: Sequence[Advice]) -> Iterator[str]:
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
    if len(advice) <= FEW:
        yield from map(_by_gamma, advice)


def _by_gamma(one: Advice) -> str:
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


def _cascades(choices: Sequence[Choice]) -> Iterator[str]:
    if choices:
        yield table(
            ("cascade, best k", "factor", "k"),
            [(choice.kind, f"{choice.factor:.2f}", choice.k) for choice in choices],
        )


def _memory(memory: Memory | None) -> Iterator[str]:
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
        yield _verdict(memory)


def _fit_row(fit: Fit) -> tuple[str, ...]:
    weights = "-" if fit.share is None else gib(fit.share.weight_bytes)
    return (
        str(fit.ranks),
        weights,
        f"{fit.pages:,}" if fit.pages else "-",
        f"{fit.sequences:,}" if fit.sequences else "-",
        fit.reason,
    )


def _verdict(memory: Memory) -> str:
    """What to put into the config."""
    best = smallest(memory.fits)
    if best is None:
        return f"The target does not fit on {memory.num_gpus} of these GPUs."
    lines = [
        f"The smallest degree that fits is target.tensor_parallel {best.ranks}: {best.pages:,} pages, {best.sequences:,} sequences of "
        f"{memory.plan.context:,} tokens at cache.memory_fraction {memory.plan.memory_fraction:g}."
    ]
    if memory.draft is not None:
        lines.append(_draft_verdict(memory))
    return "\n".join(lines)


def _draft_verdict(memory: Memory) -> str:
    fit = memory.draft_fit
    if fit is None:
        return "No GPU is left for the draft: it must share one (draft.num_gpus below 1), or run on a CPU (draft.device cpu)."
    if not fit.works:
        return f"On a GPU of its own the draft does not work: {fit.reason}."
    return f"The draft, on a GPU of its own: {fit.pages:,} pages, {fit.sequences:,} sequences of {memory.plan.context:,} tokens."


def _advice(one: Advice) -> dict[str, object]:
    return {
        **asdict(one.pair),
        "hit_rate": one.hit_rate,
        "best_serial": asdict(one.serial),
        "best_hidden": asdict(one.hidden),
        "by_gamma": [asdict(gain) for gain in one.by_gamma],
    }


def _memory_json(memory: Memory) -> dict[str, object]:
    best = smallest(memory.fits)
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
