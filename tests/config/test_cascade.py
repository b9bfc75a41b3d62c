"""The keys of a cascade: what is refused at the start, and by which name."""

from __future__ import annotations

from pathlib import Path

import pytest

from specserve import LLM
from specserve.cluster.placement import bundles
from specserve.config.cascade import ASKED, asked_of
from specserve.config.tree import DEMO, Draft, parse
from specserve.errors import ConfigError, ModelNotFound, TokenizerMismatch
from tests.support import checkpoints

NEURAL, COPY = {"path": "small"}, {"kind": "prompt_copy"}
TWO, THREE = [NEURAL, COPY], [NEURAL, NEURAL, COPY]


def cascade(kind: str = "vertical", stages: object = TWO, **keys: object) -> dict[str, object]:
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
            {"draft.kind": "max_gram", "draft.lenience": 2},
            r"draft\.lenience belongs to the kinds vertical",
        ),
    ],
)
def test_a_cascade_that_cannot_be_is_refused_by_its_key(
    keys: dict[str, object], refusal: str
) -> None:
    with pytest.raises(ConfigError, match=refusal):
        parse({"target": {"path": "t"}}, keys)


def test_a_stage_that_leaves_something_out_is_as_the_draft_has_it() -> None:
    stages = [
        {"path": "a", "device": "cuda:1", "support": 8},
        {"path": "b", "dtype": "float16"},
        {"kind": "bigram", "path": "c", "learn": True},
    ]
    parts = parse(
        {"target": {"path": "t"}},
        cascade(stages=stages, dtype="bfloat16", device="cpu", lenience=2),
    ).draft.parts
    assert [(part.kind, part.path) for part in parts] == [
        ("neural", "a"),
        ("neural", "b"),
        ("bigram", "c"),
    ]
    assert [part.device for part in parts] == ["cuda:1", "cpu", "cpu"]
    assert [part.dtype for part in parts] == ["bfloat16", "float16", "bfloat16"]
    assert [(part.support, part.learn) for part in parts] == [(8, None), (64, None), (64, True)]
    assert Draft(kind="none").parts == (Draft(kind="none"),)


def test_what_k_leaves_out_is_asked_for_evenly() -> None:
    assert asked_of("horizontal", 2, ()) == ((ASKED, ASKED),)
    assert asked_of("vertical", 2, ()) == ((ASKED, 0), (0, ASKED))
    assert asked_of("cascade", 2, ()) == ((ASKED, ASKED), (0, ASKED))
    assert asked_of("cascade", 2, ((5, 3), (0, 9))) == ((5, 3), (0, 9))


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
    config = parse({"target": {"path": "t", "device": "cpu"}}, cascade(stages=stages))
    assert bundles(config, has_gpus=True)[-1].resources.get("GPU") == gpus


def test_files_of_stages_that_are_missing_or_do_not_fit_are_told_before_any_weights_are_read(
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
