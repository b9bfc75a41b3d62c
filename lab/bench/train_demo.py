"""Training of the demo models on Python's standard library.

`python -m lab.bench.train_demo --out DIR` trains a byte-level BPE, a target by next-token loss,
and a draft (or a smaller one) distilled from that target. One file in fifty is held out; the
figures of the model card are measured on these files.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from specserve.demo.corpus import standard_library
from specserve.progress import ProgressBar, ReportProgress

END = "<|endoftext|>"
VOCAB = 4096
CONTEXT = 1024
BATCH = 2
TARGET = {
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "intermediate_size": 640,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
DRAFTS = {
    "draft": {
        "hidden_size": 128,
        "num_hidden_layers": 1,
        "intermediate_size": 384,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "small": {
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "intermediate_size": 192,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}


def train_tokenizer(
    texts: Sequence[str], *, vocab: int = VOCAB, pattern: str | None = None
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on texts split by GPT-2's pattern, or by another one."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = (
        pre_tokenizers.ByteLevel(add_prefix_space=False)
        if pattern is None
        else pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(vocab_size=vocab, special_tokens=[END], initial_alphabet=alphabet),
    )
    build: Any = PreTrainedTokenizerFast
    fast: PreTrainedTokenizerFast = build(
        tokenizer_object=tokenizer,
        eos_token=END,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )
    return fast


def encode(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> torch.Tensor:
    end = tokenizer.eos_token_id
    encoded = tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor([token for ids in encoded for token in (end, *ids)])  # [tokens]


def new_model(sizes: dict[str, Any], end: int, *, vocab: int = VOCAB) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=vocab,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=end,
        eos_token_id=end,
        **sizes,
    )
    return LlamaForCausalLM(config)


def load_model(directory: Path) -> Any:
    """Return a checkpoint as the library's model, in fp32."""
    return LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)


def new_draft(target: Any, sizes: dict[str, Any]) -> Any:
    """Return a draft whose embedding starts as the target's, projected on its main directions."""
    draft: Any = new_model(sizes, target.config.eos_token_id)
    width = sizes["hidden_size"]
    embedding = target.get_input_embeddings().weight.detach()
    left, singular_values, _ = torch.linalg.svd(embedding, full_matrices=False)
    draft.get_input_embeddings().weight.data.copy_(left[:, :width] * singular_values[:width])
    return draft


def windows(tokens: torch.Tensor, seed: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(tokens) - CONTEXT - 1, (BATCH,), generator=generator)
        # [batch, context + 1]
        yield torch.stack([tokens[start : start + CONTEXT + 1] for start in starts.tolist()])


@dataclass(frozen=True, slots=True)
class TrainingSchedule:
    """Duration and learning rates of one training run."""

    name: str
    minutes: float
    peak: float  # peak learning rates, as a share of the usual ones
    compile: bool
    seed: int  # of the windows


def train(
    model: Any,
    text: torch.Tensor,
    loss_of: Callable[..., torch.Tensor],
    schedule: TrainingSchedule,
    *,
    save: Callable[[], None],
    report_progress: ReportProgress,
) -> None:
    """Train with Muon for the matrices inside the layers and AdamW for the rest.

    The learning rates follow the elapsed share of the time.
    """
    inside = [p for name, p in model.named_parameters() if p.ndim == 2 and "layers" in name]
    ids = {id(p) for p in inside}
    rest = [p for p in model.parameters() if id(p) not in ids]
    optimizers = [
        torch.optim.Muon(
            inside, lr=0.02, momentum=0.95, weight_decay=0.02, adjust_lr_fn="original"
        ),
        torch.optim.AdamW(rest, lr=0.004, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    groups = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    running = torch.compile(model) if schedule.compile else model
    batches = windows(text, seed=schedule.seed)
    start = last_save = time.monotonic()
    step = 0
    while (progress := (time.monotonic() - start) / (60 * schedule.minutes)) < 1:
        rate = (
            schedule.peak
            * min(1.0, (step + 1) / 100)
            * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        )
        for group, usual in groups:
            group["lr"] = usual * rate
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(running, next(batches))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0:
            pace = (step + 1) * BATCH * CONTEXT / (time.monotonic() - start)
            report_progress(
                schedule.name, progress, f"step {step}, loss {loss.item():.3f}, {pace:.0f} tokens/s"
            )
        if time.monotonic() - last_save > 300:
            save()
            last_save = time.monotonic()
        step += 1
    save()


def next_token_loss(model: LlamaForCausalLM, batch: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=batch[:, :-1]).logits  # [batch, context, vocab]
    return F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())


def distillation_loss(
    target: Any, distance: Callable[..., torch.Tensor], *, compile_teacher: bool
) -> Callable[..., torch.Tensor]:
    """Return a loss by which the draft learns the target's distribution instead of the text.

    Acceptance depends on how much the two distributions overlap.
    """
    teacher = copy.deepcopy(target).eval().to(torch.bfloat16)
    teacher = torch.compile(teacher) if compile_teacher else teacher

    def loss(model: LlamaForCausalLM, batch: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            log_p = F.log_softmax(teacher(input_ids=batch[:, :-1]).logits.float(), dim=-1)
        return distance(log_p, F.log_softmax(model(input_ids=batch[:, :-1]).logits.float(), dim=-1))

    return loss


def divergence(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """Return KL(p, q), whose gradient is strong while p and q are far apart."""
    return F.kl_div(
        log_q.flatten(0, 1), log_p.flatten(0, 1), reduction="batchmean", log_target=True
    )


def rejection_rate(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """Return 1 - alpha, the aim of the draft; useful once p and q are near each other."""
    return 1 - torch.minimum(log_p, log_q).exp().sum(-1).mean()


@torch.no_grad()
def held_out_figures(target: Any, draft: Any, tokens: torch.Tensor) -> dict[str, float]:
    """Measure the models on held-out text.

    These are the target's loss, alpha = E[sum min(p, q)] at T = 1, and the share of positions where
    both have the same likeliest token.
    """
    loss = alpha = agreement = count = 0.0
    for start in range(0, len(tokens) - CONTEXT - 1, CONTEXT):
        window = tokens[start : start + CONTEXT + 1]
        p = target(input_ids=window[None, :-1]).logits[0].float().softmax(-1)
        q = draft(input_ids=window[None, :-1]).logits[0].float().softmax(-1)
        loss += -p.gather(1, window[1:, None]).log().sum().item()
        alpha += torch.minimum(p, q).sum().item()
        agreement += (p.argmax(-1) == q.argmax(-1)).sum().item()
        count += CONTEXT
    return {
        "loss": loss / count,
        "alpha": alpha / count,
        "agreement": agreement / count,
        "tokens": count,
    }


def save(model: Any, tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    shipped = copy.deepcopy(model).to(torch.bfloat16)
    shipped.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


@dataclass(frozen=True, slots=True)
class DraftLesson:
    """One stage of the draft's training, for a share of the target's minutes."""

    loss_of: Callable[..., torch.Tensor]
    share: float
    peak: float


class DemoTraining:
    """A training of target and draft on the same text, each saved in a folder of `out`."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, corpus = args, standard_library()
        self._target_dir, self._draft_dir = args.out / "target", args.out / args.draft
        if has_target := args.resume or args.only == "draft":
            self._tokenizer = PreTrainedTokenizerFast.from_pretrained(self._target_dir)
        else:
            self._tokenizer = train_tokenizer(corpus.train)
        self._text = encode(self._tokenizer, corpus.train)
        self.held_out = encode(self._tokenizer, corpus.held_out)
        end = self._tokenizer.eos_token_id
        self.target: Any = load_model(self._target_dir) if has_target else new_model(TARGET, end)

    def __str__(self) -> str:
        return f"{len(self._text)} tokens to learn from, {len(self.held_out)} held out"

    def train_target(self) -> None:
        peak, seed = (0.5, 3) if self._args.resume else (1.0, 1)
        schedule = self._schedule("target", share=1.0, peak=peak, seed=seed)
        self._train(self.target, next_token_loss, schedule, self._target_dir)

    def train_draft(self) -> Any:
        """Return a draft trained by all lessons, or the one in `out` after a single one."""
        name, only = self._args.draft, self._args.lesson
        draft: Any = load_model(self._draft_dir) if only else new_draft(self.target, DRAFTS[name])
        for seed, (topic, lesson) in enumerate(self._lessons().items(), start=4):
            if only in (None, topic):
                schedule = self._schedule(
                    f"{name}, {topic}", share=lesson.share, peak=lesson.peak, seed=seed
                )
                self._train(draft, lesson.loss_of, schedule, self._draft_dir)
        return draft

    def _lessons(self) -> dict[str, DraftLesson]:
        losses = {
            name: distillation_loss(self.target, distance, compile_teacher=self._args.compile)
            for name, distance in (("divergence", divergence), ("refusal", rejection_rate))
        }
        return {
            "text": DraftLesson(next_token_loss, share=1 / 12, peak=1.0),
            "divergence": DraftLesson(losses["divergence"], share=1 / 4, peak=1.0),
            "refusal": DraftLesson(losses["refusal"], share=1 / 8, peak=0.3),
        }

    def _schedule(self, name: str, *, share: float, peak: float, seed: int) -> TrainingSchedule:
        minutes = self._args.minutes * share
        return TrainingSchedule(name, minutes, peak=peak, compile=self._args.compile, seed=seed)

    def _train(
        self,
        model: Any,
        loss_of: Callable[..., torch.Tensor],
        schedule: TrainingSchedule,
        directory: Path,
    ) -> None:
        with ProgressBar(sys.stderr) as bar:
            train(
                model,
                self._text,
                loss_of,
                schedule,
                save=lambda: save(model, self._tokenizer, directory),
                report_progress=bar,
            )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--minutes",
        type=float,
        default=90.0,
        help="for the target; the draft takes half of it on top",
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--compile", action="store_true", help="a fifth faster; needs a C++ compiler"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on from the target in --out, at half the rates and in another order",
    )
    parser.add_argument(
        "--only",
        choices=("target", "draft"),
        help="train one of the two; for the draft, the target lies in --out already",
    )
    parser.add_argument(
        "--draft",
        choices=DRAFTS,
        default="draft",
        help="which draft to train, and where it lies in --out",
    )
    parser.add_argument(
        "--lesson",
        choices=("text", "divergence", "refusal"),
        help="go on with the draft in --out, by this lesson alone",
    )
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    training = DemoTraining(args)
    print(training, flush=True)
    if args.only != "draft":
        training.train_target()
    if args.only != "target":
        draft = training.train_draft()
        print(held_out_figures(training.target.eval(), draft.eval(), training.held_out))


if __name__ == "__main__":
    main()
