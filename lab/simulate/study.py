"""The file of `lab.simulate`: devices, a load, and a sweep, turned into scenarios to run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

from lab.simulate.acceptance_model import AcceptanceConfig
from lab.simulate.device_groups import DevicesConfig, device_groups
from lab.simulate.load import LoadConfig, arrivals
from lab.simulate.scenario import Mode, Scenario
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
)
from specserve.engine.draft_placement import TOGETHER
from specserve.errors import ConfigError


def _engine_config() -> FieldRule:
    """Return the rule for the engine's own config."""

    def read(value: object, key: str) -> engine.Config:
        if isinstance(value, Mapping):
            config = engine.config_from_keys(value)
            config.require_one_model()
            return config
        raise ValueError

    return FieldRule("the keys of the engine's config", read)


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
    """Devices of a replica for target and draft; none for the draft is plain decoding.

    None is a draft that is together with the target on its devices.
    """

    target: int = setting(1, integer(1, 4096))
    draft: int | None = setting(1, none_as("together", integer(0, 4096)))


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
    sweep = study.sweep
    bases = {
        mode: scenario(study, directory=directory, mode=mode)
        for mode in map(Mode, sweep.modes or (_mode(study, None),))
    }
    for load, replicas, mode in product(_loads(study), sweep.replicas or (None,), bases):
        loaded = replace(
            bases[mode],
            arrivals=arrivals(load, seed=study.seed, directory=directory),
            concurrency=_clients(load),
        )
        for gamma in (
            (0,) if mode is Mode.PLAIN else sweep.gamma or (study.config.speculation.gamma,)
        ):
            config = with_gamma(with_replicas(study.config, replicas), gamma)
            rules = config.replicas
            count = f"{rules.min}" if rules.min == rules.max else f"{rules.min} to {rules.max}"
            yield Case(mode, _load_name(load), count, gamma, replace(loaded, config=config))


def scenario(
    study: StudyConfig,
    *,
    directory: Path,
    split: SplitConfig | None = None,
    mode: Mode | None = None,
) -> Scenario:
    """Return the study's load on its devices or on a split of them, by default in its own mode."""
    mode = mode or _mode(study, split)
    target, draft = device_groups(
        study.devices,
        mode,
        directory,
        page_size=study.config.cache.page_size,
        num_devices=None if split is None else (split.target, split.draft),
    )
    return Scenario(
        target=target
        if study.config.cache.pages is None
        else replace(target, pages=study.config.cache.pages),
        draft=draft,
        arrivals=arrivals(study.load, seed=study.seed, directory=directory),
        concurrency=_clients(study.load),
        mode=mode,
        config=study.config,
        acceptance=study.acceptance,
        host=study.devices.host,
        startup_s=study.devices.startup_s,
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
    for name, device in devices.by_name.items():
        if device.num_pass_times != 1:
            raise ConfigError(
                f"devices.{name} needs its pass times in one way: seconds, roofline or trace"
            )
        if device.roofline is None and study.find is not None and study.find.splits:
            raise ConfigError(
                f"find.splits needs devices.{name}.roofline; "
                "other pass times are those of one split"
            )
    if devices.draft is None and devices.draft_together is not None:
        raise ConfigError("devices.draft_together stands in for devices.draft; give that as well")
    if devices.draft is None and set(sweep.modes) - {Mode.PLAIN}:
        raise ConfigError("sweep.modes other than plain need devices.draft")
    if Mode.POOLED in sweep.modes and not study.config.draft.is_pooled:
        raise ConfigError(
            "sweep.modes pooled needs config.draft.pool, such as {name: shared, devices: 1}"
        )
    if study.find is not None and study.config.draft.is_pooled:
        raise ConfigError(
            "find searches for replicas with devices of their own, and config.draft.pool shares "
            "drafts; leave one out, and compare pools by sweep.replicas"
        )
    if study.config.draft.pool.devices_per_engine > 1:
        raise ConfigError(
            "a simulated engine drafts on one device; leave config.draft.pool.devices_per_engine "
            "out"
        )
    if study.config.draft.pool.max_devices is not None:
        raise ConfigError(
            "a simulated pool keeps config.draft.pool.devices; leave "
            "config.draft.pool.max_devices out"
        )
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


def _mode(study: StudyConfig, split: SplitConfig | None) -> Mode:
    config, num_draft = study.config, 1 if split is None else split.draft
    if study.devices.draft is None or config.speculation.gamma == 0 or num_draft == 0:
        return Mode.PLAIN
    if config.draft.is_pooled and split is None:
        return Mode.POOLED
    if num_draft is None or (split is None and config.draft.placement == TOGETHER):
        return Mode.TOGETHER
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
