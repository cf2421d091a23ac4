"""A few processes of verifiers, shared by threads."""

import dataclasses
import logging
import queue
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from typing import Any

from forgeasync.config import ScorerSection
from forgeasync.rollouts import NO_SCORE, Score, ScoreStatus, VerifierCounts, as_feedback
from forgeasync.schema import raise_if_any
from forgeasync.scoring.sandbox import Bubblewrap, check_isolation, find_bubblewrap
from forgeasync.scoring.verifier import MathProblem, MathVerifierChoice, Problem, VerifierChoice
from forgeasync.scoring.verifier_process import AnswerLimits, VerifierProcess

logger = logging.getLogger(__name__)


MAX_ANSWER_BYTES = 1 << 20
"""Longest answer that is read; a longer one scores 0. Many verifiers take time quadratic in the length."""


_NUM_LOGGED = 20
"""Number of unverified answers of each kind that are logged one by one; all are counted."""


class _Lost(StrEnum):
    """Why an answer could not be verified."""

    TIMEOUT = "timeout"
    CRASH = "crash"
    ERROR = "error"
    OVERSIZED = "oversized"


_STATUS = {kind: ScoreStatus(kind.value) for kind in _Lost}


class VerifierPool:
    """Verifies answers in up to ``scorer.num_workers`` processes at once; thread-safe.

    Every call takes one process for itself. Waiting for one does not count against the answer's limit of
    time.
    """

    def __init__(
        self, choice: VerifierChoice, section: ScorerSection, *, bubblewrap: Bubblewrap | None = None
    ) -> None:
        """Processes start when they are first needed; without ``bubblewrap`` it is looked for then."""
        self._choice = choice
        self._section = section
        self._limits = AnswerLimits(
            time_s=section.answer_limit_s, memory_bytes=section.answer_memory_mib * 2**20
        )
        self._bubblewrap = bubblewrap
        self._processes: list[VerifierProcess] = []
        self._idle: queue.LifoQueue[VerifierProcess] = queue.LifoQueue()
        self._lock = threading.Lock()
        self._num_lost: Counter[_Lost] = Counter()

    @property
    def counts(self) -> VerifierCounts:
        """Count the answers that could not be verified so far."""
        with self._lock:
            return VerifierCounts(
                num_timeouts=self._num_lost[_Lost.TIMEOUT],
                num_crashes=self._num_lost[_Lost.CRASH],
                num_errors=self._num_lost[_Lost.ERROR],
                num_oversized=self._num_lost[_Lost.OVERSIZED],
            )

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the running workers."""
        return tuple(one.pid for one in self._processes if one.pid is not None)

    def start(self) -> str:
        """Start all processes concurrently; returns a sentence on what isolates them.

        Raises:
            ValueError: the choice of verifier is impossible, or bubblewrap does not work and the config does
                not accept weaker layers; names the config field.
            VerifierFailure: a process does not start.
        """
        self._make_processes()
        with ThreadPoolExecutor(self._section.num_workers) as threads:
            (layers, *_) = threads.map(VerifierProcess.start, self._processes)
        assert self._bubblewrap is not None
        why = f" (no bubblewrap: {self._bubblewrap.problem})" if self._bubblewrap.path is None else ""
        description = (
            f"{self._section.num_workers} processes verify answers, isolated by {', '.join(layers)}{why}"
        )
        logger.info("%s", description)
        return description

    def score(self, problem: Problem, response: str) -> Score:
        """Score one response; 0.0, counted, if it cannot be verified within its limits.

        Raises:
            ValueError: as ``start``; ``ProblemDiffers``: the problem is not what its index generates.
            VerifierFailure: a process cannot be started.
        """
        if len(response) > MAX_ANSWER_BYTES or len(response.encode(errors="replace")) > MAX_ANSWER_BYTES:
            return self._lost(_Lost.OVERSIZED, f"longer than {MAX_ANSWER_BYTES} bytes")
        self._make_processes()
        process = self._idle.get()
        try:
            verdict = process.verify(problem, response)
        finally:
            self._idle.put(process)
        return self._judged(verdict)

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
                self._processes.append(VerifierProcess(self._choice, self._limits, self._bubblewrap))
        for process in self._processes:
            self._idle.put(process)

    def _judged(self, verdict: dict[str, Any]) -> Score:
        if "value" in verdict:
            return Score(verdict["value"], verdict["is_correct"], has_answer=verdict["has_answer"])
        if "timeout" in verdict:
            return self._lost(_Lost.TIMEOUT, f"not done in {self._limits.time_s:g} s")
        if "crash" in verdict:
            return self._lost(_Lost.CRASH, f"its process ended ({verdict['crash']})")
        return self._lost(_Lost.ERROR, verdict["error"])

    def _lost(self, kind: _Lost, reason: str) -> Score:
        with self._lock:
            self._num_lost[kind] += 1
            number = self._num_lost[kind]
        if number <= _NUM_LOGGED:
            logger.warning("an answer scores 0, %s no. %d: %s", kind, number, ascii(reason))
        return dataclasses.replace(NO_SCORE, status=_STATUS[kind], feedback=as_feedback(f"{kind}: {reason}"))


_MATH_POOLS = {
    allowed: VerifierPool(MathVerifierChoice(), ScorerSection(num_workers=1, allow_weaker_isolation=allowed))
    for allowed in (False, True)
}
"""The pools behind ``math_reward``; neither starts a process before its first call."""


def math_reward(response: str, answer: str, *, allow_weaker_isolation: bool = False) -> float:
    r"""1.0 if the final answer of ``response`` equals ``answer``, else 0.0.

    The final answer is the content of the last ``\boxed`` or ``\fbox`` after ``</think>``, else the last
    number or formula there. A last box that is empty or not finished is no answer.

    Rational numbers are equal only exactly, with powers, factorials and decimals: 0.333333 is not 1/3. A
    decimal stands for an irrational number if it differs by at most one part in 10**6. Irrational numbers are
    equal if they agree to 50 digits and their difference vanishes at 1000. A number of more than 131,072 bits
    is not computed: it equals only what is written alike. A number with a base, as 100_2, equals only the
    same number with the same base.

    Works from any thread. ``response`` is hostile input, so it is verified in a process that bubblewrap
    isolates. Where bubblewrap does not work, ``allow_weaker_isolation`` has it verified behind the layers
    that do (``forgeasync.scoring.isolation``).

    Raises:
        ValueError: bubblewrap does not work here, and weaker layers are not allowed.
        VerifierFailure: no process can be started.
    """
    pool = _MATH_POOLS[allow_weaker_isolation]
    return pool.score(MathProblem(answer=answer), response).value
