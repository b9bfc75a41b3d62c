"""Plans equal theory, config and loader; what cannot be planned is an error of one line."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from lab.papers.family import reader
from specserve import theory
from specserve.cli.main import main
from specserve.config.tree import DEMO
from specserve.drafters.ngram.tables import UnigramTable, count_texts
from specserve.engine.draft_placement import PlacementCosts, choose_placement
from specserve.models.checkpoints.find import describe
from specserve.models.checkpoints.held_bytes import num_held_bytes
from specserve.models.checkpoints.load import load_model
from specserve.models.checkpoints.weights import Codes
from specserve.models.checkpoints.widen import _open
from specserve.models.cpu.linear_kernels import missing_for_compiled
from specserve.tools.plan.cascades import CascadeStage, best_cascades, best_matrix, cascade_factor
from specserve.tools.plan.gains import GammaAdvice, ModelPair
from specserve.tools.plan.measure import ModelReader, TableDrafter, overlaps
from specserve.tools.plan.memory import (
    GIB,
    GpuGroup,
    MemoryPlan,
    fits,
    smallest_fit,
    whole_model_share,
)
from specserve.tools.plan.placement import LOADS, TARGET_ROWS, measure_placement
from specserve.tools.plan.pools import PoolAdvice, pool_advice
from specserve.types import Curve
from tests.formats.check import MADE
from tests.support.checkpoints import ARCHITECTURES, add_tokenizer, make, perturb

GPTQ = MADE / "gptq"
PLAN = MemoryPlan(torch.bfloat16, page_size=16, memory_fraction=0.5, context=8192)
LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="module")
def seventy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint that has a config.json and nothing else."""
    directory = tmp_path_factory.mktemp("seventy")
    (directory / "config.json").write_text(json.dumps(LLAMA_70B))
    return directory


def test_a_70b_model_is_weighed_by_its_config_alone(seventy: Path) -> None:
    share = whole_model_share(seventy, PLAN)
    assert share.num_parameters == pytest.approx(70.55e9, rel=0.01)
    assert share.weight_bytes == 2 * share.num_parameters
    assert share.kv_bytes == 2 * 80 * 8 * 128 * 2
    assert share.page_bytes == 16 * share.kv_bytes


def test_the_smallest_degree_divides_the_heads_and_fits(seventy: Path) -> None:
    found = fits(seventy, GpuGroup.parse("4xH100"), PLAN)
    assert [fit.works for fit in found] == [False, True, False, True]
    assert "too large" in found[0].reason
    assert "64 attention heads" in found[2].reason
    best = smallest_fit(found)
    assert best is found[1]
    assert best.share is not None
    free = 79.6 * GIB - best.share.weight_bytes
    assert best.pages == int(free * 0.5) // (best.share.kv_bytes * 16)
    assert best.sequences == best.pages // 512
    assert best.share.kv_bytes == 2 * 80 * 4 * 128 * 2


def test_no_degree_is_a_plain_answer_too(seventy: Path) -> None:
    assert smallest_fit(fits(seventy, GpuGroup.parse("2x24"), PLAN)) is None


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_parameters_by_config_are_those_that_are_loaded(name: str, tmp_path: Path) -> None:
    directory = make(name, tmp_path)
    loaded = load_model(directory, dtype=torch.float32, device="cpu", attention="eager")
    assert describe(directory).num_parameters == sum(
        parameter.numel() for parameter in loaded.module.parameters()
    )


def test_the_ranks_of_a_model_hold_it_together() -> None:
    """Each rank has the embedding, the norms and half of the rest; the tied head is a share."""
    one, two = (describe(DEMO / "target", ranks=ranks) for ranks in (1, 2))
    embedding, norms = 4096 * 256, 17 * 256
    assert one.num_parameters == _open(DEMO / "target").num_parameters
    assert (
        two.num_parameters
        == embedding + norms + (one.num_parameters - embedding - norms) // 2 + embedding // 2
    )


def test_advice_is_the_best_of_all_gammas() -> None:
    pair = ModelPair("given", 0.8, 0.1, 0.02)
    advice = GammaAdvice.from_pair(pair, hit_rate=0.8, max_gamma=16)
    assert advice.serial.serial == max(gain.serial for gain in advice.by_gamma)
    assert advice.hidden.hidden == max(gain.hidden for gain in advice.by_gamma)
    assert advice.best_hidden > advice.best_serial == 6
    assert advice.by_gamma[0].serial == advice.by_gamma[0].operations == 1


TWO = (CascadeStage((0.8,), 0.1), CascadeStage((0.6, 0.7), 0.01))
THREE = (
    CascadeStage((0.85,), 0.2),
    CascadeStage((0.7, 0.8), 0.05),
    CascadeStage((0.4, 0.45, 0.5), 0.0),
)


def played(
    stages: tuple[CascadeStage, ...],
    k: tuple[tuple[int, ...], ...],
    rounds: int,
    dice: random.Random,
) -> float:
    """Tokens a unit of time, by throwing dice for every review."""

    def write(stage: int, length: int) -> float:
        if stage + 1 >= len(k):
            return length * stages[stage].cost
        cost, done = 0.0, 0
        while done < length:
            tokens, price = review(stage + 1, length - done - 1)
            done, cost = done + tokens, cost + price
        return cost

    def review(reviewer: int, most: int) -> tuple[int, float]:
        cost = 1.0 if reviewer == 0 else stages[reviewer - 1].cost
        alphas: list[float] = []
        for stage in range(reviewer, len(stages)):
            length = min(k[reviewer][stage], most - len(alphas))
            cost += write(stage, length)
            alphas += [stages[stage].alphas[reviewer]] * length
        accepted = next(
            (i for i, alpha in enumerate(alphas) if dice.random() >= alpha), len(alphas)
        )
        return accepted + 1, cost

    reviews = [review(0, sum(k[0])) for _ in range(rounds)]
    return sum(tokens for tokens, _ in reviews) / sum(cost for _, cost in reviews)


@pytest.mark.parametrize(
    ("stages", "k"),
    [
        (TWO, ((5, 0), (0, 3))),
        (TWO, ((4, 3), (0, 2))),
        (TWO, ((4, 3),)),
        (THREE, ((4, 2, 3), (0, 2, 2), (0, 0, 3))),
        (THREE, ((6, 0, 0), (0, 4, 0), (0, 0, 2))),
    ],
)
def test_cascades_are_what_dice_give(
    stages: tuple[CascadeStage, ...], k: tuple[tuple[int, ...], ...]
) -> None:
    dice = random.Random(1)
    batches = [played(stages, k, 2000, dice) for _ in range(10)]
    mean = sum(batches) / 10
    error = (sum((one - mean) ** 2 for one in batches) / 9 / 10) ** 0.5
    assert mean == pytest.approx(cascade_factor(stages, k), abs=5 * error)


def test_a_horizontal_matrix_is_the_papers_formula() -> None:
    expected = theory.horizontal_factor([0.8] * 4 + [0.6] * 3, [0.1] * 4 + [0.01] * 3)
    assert cascade_factor(TWO, ((4, 3),)) == pytest.approx(expected, rel=1e-12)


def test_a_cascade_that_reviews_nothing_is_plain_speculation() -> None:
    alone = (CascadeStage((0.75,), 0.1),)
    assert cascade_factor(alone, ((5,),)) == pytest.approx(
        theory.walltime_factor(0.75, 5, 0.1), rel=1e-12
    )


def test_the_best_matrix_is_that_of_an_exhaustive_search() -> None:
    every = [
        ((a, b), (0, c)) for a, b, c in product(range(1, 9), range(9), range(1, 9)) if a + b <= 8
    ]
    best = max(every, key=lambda k: cascade_factor(TWO, k))
    assert cascade_factor(TWO, best_matrix("cascade", TWO, 8)) == pytest.approx(
        cascade_factor(TWO, best), rel=1e-9
    )


def test_every_kind_of_cascade_is_ranked() -> None:
    choices = best_cascades(THREE, 8)
    assert {choice.kind for choice in choices} == {"vertical", "horizontal", "cascade"}
    assert [choice.factor for choice in choices] == sorted(
        (choice.factor for choice in choices), reverse=True
    )
    assert (
        choices[0].kind == "cascade"
    )  # the others are among its matrices, but for what needs no review


def test_overlap_is_measured_as_it_is_defined(tmp_path: Path) -> None:
    directory = make("llama", tmp_path / "target")
    target = reader(directory)
    text = [random.Random(3).randrange(4, 289) for _ in range(300)]
    table = TableDrafter(UnigramTable(count_texts([[5, 5, 5, 7]], keep=2), width=2))
    found = overlaps(target, {"itself": target, "unigram": table}, text)
    assert found["unigram"].num_tokens == 300
    assert found["itself"].alphas[0.0] == 1
    assert 0 < found["itself"].alphas[1.0] <= 1 + 1e-6  # its own 64 likeliest tokens
    p = torch.cat([target.p(0, text[:256])[1.0], target.p(256, text[256:])[1.0]])
    expected = theory.acceptance(p[:, [5, 7]].tolist(), [[0.75, 0.25]] * 300)
    assert found["unigram"].alphas[1.0] == pytest.approx(expected, abs=1e-5)
    greedy = torch.cat([target.p(0, text[:256])[0.0], target.p(256, text[256:])[0.0]])
    assert found["unigram"].alphas[0.0] == pytest.approx(
        float((greedy.argmax(-1) == 5).float().mean())
    )


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    root = tmp_path_factory.mktemp("pair")
    target = make("llama", root / "target")
    add_tokenizer(target)
    return str(target), str(perturb(target, root / "draft", 0.2))


def test_plan_measures_a_pair_and_writes_figures_and_a_picture(
    pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, figures, picture = (tmp_path / name for name in ("text.txt", "plan.json", "plan.png"))
    text.write_text("the quick brown fox " * 20)
    files = ["--text", str(text), "--json", str(figures), "--plot", str(picture)]
    assert (
        main(
            ["plan", "--target", pair[0], "--draft", pair[1], "--measure", *files, "--gpus", "2x1"]
        )
        == 0
    )
    printed = capsys.readouterr().out
    assert "Measured on 400 tokens" in printed
    assert "target.tensor_parallel 1" in printed
    cold, warm = json.loads(figures.read_text())["speculation"]
    assert (cold["name"], warm["name"]) == ("T = 0", "T = 1")
    assert 0 < cold["alpha"] <= 1
    assert cold["c"] == warm["c"] > 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(missing_for_compiled() is not None, reason=f"it needs {missing_for_compiled()}")
def test_plan_counts_a_rounded_draft_as_it_is_held(tmp_path: Path) -> None:
    figures, taken = tmp_path / "plan.json", {}
    models = ["--target", str(DEMO / "target"), "--draft", str(DEMO / "target")]
    for bits in (None, "int8", "int4"):
        options = [] if bits is None else ["--draft-quantize", bits]
        assert main(["plan", *models, *options, "--json", str(figures)]) == 0
        memory = json.loads(figures.read_text())["memory"]
        taken[bits] = memory["draft"]["weight_bytes"]
        assert memory["target"]["weight_bytes"] == taken[None]
    assert taken[None] > 1.5 * taken["int8"] > 1.5 * 1.2 * taken["int4"]


def weight_bytes(out: Path, *arguments: str) -> tuple[int, int]:
    """Return the bytes of the target's weights and of the draft's that `specserve plan` counts."""
    assert main(["plan", *arguments, "--json", str(out)]) == 0
    memory = json.loads(out.read_text())["memory"]
    return memory["target"]["weight_bytes"], memory["draft"]["weight_bytes"]


def test_plan_counts_fp8_as_it_is_held_on_gpus_that_multiply_it(tmp_path: Path) -> None:
    figures = tmp_path / "plan.json"
    models = ["--target", str(MADE / "fp8-dynamic"), "--draft", str(DEMO / "target")]
    target, draft = weight_bytes(figures, *models, "--gpus", "2xA100")
    found = weight_bytes(figures, *models, "--gpus", "2xl40s", "--draft-quantize", "fp8")
    assert found[0] == num_held_bytes(MADE / "fp8-dynamic", torch.bfloat16, keeps=Codes.FLOAT8)
    assert found[0] < 0.8 * target
    assert found[1] < 0.75 * draft
    unknown = weight_bytes(figures, *models, "--gpus", "2x80", "--draft-quantize", "fp8")
    assert unknown == (target, draft)
    in_fp16 = replace(PLAN, dtype=torch.float16)
    [alone] = fits(MADE / "fp8-dynamic", GpuGroup.parse("H100"), in_fp16)
    assert alone.share is not None
    assert alone.share.weight_bytes == target
    [one, two] = fits(MADE / "fp8-dynamic", GpuGroup.parse("2xH200"), PLAN)
    assert one.share is not None
    assert two.share is not None
    assert abs(one.share.weight_bytes - 2 * two.share.weight_bytes) <= 1
    assert one.share.weight_bytes < 0.8 * target


@pytest.mark.parametrize(("threads", "is_measured"), [("2", True), ("1", False)])
def test_plan_measures_the_placement_of_the_draft_where_threads_can_be_divided(
    threads: str,
    is_measured: bool,
    pair: tuple[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    text, figures, before = tmp_path / "text.txt", tmp_path / "plan.json", torch.get_num_threads()
    text.write_text("the quick brown fox " * 5)
    models = ["--target", pair[0], "--draft", pair[1], "--measure", "--text", str(text)]
    try:
        assert main(["plan", *models, "--threads", threads, "--json", str(figures)]) == 0
        assert torch.get_num_threads() == int(threads)
    finally:
        torch.set_num_threads(before)
    placement = json.loads(figures.read_text())["placement"]
    printed = capsys.readouterr().out
    assert (placement is not None) is is_measured
    assert ("draft.placement auto would take " in printed) is is_measured
    if placement is not None:
        assert f"auto would take {placement['placement']}, expected to reach " in printed
        assert placement["loads"] == [1, 8]
        assert all(rate > 0 for rate in placement["together"] + placement["apart"])


def test_together_all_threads_take_turns_and_apart_the_draft_has_one_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class FakeReader:
        runner = SimpleNamespace(device=torch.device("cpu"))

        def __init__(self, one_thread_s: float) -> None:
            self._one_thread_s = one_thread_s

        def pass_seconds(self, rows: int, *, sequences: int = 1) -> Callable[[], float]:
            return lambda: self._one_thread_s * (rows + sequences) / torch.get_num_threads()

    def curve(one_thread_s: float, counts: Sequence[int], threads: int) -> Curve:
        return tuple((count, one_thread_s * (count + 1) / threads) for count in counts)

    threads = [4]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    target, draft = (cast(ModelReader, FakeReader(seconds)) for seconds in (0.02, 0.004))
    assert measure_placement(target, draft, alpha=0.8, max_gamma=8) == choose_placement(
        PlacementCosts(curve(0.02, TARGET_ROWS, 4), curve(0.004, LOADS, 4)),
        PlacementCosts(curve(0.02, TARGET_ROWS, 3), curve(0.004, LOADS, 1)),
        loads=LOADS,
        max_gamma=8,
        alpha=0.8,
    )
    assert threads[-1] == 4


def test_passes_of_several_sequences_take_turns_with_those_of_one(pair: tuple[str, str]) -> None:
    target = reader(Path(pair[0]))
    passes = [target.pass_seconds(4), target.pass_seconds(1, sequences=8), target.pass_seconds(1)]
    for timed in passes * 2:
        assert timed() > 0


def test_plan_of_numbers_alone_needs_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--alpha", "0.75", "--cost", "0.05", "--hit-rate", "0.5"]) == 0
    printed = capsys.readouterr().out
    assert f"{theory.walltime_factor(0.75, 7, 0.05):.2f}" in printed
    assert "memory" not in printed


def test_plan_of_a_config_adds_up_the_devices_of_all_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "two.yaml").write_text(
        "models:\n"
        "  - {name: small, target: {threads: 2, device: cpu}, draft: {kind: none}}\n"
        "  - name: large\n"
        "    target: {path: org/large, tensor_parallel: 2}\n"
        "    draft: {path: org/small, device: cpu, threads: 3}\n"
        "    replicas: {min: 0, max: 4}\n"
        "replicas: {gateways: 2}\n"
    )
    out = tmp_path / "plan.json"
    assert main(["plan", "--config", str(file), "--gpus", "8x80", "--json", str(out)]) == 0
    text = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "small 1 3 0 3 0" in lines
    assert "large 0 to 4 6 2 0 to 24 0 to 8" in lines
    assert "gateways 1 to 2 1 0 1 to 2 0" in lines
    assert "all 4 to 29 0 to 8" in lines
    assert "tensor parallel" not in text, "the memory of models is planned where they are named"
    devices = json.loads(out.read_text())["devices"]
    assert [(one["name"], one["gpus"]) for one in devices] == [
        ("small", 0),
        ("large", 2),
        ("gateways", 0),
    ]


def test_plan_of_a_cascade_names_the_best_k(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--stages", "0.8:0.1", "0.6,0.7:0.01", "--max-gamma", "8"]) == 0
    assert str([list(row) for row in best_matrix("cascade", TWO, 8)]) in capsys.readouterr().out


def test_without_a_number_or_a_draft_it_says_what_is_missing(
    seventy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--target", str(seventy)]) == 0
    assert "No draft was named" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--alpha", "1.2", "--cost", "0.1"], "a number from 0 to 1, not '1.2'"),
        (["--alpha", "nan", "--cost", "0.1"], "a number from 0 on, not 'nan'"),
        (["--alpha", "0.5", "--cost", "-0.1"], "--cost"),
        (["--alpha", "0.5"], "give --cost"),
        (["--gpus", "4xZ80"], "knows no 'Z80'"),
        (["--gpus", "0x80"], "such as 4x80"),
        (["--gpus", "80", "24", "24"], "the target's and"),
        (["--target", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--target", str(Path(__file__).parent)], "no config.json"),
        (["--draft", str(DEMO / "draft")], "--draft needs --target"),
        (
            ["--target", str(DEMO / "target"), "--draft-quantize", "int4"],
            "--draft-quantize rounds the draft's weights; name it by --draft",
        ),
        (
            ["--target", str(DEMO / "target"), "--draft", str(GPTQ), "--draft-quantize", "int4"],
            "is quantized already (gptq)",
        ),
        (["--stages", "0.8:0.1"], "two or more"),
        (["--stages", "0.8", "0.5:0"], "alpha:cost"),
        (["--stages", "0.8,0.9:0.1", "0.5:0"], "reviewed by the target alone"),
        (["--measure", "--alpha", "0.5"], "finds alpha and c itself"),
        (["--target", str(DEMO / "target"), "--measure"], "--measure needs --text"),
        (["--text", "x.txt"], "with --measure only"),
        (["--measure", "--text", "/nowhere.txt"], "cannot be read"),
        (["--alpha", "0.5", "--cost", "0", "--plot", "plan.bmp"], ".png"),
        (["--alpha", "0.5", "--cost", "0", "--json", "/nowhere/plan.json"], "does not exist"),
        (["--max-gamma", "0"], "--max-gamma"),
    ],
)
def test_bad_input_is_one_clear_line_and_exit_code_2(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert complaint in captured.err
    assert captured.err.count("\n") == 1


def test_a_plan_says_how_many_engines_a_draft_can_serve_and_how_many_devices_that_takes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A draft of gamma 4 and c 0.02 works 5 and 0.8 passes of a round of 1.016: 11%."""
    pair = ModelPair("given", 0.7, 0.02, 0.02)
    advice = replace(GammaAdvice.from_pair(pair, hit_rate=0.8, max_gamma=8), best_hidden=4)
    pool = PoolAdvice.from_advice(advice)
    assert pool.busy == pytest.approx(0.02 * 5.8 / 1.016)
    assert (pool.engines, pool.devices(6), pool.devices(7)) == (6, 1, 2)
    heavy = replace(advice, pair=replace(pair, c=0.5))
    assert PoolAdvice.from_advice(heavy).engines == 1, "a draft each"
    assert pool_advice([replace(advice, best_hidden=0)]) == (), "this draft is not worth running"

    file = tmp_path / "plan.json"
    assert main(["plan", "--alpha", "0.7", "--cost", "0.02", "--json", str(file)]) == 0
    assert "engines a draft, below 70%" in capsys.readouterr().out
    (written,) = json.loads(file.read_text())["pools"]
    assert written["engines"] >= 2


@pytest.mark.parametrize(("gpus", "placed"), [("1xH100", True), ("2xH100", False)])
def test_a_plan_says_that_a_draft_finds_no_gpu_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], gpus: str, placed: bool
) -> None:
    config, file = tmp_path / "config.yaml", tmp_path / "plan.json"
    config.write_text("model: demo\n")
    assert main(["plan", "--config", str(config), "--gpus", gpus, "--json", str(file)]) == 0
    assert ("auto means together, as the cluster has no GPU" in capsys.readouterr().out) == placed
