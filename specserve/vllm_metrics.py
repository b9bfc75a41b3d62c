"""Our metrics under vLLM's names and labels, which dashboards and autoscalers of others read."""

from __future__ import annotations

from collections.abc import Mapping

from specserve.metric_families import FAMILIES, MetricFamily
from specserve.metrics import MODEL_LABEL, Labels, Sample, Snapshot, family_lines

PREFIX = "vllm:"
SAME = (
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "e2e_request_latency_seconds",
)
NAMES: Mapping[str, str] = {
    **{name: name for name in SAME},
    "preemptions_total": "num_preemptions_total",
    "time_per_output_token_seconds": "request_time_per_output_token_seconds",
}
"""vLLM's names, without its prefix, by ours."""
ROLE = "target"
"""The role whose cache vLLM knows."""


def render(snapshot: Snapshot, model: str) -> str:
    """Return the metrics that vLLM has, too, as Prometheus text; `model` is the only one's name."""
    return "".join(
        line + "\n"
        for family in FAMILIES
        if family.name in NAMES
        for line in family_lines(
            PREFIX + NAMES[family.name],
            family,
            _labelled(family, snapshot.samples.get(family.name, {}), model),
        )
    )


def _labelled(
    family: MetricFamily, samples: Mapping[Labels, Sample], model: str
) -> list[tuple[dict[str, str], Sample]]:
    """Return the samples with the labels that vLLM's have: always a model, and never a role."""
    found = []
    for values, sample in sorted(samples.items()):
        labels = {
            MODEL_LABEL: model,
            **dict(zip((*family.labels, MODEL_LABEL), values, strict=False)),
        }
        if labels.pop("role", ROLE) == ROLE:
            found.append(({**labels, "engine": "0"}, sample))
    return found
