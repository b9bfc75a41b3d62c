"""The configuration tree: defaults, overrides, and the errors for keys and values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from specserve.config.cascade import StageConfig
from specserve.config.tree import DEMO, Config, config_from_file, config_from_keys, parse_override
from specserve.errors import ConfigError

CONTRACT = {
    "model": None,
    "name": None,
    "models": None,  # beyond the first contract
    "target": {
        "path",
        "revision",
        "dtype",
        "tensor_parallel",
        "degree_invariant",  # beyond the first contract
        "device",
        "threads",
        "attention",
        "sampling_defaults",  # beyond the first contract
        "label_selector",
    },
    "draft": {
        "kind",
        "path",
        "revision",  # beyond the first contract
        "quantize",
        "skip",
        "learn",
        "placement",
        "dtype",
        "device",
        "threads",
        "num_gpus",
        "label_selector",
        "support",
        "stages",
        "k",
        "lenience",
        "pool",
    },
    "speculation": {"verifier", "gamma", "max_gamma", "anticipation", "lenience"},
    "cache": {"page_size", "memory_fraction", "pages", "prefix_caching", "shared", "dtype"},
    "weights": {"shared", "directory", "kernel"},  # beyond the first contract
    "adapters": {"paths", "memory_mb", "load_from"},  # beyond the first contract
    "limits": {
        "max_context",
        "max_running",
        "max_queued",
        "max_batch_tokens",
        "request_timeout_s",
        "max_body_bytes",
    },
    "replicas": {
        "min",
        "max",
        "target_ongoing_requests",
        "target_ttft_s",
        "upscale_delay_s",
        "downscale_delay_s",
        "surge_percent",
        "routing",
        "gateways",
        "min_gateways",
    },
    "http": {
        "host",
        "port",
        "api_keys_file",
        "open_paths",
        "cors_origins",
        "hosts",
        "root_path",
        "unknown_parameters",
        "trusted_proxies",
        "vllm_metrics",
        "tls_cert",
        "tls_key",
        "label_selector",
    },  # open_paths, proxies, metrics, TLS and labels go beyond the first contract
    "demo": {"size"},  # and so does this
    "logs": {"format", "level", "prompts"},
    "faults": {"round_deadline_s", "max_restarts", "max_slow_s"},  # max_slow_s goes beyond it
}


def test_the_keys_are_those_of_the_contract() -> None:
    config = config_from_keys({})
    assert {key.name for key in dataclasses.fields(config)} == set(CONTRACT)
    for name, keys in CONTRACT.items():
        if keys is not None:
            assert {key.name for key in dataclasses.fields(getattr(config, name))} == keys
    assert {key.name for key in dataclasses.fields(config.speculation.anticipation)} == {
        "enabled",
        "fanout",
    }


@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({}, "specserve-demo-8000"),
        ({"http.port": 9000, "target.path": "org/My Model"}, "specserve-My-Model-9000"),
        ({"model": "m" * 200}, f"specserve-{'m' * 80}-8000"),
        ({"name": "mine"}, "mine"),
    ],
)
def test_an_application_is_named_after_model_and_port(keys: dict[str, object], name: str) -> None:
    assert config_from_keys(keys).name == name


@pytest.mark.parametrize("name", ["a b", "a/b", "a#b", "-a", "a" * 101])
def test_a_name_that_could_not_be_part_of_a_file_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"name .*such as my-model-8000"):
        config_from_keys({"name": name})


@pytest.mark.parametrize("path", ["models", "/models/", "/", "//models"])
def test_a_root_path_that_serve_would_not_take_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=r"http.root_path .*such as /my-model"):
        config_from_keys({"http.root_path": path})


def test_without_keys_the_demo_pair_is_served() -> None:
    config = config_from_keys({})
    assert (config.model, config.target.path, config.draft.path, config.draft.kind) == (
        "demo",
        str(DEMO / "target"),
        str(DEMO / "draft"),
        "neural",
    )


def test_the_demo_target_can_do_without_its_draft() -> None:
    assert config_from_keys({}, {"draft.kind": "none"}).draft.kind == "none"


@pytest.mark.parametrize(
    ("keys", "kind"),
    [
        ({}, "none"),
        ({"draft.path": "small"}, "neural"),
        ({"draft.path": "small", "draft.kind": "none"}, "none"),
    ],
)
def test_the_draft_kind_follows_from_the_path_unless_given(
    keys: Mapping[str, object], kind: str
) -> None:
    config = config_from_keys({"target": {"path": "/models/big-7b"}}, keys)
    assert config.draft.kind == kind
    assert config.model == "big-7b"


def test_overrides_win_and_leave_their_neighbours_alone() -> None:
    config = config_from_keys(
        {"speculation": {"gamma": 3, "lenience": 2}}, {"speculation.gamma": 5, "http": {"port": 9}}
    )
    assert (config.speculation.gamma, config.speculation.lenience, config.http.port) == (5, 2.0, 9)


def test_auto_and_null_leave_the_choice_open() -> None:
    config = config_from_keys(
        {"speculation": {"gamma": "auto", "verifier": "auto", "max_gamma": None}, "http": None}
    )
    assert config.speculation.gamma is None
    assert config.speculation.verifier is None
    assert config.speculation.max_gamma == 16
    assert config.http.port == 8000


def test_labels_may_have_dots() -> None:
    assert config_from_keys(
        {"target": {"label_selector": {"ray.io/accelerator-type": "L4"}}}
    ).target.label_selector == {"ray.io/accelerator-type": "L4"}


def test_a_config_written_out_reads_back_the_same() -> None:
    config = config_from_keys(
        {},
        {
            "speculation.gamma": 4,
            "http.cors_origins": ["http://a"],
            "target.label_selector": {"a": "b"},
        },
    )
    assert config_from_keys(yaml.safe_load(yaml.safe_dump(_plain(config)))) == config


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {key.name: _plain(getattr(value, key.name)) for key in dataclasses.fields(value)}
    return list(map(_plain, value)) if isinstance(value, tuple) else value


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("speculation.gama", "speculation.gamma"),
        ("specluation", "speculation"),
        ("gamma", "speculation.gamma"),
        ("tensor_paralel", "target.tensor_parallel"),
        ("http.prot", "http.port"),
        ("speculation.anticipation.fan_out", "speculation.anticipation.fanout"),
    ],
)
def test_an_unknown_key_is_refused_with_its_path_and_the_nearest_known_one(
    key: str, nearest: str
) -> None:
    with pytest.raises(ConfigError, match=f"unknown key {key}; did you mean {nearest}\\?"):
        config_from_keys({}, {key: 1})


def test_a_key_unlike_any_other_is_refused_listing_all() -> None:
    with pytest.raises(ConfigError, match=r"unknown key http\.zzzz; known here: host, port"):
        config_from_keys({"http": {"zzzz": 1}})


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("speculation.gamma", -1, "auto, or a whole number from 0 to 64"),
        ("speculation.gamma", True, "a whole number"),
        ("speculation.gamma", 2.5, "a whole number"),
        ("speculation.verifier", "fast", "one of speculative, block, coupled, lenient"),
        ("speculation.lenience", float("nan"), "a number from 1"),
        ("speculation.lenience", float("inf"), "a number from 1"),
        ("speculation.lenience", 0.5, "a number from 1"),
        ("target.dtype", "bf16", "bfloat16"),
        ("target.device", "gpu", "auto, cpu, cuda or cuda:N"),
        ("target.device", "cuda:", "cuda:N"),
        ("target.tensor_parallel", 0, "from 1"),
        ("target.path", "", "text that is not empty"),
        ("target.path", 7, "text"),
        ("target.label_selector", {"a": 1}, "a mapping of text to text"),
        ("cache.memory_fraction", 0, "above 0 and up to 1"),
        ("cache.prefix_caching", "yes please", "true or false"),
        ("limits.max_running", 10**400, "from 1 to 65536"),
        ("limits.max_batch_tokens", 1, "from 2 to 1048576"),
        ("http.port", 70000, "from 0 to 65535"),
        ("http.cors_origins", "http://a", "a list"),
        ("http", 8000, "a group of keys"),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_naming_key_and_remedy(
    key: str, value: object, wanted: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        config_from_keys({}, {key: value})
    assert str(refusal.value).startswith(f"{key} must be ")
    assert wanted in str(refusal.value)


def test_an_item_of_a_list_is_refused_by_its_index() -> None:
    with pytest.raises(ConfigError, match=r"http.cors_origins\[1\] must be text"):
        config_from_keys({}, {"http.cors_origins": ["http://a", 3]})


@pytest.mark.parametrize(
    ("keys", "refusal"),
    [
        ({"speculation.gamma": 20}, "speculation.gamma 20 is above speculation.max_gamma 16"),
        (
            {"cache.pages": 10, "cache.memory_fraction": 0.5},
            "cache.pages and cache.memory_fraction",
        ),
        ({"replicas.min": 2}, "replicas.min 2 is above replicas.max 1"),
        (
            {"replicas.min_gateways": 3, "replicas.gateways": 2},
            "replicas.min_gateways 3 is above replicas.gateways 2",
        ),
        ({"http.tls_cert": "cert.pem"}, "http.tls_cert and http.tls_key go together"),
        ({"draft.kind": "neural", "target.path": "t"}, "draft.kind neural needs draft.path"),
        ({"draft.learn": True}, "draft.learn belongs to the kinds unigram"),
    ],
)
def test_keys_that_contradict_one_another_are_refused(
    keys: Mapping[str, object], refusal: str
) -> None:
    with pytest.raises(ConfigError, match=refusal):
        config_from_keys({}, keys)


def test_the_stages_of_a_cascade_are_sections_of_their_own() -> None:
    with pytest.raises(
        ConfigError,
        match=r"unknown key draft\.stages\[0\]\.knid; did you mean draft\.stages\[0\]\.kind",
    ):
        config_from_keys({"draft": {"stages": [{"knid": "neural"}]}})
    assert StageConfig() == StageConfig(kind="neural", path=None, device=None)


def test_a_file_is_read_and_overridden(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("speculation:\n  gamma: 7\n  verifier: block\n")
    config = config_from_file(
        file, dict([parse_override("speculation.gamma=auto"), parse_override("http.port=81")])
    )
    assert (config.speculation.gamma, config.speculation.verifier, config.http.port) == (
        None,
        "block",
        81,
    )
    file.write_text("")
    assert config_from_file(file) == config_from_file(None) == config_from_keys({})


@pytest.mark.parametrize("content", ["a: [", "- a\n- b\n", "just text", b"\xff\xfe\x00"])
def test_a_file_that_is_no_config_is_refused_in_one_line(
    tmp_path: Path, content: str | bytes
) -> None:
    file = tmp_path / "config.yaml"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as refusal:
        config_from_file(file)
    assert str(file) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        config_from_file(tmp_path / "nowhere.yaml")


@pytest.mark.parametrize("argument", ["gamma", "=5", "", "http.port=[1"])
def test_an_override_that_is_not_written_as_one_is_refused(argument: str) -> None:
    with pytest.raises(ConfigError):
        parse_override(argument)


def test_the_tree_cannot_be_changed() -> None:
    config = Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.http.port = 1  # type: ignore[misc]


@pytest.mark.parametrize("name", ["demo.yaml", "llama-70b.yaml", "ray-llm.yaml"])
def test_a_file_of_serve_is_refused_with_the_command_that_takes_it(name: str) -> None:
    file = Path(__file__).parents[2] / "deploy" / name
    with pytest.raises(ConfigError, match=rf"is a file of Ray Serve, for `serve deploy {file}`;"):
        config_from_file(file)


@pytest.mark.parametrize(
    "value", ["!!int x", "!!bool x", "!!timestamp x", "2026-13-45", "9" * 5000, "[" * 2000]
)
def test_a_value_that_its_type_does_not_fit_is_refused_and_no_traceback(
    tmp_path: Path, value: str
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(f"model: {value}")
    with pytest.raises(ConfigError, match="is not YAML"):
        config_from_file(file)
    with pytest.raises(ConfigError, match="is not YAML"):
        parse_override(f"model={value}")


@pytest.mark.parametrize(
    ("keys", "size"),
    [
        ({}, 200_000_000),
        ({"demo.size": "30M"}, 30_000_000),
        ({"demo.size": "none"}, None),
        ({"target.path": "org/model"}, None),
    ],
)
def test_a_command_widens_the_demo_unless_it_says_another_size_or_model(
    keys: dict[str, object], size: int | None
) -> None:
    config = config_from_file(None, keys, default_model=lambda: {"demo": {"size": "200M"}})
    assert config.demo.size == size


@pytest.mark.parametrize(
    ("keys", "target", "draft"),
    [
        ({}, "talks.gguf", "max_gram"),
        ({"draft.kind": "prompt_copy"}, "talks.gguf", "prompt_copy"),
        ({"draft.kind": "none"}, "talks.gguf", "none"),
        ({"target.path": "org/model"}, "org/model", "none"),
        ({"demo.size": "30M"}, str(DEMO / "target"), "neural"),
    ],
)
def test_the_default_model_brings_a_draft_unless_the_keys_name_one(
    keys: dict[str, object], target: str, draft: str
) -> None:
    default = {"target": {"path": "talks.gguf"}, "draft": {"kind": "max_gram", "path": "tables"}}
    config = config_from_file(None, keys, default_model=lambda: default)
    assert (config.target.path, config.draft.kind) == (target, draft)


def test_a_size_of_the_demo_is_refused_beside_another_target() -> None:
    with pytest.raises(ConfigError, match=r"demo.size is of the demo pair"):
        config_from_keys({"demo.size": "200M", "target.path": "org/model"})


@pytest.mark.parametrize("size", ["1M", "many", True, -3, "0"])
def test_a_size_that_the_demo_cannot_have_is_refused(size: object) -> None:
    with pytest.raises(ConfigError, match=r"demo.size must be none, or a number of parameters"):
        config_from_keys({"demo.size": size})
