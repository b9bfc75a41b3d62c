"""Steps of a draft that learns, between the messages of the worker that it lives in."""

from __future__ import annotations

import time

from specserve.cluster.transport.link import Server
from specserve.drafters.learning.learner import DraftLearner
from specserve.learning_progress import LearningProgress
from specserve.wire.messages import LearningReport

REPORT_INTERVAL_S = 1.0


class IdleLearning:
    """A learner that works when its worker would wait for a message, and reports to the engine."""

    def __init__(self, learner: DraftLearner, server: Server) -> None:
        self._learner, self._server = learner, server
        self._reported = LearningProgress()
        self._reported_at = time.monotonic()

    def on_message(self) -> None:
        self._learner.idle.on_message()

    def on_answer(self) -> None:
        self._learner.idle.on_answer()

    def step(self) -> float | None:
        """Do one small piece of work if its time has come.

        Returns the seconds for which to wait for a message before the next; None: until it comes.
        """
        wait = self._learner.step(self._server.has_message)
        progress, now = self._learner.progress, time.monotonic()
        if progress == self._reported:
            return wait
        left = REPORT_INTERVAL_S - (now - self._reported_at)
        if left > 0:
            return left if wait is None else min(wait, left)
        self._server.send(LearningReport(progress))
        self._reported, self._reported_at = progress, now
        return wait
