"""Open the learner of a draft of each kind that can learn."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from specserve.drafters.eagle import EagleDrafter
from specserve.drafters.heads import HeadsDrafter
from specserve.drafters.learning.heads_drafter import LearningHeads
from specserve.drafters.learning.learner import DraftLearner, LearningOptions
from specserve.drafters.learning.served_states import ServedStates, StateLimits
from specserve.drafters.learning.served_texts import NEW_TOKENS
from specserve.drafters.learning.swap import DraftWeights, EagleSwap, HeadsSwap
from specserve.drafters.learning.trainable_eagle import TrainableEagle
from specserve.drafters.learning.trainable_heads import TrainableHeads
from specserve.drafters.learning.trainable_model import TrainableModel
from specserve.drafters.learning.trainer import LEARNING_RATE, DraftTrainer, Weights
from specserve.drafters.neural.drafter import NeuralDrafter
from specserve.models.eagle.checkpoint import NUM_TAPS
from specserve.models.heads import Heads
from specserve.models.model import Model


def neural_learner(drafter: NeuralDrafter, model: Model, checkpoint: Path) -> DraftLearner:
    """Return a learner of a draft model, from the weights of its checkpoint."""
    assert model.rebuild is not None, "the files have been checked"
    trained = TrainableModel.from_checkpoint(checkpoint, model.runner.device)
    return DraftLearner(DraftWeights(drafter), DraftTrainer(trained), model.rebuild)


def eagle_learner(
    eagle: EagleDrafter,
    *,
    learning_rate: float = LEARNING_RATE,
    options: LearningOptions | None = None,
    new_tokens: int = NEW_TOKENS,
) -> DraftLearner:
    """Return a learner of a head, which reads the target's states as they arrive."""
    head = eagle.head
    row_bytes = NUM_TAPS * head.weights.info.target_hidden_size * head.cache.states.element_size()
    trained = TrainableEagle(head)
    states = ServedStates(StateLimits.from_row_bytes(row_bytes), trained.complete)
    eagle.on_hidden = states.receive
    return DraftLearner(
        EagleSwap(eagle),
        DraftTrainer(trained, learning_rate=learning_rate),
        lambda weights: head.build(head.weights.with_tensors(weights)),
        options=options,
        texts=states.texts(new_tokens=new_tokens),
    )


def learning_heads(
    drafter: HeadsDrafter,
    embed: Callable[[Tensor], Tensor],  # [rows] -> [rows, hidden]
    vocabulary_head: Tensor,  # [vocab, hidden]
    *,
    learning_rate: float = LEARNING_RATE,
    options: LearningOptions | None = None,
    new_tokens: int = NEW_TOKENS,
) -> LearningHeads:
    """Return heads that learn, over the target's embedding and a copy of its vocabulary head.

    The copy is plain: packed for inference, no gradient flows through it.
    """
    heads = drafter.heads
    trained = TrainableHeads(heads, embed, vocabulary_head)
    row_bytes = heads.weight.shape[-1] * heads.weight.element_size()
    states = ServedStates(StateLimits.from_row_bytes(row_bytes), trained.complete)

    def rebuild(weights: Weights) -> Heads:
        other = copy.deepcopy(heads)
        other.load_state_dict(dict(weights))
        return other

    learner = DraftLearner(
        HeadsSwap(drafter),
        DraftTrainer(trained, learning_rate=learning_rate),
        rebuild,
        options=options,
        texts=states.texts(new_tokens=new_tokens),
    )
    return LearningHeads(drafter, learner, states)
