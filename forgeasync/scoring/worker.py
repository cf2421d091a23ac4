"""The process that verifies answers: reads one JSON request a line on stdin, answers one a line on stdout.

Started by ``forgeasync.scoring.verifier_process`` as ``python -m forgeasync.scoring.worker``. It imports the
verifier and generates problems, once for all answers; answers are read in forks of it only.

    {"setup": {...}}        ->  {"ready": [<layers>]}      or {"refused": "<reason>"}
    {"problem": {...}}      ->  {"loaded": true}           or {"refused": "<reason>"}
    {"answer": "<text>"}    ->  {"value": 1.0, "is_correct": true, "has_answer": true},
                                {"error": "<reason>"}, {"timeout": true} or {"crash": <exit status>}
"""

import gc
import json
import os
import shutil
import signal
import sys
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, BinaryIO

from forgeasync.scoring.answer_fork import AnswerFork, ForkLimits, close_all
from forgeasync.scoring.isolation import enter_isolation, read_only_roots
from forgeasync.scoring.verifier import CHOICE_CODEC, PROBLEM_CODEC, Problem, Verifier, build_verifier

LOAD_LIMIT_S = 60.0
"""Seconds to generate a problem again; after that, this process ends."""
MAX_PROBLEMS = 16
"""Most problems that are known at once; the fork of each has some 2 MiB of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """Settings of a process of verifiers."""

    choice: dict[str, Any]
    """The choice of verifier, encoded by ``CHOICE_CODEC``."""
    answer_limit_s: float
    answer_memory_bytes: int
    scratch_folder: str | None
    """A folder of the host, removed once all is imported; None where bubblewrap is around."""


@dataclass(slots=True)
class _Known:
    """A problem that answers came for."""

    loaded: Any
    fork: AnswerFork | None = None


class _Answers:
    """The latest problems, each with the fork that reads its answers.

    A fork costs far more than a plain answer (12 ms to 0.5 ms of processor time for sums), and responses to
    several problems come in turns.
    """

    def __init__(self, verifier: Verifier, limits: ForkLimits) -> None:
        self._verifier = verifier
        self._limits = limits
        self._known: OrderedDict[Problem, _Known] = OrderedDict()
        """Those asked for last come last."""
        # The forks share its pages for as long as neither side writes to them.
        gc.collect()
        gc.freeze()

    def load(self, problem: Problem) -> dict[str, Any]:
        """Have the next answer be one to this problem."""
        if problem not in self._known:
            signal.setitimer(signal.ITIMER_REAL, LOAD_LIMIT_S)
            try:
                self._known[problem] = _Known(self._verifier.load(problem))
            except ValueError as error:
                return {"refused": str(error)}
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0.0)
            if len(self._known) > MAX_PROBLEMS:
                _, oldest = self._known.popitem(last=False)
                self._end_fork(oldest)
        self._known.move_to_end(problem)
        return {"loaded": True}

    def verify(self, answer: str) -> dict[str, Any]:
        """Verify an answer to the problem that was loaded last."""
        known = next(reversed(self._known.values()))
        if known.fork is not None and known.fork.has_ended():
            # Between two answers: not the next one's fault.
            self._end_fork(known)
        if known.fork is None:
            known.fork = AnswerFork(self._verifier, known.loaded, self._limits)
        verdict, is_clean = known.fork.verify(answer)
        if not is_clean:
            self._end_forks()
        return verdict

    def _end_fork(self, known: _Known) -> None:
        if known.fork is not None:
            known.fork.close()
            known.fork = None

    def _end_forks(self) -> None:
        close_all((one.fork for one in self._known.values() if one.fork is not None), self._limits)
        for one in self._known.values():
            one.fork = None


def _reply(replies: BinaryIO, reply: dict[str, Any]) -> None:
    replies.write(json.dumps(reply).encode() + b"\n")
    replies.flush()


def serve() -> None:
    """Answer requests until stdin ends."""
    # Replies get a private descriptor, so that nothing a library prints can end up among them.
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    setup = WorkerSetup(**json.loads(sys.stdin.buffer.readline())["setup"])
    # Before any library can start a thread.
    in_bubblewrap = setup.scratch_folder is None
    layers = enter_isolation(in_bubblewrap=in_bubblewrap)

    limits = ForkLimits(
        answer_limit_s=setup.answer_limit_s,
        answer_memory_bytes=setup.answer_memory_bytes,
        read_roots=read_only_roots(),
        in_bubblewrap=in_bubblewrap,
    )
    try:
        answers = _Answers(build_verifier(CHOICE_CODEC.validate_python(setup.choice)), limits)
    except ValueError as error:
        _reply(replies, {"refused": str(error)})
        return
    if setup.scratch_folder is not None:
        shutil.rmtree(setup.scratch_folder)
    _reply(replies, {"ready": layers})
    for line in sys.stdin.buffer:
        request = json.loads(line)
        if "problem" in request:
            _reply(replies, answers.load(PROBLEM_CODEC.validate_python(request["problem"])))
        else:
            _reply(replies, answers.verify(request["answer"]))


if __name__ == "__main__":
    serve()
