"""Verifies answers of models in guarded processes, shared by threads: limits, kill and replacement."""

import dataclasses
import functools
import logging
import queue
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from typing import Any

from forgeasync.config import MathReward, NamedSource, ReasoningGymReward, ReasoningGymSource, ScorerSection
from forgeasync.isolation import (
    HOW_TO_GET,
    ContainedProcess,
    FoundBubblewrap,
    Layer,
    ProcessExited,
    find_bubblewrap,
    python_command,
    python_environment,
)
from forgeasync.processes import own_mark
from forgeasync.rollouts import NO_SCORE, Score, ScoreStatus, Task, as_feedback
from forgeasync.schema import Problem, raise_if_any
from forgeasync.scoring.worker import (
    CHOICE_CODEC,
    LOAD_LIMIT_S,
    GymVerifierChoice,
    MathVerifierChoice,
    VerifierChoice,
    WorkerSetup,
)

logger = logging.getLogger(__name__)

MAX_ANSWER_BYTES = 1 << 20
"""Maximum size of an answer; a longer one scores 0. Many verifiers take quadratic time."""
_NUM_LOGGED = 20
"""Number of unverified answers of each kind that are logged individually; all are counted."""
STARTUP_LIMIT_S = 120.0
"""Seconds within which a process must be ready."""
_GRACE_S = 5.0
"""Seconds by which the parent's kill follows the process's own limits; it is for processes that hang."""


_COUNT_OF = {
    ScoreStatus.TIMEOUT: "scoring/num_timeouts",
    ScoreStatus.CRASH: "scoring/num_crashes",
    ScoreStatus.ERROR: "scoring/num_errors",
    ScoreStatus.OVERSIZED: "scoring/num_oversized",
}


class VerifierFailure(RuntimeError):
    """The process of verifiers does not work; this is never the fault of an answer."""


class ProblemDiffers(ValueError):
    """A problem differs from what its index generates here."""


class VerifierProcess:
    """Verifies one answer at a time; not thread-safe. The process starts with the first request."""

    def __init__(self, choice: VerifierChoice, section: ScorerSection, bubblewrap: FoundBubblewrap) -> None:
        self._choice = choice
        self._section = section
        self._bubblewrap = bubblewrap
        self._process: ContainedProcess | None = None
        self._layers: tuple[Layer, ...] = ()

    @property
    def pid(self) -> int | None:
        """Process id of the running worker; None without one."""
        return None if self._process is None else self._process.pid

    def start(self) -> tuple[Layer, ...]:
        """Start the process if needed; return the layers that isolate it.

        Raises:
            ValueError: The choice of verifier is impossible; the message names the config field.
            VerifierFailure: The process does not start.
        """
        if self._process is not None and (exit_code := self._process.exit_code) is not None:
            logger.warning("a process of verifiers ended with code %d between answers", exit_code)
            self.stop()
        if self._process is None:
            scratch = self._spawn()
            setup = WorkerSetup(
                choice=CHOICE_CODEC.dump_python(self._choice, mode="json"),
                answer_limit_s=self._section.answer_limit_s,
                answer_memory_bytes=self._section.answer_memory_mib * 2**20,
                scratch_folder=scratch,
            )
            reply = self._ask({"setup": dataclasses.asdict(setup)}, limit_s=STARTUP_LIMIT_S)
            if reply is None:
                raise VerifierFailure(
                    "a process of verifiers did not start; see its messages in the scorer's log"
                )
            if "refused" in reply:
                self.stop()
                raise ValueError(reply["refused"])
            self._layers = tuple(Layer(one) for one in reply["ready"])
        return self._layers

    def verify(self, task: Task, answer: str) -> dict[str, Any]:
        """Return the verdict on one answer, in a form of ``forgeasync.scoring.worker``'s protocol.

        Raises:
            ProblemDiffers: The task's index generates another problem here.
            VerifierFailure: The process does not start, or ends while it loads the task.
        """
        self.start()
        # No verifier reads the record, which can be large.
        sent = dataclasses.asdict(dataclasses.replace(task, record={}))
        loaded = self._ask({"task": sent}, limit_s=LOAD_LIMIT_S + _GRACE_S)
        if loaded is None:
            raise VerifierFailure(f"the process of verifiers ended while it loaded {str(sent)[:500]}")
        if "refused" in loaded:
            raise ProblemDiffers(loaded["refused"])
        verdict = self._ask({"answer": answer}, limit_s=self._section.answer_limit_s + _GRACE_S)
        return {"crash": "the whole process of verifiers"} if verdict is None else verdict

    def stop(self) -> None:
        """Stop the process; the next request starts another one."""
        if self._process is not None:
            self._process.stop()
            self._process = None

    def _spawn(self) -> str | None:
        """Start the process; return the folder that it may write to until it has imported everything."""
        scratch: str | None = None
        # The parent's mark identifies the process, so that it can be ended if its parent is killed.
        if self._bubblewrap.path is not None:
            env = python_environment() | own_mark()
        else:
            scratch = tempfile.mkdtemp(prefix="forgeasync-verifier-")
            env = python_environment(scratch) | own_mark()
        command = python_command(["-m", "forgeasync.scoring.worker"])
        self._process = ContainedProcess(
            command, env=env, bubblewrap=self._bubblewrap.path, scratch=scratch, folder="/"
        )
        return scratch

    def _ask(self, request: dict[str, Any], *, limit_s: float) -> dict[str, Any] | None:
        """Return the reply to a request; None if it does not come in time, after stopping the process."""
        assert self._process is not None
        try:
            return self._process.ask(request, limit_s=limit_s)
        except ProcessExited:
            self.stop()
            return None


class VerifierPool:
    """Verifies responses in up to ``scorer.num_workers`` concurrent processes; thread-safe.

    Every call has exclusive use of one process. Waiting for one does not count towards the answer's time
    limit.
    """

    def __init__(
        self, choice: VerifierChoice, section: ScorerSection, *, bubblewrap: FoundBubblewrap | None = None
    ) -> None:
        """Store the settings. Processes start on demand; without ``bubblewrap`` it is searched for then."""
        self._choice = choice
        self._section = section
        self._bubblewrap = bubblewrap
        self._processes: list[VerifierProcess] = []
        self._idle: queue.LifoQueue[VerifierProcess] = queue.LifoQueue()
        self.num_places = section.num_workers
        """Maximum number of concurrent calls."""
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    @property
    def counts(self) -> Counter[str]:
        """Counts of the responses that could not be verified."""
        with self._lock:
            return self._counts.copy()

    # Cached, because the look-up in the file system takes longer than verifying a response.
    @functools.cached_property
    def version(self) -> str:
        """Package and version of the verifier."""
        package = "reasoning-gym" if isinstance(self._choice, GymVerifierChoice) else "math-verify"
        return f"{package} {metadata.version(package)}"

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the running workers."""
        return tuple(one.pid for one in self._processes if one.pid is not None)

    def start(self) -> str:
        """Start all processes concurrently; return a description of their isolation.

        Raises:
            ValueError: The choice of verifier is impossible, or bubblewrap does not work and the config does
                not accept weaker layers; the message names the config field.
            VerifierFailure: A process does not start.
        """
        self._make_processes()
        with ThreadPoolExecutor(self._section.num_workers) as threads:
            (layers, *_) = threads.map(VerifierProcess.start, self._processes)
        assert self._bubblewrap is not None
        why = f" (no bubblewrap: {self._bubblewrap.problem})" if self._bubblewrap.path is None else ""
        description = f"verifier processes: {self._section.num_workers}, isolated by {', '.join(layers)}{why}"
        logger.info("%s", description)
        return description

    def score(self, task: Task, response: str) -> Score:
        """Score one response; 0.0, counted, if it cannot be verified within its limits.

        An error is never the fault of the response.

        Raises:
            ValueError: See ``start``; or, as ``ProblemDiffers``, the task differs from what its index
                generates.
            VerifierFailure: A process cannot be started.
        """
        if len(response) > MAX_ANSWER_BYTES or len(response.encode(errors="replace")) > MAX_ANSWER_BYTES:
            return self._unverified(ScoreStatus.OVERSIZED, f"longer than {MAX_ANSWER_BYTES} bytes")
        self._make_processes()
        process = self._idle.get()
        try:
            verdict = process.verify(task, response)
        finally:
            self._idle.put(process)
        if "value" in verdict:
            return Score(verdict["value"], verdict["is_correct"], has_answer=verdict["has_answer"])
        if "timeout" in verdict:
            return self._unverified(ScoreStatus.TIMEOUT, f"not done in {self._section.answer_limit_s:g} s")
        if "crash" in verdict:
            return self._unverified(ScoreStatus.CRASH, f"its process ended ({verdict['crash']})")
        return self._unverified(ScoreStatus.ERROR, verdict["error"])

    def close(self) -> None:
        """Stop the processes; a later call starts new ones."""
        for process in self._processes:
            process.stop()

    def _make_processes(self) -> None:
        with self._lock:
            if self._processes:
                return
            if self._bubblewrap is None:
                self._bubblewrap = find_bubblewrap()
            raise_if_any(check_isolation(self._section, self._bubblewrap))
            for _ in range(self._section.num_workers):
                self._processes.append(VerifierProcess(self._choice, self._section, self._bubblewrap))
        for process in self._processes:
            self._idle.put(process)

    def _unverified(self, status: ScoreStatus, reason: str) -> Score:
        with self._lock:
            self._counts[_COUNT_OF[status]] += 1
            number = self._counts[_COUNT_OF[status]]
        if number <= _NUM_LOGGED:
            logger.warning("an answer scores 0, %s no. %d: %s", status, number, ascii(reason))
        return dataclasses.replace(NO_SCORE, status=status, feedback=as_feedback(f"{status}: {reason}"))


def check_isolation(section: ScorerSection, bubblewrap: FoundBubblewrap) -> Iterator[Problem]:
    """Yield a problem if answers would be verified with weaker isolation than the config accepts."""
    if bubblewrap.path is None and not section.allow_weaker_isolation:
        yield Problem(
            field="scorer.allow_weaker_isolation",
            value=False,
            remedy=f"answers are verified in bubblewrap, which does not work here ({bubblewrap.problem}): "
            f"{HOW_TO_GET}; or set it to true (in calls of math_reward: allow_weaker_isolation=True) to "
            "verify them behind the weaker layers that work here (docs/scoring.md)",
        )


_MATH_POOLS = {
    allowed: VerifierPool(MathVerifierChoice(), ScorerSection(num_workers=1, allow_weaker_isolation=allowed))
    for allowed in (False, True)
}
"""Pools of ``math_reward``; neither starts a process before its first call."""


def math_reward(response: str, answer: str, *, allow_weaker_isolation: bool = False) -> float:
    r"""Return 1.0 if the final answer of ``response`` equals ``answer``, else 0.0.

    The final answer is the content of the last ``\boxed`` or ``\fbox`` after ``</think>``, else the last
    number or formula there. A last box that is empty or unfinished is not an answer.

    Rational numbers must be equal exactly, including powers, factorials and decimals: 0.333333 is not 1/3. A
    decimal equals an irrational number if it differs by at most one part in 10**6. Irrational numbers are
    equal if they agree to 50 digits and their difference vanishes at 1000. A number of more than 131,072 bits
    is not computed: it equals only a number in the same notation. A number with a base, as 100_2, equals only
    the same number with the same base.

    Works from any thread. ``response`` is untrusted, so it is verified in a process that bubblewrap isolates.
    If bubblewrap does not work, ``allow_weaker_isolation`` allows verification behind the layers that do
    (``forgeasync.isolation.layers``).

    Raises:
        ValueError: Bubblewrap does not work here, and weaker layers are not allowed.
        VerifierFailure: No process can be started.
    """
    pool = _MATH_POOLS[allow_weaker_isolation]
    task = Task(task_id="math_reward", prompt="", answer=answer, source_index=0, source="math_reward")
    return pool.score(task, response).value


def verifier_choice(
    reward: ReasoningGymReward | MathReward, source: NamedSource, *, seed: int
) -> VerifierChoice:
    """Return the verifier of the problems that ``build_source`` makes with the same seed, in any process."""
    if isinstance(reward, MathReward):
        return MathVerifierChoice()
    assert isinstance(source.source, ReasoningGymSource), "checked before a run starts"
    return GymVerifierChoice(
        source=source.source, num_train=source.num_train, num_held_out=source.num_held_out, seed=seed
    )
