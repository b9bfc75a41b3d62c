"""Metrics: counting, merging over replicas, and the text that Prometheus parses."""

from __future__ import annotations

import pickle

import pytest
from prometheus_client.parser import text_string_to_metric_families

from specserve import vllm_metrics
from specserve.metric_families import FAMILIES, MetricKind
from specserve.metrics import Registry, merge, render


def values(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def filled(scale: int) -> Registry:
    registry = Registry()
    for family in FAMILIES:
        labels = tuple(f"{label}-a" for label in family.labels)
        if family.kind is MetricKind.COUNTER:
            registry.counter(family.name).add(scale, *labels)
        elif family.kind is MetricKind.HISTOGRAM:
            registry.histogram(family.name).observe(scale / 100, *labels)
        else:
            registry.gauge(family.name).set(scale, *labels)
    return registry


def test_every_family_is_parsed_by_prometheus_own_parser_with_its_type() -> None:
    parsed = {
        family.name: family
        for family in text_string_to_metric_families(render(filled(3).snapshot()))
    }
    for family in FAMILIES:
        parsed_family = parsed["specserve_" + family.name.removesuffix("_total")]
        assert parsed_family.documentation == family.help
        assert parsed_family.type == (
            "gauge" if "gauge" in family.kind.value else family.kind.value
        )
        assert parsed_family.samples


def test_counters_and_histograms_of_replicas_add_up_and_gauges_do_as_declared() -> None:
    merged = values(
        render(merge([filled(1).snapshot(), filled(3).snapshot(), Registry().snapshot()]))
    )
    assert merged[("specserve_prompt_tokens_total", ())] == 4
    assert (
        merged[("specserve_request_success_total", (("finished_reason", "finished_reason-a"),))]
        == 4
    )
    assert merged[("specserve_num_requests_running", ())] == 4
    assert merged[("specserve_gamma", ())] == 2  # of the two that have one
    assert merged[("specserve_kv_cache_usage_perc", (("role", "role-a"),))] == 2
    assert merged[("specserve_round_seconds_count", ())] == 2
    assert merged[("specserve_round_seconds_sum", ())] == pytest.approx(0.04)


def test_merging_in_two_steps_is_merging_at_once() -> None:
    one, two, three = (filled(i).snapshot() for i in (1, 2, 6))
    assert render(merge([merge([one, two]), three])) == render(merge([one, two, three]))


def test_a_bucket_counts_observations_at_or_below_its_bound() -> None:
    registry = Registry()
    for seconds in (0.005, 0.0051, 0.01, 5000.0):
        registry.histogram("time_to_first_token_seconds").observe(seconds)
    read = values(render(registry.snapshot()))
    buckets = {
        dict(labels)["le"]: value
        for (name, labels), value in read.items()
        if name == "specserve_time_to_first_token_seconds_bucket"
    }
    assert (
        buckets["0.005"],
        buckets["0.01"],
        buckets["0.025"],
        buckets["600"],
        buckets["+Inf"],
    ) == (1, 3, 3, 3, 4)
    assert list(buckets.values()) == sorted(buckets.values())


def test_counters_without_labels_are_there_from_the_start_and_gauges_only_once_set() -> None:
    read = values(render(Registry().snapshot()))
    assert read[("specserve_preemptions_total", ())] == 0
    assert ("specserve_gamma", ()) not in read


def test_label_values_are_escaped() -> None:
    registry = Registry()
    strange = 'a"b\\c\nd,e={}'
    registry.counter("request_failure_total").add(1, strange)
    assert (
        values(render(registry.snapshot()))[
            ("specserve_request_failure_total", (("code", strange),))
        ]
        == 1
    )


def test_a_snapshot_can_be_pickled_and_does_not_change_any_more() -> None:
    registry = filled(1)
    snapshot = registry.snapshot()
    before = render(snapshot)
    registry.counter("prompt_tokens_total").add(5)
    registry.histogram("round_seconds").observe(1)
    assert render(pickle.loads(pickle.dumps(snapshot))) == render(snapshot) == before


def test_undeclared_metrics_and_missing_labels_are_errors() -> None:
    with pytest.raises(KeyError):
        Registry().counter("gamma")  # a gauge
    with pytest.raises(AssertionError):
        Registry().counter("request_failure_total").add(1)


def test_the_name_of_a_model_is_a_label_behind_those_of_the_family() -> None:
    registry = Registry()
    registry.counter("worker_restarts_total").add(2, "draft")
    registry.gauge("gamma").set(4)
    registry.histogram("round_seconds").observe(0.01)
    small, large = registry.snapshot().of_model("small"), registry.snapshot().of_model("large")
    lines = render(merge([small, large])).splitlines()
    assert 'specserve_worker_restarts_total{role="draft",model_name="small"} 2' in lines
    assert 'specserve_gamma{model_name="large"} 4' in lines
    assert 'specserve_round_seconds_bucket{model_name="small",le="0.01"} 1' in lines
    both = merge([small, large]).over_models()
    assert both.samples["worker_restarts_total"] == {("draft",): (4.0,)}
    assert both.samples["gamma"] == {(): (8.0, 2.0)}, "two that reported, 4 on average"
    assert registry.snapshot().of_model("") == registry.snapshot()


def test_what_vllm_measures_too_has_its_names_its_labels_and_our_values() -> None:
    registry = filled(3)
    registry.gauge("kv_cache_usage_perc").set(0.25, "target")
    registry.gauge("kv_cache_usage_perc").set(0.75, "draft")
    text = vllm_metrics.render(registry.snapshot(), "org/model")
    parsed = {family.name: family for family in text_string_to_metric_families(text)}
    assert set(vllm_metrics.NAMES) <= {family.name for family in FAMILIES}
    assert set(parsed) == {
        f"vllm:{name.removesuffix('_total')}" for name in vllm_metrics.NAMES.values()
    }
    for family in parsed.values():
        for sample in family.samples:
            assert (sample.labels["model_name"], sample.labels["engine"]) == ("org/model", "0")
            assert "role" not in sample.labels
    labels = (("engine", "0"), ("model_name", "org/model"))
    assert values(text)["vllm:num_preemptions_total", labels] == 3
    assert values(text)["vllm:kv_cache_usage_perc", labels] == 0.25
    assert values(text)["vllm:inter_token_latency_seconds_count", labels] == 1


def test_each_of_several_models_keeps_its_name_under_vllms() -> None:
    text = vllm_metrics.render(
        merge([filled(1).snapshot().of_model("a"), filled(2).snapshot().of_model("b")]), "a"
    )
    for model, count in (("a", 1), ("b", 2)):
        labels = (("engine", "0"), ("model_name", model))
        assert values(text)["vllm:num_requests_running", labels] == count
