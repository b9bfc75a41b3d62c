"""Resources of an engine replica: bundles for the coordinator, the target ranks and the drafter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from specserve.config.cascade import NGRAM_KINDS
from specserve.config.tree import KINDS_WITHOUT_WORKER, Config, DraftConfig
from specserve.errors import ConfigError

FIRST_GPU = "cuda:0"  # which `auto` and `cuda` mean, too
GATEWAY_CPUS = 1.0
COORDINATOR, FIRST_RANK = 0, 1  # bundle numbers; the drafter has the last


@dataclass(frozen=True, slots=True)
class Bundle:
    """Resources and node labels of one process, as a bundle of the replica's placement group."""

    resources: Mapping[str, float]
    labels: Mapping[str, str]  # that a node must have


def bundles(config: Config, *, has_gpus: bool) -> tuple[Bundle, ...]:
    """Return the bundles in the order of their numbers.

    A device `auto` is a GPU if the cluster has any.
    """
    target, draft = config.target, config.draft
    rank = Bundle(
        _resources(1.0 if _on_gpu(target.device, has_gpus) else 0.0, target.threads),
        target.label_selector,
    )
    wanted = (Bundle({"CPU": 1.0}, {}), *[rank] * target.tensor_parallel)
    if draft.kind in KINDS_WITHOUT_WORKER:
        return wanted
    share = draft.num_gpus if draft.num_gpus is not None else _num_gpus(draft, has_gpus)
    return (*wanted, Bundle(_resources(share, draft.threads), draft.label_selector))


def check_fits(
    wanted: tuple[Bundle, ...], available: Mapping[str, float], *, replicas: int
) -> None:
    """Raise ConfigError if the cluster could not hold that many replicas even when empty.

    The message says how much is asked for and how much there is.
    """
    for kind in ("GPU", "CPU"):
        needed = replicas * sum(bundle.resources.get(kind, 0.0) for bundle in wanted)
        present = available.get(kind, 0.0)
        if needed > present:
            each = " + ".join(f"{bundle.resources.get(kind, 0.0):g}" for bundle in wanted)
            raise ConfigError(
                f"{needed:g} {kind}s are asked for "
                f"({replicas} x ({each}): coordinator, target ranks, draft), "
                f"and the cluster has {present:g}; ask for less (target.tensor_parallel, "
                "draft.num_gpus, replicas.min, device: cpu), or add nodes"
            )


def has_room(wanted: tuple[Bundle, ...], available: Mapping[str, float]) -> bool:
    """Return whether another replica and a gateway would fit at present."""
    need = {
        kind: sum(bundle.resources.get(kind, 0.0) for bundle in wanted) for kind in ("GPU", "CPU")
    }
    return (
        available.get("GPU", 0.0) >= need["GPU"]
        and available.get("CPU", 0.0) >= need["CPU"] + GATEWAY_CPUS
    )


def _resources(gpus: float, threads: int | None) -> dict[str, float]:
    return {"CPU": float(threads or 1)} if not gpus else {"CPU": 1.0, "GPU": gpus}


def _num_gpus(draft: DraftConfig, has_gpus: bool) -> float:
    """Return the number of different GPUs that the draft and the stages of a cascade name.

    Stages of a statistical kind need no device.
    """
    named = {
        part.device
        for part in draft.drafter_configs
        if _on_gpu(part.device, has_gpus) and (part is draft or part.kind not in NGRAM_KINDS)
    }
    return float(len({FIRST_GPU if name in ("auto", "cuda") else name for name in named}))


def _on_gpu(device: str, has_gpus: bool) -> bool:
    return device.startswith("cuda") or (device == "auto" and has_gpus)
