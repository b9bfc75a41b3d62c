"""The configuration: one frozen tree, parsed once at the edge from YAML or dotted keys.

An unknown key is an error. It knows the keys and what they may hold, no models and no devices.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from specserve.config.checks import check_application, check_config
from specserve.config.demo import DemoConfig
from specserve.config.features import part
from specserve.config.fields import (
    list_of,
    read_section,
    section,
    setting,
    subsection,
    text,
)
from specserve.config.model_list import check_names, check_top_level, keys_of_each
from specserve.config.sections import (
    KINDS_WITHOUT_WORKER,
    AdaptersConfig,
    CacheConfig,
    DraftConfig,
    FaultsConfig,
    HttpConfig,
    LimitsConfig,
    LogsConfig,
    ReplicasConfig,
    SpeculationConfig,
    TargetConfig,
    WeightsConfig,
)
from specserve.errors import ConfigError

DEMO = Path(__file__).parents[1] / "demo"
SERVE_KEYS = {"applications", "http_options", "proxy_location"}
"""Of a file for `serve deploy`."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """An entry of `models`. Sections that it leaves out, and keys in them, are the top level's."""

    name: str = setting("", text())  # that requests choose it by
    target: TargetConfig = subsection(TargetConfig)
    draft: DraftConfig = subsection(DraftConfig)
    demo: DemoConfig = subsection(DemoConfig)
    speculation: SpeculationConfig = subsection(SpeculationConfig)
    cache: CacheConfig = subsection(CacheConfig)
    weights: WeightsConfig = subsection(WeightsConfig)
    adapters: AdaptersConfig = subsection(AdaptersConfig)
    limits: LimitsConfig = subsection(LimitsConfig)
    replicas: ReplicasConfig = subsection(ReplicasConfig)
    faults: FaultsConfig = subsection(FaultsConfig)


@dataclass(frozen=True, slots=True)
class Config:
    """The whole tree. The YAML file, `--set` and `LLM(**overrides)` have its keys."""

    model: str = setting("", text())  # left out: the last part of the target's path
    # of the application in Ray, which may hold several; left out: specserve-<model>-<port>
    name: str = setting("", text())
    target: TargetConfig = subsection(TargetConfig)
    draft: DraftConfig = subsection(DraftConfig)
    demo: DemoConfig = subsection(DemoConfig)
    speculation: SpeculationConfig = subsection(SpeculationConfig)
    cache: CacheConfig = subsection(CacheConfig)
    weights: WeightsConfig = subsection(WeightsConfig)
    adapters: AdaptersConfig = subsection(AdaptersConfig)
    limits: LimitsConfig = subsection(LimitsConfig)
    replicas: ReplicasConfig = subsection(ReplicasConfig)
    http: HttpConfig = subsection(HttpConfig)
    logs: LogsConfig = subsection(LogsConfig)
    faults: FaultsConfig = subsection(FaultsConfig)
    # several models behind the same gateways: read as ModelConfig, kept as the config of each
    models: tuple[Config, ...] = setting((), list_of(section(ModelConfig)))

    @property
    def each_model(self) -> tuple[Config, ...]:
        """One config for each model that is served: the configs in `models`, or this one itself."""
        return self.models or (self,)

    def require_one_model(self) -> None:
        """Raise ConfigError if there are several models, for what runs a single one."""
        if self.models:
            raise ConfigError(
                "models lists models for a server, and a single one runs here; give "
                "target.path and draft.path at the top level instead"
            )

    @property
    def shares_drafts(self) -> bool:
        """True if there are drafts that several engines share."""
        return any(part.draft.is_pooled for part in self.each_model)

    def rank_threads(self, *, with_draft: bool) -> int | None:
        """Return the threads of a target's rank, which a draft's threads beside it join."""
        threads, draft = self.target.threads, self.draft
        is_alone = self.target.tensor_parallel > 1 or not with_draft or draft.is_pooled
        if threads is None or is_alone:
            return threads
        return threads + (0 if draft.kind in KINDS_WITHOUT_WORKER else draft.threads or 1)


def config_from_keys(
    keys: Mapping[str, object], overrides: Mapping[str, object] | None = None
) -> Config:
    """Return the config of these keys, nested or dotted ("speculation.gamma"). `overrides` win."""
    given = _merge(_nest(keys), _nest(overrides or {}))
    config = read_section(Config, given)
    if config.models:
        return _with_models(config, given)
    return _with_shared_drafts(_checked(_fill_in(config)))


def _with_models(config: Config, given: Mapping[str, object]) -> Config:
    """Return the config with one of its own for each entry of `models`."""
    check_top_level(given)
    names = [entry.name for entry in config.models]  # of ModelConfig, as they are read
    check_names(names)
    name = config.name or _default_name("-".join(names), config.http.port)
    check_application(replace(config, name=name))
    models = []
    for index, (shared, own) in enumerate(keys_of_each(given)):
        try:
            model = read_section(Config, _merge({**shared, "name": name}, own))
            models.append(_checked(_fill_in(model)))
        except ConfigError as error:
            raise ConfigError(f"models[{index}] ({names[index]}): {error}") from error
    return _with_shared_drafts(replace(config, name=name, models=tuple(models)))


def config_from_file(
    file: Path | None,
    overrides: Mapping[str, object] | None = None,
    *,
    default_model: Callable[[], Mapping[str, object]] | None = None,
) -> Config:
    """Return the config of a YAML file, or of the defaults, with `overrides`.

    `default_model` returns the keys of the model where none is named; its draft counts where the
    keys name none, either.
    """
    keys = {} if file is None else read_config_file(file)
    given = _merge(_nest(keys), _nest(overrides or {}))
    names_target = (
        "path" in _section(given, "target")
        or "size" in _section(given, "demo")
        or given.get("models")
    )
    if default_model is not None and not names_target:
        below = dict(default_model())
        if _section(given, "draft").keys() & {"kind", "path"}:
            below.pop("draft", None)
        given = _merge(below, given)
    return config_from_keys(given)


def read_config_file(file: Path) -> dict[str, object]:
    """Return the keys of a YAML file; an empty file has none."""
    try:
        tree = parse_yaml(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the config file {file} cannot be read: {_reason(error)}; "
            "give the path of one that is YAML"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(
            f"the config file {file} is not YAML: {' '.join(str(error).split())}; mend it there"
        ) from error
    if tree is not None and not isinstance(tree, dict):
        raise ConfigError(
            f"the config file {file} must hold keys and values, such as `model: demo`, "
            f"not a {type(tree).__name__}"
        )
    if tree and SERVE_KEYS & tree.keys():
        raise ConfigError(
            f"{file} is a file of Ray Serve, for `serve deploy {file}`; what stands under `args:` "
            "in it is a config, in a file of its own"
        )
    return tree or {}


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text.

    Raises YAMLError, which the library does not for a value that its tag does not fit, for a date
    that is none, and for brackets nested beyond Python's recursion limit.
    """
    try:
        return yaml.safe_load(text)
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise yaml.YAMLError(f"a value does not have the form of its type: {error}") from error


def _reason(error: Exception) -> str:
    """Return the error's text without the path, which the message names already."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def parse_override(argument: str) -> tuple[str, object]:
    """Split `a.b=c` into key and value; the value is YAML."""
    key, equals, value = argument.partition("=")
    if not equals or not key.strip():
        raise ConfigError(
            f"an override is written key=value, such as speculation.gamma=5, not {argument!r}"
        )
    try:
        return key.strip(), parse_yaml(value)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"the value of {key.strip()} is not YAML: {value!r}; "
            "put it in quotes, or mend the brackets"
        ) from error


def _nest(keys: Mapping[str, object]) -> dict[str, object]:
    """Turn dotted keys into nested ones, at the top level only: labels contain dots themselves."""
    tree: dict[str, object] = {}
    for key, value in keys.items():
        *sections, name = str(key).split(".")
        branch: dict[str, object] = {name: value}
        for above in reversed(sections):
            branch = {above: branch}
        tree = _merge(tree, branch)
    return tree


def _section(tree: Mapping[str, object], name: str) -> Mapping[str, object]:
    """Return a section of the tree, empty if there is none."""
    section_keys = tree.get(name)
    return section_keys if isinstance(section_keys, Mapping) else {}


def _merge(below: Mapping[str, object], above: Mapping[str, object]) -> dict[str, object]:
    tree = dict(below)
    for key, value in above.items():
        under = tree.get(key)
        tree[key] = (
            _merge(under, value)
            if isinstance(under, Mapping) and isinstance(value, Mapping)
            else value
        )
    return tree


def _fill_in(config: Config) -> Config:
    """Return the config with those keys filled in whose defaults follow from other keys."""
    target, draft, model = config.target, config.draft, config.model
    if target.path and config.demo.size is not None:
        raise ConfigError(
            "demo.size is of the demo pair, and target.path names another model; leave one out "
            "(`specserve inflate` widens any model)"
        )
    if not target.path:
        target = replace(target, path=str(DEMO / "target"))
        model = model or "demo"
        if draft.path is None and draft.kind in ("", "neural"):
            draft = replace(draft, path=str(DEMO / "draft"))
    if (
        draft.kind == "heads"
        and draft.path is None
        and Path(target.path).resolve() == (DEMO / "target").resolve()
    ):
        draft = replace(draft, path=str(DEMO / "heads"))
    if not draft.kind:
        draft = replace(draft, kind="neural" if draft.path else "none")
    model = model or Path(target.path).name
    name = config.name or _default_name(model, config.http.port)
    return replace(config, target=target, draft=draft, model=model, name=name)


def _default_name(model: str, port: int) -> str:
    return f"specserve-{re.sub('[^A-Za-z0-9._-]+', '-', model).strip('-')[:80]}-{port}"


def _checked(config: Config) -> Config:
    """Return the config. Raises ConfigError for keys that contradict one another."""
    check_config(config)
    return config


def _with_shared_drafts(config: Config) -> Config:
    """Return the config with what models that share a draft must know of one another."""
    if not config.shares_drafts:
        return config
    shared: Config = part("draft_pools.checks:with_shared_pools")(config)
    return shared
