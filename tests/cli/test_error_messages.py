"""A mistake on the command line is answered by one line with the key, the value and a remedy."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest
import torch

from specserve.cli.main import main
from specserve.cluster.placement import Bundle, NodeResources, check_fits
from specserve.cluster.ray_session import require_free_port
from specserve.config.tree import config_from_keys
from specserve.errors import ConfigError, TooLittleMemory
from specserve.models.memory import num_pages_for, require_room
from specserve.models.model import ModelOptions, open_model
from tests.support.checkpoints import add_tokenizer, make


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make("llama", tmp_path_factory.mktemp("models") / "target")
    add_tokenizer(made)
    return made


@pytest.fixture
def folder(tmp_path: Path, model: Path) -> Path:
    """Return a directory with every kind of broken file."""
    (tmp_path / "broken.yaml").write_text("target: [unclosed\n")
    (tmp_path / "list.yaml").write_text("- target\n")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "a-file").write_text("no directory")
    (tmp_path / "no-config").mkdir()
    shutil.copytree(model, tmp_path / "other-words")
    words = json.loads((model / "tokenizer.json").read_text())
    words["model"]["vocab"] = {2 * word: i for word, i in words["model"]["vocab"].items()}
    (tmp_path / "other-words" / "tokenizer.json").write_text(json.dumps(words))
    return tmp_path


GENERATE = ["generate", "--prompt", "a"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [  # the key, the value, and what to do
        (
            [*GENERATE, "--config", "{folder}/none.yaml"],
            ("config file", "none.yaml cannot be read: No such file", "give the path"),
        ),
        (
            [*GENERATE, "--config", "{folder}/broken.yaml"],
            ("config file", "broken.yaml is not YAML", "line 2", "mend it"),
        ),
        (
            [*GENERATE, "--config", "{folder}/list.yaml"],
            ("config file", "list.yaml must hold keys and values", "not a list"),
        ),
        (
            [*GENERATE, "--target", "{folder}/nowhere"],
            ("target.path", "nowhere does not exist", "give a directory with config.json"),
        ),
        (
            [*GENERATE, "--target", "{folder}/a-file"],
            ("target.path", "a-file is a file", "give a directory"),
        ),
        (
            [*GENERATE, "--target", "{folder}/no-config"],
            ("target.path", "it has no config.json", "give a directory"),
        ),
        (
            [*GENERATE, "--target", "{model}", "--draft", "{folder}/nowhere"],
            ("draft.path", "nowhere does not exist", "give a directory"),
        ),
        (
            [*GENERATE, "--target", "{model}", "--draft", "{folder}/other-words"],
            ("draft.path", "other-words has another tokenizer, which shares", "choose a draft"),
        ),
        (
            [*GENERATE, "--set", "speculation.gama=3"],
            ("unknown key speculation.gama", "did you mean speculation.gamma?"),
        ),
        (
            [*GENERATE, "--set", "speculation.gamma=many"],
            ("speculation.gamma", "'many'", "auto, or a whole number"),
        ),
        ([*GENERATE, "--set", "target.dtype=bf16"], ("target.dtype", "'bf16'", "did you mean")),
        ([*GENERATE, "--set", "draft.stages=[{"], ("draft.stages", "'[{'", "mend the brackets")),
        ([*GENERATE, "--set", "speculation"], ("--set", "'speculation'", "key=value")),
        (
            [*GENERATE, "--set", "target.tensor_parallel=2"],
            ("target.tensor_parallel 2", "specserve serve --tp 2"),
        ),
        (
            [*GENERATE, "--set", "target.device=cuda", "--target", "{model}", "--draft", "none"],
            ("device cuda", "set target.device", "doctor"),
        ),
        (
            [*GENERATE, "--drafter", "neural", "--target", "{model}"],
            ("draft.kind neural", "give --draft"),
        ),
        (
            [*GENERATE, "--trace", "{folder}/nowhere/t.json"],
            ("--trace", "nowhere/t.json", "a directory that exists"),
        ),
        (["serve", "--port", "70000"], ("http.port", "70000", "from 0 to 65535")),
        (["serve", "--tp", "two"], ("--tp", "'two'", "--help")),
        (["bench", "--url", "here"], ("--url", "'here'", "http://host:port")),
        (
            ["bench", "--url", "http://127.0.0.1:9", "--rate", "2", "--concurrency", "3"],
            ("not allowed with argument", "--help"),
        ),
        (
            ["bench", "--url", "http://127.0.0.1:9", "--prompts", "{folder}/empty.txt"],
            ("--prompts", "empty.txt has no prompt", "write one a line"),
        ),
        (
            ["bench", "--url", "http://127.0.0.1:9", "--json", "{folder}"],
            ("--json", "cannot be written", "name a file"),
        ),
        (
            ["plan", "--target", "{folder}/nowhere"],
            ("--target", "nowhere does not exist", "give a directory"),
        ),
        (["plan", "--alpha", "0.5"], ("--alpha alone", "give --cost")),
        (["plan", "--gpus", "4xH1000"], ("--gpus", "'H1000'", "say its GiB")),
        (
            [
                "tables",
                "--tokenizer",
                "{model}",
                "--text",
                "{folder}/empty.txt",
                "--out",
                "{folder}/t",
            ],
            ("--text", "empty", "name files"),
        ),
        (
            [
                "tables",
                "--tokenizer",
                "{model}",
                "--text",
                "{folder}/none.txt",
                "--out",
                "{folder}/t",
            ],
            ("--text", "none.txt cannot be read"),
        ),
        (
            ["heads", "--target", "{model}", "--text", "x", "--out", "y", "--heads", "0"],
            ("--heads", "not 0", "above 0"),
        ),
        (
            ["heads", "--target", "{model}", "--text", "x", "--out", "y", "--minutes", "0"],
            ("--minutes", "not 0", "above 0"),
        ),
        (
            ["inflate", "--model", "{model}", "--params", "1K", "--out", "{folder}/wide"],
            ("--params", "1,000", "at least"),
        ),
        (
            ["inflate", "--model", "{model}", "--params", "1M", "--out", "{folder}"],
            ("--out", "is not empty", "name a new directory"),
        ),
        (
            ["quantize", "--model", "{model}", "--to", "int8", "--out", "{folder}"],
            ("--out", "is not empty", "name a new directory"),
        ),
        (
            ["quantize", "--model", "{model}", "--to", "int3", "--out", "{folder}/small"],
            ("--to", "'int3'", "int4"),
        ),
        (["simulate", "study.yaml"], ("COMMAND", "'simulate'", "choose from")),
        (["completion", "csh"], ("shell", "'csh'", "choose from")),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key_the_value_and_a_remedy(
    arguments: list[str],
    expected: tuple[str, ...],
    folder: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        main(
            [
                argument.replace("{folder}", str(folder)).replace("{model}", str(model))
                for argument in arguments
            ]
        )
        == 2
    )
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("specserve: ")
    assert shown.err.count("\n") == 1
    assert [words for words in expected if words not in shown.err] == []


def test_a_port_in_use_is_named_with_its_key() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127.0.0.1:{port}.*in use.*--port \(http.port\)"):
            require_free_port(config_from_keys({"http.port": port}))


def test_a_cluster_that_is_too_small_is_an_error_that_names_the_key_to_lower() -> None:
    with pytest.raises(
        ConfigError,
        match=r"needs 2 GPUs \(target-0 2\), the cluster has 1; lower target.tensor_parallel",
    ):
        check_fits(
            (Bundle("target-0", {"GPU": 2.0}, {}),),
            [NodeResources("one", {"GPU": 1.0}, {"GPU": 1.0}, {})],
            replicas=1,
            gateway=Bundle("gateway", {"CPU": 1.0}, {}),
        )


def test_a_model_that_is_too_big_is_refused_before_it_is_loaded(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_room(model, 2_000, device=torch.device("cpu"), ranks=1)
    monkeypatch.setattr("specserve.models.memory.free_memory", lambda device: 1000)
    with pytest.raises(
        TooLittleMemory,
        match=r"take 0.0 GiB, and 0.0 GiB of cpu memory are free; use a smaller model",
    ):
        require_room(model, 2_000, device=torch.device("cpu"), ranks=1)


def test_a_cache_that_holds_no_page_names_the_key() -> None:
    with pytest.raises(
        TooLittleMemory, match=r"single page of 16 positions.*raise cache.memory_fraction"
    ):
        num_pages_for(10, 1024, page_size=16)


def test_pages_beyond_the_memory_name_the_key(model: Path) -> None:
    options = ModelOptions(dtype="float32", device="cpu", pages=2**31 - 1)
    with pytest.raises(TooLittleMemory, match=r"cache\.pages 2,147,483,647 take .* lower it"):
        open_model(model, options)
