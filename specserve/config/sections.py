"""The sections of the config: their keys, what each may hold, and its default.

Knows what one section says of itself, and nothing of the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from specserve.config.cascade import StageConfig, leniences, token_matrix
from specserve.config.fields import (
    boolean,
    choice,
    integer,
    labels,
    list_of,
    none_as,
    number,
    section,
    setting,
    subsection,
    text,
)
from specserve.config.kinds import DTYPES, device_name
from specserve.config.pool import PoolConfig
from specserve.types import VERIFIERS

MAX_BATCH_TOKENS = 8192
"""Positions in a pass of the target at most, unless limits.max_batch_tokens says otherwise."""
MAX_CATCH_UP = 512
"""Tokens that a drafter which reads prompts after the target prefills at once."""
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
    "dflash",
    "none",
)
SELF_SPECULATIVE_KINDS = ("layer_skip", "heads")  # draft with the target's own weights
# draft on a target's rank, where they need no threads of their own
KINDS_WITHOUT_WORKER = ("heads", "eagle", "dflash", "none")
HIDDEN_STATE_KINDS = ("eagle", "dflash")  # read the target's states, which are sent to them apart
PLACEMENTS = ("auto", "together", "apart")
REFUSE, WARN, IGNORE = "refuse", "warn", "ignore"  # of http.unknown_parameters
LOG_FORMATS = ("text", "json")
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


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
    # of requests that say nothing else: what the checkpoint recommends, or none of that
    sampling_defaults: str = setting("model", choice("model", "none"))
    label_selector: Mapping[str, str] = setting({}, labels())  # where Ray may place it


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """The drafter."""

    # together with the target in its process, or apart; auto: measured on CPUs, elsewhere apart if
    # there are devices for it
    placement: str = setting("auto", choice(*PLACEMENTS))
    kind: str = setting("", choice(*DRAFT_KINDS))  # left out: neural if there is a path, else none
    # of a model, an EAGLE-3 head or a DFlash draft, or what `specserve tables` and `heads` made
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
    # k[i][j]: tokens requested from stage j by the target (i = 0) or the stage before i
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
        if self.kind in HIDDEN_STATE_KINDS:
            return self.placement == "apart"  # it is cheap, and its states have to be sent there
        return self.kind not in KINDS_WITHOUT_WORKER and self.placement != "together"

    @property
    def reads_sent_hidden(self) -> bool:
        """True if the target's hidden states have to be sent to the drafter."""
        return self.kind in HIDDEN_STATE_KINDS and self.may_be_apart

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
    """Low-rank adapters (LoRA) of the target; a request names one in a suffix of its model name."""

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
    vllm_metrics: bool = setting(True, boolean())  # /metrics has them under vLLM's names, too
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
