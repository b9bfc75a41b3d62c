"""Each finding of the doctor: one line with a remedy, whatever the other checks find."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specserve import processor
from specserve.api.tokenizer import Tokenizer
from specserve.cli import main as cli
from specserve.cluster.checkup import Checkup
from specserve.config.sections import HttpConfig
from specserve.config.tree import DEMO, Config, config_from_keys
from specserve.errors import ConfigError
from specserve.models.checkpoints.load import load_model
from specserve.models.checkpoints.weights import Codes
from specserve.models.coded_weight import CodedWeight
from specserve.models.cpu.linear_kernels import missing_for_compiled
from specserve.tools.doctor import cluster, command, machine, models, ports, room, secrets
from specserve.tools.doctor.findings import Finding, Grade, guarded, ok
from specserve.tools.doctor.report import DoctorReport
from specserve.tools.doctor.room import MemoryNeed
from tests.support import gguf_files
from tests.support.card import emulated_cards
from tests.support.checkpoints import add_tokenizer, make

needs_compiled = pytest.mark.skipif(
    missing_for_compiled() is not None, reason=f"it needs {missing_for_compiled()}"
)
WELL = Checkup("2.60.0", None, (), False, {"CPU": 5.0}, None, "/bin/haproxy", "", {})


def only(findings: Iterable[Finding], grade: Grade = Grade.BAD) -> Finding:
    (found,) = [finding for finding in findings if finding.grade is grade]
    return found


@pytest.fixture
def target(tmp_path: Path) -> Path:
    made = make("llama", tmp_path / "target")
    add_tokenizer(made)
    return made


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specserve.cluster.checkup.check", lambda config, *, num_gpus, join: WELL)


def test_the_demo_pair_is_well(no_ray: None, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert cli.main(["doctor", "--json", "--set", f"http.port={port}"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["well"]
    subjects = {finding["subject"]: finding["grade"] for finding in printed["findings"]}
    assert set(subjects.values()) <= {"ok", "warn"}
    assert {
        "python",
        "specserve",
        "demo pair",
        "torch",
        "memory",
        "config",
        "target, weights",
        "tokenizer",
        "draft, tokens",
        "reproducible",
        "http port",
        "ray",
    } <= set(subjects)
    assert subjects["draft, tokens"] == "ok"


def test_the_doctor_says_whether_texts_depend_on_what_else_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def finding(name: str, **keys: object) -> Finding:
        path = tmp_path / name
        config = config_from_keys(
            {"target.path": str(make(name, path)), "draft.kind": "none"} | keys
        )
        (found,) = models.reproducible(config)
        return found

    well = finding("llama", **{"target.dtype": "bfloat16"})
    assert (well.grade, well.found.partition(":")[0]) == (Grade.OK, "true")
    experts = finding("mixtral")
    assert (experts.grade, experts.found.partition(":")[0]) == (Grade.WARN, "false")
    assert "is multiplied by the library" in experts.found
    assert "on GPUs" in finding("qwen2", **{"target.device": "cuda"}).found


def test_a_config_that_is_wrong_is_a_finding_and_the_machine_is_looked_at_all_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["doctor", "--set", "speculation.gama=3"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("ok    python ") for line in lines)
    assert any(
        line.startswith("bad   config ") and "did you mean speculation.gamma? -> " in line
        for line in lines
    )
    assert lines[-1].startswith("1 bad, ")


def test_a_model_that_is_not_there_leaves_the_other_checks(no_ray: None) -> None:
    keys = {"target.path": "/nowhere/model", "http.port": 0}
    report = command.examine(lambda: config_from_keys(keys))
    assert not report.is_well
    assert (
        "target.path /nowhere/model does not exist; give a directory"
        in only([f for f in report.findings if f.subject == "models"]).found
    )
    assert any(finding.subject == "http port" for finding in report.findings)


def test_an_old_python_and_a_package_without_its_demo_pair_are_bad(tmp_path: Path) -> None:
    assert "3.11" in only(machine.python((3, 10, 4))).remedy
    assert "target/model.safetensors" in only(machine.install(tmp_path)).found


def test_a_machine_that_will_be_slow_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert (
        "float32 is used"
        in only(machine.processor(frozenset({"avx2"}), bf16=False, threads=2), Grade.WARN).remedy
    )
    assert only(
        machine.processor(frozenset({"amx_tile", "avx512_bf16"}), bf16=True, threads=2), Grade.OK
    ).found.endswith("amx_tile, avx512_bf16")
    assert "--shm-size" in only(machine.shared(64 * 2**20), Grade.WARN).remedy
    assert "there is no /dev/shm" in only(machine.shared(None), Grade.WARN).found
    assert "ulimit -n" in only(machine.open_files(1024, 1_000_000), Grade.WARN).remedy
    assert only(machine.open_files(-1, -1), Grade.OK).found == "no limit for each process"


def test_linear_layers_say_what_would_make_them_faster() -> None:
    for amx, found in ((False, "this processor"), (True, "this processor and its AMX")):
        assert only(machine.linear_layers(None, amx=amx), Grade.OK).found == f"compiled for {found}"
    missing = "llvmlite (pip install 'specserve[cpu]')"
    assert "specserve[cpu]" in only(machine.linear_layers(missing), Grade.WARN).remedy
    missing = "a processor that has AVX-512 with bf16"
    assert missing in only(machine.linear_layers(missing), Grade.OK).found


@pytest.mark.parametrize(
    ("flags", "value", "grade"),
    [
        ({"avx512_bf16"}, "ALL", None),
        ({"avx512_bf16", "amx_bf16"}, "AVX512_CORE_BF16", Grade.OK),
        ({"avx512_bf16", "amx_bf16"}, "ALL", Grade.WARN),
    ],
)
def test_amx_is_named_with_what_keeps_onednn_from_it_or_does_not(
    monkeypatch: pytest.MonkeyPatch, flags: set[str], value: str, grade: Grade | None
) -> None:
    monkeypatch.setattr(processor, "processor_flags", lambda: frozenset(flags))
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", value)
    findings = list(machine.onednn())
    assert [finding.grade for finding in findings] == [grade] * (grade is not None)
    assert all(f"ONEDNN_MAX_CPU_ISA={value}" in finding.found for finding in findings)


def test_a_full_disk_is_warned_of_even_where_the_folder_is_not_made_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    assert (
        "make room" in only(machine.disk([("models", tmp_path / "not" / "yet")]), Grade.WARN).remedy
    )


def test_a_driver_without_a_torch_that_can_use_it_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan\n")
    found = only(machine.cuda(driver), Grade.WARN)
    assert "driver 570.86.15" in found.found
    assert "install a build of torch for the CUDA version" in found.remedy


def test_libraries_of_cuda_that_a_machine_without_a_gpu_does_not_need_are_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert only(machine.cuda(tmp_path / "version"), Grade.OK)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = only(machine.cuda(tmp_path / "version"), Grade.WARN)
    assert found.found == "none, and torch was built for CUDA 13.0; models run on CPUs"
    assert "uv pip install --torch-backend cpu" in found.remedy


def test_a_port_that_is_taken_is_found_with_what_to_do() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = only(ports.http(HttpConfig(port=port)))
        assert found.found == f"127.0.0.1:{port} is taken"
        assert "--port" in found.remedy
        assert "RAY_X" in only(ports.proxy({"RAY_X": port})).remedy
    assert only(ports.http(HttpConfig(port=port)), Grade.OK)
    assert "http.host" in only(ports.http(HttpConfig(host="192.0.2.1"))).remedy


def test_keys_and_certificates_are_read_as_the_server_reads_them(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("anna secret-1\n")
    keys.chmod(0o644)
    found = only(secrets.keys(HttpConfig(api_keys_file=str(keys))), Grade.WARN)
    assert (found.found, found.remedy) == (
        f"1 in {keys}; others may read it (mode 644)",
        f"chmod 600 {keys}",
    )
    keys.chmod(0o600)
    assert only(secrets.keys(HttpConfig(api_keys_file=str(keys))), Grade.OK)
    keys.write_text("")
    http_config = HttpConfig(api_keys_file=str(keys))
    assert "it has no key" in only(guarded("API keys", lambda: secrets.keys(http_config))).found
    assert only(secrets.keys(HttpConfig(host="0.0.0.0")), Grade.WARN)
    assert "PEM" in only(secrets.tls(HttpConfig(tls_cert=str(keys), tls_key=str(keys)))).remedy
    assert list(secrets.tls(HttpConfig())) == []


def test_weights_that_are_cut_off_or_missing_are_found_without_reading_them(target: Path) -> None:
    assert only(models.weights("target", target, local=True), Grade.OK)
    whole = target / "model.safetensors"
    (target / "model-1.safetensors").write_bytes(whole.read_bytes())
    names = ["lm_head.weight", "model.norm.weight"]
    index = {
        "metadata": {},
        "weight_map": {names[0]: "model-1.safetensors", names[1]: "model-2.safetensors"},
    }
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    content = whole.read_bytes()
    whole.unlink()
    assert (
        "1 of 2 files missing: model-2.safetensors"
        in only(models.weights("target", target, local=True)).found
    )
    index["weight_map"] = {
        "model.norm.weight": "model-1.safetensors",
        "model.lost.weight": "model-1.safetensors",
    }
    (target / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "such as model.lost.weight" in only(models.weights("target", target, local=True)).found
    (target / "model.safetensors.index.json").unlink()
    whole.write_bytes(content[:-10])
    assert "fetch it again" in only(models.weights("target", target, local=True)).remedy
    whole.unlink()
    (target / "model-1.safetensors").unlink()
    assert (
        "not on this machine yet"
        in only(models.weights("target", target, local=False), Grade.WARN).found
    )


def test_the_sampling_that_a_target_recommends_is_named(target: Path) -> None:
    keys = {"target.path": str(target), "draft.kind": "none"}

    def sampling(**stated: object) -> list[Finding]:
        (target / "generation_config.json").write_text(json.dumps(stated))
        found = list(models.pair(config_from_keys(keys)))
        return [finding for finding in found if finding.subject == "target, sampling"]

    assert sampling(eos_token_id=2) == []
    assert only(sampling(temperature=0.6, top_k=20), Grade.OK).found.startswith(
        "temperature 0.6, top_k 20, where"
    )
    assert "temperature must be a number" in only(sampling(temperature="hot")).found


def test_a_gguf_file_is_examined_without_reading_its_weights(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = gguf_files.write(target, tmp_path / "tiny.gguf", kind="Q4_1")
    keys = {"target.path": str(file), "draft.path": str(file)}
    findings = list(models.pair(config_from_keys(keys)))
    assert Grade.BAD not in {finding.grade for finding in findings}
    (weights,) = [finding for finding in findings if finding.subject == "target, weights"]
    assert weights.found == "21 tensors in 1 files, 0 MiB"
    file.write_bytes(file.read_bytes()[:-100])
    bad = only(guarded("models", lambda: models.pair(config_from_keys(keys))))
    assert f"{file} cannot be read as GGUF; it is damaged or cut short" in bad.found


def test_tokenizers_that_differ_are_found_by_their_ids(target: Path, tmp_path: Path) -> None:
    other = shutil.copytree(target, tmp_path / "other")
    words = json.loads((target / "tokenizer.json").read_text())
    vocab = words["model"]["vocab"]
    first, second = list(vocab)[5:7]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (other / "tokenizer.json").write_text(json.dumps(words))
    ours = Tokenizer.load(target)
    theirs = Tokenizer.load(other)
    found = only(models.same_tokens(ours, theirs, key="draft", is_stage=True))
    assert found.found.startswith(
        f"2 of {ours.vocab_size:,} ids mean something else than to the target: "
        f"5 ({first!r}, {second!r}), 6 ("
    )
    assert "layer_skip or heads" in found.remedy
    assert only(models.same_tokens(ours, Tokenizer.load(target), key="draft"), Grade.OK)
    assert "may have been changed" in found.found, "two of 260 are few"


def test_drafts_without_a_second_model_are_looked_at_as_serving_does(target: Path) -> None:
    def looked(**keys: object) -> list[Finding]:
        return [
            *models.pair(
                config_from_keys(
                    {
                        "target.path": str(target),
                        **{key.replace("__", "."): value for key, value in keys.items()},
                    }
                )
            )
        ]

    assert any(
        finding.subject == "draft" and finding.grade is Grade.WARN
        for finding in looked(draft__kind="none")
    )
    assert any(
        "prompt_copy, which needs no second model" in finding.found
        for finding in looked(draft__kind="prompt_copy")
    )


def test_memory_is_held_against_what_the_plan_says() -> None:
    config, gib = config_from_keys({}), 2**30
    assert (
        "raise target.tensor_parallel"
        in only(room.fits("memory", MemoryNeed(10 * gib, gib), 8 * gib, config)).remedy
    )
    need = MemoryNeed(5 * gib, gib)
    assert (
        only(room.fits("memory", need, 8 * gib, config, beside=MemoryNeed(4 * gib, gib))).grade
        is Grade.BAD
    )
    assert (
        "limits.max_context"
        in only(room.fits("memory", MemoryNeed(7 * gib, gib), 8 * gib, config), Grade.WARN).remedy
    )
    assert (
        "1.5 sequences"
        in only(room.fits("memory", MemoryNeed(5 * gib, gib), 8 * gib, config), Grade.OK).found
    )
    small = MemoryNeed(4 * gib, gib // 1000)
    assert "2,000 sequences" in only(room.fits("memory", small, 8 * gib, config), Grade.OK).found


def test_the_room_of_the_demo_pair_is_the_weights_of_both() -> None:
    config = config_from_keys({"target.device": "cpu", "draft.device": "cpu"})
    (found,) = room.room(config, DEMO / "target", DEMO / "draft")
    assert found.grade is Grade.OK
    alone = room.memory_need(DEMO / "target", config.target, config)
    assert 2 * 6_000_000 < alone.weight_bytes < 4 * 7_000_000


@needs_compiled
def test_a_rounded_draft_takes_the_room_of_its_small_integers(tmp_path: Path) -> None:
    draft = DEMO / "target"
    module = load_model(
        draft, dtype=torch.bfloat16, device="cpu", keeps=Codes.INTEGERS, round_to="int4"
    ).module
    taken = sum(
        weight.num_bytes if isinstance(weight, CodedWeight) else weight.nbytes
        for weight in module.parameters()
    )
    keys = {"target.device": "cpu", "draft.device": "cpu", "draft.dtype": "bfloat16"}
    config = config_from_keys(keys | {"draft.kind": "neural", "draft.quantize": "int4"})
    assert room.memory_need(draft, config.draft, config).weight_bytes == taken
    whole = room.memory_need(draft, config_from_keys(keys).draft, config_from_keys(keys))
    assert whole.weight_bytes > 2 * taken


def test_a_draft_in_fp8_takes_the_room_of_its_small_weights_on_a_gpu_alone() -> None:
    keys = {"draft.kind": "neural", "draft.device": "cuda", "draft.path": str(DEMO / "target")}
    config = config_from_keys({**keys, "draft.quantize": "fp8"})
    whole = config_from_keys(keys)
    with emulated_cards():
        small = room.memory_need(DEMO / "target", config.draft, config).weight_bytes
        assert small < 0.75 * room.memory_need(DEMO / "target", whole.draft, whole).weight_bytes
        found = {finding.subject: finding.found for finding in machine.cuda()}
    assert found["FP8"] == "checkpoints and drafts in FP8 are multiplied as they are"


def test_a_full_disk_of_ray_is_bad_and_names_the_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def findings() -> list[Finding]:
        return list(guarded("disk, Ray", command._disk_for_ray))

    assert not any(finding.grade is Grade.BAD for finding in findings())
    monkeypatch.setattr("specserve.cluster.preflight.MIN_RAY_BYTES", 2**60)
    assert "/ray has " in only(findings()).found


def test_what_ray_says_becomes_findings() -> None:
    refused = Checkup(
        "2.60.0",
        "10.0.0.1:6379",
        ("10.0.0.1:6379",),
        True,
        {"CPU": 2.0},
        "needs 10 GPUs",
        None,
        "no haproxy",
        {"RAY_PORT": 1},
    )
    found = [*cluster.ray(refused), *cluster.proxy(refused)]
    assert [finding.grade for finding in found] == [Grade.OK, Grade.BAD, Grade.BAD]
    assert (
        found[0].found
        == "2.60.0; `specserve serve` joins the Ray cluster at 10.0.0.1:6379 (2 CPUs, 0 GPUs)"
    )
    assert {finding.grade for finding in [*cluster.ray(WELL), *cluster.proxy(WELL)]} == {Grade.OK}
    *_, place = cluster.ray(replace(WELL, moves_draft=True))
    assert place.found.endswith("means together, as the cluster has no GPU for a draft apart")
    splicing = only(cluster.proxy(replace(WELL, splices=True)), Grade.WARN)
    assert "specserve-haproxy is missing" in splicing.found


def test_a_check_that_fails_is_a_finding_and_not_a_traceback() -> None:
    def fails() -> list[Finding]:
        raise RuntimeError("of a library\nwith more lines")

    assert (
        only(guarded("machine", fails), Grade.WARN).found
        == "this could not be looked at: RuntimeError: of a library"
    )


def test_the_report_is_a_line_for_each_finding_and_says_at_last_whether_it_will_serve() -> None:
    warning = Finding(Grade.WARN, "open files", "1024", "raise them")
    report = DoctorReport((ok("python", "3.11"), warning))
    assert report.text().plain.splitlines() == [
        "ok    python      3.11",
        "warn  open files  1024 -> raise them",
        "ready to serve, 1 to be warned of",
    ]
    assert report.is_well


def test_a_config_that_cannot_be_read_is_what_the_command_line_says_of_it() -> None:
    def refuse() -> Config:
        raise ConfigError("unknown key a")

    assert only(command.examine(refuse).findings).found == "unknown key a"
