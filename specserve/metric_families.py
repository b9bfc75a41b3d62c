"""The table of all metrics: their names, kinds, help texts, labels and buckets."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class MetricKind(StrEnum):
    COUNTER = "counter"
    SUMMED = "gauge, summed over replicas"
    AVERAGED = "gauge, averaged over replicas"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class MetricFamily:
    """One metric's name, kind, help text and labels."""

    name: str  # without the prefix
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()
    # Upper bounds of a histogram's buckets; one more bucket takes the rest.
    bounds: tuple[float, ...] = ()


_REQUEST_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1)
_ROUND_S = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.015,
    0.02,
    0.03,
    0.05,
    0.075,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
)

FAMILIES = (
    MetricFamily(
        "spec_decode_num_drafts_total", MetricKind.COUNTER, "Proposals that were verified."
    ),
    MetricFamily(
        "spec_decode_num_draft_tokens_total", MetricKind.COUNTER, "Draft tokens that were verified."
    ),
    MetricFamily(
        "spec_decode_num_accepted_tokens_total",
        MetricKind.COUNTER,
        "Draft tokens that were accepted.",
    ),
    MetricFamily(
        "spec_decode_num_accepted_tokens_per_pos_total",
        MetricKind.COUNTER,
        "Draft tokens accepted, by position in their proposal.",
        ("position",),
    ),
    MetricFamily(
        "anticipation_hits_total",
        MetricKind.COUNTER,
        "Proposals that lay ready when they were asked for.",
    ),
    MetricFamily("anticipation_misses_total", MetricKind.COUNTER, "Proposals that did not."),
    MetricFamily("prompt_tokens_total", MetricKind.COUNTER, "Tokens of prompts."),
    MetricFamily("generation_tokens_total", MetricKind.COUNTER, "Tokens written."),
    MetricFamily(
        "request_success_total",
        MetricKind.COUNTER,
        "Continuations that came to their end, by why they ended.",
        ("finished_reason",),
    ),
    MetricFamily(
        "request_failure_total",
        MetricKind.COUNTER,
        "Requests that failed, by HTTP status; 499 is a client that left.",
        ("code",),
    ),
    MetricFamily(
        "rate_limited_total",
        MetricKind.COUNTER,
        "Requests refused by a key's limit of requests, tokens, concurrent or grammars.",
        ("limit",),
    ),
    MetricFamily(
        "worker_restarts_total", MetricKind.COUNTER, "Workers that were restarted.", ("role",)
    ),
    MetricFamily(
        "slow_passes_total",
        MetricKind.COUNTER,
        "Passes far slower than others of their size on the same device.",
        ("role",),
    ),
    MetricFamily(
        "requests_resumed_total",
        MetricKind.COUNTER,
        "Requests that went on elsewhere after a failure.",
    ),
    MetricFamily(
        "preemptions_total", MetricKind.COUNTER, "Sequences preempted because the cache was full."
    ),
    MetricFamily(
        "prefix_cache_queries_total",
        MetricKind.COUNTER,
        "Prompt tokens looked up in the prefix cache.",
    ),
    MetricFamily("prefix_cache_hits_total", MetricKind.COUNTER, "Prompt tokens found there."),
    MetricFamily("num_requests_running", MetricKind.SUMMED, "Sequences that take part in rounds."),
    MetricFamily("num_requests_waiting", MetricKind.SUMMED, "Sequences in the queue."),
    MetricFamily(
        "kv_cache_usage_perc",
        MetricKind.AVERAGED,
        "Share of the cache's pages in use, 0 to 1.",
        ("role",),
    ),
    MetricFamily(
        "gamma", MetricKind.AVERAGED, "Draft tokens a sequence and round, as last chosen."
    ),
    MetricFamily(
        "device_busy_fraction",
        MetricKind.AVERAGED,
        "Share of the time that a worker computes, 0 to 1.",
        ("role",),
    ),
    MetricFamily(
        "api_keys_valid",
        MetricKind.AVERAGED,
        "Share of the gateways whose file of API keys can be used, 0 to 1; absent without keys.",
    ),
    MetricFamily("replicas", MetricKind.SUMMED, "Engine replicas that run."),
    MetricFamily("min_replicas", MetricKind.SUMMED, "Engine replicas that run at least."),
    MetricFamily(
        "avoided_devices",
        MetricKind.SUMMED,
        "Devices that engines avoid, since they have failed or were slow in the last ten minutes.",
    ),
    MetricFamily(
        "pool_engines",
        MetricKind.SUMMED,
        "Engines that one device of a draft pool drafts for.",
        ("pool", "replica"),
    ),
    MetricFamily(
        "pool_busy_fraction",
        MetricKind.AVERAGED,
        "Share of the time that a device of a draft pool computes, 0 to 1: proposals that were "
        "asked for (draft), or likely next ones, for which all the time that is left is used "
        "(anticipate).",
        ("pool", "replica", "work"),
    ),
    MetricFamily(
        "pool_load",
        MetricKind.AVERAGED,
        "Share of the time that a device of a draft pool would draft if it prepared nothing, by "
        "which the pool grows and shrinks.",
        ("pool", "replica"),
    ),
    MetricFamily(
        "pool_batches_total",
        MetricKind.COUNTER,
        "Batches of a draft pool: passes in a row, while some round waits for its drafts.",
        ("pool",),
    ),
    MetricFamily(
        "pool_rounds_total",
        MetricKind.COUNTER,
        "Rounds of engines in those batches; above one a batch, engines have shared it.",
        ("pool",),
    ),
    MetricFamily(
        "gateway_cpu_share",
        MetricKind.AVERAGED,
        "Share of a core that the process of one gateway uses, by which gateways scale beside "
        "their streams; above 1 with several threads.",
        ("replica",),
    ),
    MetricFamily(
        "engine_num_requests_running",
        MetricKind.SUMMED,
        "Sequences of one engine that take part in rounds.",
        ("replica",),
    ),
    MetricFamily(
        "engine_num_requests_waiting",
        MetricKind.SUMMED,
        "Sequences in the queue of one engine.",
        ("replica",),
    ),
    MetricFamily(
        "engine_load_limit",
        MetricKind.SUMMED,
        "Requests of one engine up to which first tokens keep to replicas.target_ttft_s; 0 while "
        "none was too late.",
        ("replica",),
    ),
    MetricFamily(
        "engine_kv_cache_usage_perc",
        MetricKind.AVERAGED,
        "Share of one engine's pages in use, 0 to 1.",
        ("replica", "role"),
    ),
    MetricFamily(
        "engine_device_busy_fraction",
        MetricKind.AVERAGED,
        "Share of the time that a worker of one engine computes, 0 to 1.",
        ("replica", "role"),
    ),
    MetricFamily(
        "engine_prefix_cache_queries",
        MetricKind.SUMMED,
        "Prompt tokens that one engine looked up in its prefix cache since it started.",
        ("replica",),
    ),
    MetricFamily(
        "engine_prefix_cache_hits",
        MetricKind.SUMMED,
        "Prompt tokens that one engine found there.",
        ("replica",),
    ),
    MetricFamily(
        "rank_busy_fraction",
        MetricKind.AVERAGED,
        "Share of the time that one rank of a target computes or waits for others, 0 to 1.",
        ("replica", "rank"),
    ),
    MetricFamily(
        "rank_pass_seconds",
        MetricKind.AVERAGED,
        "Mean time of one rank's passes, of the last second that had any.",
        ("replica", "rank"),
    ),
    MetricFamily(
        "time_to_first_token_seconds",
        MetricKind.HISTOGRAM,
        "From a request's arrival to its first token.",
        bounds=_REQUEST_S,
    ),
    MetricFamily(
        "time_to_first_token_engine_seconds",
        MetricKind.HISTOGRAM,
        "The engine's part of it: its queue, and the prefill.",
        bounds=_REQUEST_S,
    ),
    MetricFamily(
        "time_to_first_token_framework_seconds",
        MetricKind.HISTOGRAM,
        "The rest of it: HTTP, tokenizing, routing and the way of the token back.",
        bounds=_ROUND_S,
    ),
    MetricFamily(
        "time_per_output_token_seconds",
        MetricKind.HISTOGRAM,
        "Mean time a token after the first, of one continuation.",
        bounds=_TOKEN_S,
    ),
    MetricFamily(
        "inter_token_latency_seconds",
        MetricKind.HISTOGRAM,
        "From one chunk of a text to the next; each brings the tokens of a round.",
        bounds=_TOKEN_S,
    ),
    MetricFamily(
        "e2e_request_latency_seconds",
        MetricKind.HISTOGRAM,
        "From a request's arrival to its last token.",
        bounds=_REQUEST_S,
    ),
    MetricFamily(
        "verify_seconds", MetricKind.HISTOGRAM, "The target's part of a round.", bounds=_ROUND_S
    ),
    MetricFamily(
        "draft_seconds", MetricKind.HISTOGRAM, "The drafter's part of a round.", bounds=_ROUND_S
    ),
    MetricFamily("round_seconds", MetricKind.HISTOGRAM, "A whole round.", bounds=_ROUND_S),
)

FAMILY_LABELS = {family.name: family.labels for family in FAMILIES}
