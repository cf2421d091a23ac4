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
from dataclasses import dataclass
from typing import Any, BinaryIO

from forgeasync.scoring.answer_fork import AnswerFork, ForkLimits, plain_bytes
from forgeasync.scoring.isolation import enter_isolation, read_only_roots
from forgeasync.scoring.verifier import CHOICE_CODEC, PROBLEM_CODEC, Problem, Verifier, build_verifier

LOAD_LIMIT_S = 60.0
"""Seconds to generate a problem again; after that, this process ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """Settings of a process of verifiers."""

    choice: dict[str, Any]
    """The choice of verifier, encoded by ``CHOICE_CODEC``."""
    answer_limit_s: float
    answer_memory_bytes: int
    scratch_folder: str | None
    """A folder of the host, removed once all is imported; None where bubblewrap is around."""


class _Answers:
    """The problem that answers are for, and the fork that reads them."""

    def __init__(self, verifier: Verifier, limits: ForkLimits) -> None:
        self._verifier = verifier
        self._limits = limits
        self._problem: Problem | None = None
        self._loaded: Any = None
        self._news = b""
        """The problem as the fork has not seen it yet."""
        self._fork: AnswerFork | None = None
        # The forks share its pages for as long as neither side writes to them.
        gc.collect()
        gc.freeze()

    def load(self, problem: Problem) -> dict[str, Any]:
        if problem == self._problem:
            return {"loaded": True}
        signal.setitimer(signal.ITIMER_REAL, LOAD_LIMIT_S)
        try:
            self._loaded = self._verifier.load(problem)
        except ValueError as error:
            return {"refused": str(error)}
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        self._problem = problem
        if self._fork is not None:
            plain = plain_bytes(self._loaded)
            if plain is None:
                self._end_fork()
            else:
                self._news = plain
        return {"loaded": True}

    def verify(self, answer: str) -> dict[str, Any]:
        if self._fork is not None and self._fork.has_ended():
            # Between two answers: not the next one's fault.
            self._end_fork()
        if self._fork is None:
            self._fork, self._news = AnswerFork(self._verifier, self._loaded, self._limits), b""
        news, self._news = self._news, b""
        verdict, is_clean = self._fork.verify(answer, news)
        if not is_clean:
            self._end_fork()
        return verdict

    def _end_fork(self) -> None:
        if self._fork is not None:
            self._fork.close()
            self._fork = None


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
