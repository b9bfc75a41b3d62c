"""The configuration: one frozen tree, parsed once at the edge from nested keys (YAML) or dotted ones. Refuses what it does not know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from specserve.config.cascade import (
    CASCADES,
    DTYPES,
    STATISTICAL,
    Stage,
    asked,
    check_stages,
    device_name,
    leniences,
)
from specserve.config.fields import (
    boolean,
    choice,
    group,
    items,
    labels,
    number,
    read_section,
    section,
    setting,
    text,
    unset_as,
    whole,
)
from specserve.errors import ConfigError
from specserve.types import VERIFIERS

DEMO = Path(__file__).parents[1] / "demo"
ATTENTION = ("auto", "invariant", "sdpa", "flash")
DRAFT_KINDS = (
    "neural",
    "max_gram",
    "prompt_copy",
    "bigram",
    "unigram",
    "random",
    "vertical",
    "horizontal",
    "cascade",
    "layer_skip",
    "heads",
    "none",
)
TIED = ("layer_skip", "heads")  # to the target's own weights
WITHOUT_WORKER = ("heads", "none")  # heads draft where the target judges
LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


@dataclass(frozen=True, slots=True)
class Target:
    """The model that decides what is written. Left out, it is the demo pair's, with that pair's draft."""

    path: str = setting("", text())
    revision: str | None = setting(None, text())  # of a hub name
    dtype: str = setting(
        "auto", choice(*DTYPES)
    )  # auto: bfloat16 where the processor has it, else float32
    tensor_parallel: int = setting(1, whole(1, 64))
    device: str = setting("auto", device_name())
    threads: int | None = setting(None, whole(1, 1024))  # of a CPU; None: torch's own choice
    attention: str = setting("auto", choice(*ATTENTION))
    label_selector: Mapping[str, str] = setting({}, labels())  # where Ray may place it


@dataclass(frozen=True, slots=True)
class Draft:
    """What guesses."""

    kind: str = setting("", choice(*DRAFT_KINDS))  # left out: neural if there is a path, else none
    path: str | None = setting(
        None, text()
    )  # of a model, of tables that `specserve tables` made, or of heads that `specserve heads` made
    skip: tuple[int, ...] | None = setting(
        None, items(whole(0, 10_000))
    )  # layers that `layer_skip` leaves out; None: about every second
    learn: bool | None = setting(
        None, boolean()
    )  # whether tables follow the served texts; None: if there are none to begin with
    dtype: str = setting("auto", choice(*DTYPES))
    device: str = setting("auto", device_name())
    threads: int | None = setting(None, whole(1, 1024))
    num_gpus: float | None = setting(None, number(0, 64))
    label_selector: Mapping[str, str] = setting({}, labels())
    support: int = setting(64, whole(1, 4096))  # it samples from that many of its likeliest tokens
    stages: tuple[Stage, ...] = setting(
        (), items(section(Stage))
    )  # of a cascade, from the largest to the smallest
    k: tuple[tuple[int, ...], ...] = setting(
        (), asked()
    )  # k[i][j]: tokens asked of stage j by the target (i = 0) or the stage before i
    lenience: tuple[float, ...] = setting(
        (1.0,), leniences()
    )  # of reviews between stages: one for all, or one for each that reviews

    @property
    def parts(self) -> tuple[Draft, ...]:
        """Its stages, each as the draft that it would be alone; of any other kind itself."""
        return tuple(self._part(stage) for stage in self.stages) or (self,)

    def _part(self, stage: Stage) -> Draft:
        return replace(
            self,
            kind=stage.kind,
            path=stage.path,
            learn=stage.learn,
            dtype=stage.dtype or self.dtype,
            device=stage.device or self.device,
            support=stage.support or self.support,
            stages=(),
            k=(),
            lenience=(1.0,),
        )


@dataclass(frozen=True, slots=True)
class Anticipation:
    """Of the draft worker, while the target verifies."""

    enabled: bool = setting(True, boolean())
    fanout: int | None = setting(
        None, unset_as("auto", whole(1, 64))
    )  # continuations prepared at each place; None: as many as pay


@dataclass(frozen=True, slots=True)
class Speculation:
    """How guesses are made and judged; a request may wish otherwise within `max_gamma`."""

    verifier: str | None = setting(None, unset_as("auto", choice(*VERIFIERS)))
    gamma: int | None = setting(None, unset_as("auto", whole(0, 64)))
    max_gamma: int = setting(16, whole(0, 64))
    anticipation: Anticipation = group(Anticipation)
    lenience: float = setting(1.0, number(1, 1000))  # of the verifier `lenient` alone


@dataclass(frozen=True, slots=True)
class Cache:
    """Pages of keys and values. With neither `pages` nor `memory_fraction` the engine takes what it can use."""

    page_size: int = setting(16, whole(1, 1024))
    memory_fraction: float | None = setting(
        None, number(0, 1, above=True)
    )  # of what is free once the weights are there
    pages: int | None = setting(None, whole(1, 2**31))
    prefix_caching: bool = setting(True, boolean())


@dataclass(frozen=True, slots=True)
class Limits:
    max_context: int | None = setting(None, whole(2, 2**31))  # None: the model's
    max_running: int = setting(64, whole(1, 65536))
    max_queued: int = setting(1024, whole(0, 2**31))
    request_timeout_s: float = setting(600.0, number(0, 1e6, above=True))
    max_body_bytes: int = setting(4 * 2**20, whole(1, 2**31))


@dataclass(frozen=True, slots=True)
class Replicas:
    min: int = setting(1, whole(0, 4096))
    max: int = setting(1, whole(1, 4096))
    target_ongoing_requests: float = setting(32.0, number(0, 1e6, above=True))
    upscale_delay_s: float = setting(10.0, number(0, 1e6))
    downscale_delay_s: float = setting(120.0, number(0, 1e6))
    surge_percent: int | None = setting(
        None, whole(0, 100)
    )  # replicas, at least one, that an update starts before old ones go; None: if there is room
    gateways: int = setting(1, whole(1, 1024))  # at most; they scale apart from the engines


@dataclass(frozen=True, slots=True)
class Http:
    host: str = setting("127.0.0.1", text())
    port: int = setting(8000, whole(0, 65535))
    api_keys_file: str | None = setting(None, text())
    open_paths: tuple[str, ...] = setting(
        ("/", "/health", "/ready", "/metrics"), items(text())
    )  # need no key
    cors_origins: tuple[str, ...] = setting((), items(text()))
    root_path: str = setting("", text(empty=True))
    label_selector: Mapping[str, str] = setting(
        {}, labels()
    )  # where Ray may place gateways: clients' connections end with their node
    tls_cert: str | None = setting(None, text())  # PEM files; with both, https alone is spoken
    tls_key: str | None = setting(None, text())


@dataclass(frozen=True, slots=True)
class Logs:
    """What is written by gateways and engines, to the log files of Ray Serve."""

    format: str = setting("text", choice(*LOG_FORMATS))
    level: str = setting("INFO", choice(*LOG_LEVELS))
    prompts: bool = setting(False, boolean())  # whether what was asked may be quoted


@dataclass(frozen=True, slots=True)
class Faults:
    round_deadline_s: float = setting(30.0, number(0, 1e6, above=True))
    max_restarts: int = setting(3, whole(0, 1000))


@dataclass(frozen=True, slots=True)
class Config:
    """The whole tree; its keys are those of the YAML file, of `--set`, and of `LLM(**overrides)`."""

    model: str = setting("", text())  # left out: the last part of the target's path
    target: Target = group(Target)
    draft: Draft = group(Draft)
    speculation: Speculation = group(Speculation)
    cache: Cache = group(Cache)
    limits: Limits = group(Limits)
    replicas: Replicas = group(Replicas)
    http: Http = group(Http)
    logs: Logs = group(Logs)
    faults: Faults = group(Faults)


def parse(tree: Mapping[str, object], overrides: Mapping[str, object] | None = None) -> Config:
    """The config of nested keys; `overrides`, whose keys may be dotted ("speculation.gamma"), win over them."""
    given = _merged(_nested(tree), _nested(overrides or {}))
    return _checked(_settled(read_section(Config, given)))


def load(file: Path | None, overrides: Mapping[str, object] | None = None) -> Config:
    """The config of a YAML file, or of the defaults, with `overrides`."""
    if file is None:
        return parse({}, overrides)
    return parse(read_tree(file), overrides)


def read_tree(file: Path) -> dict[str, object]:
    """Of a YAML file; an empty one has no keys."""
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the config file {file} cannot be read: {_why(error)}; give the path of one that is YAML"
        ) from error
    except yaml.YAMLError as error:
        raise ConfigError(
            f"the config file {file} is not YAML: {' '.join(str(error).split())}; mend it there"
        ) from error
    if tree is not None and not isinstance(tree, dict):
        raise ConfigError(
            f"the config file {file} must hold keys and values, such as `model: demo`, not a {type(tree).__name__}"
        )
    return tree or {}


def _why(error: Exception) -> str:
    """Without the path, which is named already."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def override(argument: str) -> tuple[str, object]:
    """`a.b=c` as key and value; the value is read as YAML."""
    key, equals, value = argument.partition("=")
    if not equals or not key.strip():
        raise ConfigError(
            f"an override is written key=value, such as speculation.gamma=5, not {argument!r}"
        )
    try:
        return key.strip(), yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise ConfigError(
            f"the value of {key.strip()} is not YAML: {value!r}; put it in quotes, or mend the brackets"
        ) from error


def _nested(keys: Mapping[str, object]) -> dict[str, object]:
    """Dotted keys unfolded. Only at the top: labels have dots of their own."""
    tree: dict[str, object] = {}
    for key, value in keys.items():
        *sections, name = str(key).split(".")
        branch: dict[str, object] = {name: value}
        for above in reversed(sections):
            branch = {above: branch}
        tree = _merged(tree, branch)
    return tree


def _merged(below: Mapping[str, object], above: Mapping[str, object]) -> dict[str, object]:
    tree = dict(below)
    for key, value in above.items():
        under = tree.get(key)
        tree[key] = (
            _merged(under, value)
            if isinstance(under, Mapping) and isinstance(value, Mapping)
            else value
        )
    return tree


def _settled(config: Config) -> Config:
    """Fills in what was left out and follows from the rest."""
    target, draft, model = config.target, config.draft, config.model
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
    return replace(config, target=target, draft=draft, model=model or Path(target.path).name)


def _checked(config: Config) -> Config:
    """What no key can see alone."""
    draft, speculation, cache, replicas = (
        config.draft,
        config.speculation,
        config.cache,
        config.replicas,
    )
    check_stages(draft.kind, draft.stages, draft.k, draft.lenience)
    if draft.kind in CASCADES and draft.path is not None:
        raise ConfigError(
            f"draft.path is of no use to draft.kind {draft.kind}, whose stages have their own; leave it out"
        )
    if draft.kind == "neural" and draft.path is None:
        raise ConfigError(
            "draft.kind neural needs draft.path, the model that drafts; give --draft, or choose a draft.kind that needs none"
        )
    _check_tied(draft, tensor_parallel=config.target.tensor_parallel)
    if draft.learn is not None and draft.kind not in STATISTICAL:
        raise ConfigError(
            f"draft.learn belongs to the kinds {', '.join(STATISTICAL)}, and draft.kind is {draft.kind}; leave it out"
        )
    if speculation.gamma is not None and speculation.gamma > speculation.max_gamma:
        raise ConfigError(
            f"speculation.gamma {speculation.gamma} is above speculation.max_gamma {speculation.max_gamma}; lower the one or raise the other"
        )
    if cache.pages is not None and cache.memory_fraction is not None:
        raise ConfigError(
            "cache.pages and cache.memory_fraction say the same thing twice; give one of them"
        )
    if (config.http.tls_cert is None) != (config.http.tls_key is None):
        raise ConfigError(
            "http.tls_cert and http.tls_key go together: a certificate and the key that belongs to it; give both or neither"
        )
    if replicas.min > replicas.max:
        raise ConfigError(
            f"replicas.min {replicas.min} is above replicas.max {replicas.max}; lower the one or raise the other"
        )
    return config


def _check_tied(draft: Draft, *, tensor_parallel: int) -> None:
    if draft.kind == "layer_skip" and draft.path is not None:
        raise ConfigError(
            "draft.kind layer_skip drafts with the target's own layers; leave draft.path out"
        )
    if draft.skip is not None and draft.kind != "layer_skip":
        raise ConfigError(
            f"draft.skip belongs to the kind layer_skip, and draft.kind is {draft.kind}; leave it out"
        )
    if draft.skip is not None and len(set(draft.skip)) < len(draft.skip):
        raise ConfigError(
            f"draft.skip names a layer twice: {', '.join(map(str, draft.skip))}; name each once"
        )
    if draft.kind == "heads" and draft.path is None:
        raise ConfigError(
            "draft.kind heads needs draft.path, heads that `specserve heads --target M --text FILE --out DIR` has fitted to the target"
        )
    if draft.kind == "heads" and tensor_parallel > 1:
        raise ConfigError(
            f"draft.kind heads needs the whole vocabulary head on one rank, and target.tensor_parallel is {tensor_parallel}; set it to 1"
        )
