"""The file that `specserve simulate` reads: devices, a load, and what is to be varied. Turns it into scenarios; runs none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

from specserve.config import tree as engine
from specserve.config.fields import (
    Rule,
    choice,
    group,
    items,
    number,
    read_section,
    section,
    setting,
    text,
    unset_as,
    whole,
)
from specserve.errors import ConfigError
from specserve.tools.simulate.acceptance_model import Acceptance
from specserve.tools.simulate.devices import Host
from specserve.tools.simulate.fit import from_trace
from specserve.tools.simulate.load import Load, arrivals
from specserve.tools.simulate.pass_times import Linear, PassTime, Roofline
from specserve.tools.simulate.scenario import BATCH_TOKENS, PLENTY, Mode, Scenario, Worker


def _tree() -> Rule:
    """The engine's own config."""

    def read(value: object, key: str) -> engine.Config:
        if isinstance(value, Mapping):
            return engine.parse(value)
        raise ValueError

    return Rule("the keys of the engine's config", read)


@dataclass(frozen=True, slots=True)
class Device:
    """A group of devices: its pass times in one of three ways, and how far away it is."""

    seconds: Linear | None = setting(None, section(Linear))
    roofline: Roofline | None = setting(None, section(Roofline))
    trace: str | None = setting(None, text())  # what GET /trace of a running engine gave
    link_us: float = setting(0.0, number(0, 1e9))  # one way
    pages: int | None = setting(
        None, whole(1, 2**31)
    )  # of the cache; None: what a roofline's memory holds, else plenty

    @property
    def ways(self) -> int:
        return sum(way is not None for way in (self.seconds, self.roofline, self.trace))


@dataclass(frozen=True, slots=True)
class Devices:
    """Of one replica."""

    target: Device = group(Device)
    draft: Device | None = setting(None, section(Device))
    host: Host = group(Host)
    startup_s: float = setting(60.0, number(0, 1e6))


@dataclass(frozen=True, slots=True)
class Sweep:
    """Each list is tried with each of the others; an empty one means what load and config say."""

    concurrency: tuple[int, ...] = setting((), items(whole(1, 10**6)))
    rate: tuple[float, ...] = setting((), items(number(0, 10**6, above=True)))
    replicas: tuple[int, ...] = setting((), items(whole(1, 4096)))  # so many, and no autoscaling
    modes: tuple[str, ...] = setting((), items(choice(*Mode)))
    gamma: tuple[int | None, ...] = setting(
        (), items(unset_as("auto", whole(0, 64)))
    )  # plain decoding knows but one


@dataclass(frozen=True, slots=True)
class Split:
    """How many devices of a replica have which part; 0 for the draft is plain decoding."""

    target: int = setting(1, whole(1, 4096))
    draft: int = setting(1, whole(0, 4096))


@dataclass(frozen=True, slots=True)
class Find:
    """The limits that most requests are to keep, and what may be spent on it."""

    ttft_p90_s: float = setting(1.0, number(0, 1e6, above=True))
    tpot_p90_s: float = setting(0.1, number(0, 1e6, above=True))
    max_replicas: int = setting(16, whole(1, 4096))
    splits: tuple[Split, ...] = setting(
        (), items(section(Split))
    )  # of rooflines alone; none: as the devices stand


@dataclass(frozen=True, slots=True)
class Study:
    """The whole file."""

    config: engine.Config = setting(engine.Config(), _tree())
    devices: Devices = group(Devices)
    acceptance: Acceptance = group(Acceptance)
    load: Load = group(Load)
    sweep: Sweep = group(Sweep)
    find: Find | None = setting(None, section(Find))
    batch_tokens: int = setting(
        BATCH_TOKENS, whole(1, 2**20)
    )  # that the target reads in a round at most, prompts and drafts
    seed: int = setting(0, whole(0, 2**31))


@dataclass(frozen=True, slots=True)
class Case:
    """A scenario and what it was made of."""

    mode: Mode
    load: str  # such as "8 clients", or "2/s"
    replicas: str
    gamma: int | None
    scenario: Scenario = field(repr=False)


def load_study(file: Path) -> Study:
    """Raises ConfigError for a key or a value that cannot be used."""
    return _checked(read_section(Study, engine.read_tree(file)))


def cases(study: Study, *, directory: Path) -> Iterator[Case]:
    """All combinations of the sweep; files that the study names are looked for in `directory`."""
    sweep, base = study.sweep, scenario(study, directory=directory)
    for load, replicas, mode in product(
        _loads(study), sweep.replicas or (None,), map(Mode, sweep.modes or (_mode(study),))
    ):
        asked = replace(
            base,
            arrivals=arrivals(load, seed=study.seed, directory=directory),
            concurrency=_clients(load),
            mode=mode,
        )
        for gamma in (
            (0,) if mode is Mode.PLAIN else sweep.gamma or (study.config.speculation.gamma,)
        ):
            config = with_gamma(with_replicas(study.config, replicas), gamma)
            rules = config.replicas
            count = f"{rules.min}" if rules.min == rules.max else f"{rules.min} to {rules.max}"
            yield Case(mode, _named(load), count, gamma, replace(asked, config=config))


def scenario(study: Study, *, directory: Path, split: Split | None = None) -> Scenario:
    """The study's load on its devices, or on a split of them."""
    devices, page_size = study.devices, study.config.cache.page_size
    target = _worker(
        devices.target,
        "target",
        directory,
        page_size=page_size,
        num_devices=None if split is None else split.target,
    )
    draft = None
    if devices.draft is not None and (split is None or split.draft):
        draft = _worker(
            devices.draft,
            "draft",
            directory,
            page_size=page_size,
            num_devices=None if split is None else split.draft,
        )
    return Scenario(
        target=target
        if study.config.cache.pages is None
        else replace(target, pages=study.config.cache.pages),
        draft=draft,
        arrivals=arrivals(study.load, seed=study.seed, directory=directory),
        concurrency=_clients(study.load),
        mode=Mode.PLAIN if draft is None else _mode(study),
        config=study.config,
        acceptance=study.acceptance,
        host=devices.host,
        batch_tokens=study.batch_tokens,
        startup_s=devices.startup_s,
        seed=study.seed,
    )


def with_gamma(config: engine.Config, gamma: int | None) -> engine.Config:
    most = max(config.speculation.max_gamma, gamma or 0)
    return replace(config, speculation=replace(config.speculation, gamma=gamma, max_gamma=most))


def with_replicas(config: engine.Config, replicas: int | None) -> engine.Config:
    """A fixed number of them; None leaves the config's rules."""
    return (
        config
        if replicas is None
        else replace(config, replicas=replace(config.replicas, min=replicas, max=replicas))
    )


def _checked(study: Study) -> Study:
    """What no key can see alone."""
    devices, sweep = study.devices, study.sweep
    for name, device in (("target", devices.target), ("draft", devices.draft)):
        if device is not None and device.ways != 1:
            raise ConfigError(
                f"devices.{name} needs its pass times in one way: seconds, roofline or trace"
            )
        if (
            device is not None
            and device.roofline is None
            and study.find is not None
            and study.find.splits
        ):
            raise ConfigError(
                f"find.splits needs devices.{name}.roofline; other pass times are those of one split"
            )
    if devices.draft is None and set(sweep.modes) - {Mode.PLAIN}:
        raise ConfigError("sweep.modes other than plain need devices.draft")
    if study.load.kind == "recorded" and (sweep.concurrency or sweep.rate):
        raise ConfigError(
            "a recorded load has its own times; leave out sweep.concurrency and sweep.rate"
        )
    if list(study.acceptance.ranks) != sorted(study.acceptance.ranks):
        raise ConfigError(
            "acceptance.ranks are shares of the 1, 2, 3, ... likeliest together, so they cannot fall"
        )
    return study


def _mode(study: Study) -> Mode:
    if study.devices.draft is None or study.config.speculation.gamma == 0:
        return Mode.PLAIN
    return Mode.ANTICIPATED if study.config.speculation.anticipation.enabled else Mode.LOCKSTEP


def _loads(study: Study) -> list[Load]:
    closed = [
        replace(study.load, kind="closed", concurrency=clients)
        for clients in study.sweep.concurrency
    ]
    return closed + [
        replace(study.load, kind="poisson", rate=rate) for rate in study.sweep.rate
    ] or [study.load]


def _clients(load: Load) -> int | None:
    return load.concurrency if load.kind == "closed" else None


def _named(load: Load) -> str:
    if load.kind == "closed":
        return f"{load.concurrency} client" + "s" * (load.concurrency > 1)
    return "recorded" if load.kind == "recorded" else f"{load.rate:g}/s"


def _worker(
    device: Device, name: str, directory: Path, *, page_size: int, num_devices: int | None
) -> Worker:
    roofline = device.roofline
    if roofline is not None and num_devices is not None:
        roofline = replace(roofline, devices=num_devices)
    pages = PLENTY if roofline is None else min(PLENTY, roofline.positions() // page_size)
    if roofline is not None and pages < 1:
        raise ConfigError(
            f"devices.{name}: the memory ({roofline.devices} x {roofline.memory_gb:g} GB) does not hold the weights and a cache"
        )
    return Worker(
        pass_time=roofline or _pass_time(device, name, directory),
        link_s=device.link_us * 1e-6,
        pages=device.pages or pages,
        num_devices=roofline.devices if roofline else 1,
    )


def _pass_time(device: Device, name: str, directory: Path) -> PassTime:
    if device.trace is not None:
        return from_trace(directory / device.trace, name)
    assert device.seconds is not None, "_checked has looked"
    return device.seconds
