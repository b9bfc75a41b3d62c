"""What one engine replica asks of the cluster: a bundle for the coordinator, one for each rank of the target, one for what drafts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specserve.config.cascade import STATISTICAL
from specserve.config.tree import WITHOUT_WORKER, Config, Draft
from specserve.errors import ConfigError

FIRST_GPU = "cuda:0"  # is also what `auto` and `cuda` come to
GATEWAY_CPUS = 1.0
COORDINATOR, FIRST_RANK = 0, 1  # bundle numbers; the drafter has the last


@dataclass(frozen=True, slots=True)
class Bundle:
    resources: Mapping[str, float]
    labels: Mapping[str, str]  # which nodes will do


def bundles(config: Config, *, has_gpus: bool) -> tuple[Bundle, ...]:
    """In the order of their numbers. Where a device is `auto`, it is a GPU if the cluster has any."""
    target, draft = config.target, config.draft
    rank = Bundle(
        _resources(1.0 if _on_gpu(target.device, has_gpus) else 0.0, target.threads),
        target.label_selector,
    )
    wanted = (Bundle({"CPU": 1.0}, {}), *[rank] * target.tensor_parallel)
    if draft.kind in WITHOUT_WORKER:
        return wanted
    share = draft.num_gpus if draft.num_gpus is not None else _num_gpus(draft, has_gpus)
    return (*wanted, Bundle(_resources(share, draft.threads), draft.label_selector))


def check_fits(
    wanted: tuple[Bundle, ...], available: Mapping[str, float], *, replicas: int
) -> None:
    """Raises ConfigError when the cluster, were it empty, could not hold that many replicas. Says how much is asked for and there."""
    for kind in ("GPU", "CPU"):
        asked = replicas * sum(bundle.resources.get(kind, 0.0) for bundle in wanted)
        there = available.get(kind, 0.0)
        if asked > there:
            each = " + ".join(f"{bundle.resources.get(kind, 0.0):g}" for bundle in wanted)
            raise ConfigError(
                f"{asked:g} {kind}s are asked for ({replicas} x ({each}): coordinator, target ranks, draft), and the cluster has {there:g}; "
                "ask for less (target.tensor_parallel, draft.num_gpus, replicas.min, device: cpu), or add nodes"
            )


def has_room(wanted: tuple[Bundle, ...], available: Mapping[str, float]) -> bool:
    """Whether one replica more, and a gateway, would find a place now."""
    need = {
        kind: sum(bundle.resources.get(kind, 0.0) for bundle in wanted) for kind in ("GPU", "CPU")
    }
    return (
        available.get("GPU", 0.0) >= need["GPU"]
        and available.get("CPU", 0.0) >= need["CPU"] + GATEWAY_CPUS
    )


def _resources(gpus: float, threads: int | None) -> dict[str, float]:
    return {"CPU": float(threads or 1)} if not gpus else {"CPU": 1.0, "GPU": gpus}


def _num_gpus(draft: Draft, has_gpus: bool) -> float:
    """The stages of a cascade may name several; those that need no device do not."""
    named = {
        part.device
        for part in draft.parts
        if _on_gpu(part.device, has_gpus) and (part is draft or part.kind not in STATISTICAL)
    }
    return float(len({FIRST_GPU if name in ("auto", "cuda") else name for name in named}))


def _on_gpu(device: str, has_gpus: bool) -> bool:
    return device.startswith("cuda") or (device == "auto" and has_gpus)
