"""Keys of a cascade: invalid ones are refused at the start, by their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specserve import LLM
from specserve.cli.main import main
from specserve.cluster.model_paths import local_models
from specserve.cluster.placement import bundles, with_devices
from specserve.config.hub_models import unpinned_models
from specserve.config.sections import DraftConfig
from specserve.config.tree import DEMO, config_from_keys
from specserve.errors import ConfigError, ModelNotFound, TokenizerMismatch
from specserve.features.cascade.build import DEFAULT_STAGE_TOKENS, stage_token_matrix
from tests.support import checkpoints

NEURAL = {"path": "small"}
COPY = {"kind": "prompt_copy"}
TWO, THREE = [NEURAL, COPY], [NEURAL, NEURAL, COPY]


def cascade(kind: str = "vertical", stages: object = TWO, **keys: object) -> dict[str, Any]:
    return {
        "draft.kind": kind,
        "draft.stages": stages,
        **{f"draft.{key}": value for key, value in keys.items()},
    }


@pytest.mark.parametrize(
    ("keys", "refusal"),
    [
        (cascade(stages=[]), r"draft\.kind vertical needs draft\.stages, two or more .* not 0"),
        (cascade(stages=[NEURAL]), r"needs draft\.stages, two or more .* not 1"),
        (
            cascade(stages=[NEURAL, {"kind": "horizontal"}]),
            r"draft\.stages\[1\]\.kind horizontal would be a cascade in a cascade",
        ),
        (
            cascade(stages=[NEURAL, {"kind": "heads"}]),
            r"draft\.stages\[1\]\.kind must be one of neural, unigram",
        ),
        (cascade(stages=[{"kind": "neural"}, COPY]), r"draft\.stages\[0\]\.path is missing"),
        (
            cascade(stages=[COPY, NEURAL]),
            r"draft\.stages\[0\]\.kind prompt_copy can only be the last stage",
        ),
        (
            cascade(stages=[NEURAL, {"kind": "bigram", "learn": False}]),
            r"draft\.stages\[1\]\.path is missing",
        ),
        (
            cascade(stages=[{"path": "small", "learn": True}, COPY]),
            r"draft\.stages\[0\]\.learn belongs to",
        ),
        (
            cascade(stages=[{"path": "small", "device": "gpu"}, COPY]),
            r"draft\.stages\[0\]\.device must be auto, cpu, cuda or cuda:N",
        ),
        (cascade(path="small"), r"draft\.path is of no use to draft\.kind vertical"),
        (cascade(learn=True), r"draft\.learn belongs to"),
        (cascade(k=[[4]]), r"draft\.k must be 2 x 2 .* not a row of 1"),
        (cascade(k=[[4, 0], [0, 4, 1]]), r"draft\.k must be 2 x 2 .* a row of 2 and a row of 3"),
        (cascade("horizontal", k=[[4, 1], [0, 4]]), r"draft\.k must be 1 x 2"),
        (
            cascade("cascade", k=[[4, 1], [1, 4]]),
            r"draft\.k\[1\] must begin with 1 zeros, not \[1, 4\]",
        ),
        (
            cascade("cascade", k=[[4, -1], [0, 4]]),
            r"draft\.k\[0\]\[1\] must be a whole number from 0 to 64, not -1",
        ),
        (cascade("cascade", k=[[4, 1], [0, 0]]), r"draft\.k\[1\]\[1\] must be above 0"),
        (cascade("vertical", k=[[4, 1], [0, 4]]), r"draft\.k\[0\] must end with zeros"),
        (cascade("vertical", k=4), r"draft\.k must be a list"),
        (
            cascade(lenience=0.5),
            r"draft\.lenience must be a number from 1 to 1000, or a list of such numbers, not 0\.5",
        ),
        (cascade(lenience=[0.5]), r"draft\.lenience.* must be a number from 1 to 1000"),
        (cascade(lenience=[2, 2]), r"draft\.lenience must be one number, or 1 for 2 stages, not 2"),
        (
            cascade("horizontal", lenience=2),
            r"draft\.lenience belongs to the kinds vertical and cascade",
        ),
        ({"draft.kind": "max_gram", "draft.k": [[1]]}, r"draft\.k belongs to the kinds vertical"),
        (
            {"draft.kind": "none", "draft.stages": [{"kind": "unigram"}]},
            "draft.stages belongs to the kinds vertical",
        ),
        (
            {"draft.kind": "max_gram", "draft.lenience": 2},
            r"draft\.lenience belongs to the kinds vertical",
        ),
    ],
)
def test_an_invalid_cascade_is_refused_naming_the_key(
    keys: dict[str, object], refusal: str
) -> None:
    with pytest.raises(ConfigError, match=refusal):
        config_from_keys({"target": {"path": "t"}}, keys)


def test_a_stage_inherits_missing_keys_from_the_draft() -> None:
    stages = [
        {"path": "a", "device": "cuda:1", "support": 8},
        {"path": "b", "dtype": "float16"},
        {"kind": "bigram", "path": "c", "learn": True},
    ]
    configs = config_from_keys(
        {"target": {"path": "t"}},
        cascade(stages=stages, dtype="bfloat16", device="cpu", lenience=2),
    ).draft.drafter_configs
    assert [(config.kind, config.path) for config in configs] == [
        ("neural", "a"),
        ("neural", "b"),
        ("bigram", "c"),
    ]
    assert [config.device for config in configs] == ["cuda:1", "cpu", "cpu"]
    assert [config.dtype for config in configs] == ["bfloat16", "float16", "bfloat16"]
    assert [(config.support, config.learn) for config in configs] == [
        (8, None),
        (64, None),
        (64, True),
    ]
    assert DraftConfig(kind="none").drafter_configs == (DraftConfig(kind="none"),)


def test_k_left_out_asks_every_stage_for_the_default() -> None:
    assert stage_token_matrix("horizontal", 2, ()) == (
        (DEFAULT_STAGE_TOKENS, DEFAULT_STAGE_TOKENS),
    )
    assert stage_token_matrix("vertical", 2, ()) == (
        (DEFAULT_STAGE_TOKENS, 0),
        (0, DEFAULT_STAGE_TOKENS),
    )
    assert stage_token_matrix("cascade", 2, ()) == (
        (DEFAULT_STAGE_TOKENS, DEFAULT_STAGE_TOKENS),
        (0, DEFAULT_STAGE_TOKENS),
    )
    assert stage_token_matrix("cascade", 2, ((5, 3), (0, 9))) == ((5, 3), (0, 9))


@pytest.mark.parametrize(
    ("devices", "gpus"),
    [
        (("cuda:0", "cuda:1"), 2),
        (("auto", "cuda:0"), 1),
        (("cuda:1", "cpu"), 1),
        (("cpu", "cpu"), None),
        (("auto", "auto"), 1),
    ],
)
def test_the_draft_asks_for_as_many_gpus_as_its_stages_name(
    devices: tuple[str, ...], gpus: float | None
) -> None:
    stages = [*({"path": "small", "device": device} for device in devices), COPY]
    config = config_from_keys({"target": {"path": "t", "device": "cpu"}}, cascade(stages=stages))
    assert bundles(config, has_gpus=True)[-1].resources.get("GPU") == gpus


def test_gpus_of_a_cascade_are_numbered_as_its_worker_sees_them() -> None:
    stages = [
        {"path": "a", "device": "cuda:5"},
        {"path": "b", "device": "cuda:2"},
        {"path": "c", "device": "cpu"},
        {"kind": "bigram"},
    ]
    config = config_from_keys({"draft.kind": "vertical", "draft.stages": stages})
    wanted = bundles(config, has_gpus=True)
    assert wanted[-1].resources["GPU"] == 2
    devices = [stage.device for stage in with_devices(config, wanted).draft.stages]
    assert devices == ["cuda:1", "cuda:0", "cpu", "cpu"]


def test_each_stage_of_a_cascade_has_a_revision_of_its_own() -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    stages = [{"path": "someone/large", "revision": commit}, {"path": "someone/small"}]
    keys = {"target.path": "x/y", "target.revision": commit, **cascade(stages=stages)}
    unpinned = unpinned_models(config_from_keys(keys))
    assert [model.section for model in unpinned] == ["draft.stages[1]"]


def test_missing_or_mismatched_stage_files_are_reported_before_weights_are_loaded(
    tmp_path: Path,
) -> None:
    other = checkpoints.make("llama", tmp_path / "other")
    checkpoints.add_tokenizer(other)
    with pytest.raises(TokenizerMismatch):
        LLM(**cascade(stages=[{"path": str(DEMO / "draft")}, {"path": str(other)}]))
    with pytest.raises(ModelNotFound):
        LLM(
            **cascade(
                stages=[
                    {"path": str(DEMO / "draft")},
                    {"kind": "bigram", "path": str(tmp_path / "nowhere")},
                ]
            )
        )
    with pytest.raises(ModelNotFound):
        LLM(**cascade(stages=[{"path": str(tmp_path / "nothing")}, COPY]))


def test_stages_are_looked_for_where_they_are_opened() -> None:
    stages = [{"path": str(DEMO / "draft")}, {"kind": "bigram", "path": "tables"}]
    config = config_from_keys({"target.path": "owner/model"}, cascade(stages=stages))
    found = [model.key for model in local_models(config, has_gpus=False)]
    assert found == ["draft.stages[0].path", "draft.stages[1].path"]


def test_a_cascade_without_stages_is_one_clear_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["generate", "--prompt", "a", "--drafter", "cascade"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("specserve: ")
    assert "draft.stages" in captured.err


def test_a_cascade_on_more_gpus_than_its_share_is_refused() -> None:
    stages = [{"path": "a", "device": f"cuda:{n}"} for n in range(2)]
    config = config_from_keys(cascade("horizontal", stages, num_gpus=1))
    with pytest.raises(ConfigError, match=r"draft.num_gpus is 1, .* names cuda:0, cuda:1"):
        bundles(config, has_gpus=True)
