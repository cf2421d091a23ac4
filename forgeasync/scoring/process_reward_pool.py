"""The engine of a process reward model in one scorer, as the scorer sees it: calls, and its replacement."""

import logging
import threading
from collections.abc import Sequence

from forgeasync.config import ProcessRewardModel, name_of
from forgeasync.environments import Response
from forgeasync.rollouts import Score, ScoreStatus, Task, VerifierCounts
from forgeasync.scoring.reward_pool import ProcessKilled, RewardFailure, RewardProcess, RewardTimeout
from forgeasync.scoring.unavailable import RewardUnavailable

logger = logging.getLogger(__name__)

AGAIN_S = 2.0
"""Seconds after which it is worth asking again while an engine is started."""


class ProcessRewardPool:
    """One engine; thread-safe. Responses are scored concurrently, each in a call of its own.

    What becomes of a response whose engine is gone: its call has failed, which is an attempt; responses that
    come while the next engine loads wait, which is none.
    """

    def __init__(self, section: ProcessRewardModel) -> None:
        """Store the settings; ``start`` starts the process."""
        self._section = section
        self._name = name_of(section)
        self._process = RewardProcess(section)
        self._lock = threading.Lock()
        self._starting: threading.Thread | None = None
        self._start_failure: str | None = None
        self._num_oversized = 0

    @property
    def num_places(self) -> int:
        """Number of calls that can run at once."""
        return self._section.max_num_seqs

    @property
    def counts(self) -> VerifierCounts:
        """Counts since it began."""
        return VerifierCounts(num_oversized=self._num_oversized, num_killed_rewards=self._process.num_killed)

    @property
    def pid(self) -> int | None:
        """Process id of the engine; None without one."""
        return self._process.pid

    @property
    def version(self) -> str:
        """A digest of what decides the scores; "" before ``start``."""
        return self._process.version

    def start(self) -> str:
        """Load the model; returns in words what there is. Raises as ``RewardProcess.start``."""
        self._process.start()
        return f"a process with {self._section.model_path} scores steps as reward {self._name!r}"

    def score(self, task: Task, responses: Sequence[Response], rollouts: str) -> tuple[Score, ...]:
        """Score one response to a task; ``rollouts`` names it in errors ("rollout 3").

        Raises:
            RewardUnavailable: the engine is being started again.
            RewardFailure: it has not scored; names the reward, the task and the rollout.
        """
        where = f"reward {self._name!r} ({self._section.model_path}) on task {task.task_id}, {rollouts}"
        self._check_running(where)
        try:
            scores = self._process.call(task, responses)
        except ProcessKilled:
            raise RewardUnavailable(f"{where}: its engine was killed over another call", AGAIN_S) from None
        except RewardFailure as error:
            kind = RewardTimeout if isinstance(error, RewardTimeout) else RewardFailure
            raise kind(f"{where}: {error}") from None
        with self._lock:
            self._num_oversized += sum(score.status is ScoreStatus.OVERSIZED for score in scores)
        return scores

    def close(self) -> None:
        """Stop the process."""
        self._process.stop()

    def _check_running(self, where: str) -> None:
        with self._lock:
            failure, self._start_failure = self._start_failure, None
            if failure is not None:
                raise RewardFailure(f"{where}: {failure}")
            if self._process.is_running:
                return
            if self._starting is None:
                logger.warning("the engine of reward %r is gone; another one is started", self._name)
                self._starting = threading.Thread(target=self._start_again, name="step engine", daemon=True)
                self._starting.start()
        raise RewardUnavailable(f"{where}: its engine is being started again", AGAIN_S)

    def _start_again(self) -> None:
        failure = None
        try:
            self._process.start()
        except (ValueError, RewardFailure) as error:
            failure = f"the engine cannot be started again: {error}"
        with self._lock:
            self._start_failure, self._starting = failure, None
