"""The file of `specserve simulate`: devices, a load, and a sweep, turned into scenarios to run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

from specserve.config import tree as engine
from specserve.config.fields import (
    FieldRule,
    choice,
    integer,
    list_of,
    none_as,
    number,
    read_section,
    section,
    setting,
    subsection,
    text,
)
from specserve.errors import ConfigError
from specserve.tools.simulate.acceptance_model import AcceptanceConfig
from specserve.tools.simulate.devices import HostConfig
from specserve.tools.simulate.fit import pass_time_from_trace
from specserve.tools.simulate.load import LoadConfig, arrivals
from specserve.tools.simulate.pass_times import LinearPassTime, PassTime, RooflinePassTime
from specserve.tools.simulate.scenario import (
    DEFAULT_PAGES,
    DeviceGroup,
    Mode,
    Scenario,
)


def _engine_config() -> FieldRule:
    """Return the rule for the engine's own config."""

    def read(value: object, key: str) -> engine.Config:
        if isinstance(value, Mapping):
            return engine.config_from_keys(value)
        raise ValueError

    return FieldRule("the keys of the engine's config", read)


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """A group of devices: its pass times, given in one of three ways, and its link."""

    seconds: LinearPassTime | None = setting(None, section(LinearPassTime))
    roofline: RooflinePassTime | None = setting(None, section(RooflinePassTime))
    trace: str | None = setting(None, text())  # file from GET /trace of a running engine
    link_us: float = setting(0.0, number(0, 1e9))  # one way
    # Pages of the KV cache; by default what a roofline's memory holds, else DEFAULT_PAGES.
    pages: int | None = setting(None, integer(1, 2**31))

    @property
    def num_pass_times(self) -> int:
        """Number of ways in which the pass times are given, which should be 1."""
        return sum(way is not None for way in (self.seconds, self.roofline, self.trace))


@dataclass(frozen=True, slots=True)
class DevicesConfig:
    """Devices of one replica."""

    target: DeviceConfig = subsection(DeviceConfig)
    draft: DeviceConfig | None = setting(None, section(DeviceConfig))
    host: HostConfig = subsection(HostConfig)
    startup_s: float = setting(60.0, number(0, 1e6))


@dataclass(frozen=True, slots=True)
class SweepConfig:
    """Lists of values, all combinations of which are simulated.

    An empty list stands for the value in load or config.
    """

    concurrency: tuple[int, ...] = setting((), list_of(integer(1, 10**6)))
    rate: tuple[float, ...] = setting((), list_of(number(0, 10**6, above=True)))
    replicas: tuple[int, ...] = setting((), list_of(integer(1, 4096)))  # without autoscaling
    modes: tuple[str, ...] = setting((), list_of(choice(*Mode)))
    # Plain decoding is simulated once, whatever the list.
    gamma: tuple[int | None, ...] = setting((), list_of(none_as("auto", integer(0, 64))))


@dataclass(frozen=True, slots=True)
class SplitConfig:
    """Devices of a replica for target and draft; none for the draft is plain decoding."""

    target: int = setting(1, integer(1, 4096))
    draft: int = setting(1, integer(0, 4096))


@dataclass(frozen=True, slots=True)
class FindConfig:
    """A search for the fewest replicas that keep latency limits."""

    ttft_p90_s: float = setting(1.0, number(0, 1e6, above=True))
    tpot_p90_s: float = setting(0.1, number(0, 1e6, above=True))
    max_replicas: int = setting(16, integer(1, 4096))
    # For rooflines only; by default the numbers of devices in them.
    splits: tuple[SplitConfig, ...] = setting((), list_of(section(SplitConfig)))


@dataclass(frozen=True, slots=True)
class StudyConfig:
    """The whole file."""

    config: engine.Config = setting(engine.Config(), _engine_config())
    devices: DevicesConfig = subsection(DevicesConfig)
    acceptance: AcceptanceConfig = subsection(AcceptanceConfig)
    load: LoadConfig = subsection(LoadConfig)
    sweep: SweepConfig = subsection(SweepConfig)
    find: FindConfig | None = setting(None, section(FindConfig))
    seed: int = setting(0, integer(0, 2**31))


@dataclass(frozen=True, slots=True)
class Case:
    """A scenario and the values of the sweep that make it."""

    mode: Mode
    load: str  # such as "8 clients", or "2/s"
    replicas: str
    gamma: int | None
    scenario: Scenario = field(repr=False)


def load_study(file: Path) -> StudyConfig:
    """Read a study. Raises ConfigError for a key or a value that cannot be used."""
    return _checked(read_section(StudyConfig, engine.read_config_file(file)))


def cases(study: StudyConfig, *, directory: Path) -> Iterator[Case]:
    """Yield all combinations of the sweep. Relative paths in the study start from `directory`."""
    sweep, base = study.sweep, scenario(study, directory=directory)
    for load, replicas, mode in product(
        _loads(study), sweep.replicas or (None,), map(Mode, sweep.modes or (_mode(study),))
    ):
        loaded = replace(
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
            yield Case(mode, _load_name(load), count, gamma, replace(loaded, config=config))


def scenario(study: StudyConfig, *, directory: Path, split: SplitConfig | None = None) -> Scenario:
    """Return the study's load on its devices, or on a split of them."""
    devices, page_size = study.devices, study.config.cache.page_size
    target = _device_group(
        devices.target,
        "target",
        directory,
        page_size=page_size,
        num_devices=None if split is None else split.target,
    )
    draft = None
    if devices.draft is not None and (split is None or split.draft):
        draft = _device_group(
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
        startup_s=devices.startup_s,
        seed=study.seed,
    )


def with_gamma(config: engine.Config, gamma: int | None) -> engine.Config:
    """Return the config with another gamma, raising max_gamma if needed."""
    max_gamma = max(config.speculation.max_gamma, gamma or 0)
    speculation = replace(config.speculation, gamma=gamma, max_gamma=max_gamma)
    return replace(config, speculation=speculation)


def with_replicas(config: engine.Config, replicas: int | None) -> engine.Config:
    """Return the config with a fixed number of replicas, or unchanged for None."""
    return (
        config
        if replicas is None
        else replace(config, replicas=replace(config.replicas, min=replicas, max=replicas))
    )


def _checked(study: StudyConfig) -> StudyConfig:
    """Check what concerns several keys. Raises ConfigError."""
    devices, sweep = study.devices, study.sweep
    for name, device in (("target", devices.target), ("draft", devices.draft)):
        if device is not None and device.num_pass_times != 1:
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
                f"find.splits needs devices.{name}.roofline; "
                "other pass times are those of one split"
            )
    if devices.draft is None and set(sweep.modes) - {Mode.PLAIN}:
        raise ConfigError("sweep.modes other than plain need devices.draft")
    if study.load.kind == "recorded" and (sweep.concurrency or sweep.rate):
        raise ConfigError(
            "a recorded load has its own times; leave out sweep.concurrency and sweep.rate"
        )
    if list(study.acceptance.ranks) != sorted(study.acceptance.ranks):
        raise ConfigError(
            "acceptance.ranks are shares of the 1, 2, 3, ... likeliest together, "
            "so they cannot fall"
        )
    return study


def _mode(study: StudyConfig) -> Mode:
    if study.devices.draft is None or study.config.speculation.gamma == 0:
        return Mode.PLAIN
    return Mode.ANTICIPATED if study.config.speculation.anticipation.enabled else Mode.LOCKSTEP


def _loads(study: StudyConfig) -> list[LoadConfig]:
    closed = [
        replace(study.load, kind="closed", concurrency=clients)
        for clients in study.sweep.concurrency
    ]
    return closed + [
        replace(study.load, kind="poisson", rate=rate) for rate in study.sweep.rate
    ] or [study.load]


def _clients(load: LoadConfig) -> int | None:
    return load.concurrency if load.kind == "closed" else None


def _load_name(load: LoadConfig) -> str:
    if load.kind == "closed":
        return f"{load.concurrency} client" + "s" * (load.concurrency > 1)
    return "recorded" if load.kind == "recorded" else f"{load.rate:g}/s"


def _device_group(
    device: DeviceConfig, name: str, directory: Path, *, page_size: int, num_devices: int | None
) -> DeviceGroup:
    roofline = device.roofline
    if roofline is not None and num_devices is not None:
        roofline = replace(roofline, devices=num_devices)
    pages = (
        DEFAULT_PAGES if roofline is None else min(DEFAULT_PAGES, roofline.positions() // page_size)
    )
    if roofline is not None and pages < 1:
        raise ConfigError(
            f"devices.{name}: the memory ({roofline.devices} x {roofline.memory_gb:g} GB) "
            "does not hold the weights and a cache"
        )
    return DeviceGroup(
        pass_time=roofline or _pass_time(device, name, directory),
        link_s=device.link_us * 1e-6,
        pages=device.pages or pages,
        num_devices=roofline.devices if roofline else 1,
    )


def _pass_time(device: DeviceConfig, name: str, directory: Path) -> PassTime:
    if device.trace is not None:
        return pass_time_from_trace(directory / device.trace, name)
    assert device.seconds is not None, "_checked requires one of the three"
    return device.seconds
