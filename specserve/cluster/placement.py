"""Resources of an engine replica: bundles for the coordinator, the target ranks and the drafter.

Says which of them fits no node. Knows nodes as numbers and labels, no Ray.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from specserve.config.checks import check_draft
from specserve.config.features import part
from specserve.config.kinds import NGRAM_KINDS
from specserve.config.model_list import deployment_suffix
from specserve.config.sections import DraftConfig, TargetConfig
from specserve.config.tree import Config
from specserve.errors import ConfigError

FIRST_GPU = "cuda:0"  # which `auto` and `cuda` mean, too
GATEWAY_CPUS = 1.0
ENGINE = "Engine"
"""Deployment of the engines; that of each of several models has the model's name after it."""
COORDINATOR, FIRST_RANK = 0, 1  # bundle numbers; the drafter has the last
COUNTED = ("GPU", "CPU")
FEW_GPUS = "as the cluster has no GPU for a draft apart"
REMEDY = {
    "CPU": "lower target.threads, draft.threads or replicas.min, end what holds them, or add nodes",
    "GPU": "lower target.tensor_parallel, draft.num_gpus or replicas.min, set device: cpu, "
    "end what holds them, or add nodes",
}
SET_CONDITION = re.compile(r"(!?)in\((.*)\)")


@dataclass(frozen=True, slots=True)
class Bundle:
    """Resources and node labels of one process, as a bundle of the replica's placement group."""

    name: str
    resources: Mapping[str, float]
    labels: Mapping[str, str]  # that a node must have

    def __str__(self) -> str:
        amounts = " and ".join(
            _amount(kind, self.resources.get(kind, 0.0))
            for kind in COUNTED
            if self.resources.get(kind)
        )
        labels = ", ".join(f"{key}: {value}" for key, value in self.labels.items())
        return f"{self.name} ({amounts}{f'; {labels}' if labels else ''})"


@dataclass(frozen=True, slots=True)
class NodeResources:
    """Resources and labels of one node of the cluster."""

    address: str
    total: Mapping[str, float]
    available: Mapping[str, float]
    labels: Mapping[str, str]
    node: str = ""  # Ray's id

    def has_labels(self, wanted: Mapping[str, str]) -> bool:
        return all(_satisfies(self.labels.get(key), value) for key, value in wanted.items())

    def without(self, bundle: Bundle) -> NodeResources:
        """Return the node with the bundle placed on it."""
        available = {
            kind: amount - bundle.resources.get(kind, 0.0)
            for kind, amount in self.available.items()
        }
        return replace(self, available=available)


def bundles(config: Config, *, has_gpus: bool) -> tuple[Bundle, ...]:
    """Return the bundles in the order of their numbers.

    A device `auto` is a GPU if the cluster has any.
    """
    target, draft = config.target, config.draft
    _check_devices(target, draft)
    if draft.quantize == "fp8" and not _on_gpu(draft.device, has_gpus):
        raise ConfigError(
            "draft.quantize: fp8 needs a GPU, and the cluster has none for the draft; use int8"
        )
    rank = _resources(
        1.0 if _on_gpu(target.device, has_gpus) else 0.0,
        config.rank_threads(with_draft=not draft.may_be_apart),
    )
    wanted = (
        Bundle("coordinator", {"CPU": 1.0}, {}),
        *(
            Bundle(f"target-{number}", rank, target.label_selector)
            for number in range(target.tensor_parallel)
        ),
    )
    if not draft.may_be_apart:
        return wanted
    return (*wanted, draft_bundle("draft", draft, has_gpus=has_gpus))


def draft_bundle(name: str, draft: DraftConfig, *, has_gpus: bool) -> Bundle:
    """Return what a draft needs that is not with the target."""
    share = draft.num_gpus if draft.num_gpus is not None else _num_gpus(draft, has_gpus)
    return Bundle(name, _resources(share, draft.threads), draft.label_selector)


def engine_deployments(config: Config) -> dict[str, Config]:
    """Return the config of each model that is served, by the deployment of its engines."""
    if not config.models:
        return {ENGINE: config}
    return {f"{ENGINE}-{deployment_suffix(part.model)}": part for part in config.models}


def with_drafts_that_fit(config: Config, *, num_gpus: float) -> Config:
    """Return the config with `together` for `auto` where the cluster has no GPUs for drafts apart.

    It has enough of them for all that starts but for these. Elsewhere the config stays as it is.
    """
    fitted = replace(
        _with_draft_together(config), models=tuple(map(_with_draft_together, config.models))
    )
    is_short = fitted != config and _first_gpus(fitted) <= num_gpus < _first_gpus(config)
    return fitted if is_short else config


def _with_draft_together(config: Config) -> Config:
    """Return the config with its draft together, if that has a GPU and may be on the target's."""
    draft = replace(config.draft, placement="together")
    if config.draft.placement != "auto" or not config.draft.may_be_apart:
        return config
    try:
        check_draft(replace(config, draft=draft))
    except ConfigError:
        return config
    if _named_gpus(draft, has_gpus=True) != {FIRST_GPU} or not _on_gpu(config.target.device, True):
        return config
    return replace(config, draft=draft)


def _first_gpus(config: Config) -> float:
    """Return the GPUs of all that must fit at the start, of a cluster that has some."""
    wanted, times = first_bundles(config, has_gpus=True)
    beside = bundles_beside(config, has_gpus=True)
    return sum(bundle.resources.get("GPU", 0.0) for bundle in (*wanted * times, *beside))


def first_bundles(config: Config, *, has_gpus: bool) -> tuple[tuple[Bundle, ...], int]:
    """Return the bundles that must fit at the start, and how many times.

    Deployments of several models stand together, each with its model's name.
    """
    if not config.models:
        return bundles(config, has_gpus=has_gpus), max(1, config.replicas.min)
    together = tuple(
        replace(bundle, name=f"{part.model}: {bundle.name}")
        for part in config.models
        for bundle in bundles(part, has_gpus=has_gpus) * max(1, part.replicas.min)
    )
    return together, 1


def bundles_beside(config: Config, *, has_gpus: bool, at_most: bool = False) -> tuple[Bundle, ...]:
    """Return what drafts need that engines share, one bundle each; none without such drafts.

    They are those that start, or as many as there may ever be.
    """
    if not config.shares_drafts:
        return ()
    found: tuple[Bundle, ...] = part("draft_pools.sharers:pool_bundles")(
        config, has_gpus=has_gpus, at_most=at_most
    )
    return found


def with_devices(config: Config, wanted: Sequence[Bundle]) -> Config:
    """Return the config with the devices that the workers of these bundles have.

    Ray shows a worker the GPUs of its own bundle, by numbers from 0 on, and hides none from a
    worker whose bundle has no GPU. `auto` remains where the bundle has one, which may be declared
    and not there.
    """
    target, draft = config.target, config.draft
    of_rank = "cpu"
    if wanted[FIRST_RANK].resources.get("GPU"):
        of_rank = target.device if target.device == "auto" else FIRST_GPU
    if not _has_draft_bundle(config, wanted):
        devices = {
            part.device: of_rank if _on_gpu(part.device, True) else "cpu"
            for part in draft.drafter_configs
        }
        draft = _with_device(draft, devices)
    elif wanted[-1].resources.get("GPU"):
        named = sorted(_named_gpus(draft, has_gpus=True))
        numbers = {name: f"cuda:{number}" for number, name in enumerate(named)}
        devices = {
            part.device: numbers[_gpu(part.device)] if _on_gpu(part.device, True) else "cpu"
            for part in draft.drafter_configs
            if part is draft or part.kind not in NGRAM_KINDS
        }
        if devices.get("auto") == FIRST_GPU:
            devices["auto"] = "auto"
        draft = _with_device(draft, devices)
    else:
        draft = _with_device(draft, {part.device: "cpu" for part in draft.drafter_configs})
    return replace(config, target=replace(target, device=of_rank), draft=draft)


def _with_device(draft: DraftConfig, devices: Mapping[str, str]) -> DraftConfig:
    """Return the draft, and its stages, on the devices that are to replace those named."""
    stages = tuple(
        replace(stage, device=devices.get(stage.device or draft.device, "cpu"))
        for stage in draft.stages
    )
    return replace(draft, device=devices.get(draft.device, "cpu"), stages=stages)


def with_draft_placement(config: Config, wanted: Sequence[Bundle]) -> Config:
    """Return the config with what `auto` means where there is no choice to be measured.

    That is together where there is no bundle for the draft (`with_drafts_that_fit`), else apart.
    A draft together with the target takes over the CPUs of its own bundle, so both must be on CPUs
    and, for all that is said of labels, on one node. Several ranks would share one draft's CPUs.
    """
    draft = config.draft
    is_choice = (
        config.target.tensor_parallel == 1
        and not draft.label_selector
        and not any(bundle.resources.get("GPU") for bundle in wanted)
    )
    if draft.placement != "auto" or not draft.may_be_apart or is_choice:
        return config
    placement = "apart" if _has_draft_bundle(config, wanted) else "together"
    return replace(config, draft=replace(draft, placement=placement))


def _has_draft_bundle(config: Config, wanted: Sequence[Bundle]) -> bool:
    return len(wanted) > FIRST_RANK + config.target.tensor_parallel


def gateway_bundle(config: Config) -> Bundle:
    """Return what the first gateway needs."""
    return Bundle("gateway", {"CPU": GATEWAY_CPUS}, config.http.label_selector)


def require_places(config: Config, nodes: Sequence[NodeResources], *, gateway: Bundle) -> None:
    """Raise ConfigError if the nodes cannot hold what starts first."""
    num_gpus = sum(node.total.get("GPU", 0.0) for node in nodes)
    has_gpus = num_gpus > 0
    fitted = with_drafts_that_fit(config, num_gpus=num_gpus)
    wanted, replicas = first_bundles(fitted, has_gpus=has_gpus)
    beside = bundles_beside(config, has_gpus=has_gpus)
    check_fits(wanted, nodes, replicas=replicas, gateway=gateway, beside=beside)


def check_fits(
    wanted: tuple[Bundle, ...],
    nodes: Sequence[NodeResources],
    *,
    replicas: int,
    gateway: Bundle,
    beside: tuple[Bundle, ...] = (),
) -> None:
    """Raise ConfigError if the nodes cannot hold that many replicas, a gateway and draft pools.

    The message says how much is needed and how much is free. Bundles that fit together, but on
    no single node, are found once they wait (`explain_waiting`).
    """
    for kind in COUNTED:
        each = sum(bundle.resources.get(kind, 0.0) for bundle in wanted)
        others = sum(bundle.resources.get(kind, 0.0) for bundle in beside)
        needed = replicas * each + gateway.resources.get(kind, 0.0) + others
        free = sum(node.available.get(kind, 0.0) for node in nodes)
        if needed > free:
            total = sum(node.total.get(kind, 0.0) for node in nodes)
            parts = " + ".join(
                f"{bundle.name} {bundle.resources[kind]:g}"
                for bundle in wanted
                if bundle.resources.get(kind)
            )
            times = f"{replicas} x ({parts})" if replicas > 1 else parts
            plus = f" + gateway {gateway.resources[kind]:g}" if gateway.resources.get(kind) else ""
            plus += f" + draft pools {others:g}" if others else ""
            rest = "" if free == total else f" free of {total:g}"
            raise ConfigError(
                f"needs {_amount(kind, needed)} ({times}{plus}), the cluster has {free:g}{rest}; "
                f"{REMEDY[kind]}"
            )
    for bundle in (*wanted, gateway, *beside):
        if not any(could_hold(node, bundle) for node in nodes):
            raise ConfigError(_no_node_for(bundle, nodes))


def explain_waiting(waiting: Sequence[Bundle], nodes: Sequence[NodeResources]) -> str | None:
    """Return which of the waiting bundles fits on no node beside the others, and why.

    Returns None if all fit, as when they are about to be placed.
    """
    left, placed = list(nodes), list[str]()
    for bundle in sorted(waiting, key=_size, reverse=True):
        fitting = [
            number
            for number, node in enumerate(left)
            if node.has_labels(bundle.labels) and _holds(node.available, bundle)
        ]
        if not fitting:
            return _no_node_for(bundle, left, beside=placed)
        left[fitting[0]] = left[fitting[0]].without(bundle)
        placed.append(bundle.name)
    return None


def find_other_node(
    bundle: Bundle, nodes: Sequence[NodeResources], avoided: Set[str]
) -> NodeResources | None:
    """Return a node with room for a bundle whose device is avoided; None if there is none.

    A node that is avoided serves, too, if it has another GPU: that of the bundle remains reserved.
    """
    fitting = [
        node for node in nodes if node.has_labels(bundle.labels) and _holds(node.available, bundle)
    ]
    others = [node for node in fitting if node.node not in avoided]
    return next(iter(others or (fitting if bundle.resources.get("GPU") else [])), None)


def explain_distance(nodes: Sequence[str]) -> str | None:
    """Return a warning if the nodes of ranks on GPUs are several; None if they are not."""
    num_nodes = len(set(nodes))
    if num_nodes < 2:
        return None
    return (
        f"The {len(nodes)} ranks of the target lie on {num_nodes} nodes, so every layer waits for "
        "the network; free as many GPUs on one node, or keep other work away by "
        "target.label_selector."
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
    return float(len(_named_gpus(draft, has_gpus=has_gpus)))


def _named_gpus(draft: DraftConfig, *, has_gpus: bool) -> set[str]:
    return {
        _gpu(part.device)
        for part in draft.drafter_configs
        if _on_gpu(part.device, has_gpus) and (part is draft or part.kind not in NGRAM_KINDS)
    }


def _gpu(device: str) -> str:
    return FIRST_GPU if device in ("auto", "cuda") else device


def _check_devices(target: TargetConfig, draft: DraftConfig) -> None:
    """Raise ConfigError for devices that Ray cannot give."""
    if target.device.startswith("cuda:"):
        raise ConfigError(
            f"target.device {target.device} names one GPU of a machine, and Ray gives each rank "
            "its own; write cuda"
        )
    named = sorted(_named_gpus(draft, has_gpus=False))
    if draft.num_gpus is None or not named:
        return
    # A draft on one GPU may have a part of it; on several it has them whole.
    if draft.num_gpus == 0 or (len(named) > 1 and draft.num_gpus < len(named)):
        raise ConfigError(
            f"draft.num_gpus is {draft.num_gpus:g}, and the draft names {', '.join(named)}; leave "
            "draft.num_gpus out, or set devices to cpu"
        )


def _on_gpu(device: str, has_gpus: bool) -> bool:
    return device.startswith("cuda") or (device == "auto" and has_gpus)


def could_hold(node: NodeResources, bundle: Bundle) -> bool:
    """Return whether the node, if it were empty, could hold the bundle."""
    return node.has_labels(bundle.labels) and _holds(node.total, bundle)


def _holds(resources: Mapping[str, float], bundle: Bundle) -> bool:
    return all(resources.get(kind, 0.0) >= amount for kind, amount in bundle.resources.items())


def _size(bundle: Bundle) -> tuple[float, ...]:
    return (len(bundle.labels), *(bundle.resources.get(kind, 0.0) for kind in COUNTED))


def _no_node_for(
    bundle: Bundle, nodes: Sequence[NodeResources], *, beside: Sequence[str] = ()
) -> str:
    """Say what each node lacks for the bundle, and what to do."""
    lacks = ", ".join(f"{node.address} {_lack(node, bundle)}" for node in nodes) or "there is none"
    if not any(node.has_labels(bundle.labels) for node in nodes):
        remedy = "start a node with these labels (`ray start --labels`), or change label_selector"
    else:
        kind = next((kind for kind in COUNTED if _is_short(nodes, bundle, kind)), "CPU")
        remedy = REMEDY[kind]
    others = f" beside {', '.join(beside)}" if beside else ""
    return f"no node has room for {bundle}{others}: {lacks}; {remedy}"


def _is_short(nodes: Sequence[NodeResources], bundle: Bundle, kind: str) -> bool:
    needed = bundle.resources.get(kind, 0.0)
    return all(
        node.available.get(kind, 0.0) < needed for node in nodes if node.has_labels(bundle.labels)
    )


def _lack(node: NodeResources, bundle: Bundle) -> str:
    if not node.has_labels(bundle.labels):
        return "lacks the labels"
    return "has " + " and ".join(
        f"{node.available.get(kind, 0.0):g} of {_amount(kind, node.total.get(kind, 0.0))} free"
        for kind in COUNTED
        if bundle.resources.get(kind)
    )


def _amount(kind: str, number: float) -> str:
    return f"{number:g} {kind}{'' if number == 1 else 's'}"


def _satisfies(value: str | None, condition: str) -> bool:
    """Return whether a node's label meets a condition of Ray: a value, !value, in() or !in()."""
    if match := SET_CONDITION.fullmatch(condition):
        return (value in [one.strip() for one in match[2].split(",")]) is not bool(match[1])
    if condition.startswith("!"):
        return value != condition[1:]
    return value == condition
