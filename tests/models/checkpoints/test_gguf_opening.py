"""GGUF files as users open them: tokenizer, ends and texts; bad ones fail in a sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from specserve.api.tokenizer import Tokenizer
from specserve.errors import ModelError, SpecserveError, TokenizerMismatch
from specserve.llm.llm import LLM
from specserve.models.checkpoints.find import describe, find_checkpoint
from specserve.models.checkpoints.library import save_gguf_tokenizer
from specserve.sampling_params import Sampling
from tests.support import checkpoints, gguf_files

GREEDY = Sampling(max_tokens=24, temperature=0.0)
TEXTS = ("def f(x): return 12345", "  two  spaces<eos>", "\u00e9\u6f22\U0001f600", "abab")
TEMPLATE = "{% for message in messages %}[{{ message['content'] }}]{% endfor %}"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/specserve"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("llama", tmp_path_factory.mktemp("original"))


@pytest.fixture
def file(original: Path, tmp_path: Path) -> Path:
    return gguf_files.write(original, tmp_path / "tiny.gguf", kind="Q8_0")


def test_the_tokenizer_and_its_template_are_those_that_transformers_converts(
    original: Path, tmp_path: Path
) -> None:
    file = gguf_files.write(original, tmp_path / "tiny.gguf", template=TEMPLATE)
    wanted: Any = AutoTokenizer.from_pretrained(tmp_path, gguf_file=file.name)
    found = Tokenizer.load(file)
    for text in TEXTS:
        assert list(found.encode(text)) == wanted(text).input_ids
    assert found.decode(found.encode(TEXTS[2])) == TEXTS[2]
    chat = [{"role": "user", "content": "ab"}]
    assert list(found.apply_chat_template(chat)) == wanted.encode("[ab]")
    assert found.encode("ab") != found.encode("ba")[::-1], "the merge is lost"


@pytest.mark.parametrize(
    ("architecture", "first", "second"),
    [
        ("llama", ["\u2581the", "\u2581cat"], ["\u2581cat"]),
        ("gemma3", ["the", "\u2581cat"], ["\u2581cat"]),
        ("phi3", ["\u2581the", "\u2581cat"], ["\u2581", "\u2581cat"]),
    ],
)
def test_a_vocabulary_of_pieces_treats_spaces_as_its_architecture_does(
    architecture: str, first: list[str], second: list[str], tmp_path: Path
) -> None:
    save_gguf_tokenizer(gguf_files.write_pieces(tmp_path / "pieces", architecture))
    found = Tokenizer.load(tmp_path)
    for text, pieces in (("the cat", first), (" cat", second)):
        assert [found.token_name(token) for token in found.encode(text)] == ["<s>", *pieces]


def test_a_directory_with_one_file_and_a_file_without_suffix_are_opened(
    file: Path, tmp_path: Path
) -> None:
    found = find_checkpoint(file)
    assert find_checkpoint(file.parent) == found
    assert [path.name for path in found.parent.iterdir() if path.is_dir()] == [found.name]
    blob = file.rename(tmp_path / "sha256-1234")
    assert describe(find_checkpoint(blob)) == describe(found)


def test_a_file_that_changes_is_converted_again_and_its_weights_are_never_copied(
    file: Path, original: Path, cache: Path
) -> None:
    found = find_checkpoint(file)
    assert (found / "weights.gguf").readlink() == file
    own = sum(path.stat().st_size for path in found.iterdir() if not path.is_symlink())
    assert own < 60_000 < file.stat().st_size
    gguf_files.write(original, file, kind="Q8_0", metadata={"context_length": 512})
    assert describe(find_checkpoint(file)).spec.max_context == 512


def test_a_text_ends_at_the_end_of_a_turn_too(original: Path, tmp_path: Path) -> None:
    metadata: dict[str, int | float | str] = {"tokenizer.ggml.eot_token_id": 77}
    file = gguf_files.write(original, tmp_path / "tiny.gguf", metadata=metadata)
    assert describe(find_checkpoint(file)).spec.end_ids == {checkpoints.EOS, 77}


def test_target_and_draft_from_files_write_the_texts_of_their_checkpoints(
    original: Path, tmp_path: Path
) -> None:
    draft = checkpoints.perturb(original, tmp_path / "draft", 0.02)
    files = [
        gguf_files.write(one, tmp_path / f"{name}.gguf")
        for name, one in (("target", original), ("draft", draft))
    ]
    texts = []
    for target, own_draft in ((original, None), (files[0], files[1])):
        with LLM(target, own_draft, **{"target.dtype": "float32"}) as llm:
            outputs = llm.generate([[5, 9, 12], [40, 41, 42, 43]], GREEDY)
        texts.append([output.token_ids for output in outputs])
    assert texts[0] == texts[1]
    assert any(output.stats and output.stats.accepted for output in outputs)


def test_a_draft_of_another_vocabulary_is_refused_for_a_stage(
    original: Path, file: Path, tmp_path: Path
) -> None:
    other = gguf_files.write(original, tmp_path / "other" / "b.gguf", tokens={5: "zz"})
    with pytest.raises(TokenizerMismatch, match="token 5 is"):
        Tokenizer.load(file).require_same_vocabulary(Tokenizer.load(other))


def test_a_process_that_hides_torch_can_load_the_tokenizer(file: Path) -> None:
    program = (
        "import sys; from specserve.api.tokenizer import Tokenizer, hide_torch; hide_torch(); "
        "print(*Tokenizer.load(sys.argv[1]).encode('ab')); assert 'torch' not in sys.modules"
    )
    for _ in range(2):  # converted by a process of its own, and then at hand
        ended = subprocess.run(
            [sys.executable, "-c", program, file], capture_output=True, text=True, check=True
        )
        assert ended.stdout.split() == ["260"]
    file.write_bytes(file.read_bytes()[:-100])
    ended = subprocess.run([sys.executable, "-c", program, file], capture_output=True, text=True)
    assert f"ModelError: {file} cannot be read as GGUF; it is damaged" in ended.stderr


def cut(share: float) -> Callable[[Path, Path], Path]:
    def make(original: Path, file: Path) -> Path:
        gguf_files.write(original, file)
        os.truncate(file, int(file.stat().st_size * share))
        return file

    return make


def written(**options: Any) -> Callable[[Path, Path], Path]:
    return lambda original, file: gguf_files.write(original, file, **options)


def garbage(original: Path, file: Path) -> Path:
    file.write_bytes(b"not a model")
    return file


def several(original: Path, file: Path) -> Path:
    for name in ("a", "b"):
        gguf_files.write(original, file.parent / f"{name}.gguf")
    return file.parent


def biased(original: Path, file: Path) -> Path:
    extra = {f"blk.{layer}.attn_q.bias": np.zeros(64, np.float32) for layer in range(2)}
    return gguf_files.write(original, file, extra=extra)


BAD = {
    "architecture": (
        written(architecture="mamba"),
        "is of the architecture 'mamba', which cannot be served from GGUF; gemma2, gemma3, llama,",
    ),
    "garbage": (garbage, "cannot be read as GGUF; it is damaged or cut short: GGUF magic invalid"),
    "cut in the header": (cut(0.01), "cannot be read as GGUF; it is damaged or cut short"),
    "cut in the tensors": (cut(0.9), "cannot be read as GGUF; it is damaged or cut short"),
    "split of texts": (
        written(split="deepseek-llm"),
        "has a tokenizer that splits texts by 'deepseek-llm', a rule that transformers does not",
    ),
    "kind of vocabulary": (
        written(vocabulary="bert"),
        "has a tokenizer that transformers cannot convert: .*'bert'",
    ),
    "parts": (written(metadata={"split.count": 2}), "is one of 2 parts of a model; join them"),
    "several": (several, r"holds 2 GGUF files \(a.gguf, b.gguf\); name one of them"),
    "missing tensors": (
        written(left_out="ffn_up"),
        "lacks the tensors blk.0.ffn_up.weight, blk.1.ffn_up.weight, so that llama of transformers",
    ),
    "other tensors": (biased, "has, beside the model's, the tensors blk.0.attn_q.bias, blk.1"),
    "other shapes": (
        written(metadata={"feed_forward_length": 128}),
        r"holds blk.0.ffn_gate.weight in another shape .*: \[96, 64\] instead of \[128, 64\]",
    ),
    "scaled rotation": (
        written(metadata={"rope.scaling.type": "yarn"}),
        "scales its rotary frequencies by 'yarn', which is not read from GGUF",
    ),
    "partial rotation": (written(metadata={"rope.dimension_count": 8}), "rotates 8 of the 16"),
    "scaled scores": (written(metadata={"attention.scale": 0.5}), "states attention.scale"),
    "no layers": (written(metadata={"block_count": 0}), "has num_hidden_layers '0'"),
    "no heads": (written(metadata={"attention.head_count": 0}), "that no config can be made of"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_in_one_sentence_before_weights_are_read(
    name: str, original: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, message = BAD[name]
    (tmp_path / "files").mkdir()
    path = make(original, tmp_path / "files" / "bad.gguf")
    with pytest.raises(SpecserveError, match=message) as raised:
        find_checkpoint(path)
    assert str(raised.value).startswith(str(path))
    assert "\n" not in str(raised.value)
    assert not cache.exists() or not any(one.is_dir() for one in cache.iterdir())


def test_without_the_package_a_file_is_refused_with_how_to_install_it(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModelError, match=r"^GGUF files need the package gguf: pip install 's"):
        find_checkpoint(file)


def test_a_cache_that_cannot_be_written_is_named(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "taken"))
    with pytest.raises(ModelError, match=r"cannot be written to .*/taken/specserve: .*; set XDG"):
        find_checkpoint(file)
