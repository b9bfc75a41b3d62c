"""The systems that are compared: which process runs each, in which modes, under which loads."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path

from lab.bench.peers.comparison import GAMMAS, OURS, Entry, Load, Prompts
from lab.bench.tasks import read_tasks
from specserve.api.tokenizer import Tokenizer
from specserve.demo.corpus import held_out_files

ONE, EIGHT, WIDE, PREFILL = "1 stream", "8 streams", "32 streams", "prefill"
DECODING, ALL = (ONE, EIGHT, WIDE), (ONE, EIGHT, WIDE, PREFILL)
IN_PROCESS, HTTP = "in process", "over HTTP"
TOGETHER, APART = f"{OURS} together", f"{OURS} apart"
FORCED_ALPHA = 0.8
FILE_TOKENS = 1000
ENVIRONMENTS = {"openvino-genai": ".venv-peers", "vllm": ".venv-vllm", "llama.cpp": ".venv-llama"}
"""Environments of the systems that have one of their own."""

PLAIN_ENTRIES = {
    IN_PROCESS: (
        Entry(OURS, "plain", "plain", loads=ALL),
        Entry("transformers", "plain", "plain", loads=ALL),
        Entry("openvino-genai", "plain", "plain", loads=ALL),
    ),
    HTTP: (
        Entry(OURS, "plain", "plain", loads=ALL),
        Entry("vllm", "plain", "plain", loads=ALL),
        Entry("llama.cpp", "plain", "plain", loads=ALL),
    ),
}
SPECULATING_ENTRIES = {
    IN_PROCESS: (
        Entry(OURS, "gamma auto", "auto", loads=DECODING),
        Entry(OURS, "fixed gamma", "draft", GAMMAS, DECODING),
        # transformers refuses a batch with assisted generation and with prompt lookup
        Entry("transformers", "assisted", "draft", (None, *GAMMAS), (ONE,)),
        Entry("transformers", "prompt lookup", "lookup", GAMMAS, (ONE,)),
        Entry("openvino-genai", "draft model", "draft", GAMMAS, DECODING),
        Entry("openvino-genai", "prompt lookup", "lookup", GAMMAS, DECODING),
    ),
    HTTP: (
        Entry(OURS, "gamma auto", "auto", loads=DECODING),
        Entry(OURS, "fixed gamma", "draft", GAMMAS, DECODING),
        Entry(TOGETHER, "gamma auto", "auto", loads=DECODING),
        Entry(APART, "gamma auto", "auto", loads=DECODING),
        Entry("vllm", "draft model", "draft", GAMMAS, DECODING),
        Entry("vllm", "n-grams", "lookup", GAMMAS, (ONE,)),
        Entry("llama.cpp", "draft model", "draft", GAMMAS, DECODING),
        Entry("llama.cpp", "n-grams", "lookup", GAMMAS, (ONE,)),
    ),
}
GGUF_ENTRIES = (
    Entry(OURS, "plain", "plain", loads=ALL),
    Entry(OURS, "gamma auto", "auto", loads=DECODING),
    Entry(OURS, "fixed gamma", "draft", GAMMAS, DECODING),
    Entry("llama.cpp", "plain", "plain", loads=ALL),
    Entry("llama.cpp", "n-grams", "lookup", GAMMAS, (ONE,)),
)
"""Over HTTP, of a GGUF file, which both read as it is, with an EAGLE head of ours."""
FORCED_ENTRIES = (
    Entry(OURS, f"gamma auto, {FORCED_ALPHA:.0%} accepted", "forced", loads=DECODING),
    Entry(OURS, f"fixed gamma, {FORCED_ALPHA:.0%} accepted", "forced", GAMMAS, DECODING),
)


@dataclass(frozen=True, slots=True)
class ComparedPair:
    """Checkpoints that all systems run."""

    name: str
    target: Path
    draft: Path
    is_trained: bool
    """False: random weights. Peers decode plainly, and our acceptance is forced."""

    @property
    def is_gguf(self) -> bool:
        return self.target.suffix == ".gguf"

    def entries(self, interface: str) -> Sequence[Entry]:
        if self.is_gguf:
            return GGUF_ENTRIES
        plain = PLAIN_ENTRIES[interface]
        if self.is_trained:
            return _grouped((*plain, *SPECULATING_ENTRIES[interface]))
        return (*plain, *FORCED_ENTRIES) if interface == IN_PROCESS else plain

    def commands(
        self, interface: str, work: Path, *, environments: Path, keys: Sequence[str]
    ) -> Mapping[str, Sequence[str]]:
        """Return the command of each system; `work` is a directory for converted checkpoints."""
        pythons = {name: python_of(name, environments) for name in ENVIRONMENTS}
        models = ["--target", str(self.target)]
        draft = ["--draft", str(self.draft)]
        settings = [part for key in keys for part in ("--set", key)]
        if interface == IN_PROCESS:
            alpha = [] if self.is_trained else ["--alpha", str(FORCED_ALPHA)]
            return {
                OURS: [*_module("llm"), *models, *draft, *alpha, *settings],
                "transformers": [*_module("transformers"), *models, *draft],
                "openvino-genai": [
                    str(pythons["openvino-genai"]),
                    *_module("openvino")[1:],
                    *models,
                    *draft,
                    *("--work", str(work / "openvino")),
                ],
            }
        pair = [*models, *draft] if self.is_trained else models
        llama = [*_module("llama"), *(models if self.is_gguf else pair)]
        llama += ["--python", str(pythons["llama.cpp"]), "--work", str(work / "llama")]
        if self.is_gguf:
            kind = ["--set", "draft.kind=eagle"]
            return {OURS: [*_module("specserve"), *pair, *kind, *settings], "llama.cpp": llama}
        ours = [*_module("specserve"), *pair, *settings]
        placed = {
            TOGETHER: [*ours, "--placement", "together"],
            APART: [*ours, "--placement", "apart"],
        }
        return {
            OURS: ours,
            **(placed if self.is_trained else {}),
            "vllm": [*_module("vllm"), *pair, "--python", str(pythons["vllm"])],
            "llama.cpp": llama,
        }


def python_of(system: str, environments: Path) -> Path:
    """Return the interpreter of a system that has an environment of its own."""
    return environments / ENVIRONMENTS[system] / "bin" / "python"


def full_loads(prompts: Prompts, files: Prompts, *, serial: int) -> tuple[Load, ...]:
    """Return the loads of a measurement; one stream runs `serial` prompts in each turn."""
    return (
        Load(ONE, prompts[:serial], 128, together=False),
        Load(EIGHT, prompts[:8], 128, together=True),
        Load(WIDE, prompts, 64, together=True),
        Load(PREFILL, files, 1, together=False),
    )


def quick_loads(prompts: Prompts) -> tuple[Load, ...]:
    """Return loads of the same names that take a moment."""
    return (
        Load(ONE, prompts[:1], 8, together=False),
        Load(EIGHT, prompts[:2], 8, together=True),
        Load(WIDE, prompts[:3], 4, together=True),
        Load(PREFILL, prompts[:1], 1, together=False),
    )


def code_texts() -> tuple[Prompts, Prompts]:
    """Return prompts of the demo pair's vocabulary, and long ones."""
    return text_windows(count=32, length=128), text_windows(count=4, length=FILE_TOKENS)


def chat_texts(model: Path) -> tuple[Prompts, Prompts]:
    """Return prompts of all kinds of tasks in the model's chat template, and long ones of them."""
    tokenizer = Tokenizer.load(model)
    kinds = read_tasks(per_kind=20).values()
    chats = [
        tokenizer.apply_chat_template(task.chat)
        for tasks in zip(*kinds, strict=True)
        for task in tasks
    ]
    joined = tuple(chain.from_iterable(chats))
    starts = range(0, len(joined) + 1 - FILE_TOKENS, FILE_TOKENS)
    return tuple(chats[:32]), tuple(joined[start : start + FILE_TOKENS] for start in starts)[:4]


def text_windows(*, count: int, length: int) -> Prompts:
    """Return windows of held-out files: first the beginnings, then what follows them."""
    windows = [
        text[start : start + length]
        for start in range(0, FILE_TOKENS + 1 - length, length)
        for text in _held_out_files()
    ]
    assert len(windows) >= count, "the held-out files are too short"
    return tuple(windows[:count])


@cache
def _held_out_files() -> Prompts:
    files = held_out_files()
    return tuple(tokens[:FILE_TOKENS] for tokens in files if len(tokens) >= FILE_TOKENS)


def _grouped(entries: Sequence[Entry]) -> Sequence[Entry]:
    """Return the entries of each system beside one another, in the order of the systems."""
    systems = list(dict.fromkeys(entry.system for entry in entries))
    return sorted(entries, key=lambda entry: systems.index(entry.system))


def _module(name: str) -> list[str]:
    return [sys.executable, "-m", f"{__package__}.{name}"]
