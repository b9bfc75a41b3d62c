"""The configuration: one frozen tree, parsed once at the edge from YAML or dotted keys.

An unknown key is an error. It knows the keys and what they may hold, no models and no devices.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from specserve.config.cascade import (
    DTYPES,
    NGRAM_KINDS,
    StageConfig,
    device_name,
    leniences,
    token_matrix,
)
from specserve.config.demo import DemoConfig
from specserve.config.features import check_features, part
from specserve.config.fields import (
    NAME,
    boolean,
    choice,
    integer,
    labels,
    list_of,
    none_as,
    number,
    read_section,
    section,
    setting,
    subsection,
    text,
)
from specserve.config.model_list import check_names, check_top_level, keys_of_each
from specserve.config.pool import PoolConfig
from specserve.errors import ConfigError
from specserve.types import VERIFIERS

MAX_BATCH_TOKENS = 8192
"""Positions in a pass of the target at most, unless limits.max_batch_tokens says otherwise."""
DEMO = Path(__file__).parents[1] / "demo"
ATTENTION = ("auto", "invariant", "sdpa", "flashinfer")
LINEAR_KERNELS = ("auto", "onednn", "compiled")
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
    "eagle",
    "none",
)
SELF_SPECULATIVE_KINDS = ("layer_skip", "heads")  # draft with the target's own weights
# draft on a target's rank, where they need no threads of their own
KINDS_WITHOUT_WORKER = ("heads", "eagle", "none")
PLACEMENTS = ("auto", "together", "apart")
REFUSE, WARN, IGNORE = "refuse", "warn", "ignore"  # of http.unknown_parameters
LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+")


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """The model whose distribution is served. Left out, the demo pair is served."""

    path: str = setting("", text())
    revision: str | None = setting(None, text())  # of a hub name
    # auto: bfloat16 where the processor has it, else float32
    dtype: str = setting("auto", choice(*DTYPES))
    tensor_parallel: int = setting(1, integer(1, 64))
    # the bits of one rank at every tensor_parallel, on CPUs in bfloat16; ranks exchange more
    degree_invariant: bool = setting(False, boolean())
    device: str = setting("auto", device_name())
    threads: int | None = setting(None, integer(1, 1024))  # of a CPU; None: torch's own choice
    attention: str = setting("auto", choice(*ATTENTION))
    label_selector: Mapping[str, str] = setting({}, labels())  # where Ray may place it


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """The drafter."""

    # together with the target in its process, or apart; auto: measured on CPUs, elsewhere apart if
    # there are devices for it
    placement: str = setting("auto", choice(*PLACEMENTS))
    kind: str = setting("", choice(*DRAFT_KINDS))  # left out: neural if there is a path, else none
    # of a model, of an EAGLE-3 head, or of what `specserve tables` and `specserve heads` made
    path: str | None = setting(None, text())
    revision: str | None = setting(None, text())  # of a hub name
    # of a neural draft's weights, as they are read: int8, int4, or on GPUs fp8
    quantize: str | None = setting(None, none_as("none", choice("int8", "int4", "fp8")))
    # layers that `layer_skip` leaves out; None: about every second
    skip: tuple[int, ...] | None = setting(None, list_of(integer(0, 10_000)))
    # whether tables are counted from the served texts; None: if there are none to begin with
    learn: bool | None = setting(None, boolean())
    dtype: str = setting("auto", choice(*DTYPES))
    device: str = setting("auto", device_name())
    threads: int | None = setting(None, integer(1, 1024))
    num_gpus: float | None = setting(None, number(0, 64))
    label_selector: Mapping[str, str] = setting({}, labels())
    support: int = setting(64, integer(1, 4096))  # q is kept on that many of its likeliest tokens
    # of a cascade, from the largest to the smallest
    stages: tuple[StageConfig, ...] = setting((), list_of(section(StageConfig)))
    # k[i][j]: tokens asked of stage j by the target (i = 0) or the stage before i
    k: tuple[tuple[int, ...], ...] = setting((), token_matrix())
    # of reviews between stages: one for all, or one for each that reviews
    lenience: tuple[float, ...] = setting((1.0,), leniences())
    pool: PoolConfig = subsection(PoolConfig, needs="name")

    @property
    def is_pooled(self) -> bool:
        """True if engines share drafts, and have none of their own."""
        return self.pool.name is not None

    @property
    def may_be_apart(self) -> bool:
        """True if each engine's drafter needs, or may turn out to need, a worker of its own."""
        if self.is_pooled:
            return False
        if self.kind == "eagle":
            return self.placement == "apart"  # it is cheap, and its states have to be sent there
        return self.kind not in KINDS_WITHOUT_WORKER and self.placement != "together"

    @property
    def reads_sent_hidden(self) -> bool:
        """True if the target's hidden states have to be sent to the drafter."""
        return self.kind == "eagle" and self.may_be_apart

    @property
    def drafter_configs(self) -> tuple[DraftConfig, ...]:
        """One config for each single drafter: for each stage of a cascade, else this one itself."""
        return tuple(self._stage_as_draft(stage) for stage in self.stages) or (self,)

    def _stage_as_draft(self, stage: StageConfig) -> DraftConfig:
        return replace(
            self,
            kind=stage.kind,
            path=stage.path,
            revision=stage.revision,
            learn=stage.learn,
            dtype=stage.dtype or self.dtype,
            device=stage.device or self.device,
            support=stage.support or self.support,
            stages=(),
            k=(),
            lenience=(1.0,),
        )


@dataclass(frozen=True, slots=True)
class AnticipationConfig:
    """Proposals that the draft worker prepares while the target verifies."""

    enabled: bool = setting(True, boolean())
    # continuations prepared for each predicted outcome; None: as many as pay
    fanout: int | None = setting(None, none_as("auto", integer(1, 64)))


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """Proposal and verification of draft tokens; a request may differ up to `max_gamma`."""

    verifier: str | None = setting(None, none_as("auto", choice(*VERIFIERS)))
    gamma: int | None = setting(None, none_as("auto", integer(0, 64)))
    max_gamma: int = setting(16, integer(0, 64))
    anticipation: AnticipationConfig = subsection(AnticipationConfig)
    lenience: float = setting(1.0, number(1, 1000))  # of the verifier `lenient` alone


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV cache. With neither `pages` nor `memory_fraction` the engine takes what it can use."""

    page_size: int = setting(16, integer(1, 1024))
    # of what is free once the weights are loaded
    memory_fraction: float | None = setting(None, number(0, 1, above=True))
    pages: int | None = setting(None, integer(1, 2**31))
    prefix_caching: bool = setting(True, boolean())
    shared: bool = setting(False, boolean())  # among the clients of all API keys
    # of the target's pages; auto is what its checkpoint says, else the model's own
    dtype: str = setting("auto", choice("auto", "fp8"))


@dataclass(frozen=True, slots=True)
class WeightsConfig:
    """Weights on CPUs, in memory that all processes of a node share."""

    # None: in servers, but not in LLM and generate
    shared: bool | None = setting(None, none_as("auto", boolean()))
    # of their files; None: in memory. In one that is named, files stay until they are removed
    directory: str | None = setting(None, text())
    # of linear layers; compiled is made for the processor, if it has AVX-512 with bf16
    kernel: str = setting("auto", choice(*LINEAR_KERNELS))


@dataclass(frozen=True, slots=True)
class AdaptersConfig:
    """Low-rank adapters (LoRA) of the target, which a request names behind the model's name."""

    paths: Mapping[str, str] = setting({}, labels())  # directories by name
    memory_mb: int = setting(256, integer(1, 2**20))  # of each rank, for those that are loaded
    # clients may load adapters that lie below this directory; None: they may not
    load_from: str | None = setting(None, text())

    @property
    def num_bytes(self) -> int:
        """Memory for adapters; 0 if there are none."""
        return self.memory_mb * 2**20 if self.paths or self.load_from is not None else 0


@dataclass(frozen=True, slots=True)
class LimitsConfig:
    max_context: int | None = setting(None, integer(2, 2**31))  # None: the model's
    max_running: int = setting(64, integer(1, 65536))
    max_queued: int = setting(1024, integer(0, 2**31))
    # positions in a pass of the target: decoding sequences, draft tokens and prompts together;
    # None: what it computes in 0.2 s, and as many as decode and again as many for prompts
    max_batch_tokens: int | None = setting(None, none_as("auto", integer(2, 2**20)))
    request_timeout_s: float = setting(600.0, number(0, 1e6, above=True))
    max_body_bytes: int = setting(4 * 2**20, integer(1, 2**31))


@dataclass(frozen=True, slots=True)
class ReplicasConfig:
    min: int = setting(1, integer(0, 4096))
    max: int = setting(1, integer(1, 4096))
    target_ongoing_requests: float = setting(32.0, number(0, 1e6, above=True))
    # first tokens that take longer are late, and engines are added until few do; None: no limit
    target_ttft_s: float | None = setting(None, number(0, 1e6, above=True))
    upscale_delay_s: float = setting(10.0, number(0, 1e6))
    downscale_delay_s: float = setting(120.0, number(0, 1e6))
    # replicas, at least one, that an update starts before it stops old ones; None: if they fit
    surge_percent: int | None = setting(None, integer(0, 100))
    # which engine gets a request: prefix: by what it has cached and has to do; queue: by the latter
    routing: str = setting("prefix", choice("prefix", "queue"))
    gateways: int = setting(1, integer(1, 1024))  # at most; they scale apart from the engines
    min_gateways: int = setting(1, integer(1, 1024))


@dataclass(frozen=True, slots=True)
class HttpConfig:
    host: str = setting("127.0.0.1", text())
    port: int = setting(8000, integer(0, 65535))
    api_keys_file: str | None = setting(None, text())
    # these need no key
    open_paths: tuple[str, ...] = setting(("/", "/health", "/ready", "/metrics"), list_of(text()))
    cors_origins: tuple[str, ...] = setting((), list_of(text()))
    # names that requests may be addressed to; (): any, but on the loopback without keys its own
    hosts: tuple[str, ...] = setting((), list_of(text()))
    root_path: str = setting("", text(empty=True))
    # of a body, that nothing knows; those that are only reported stand in log and headers
    unknown_parameters: str = setting(REFUSE, choice(REFUSE, WARN, IGNORE))
    # proxies in front of Serve's that append to X-Forwarded-For
    trusted_proxies: int = setting(0, integer(0, 16))
    # where Ray may place gateways: clients' connections end with their node
    label_selector: Mapping[str, str] = setting({}, labels())
    tls_cert: str | None = setting(None, text())  # PEM files; with both, only https is served
    tls_key: str | None = setting(None, text())


@dataclass(frozen=True, slots=True)
class LogsConfig:
    """The log of gateways and engines, in the log files of Ray Serve."""

    format: str = setting("text", choice(*LOG_FORMATS))
    level: str = setting("INFO", choice(*LOG_LEVELS))
    prompts: bool = setting(False, boolean())  # whether prompts may be quoted


@dataclass(frozen=True, slots=True)
class FaultsConfig:
    round_deadline_s: float = setting(30.0, number(0, 1e6, above=True))
    max_restarts: int = setting(4, integer(0, 1000))
    max_slow_s: float | None = setting(None, number(0, 1e6, above=True))


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
    """The whole tree. Its keys are those of the YAML file, `--set` and `LLM(**overrides)`."""

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
        """One config for each model that is served: those of `models`, or this one itself."""
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
        """Return the threads of a target's rank, which those of a draft beside it join."""
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
    return _with_shared_drafts(_validate(_fill_in(config)))


def _with_models(config: Config, given: Mapping[str, object]) -> Config:
    """Return the config with one of its own for each entry of `models`."""
    check_top_level(given)
    names = [entry.name for entry in config.models]  # of ModelConfig, as they are read
    check_names(names)
    name = config.name or _default_name("-".join(names), config.http.port)
    _validate_application(replace(config, name=name))
    parts = []
    for index, (shared, own) in enumerate(keys_of_each(given)):
        try:
            part = read_section(Config, _merge({**shared, "name": name}, own))
            parts.append(_validate(_fill_in(part)))
        except ConfigError as error:
            raise ConfigError(f"models[{index}] ({names[index]}): {error}") from error
    return _with_shared_drafts(replace(config, name=name, models=tuple(parts)))


def config_from_file(
    file: Path | None,
    overrides: Mapping[str, object] | None = None,
    *,
    demo_size: str | None = None,
) -> Config:
    """Return the config of a YAML file, or of the defaults, with `overrides`.

    `demo_size` is that of the demo's target where the keys name neither a target nor a size.
    """
    keys = {} if file is None else read_config_file(file)
    given = _merge(_nest(keys), _nest(overrides or {}))
    names_target = (
        "path" in _section(given, "target")
        or "size" in _section(given, "demo")
        or given.get("models")
    )
    if demo_size is not None and not names_target:
        given = _merge({"demo": {"size": demo_size}}, given)
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


def _validate(config: Config) -> Config:
    """Return the config, or raise ConfigError for keys that contradict one another."""
    speculation, cache, replicas = config.speculation, config.cache, config.replicas
    _validate_application(config)
    check_draft(config)
    _check_page_dtype(config)
    if speculation.gamma is not None and speculation.gamma > speculation.max_gamma:
        raise ConfigError(
            f"speculation.gamma {speculation.gamma} is above "
            f"speculation.max_gamma {speculation.max_gamma}; lower the one or raise the other"
        )
    if cache.pages is not None and cache.memory_fraction is not None:
        raise ConfigError(
            "cache.pages and cache.memory_fraction say the same thing twice; give one of them"
        )
    if replicas.min > replicas.max:
        raise ConfigError(
            f"replicas.min {replicas.min} is above replicas.max {replicas.max}; "
            "lower the one or raise the other"
        )
    return config


def _with_shared_drafts(config: Config) -> Config:
    """Return the config with what models that share a draft must know of one another."""
    if not config.shares_drafts:
        return config
    shared: Config = part("draft_pools.checks:with_shared_pools")(config)
    return shared


def _validate_application(config: Config) -> None:
    """Raise ConfigError for keys of the gateways and the application that contradict another."""
    replicas = config.replicas
    if not NAME.fullmatch(config.name):
        raise ConfigError(
            f"name {config.name!r} must begin with a letter or a digit and have nothing but "
            "letters, digits, '-', '_' and '.', such as my-model-8000"
        )
    if (root := config.http.root_path) and not ROOT_PATH.fullmatch(root):
        raise ConfigError(
            f"http.root_path {root!r} must begin with / and not end with it, such as /my-model"
        )
    if (config.http.tls_cert is None) != (config.http.tls_key is None):
        raise ConfigError(
            "http.tls_cert and http.tls_key go together: a certificate and the key that belongs "
            "to it; give both or neither"
        )
    if replicas.min_gateways > replicas.gateways:
        raise ConfigError(
            f"replicas.min_gateways {replicas.min_gateways} is above "
            f"replicas.gateways {replicas.gateways}; lower the one or raise the other"
        )


def check_draft(config: Config) -> None:
    """Raise ConfigError for keys of the draft, or of a feature, that contradict one another."""
    draft = config.draft
    check_features(config)
    if draft.kind == "neural" and draft.path is None:
        raise ConfigError(
            "draft.kind neural needs draft.path, the model that drafts; "
            "give --draft, or choose a draft.kind that needs none"
        )
    _check_quantize(draft)
    _check_placement(draft, config.target)
    _check_learn(draft)


def _check_quantize(draft: DraftConfig) -> None:
    if draft.quantize is not None and draft.kind != "neural":
        raise ConfigError(
            f"draft.quantize rounds a neural draft's weights, and draft.kind is {draft.kind}; "
            "leave it out, or name a draft model with draft.path"
        )
    if draft.quantize == "fp8" and draft.device == "cpu":
        raise ConfigError(
            "draft.quantize: fp8 needs a GPU, and draft.device is cpu, which multiplies no FP8; "
            "use int8"
        )


def _check_page_dtype(config: Config) -> None:
    if config.cache.dtype == "fp8" and config.target.device == "cpu":
        raise ConfigError(
            "cache.dtype: fp8 needs a GPU, and target.device is cpu, where pages have the model's "
            "number format; leave cache.dtype out"
        )


def _check_learn(draft: DraftConfig) -> None:
    if draft.learn is not None and draft.kind not in NGRAM_KINDS:
        raise ConfigError(
            f"draft.learn belongs to the kinds {', '.join(NGRAM_KINDS)}, "
            f"and draft.kind is {draft.kind}; leave it out"
        )


def _check_placement(draft: DraftConfig, target: TargetConfig) -> None:
    """Raise ConfigError for a draft that cannot live where `draft.placement` says."""
    if draft.placement != "together":
        return
    if draft.num_gpus is not None or draft.label_selector:
        raise ConfigError(
            "draft.num_gpus and draft.label_selector say where a draft apart lives, and "
            "draft.placement is together; leave them out"
        )
    if draft.device not in ("auto", target.device):
        raise ConfigError(
            f"draft.placement together puts the draft on the target's device, {target.device}, "
            f"and draft.device is {draft.device}; leave draft.device out"
        )


def require_no_pool(config: Config, what: str) -> None:
    """Raise ConfigError if the draft is in a pool, which `what` cannot use."""
    if config.draft.is_pooled:
        raise ConfigError(
            f"draft.pool is of applications that `specserve serve` or `serve deploy` runs, and "
            f"{what}; leave it out"
        )
