"""One process of verifiers, as its parent sees it: requests with a limit of time, kill, replacement."""

import dataclasses
import json
import logging
import os
import shutil
import signal
import subprocess
import tempfile
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from forgeasync.scoring.isolation import Layer
from forgeasync.scoring.kill_watch import KILL_WATCH
from forgeasync.scoring.sandbox import (
    Bubblewrap,
    bubblewrap_command,
    environment,
    python_command,
)
from forgeasync.scoring.verifier import CHOICE_CODEC, PROBLEM_CODEC, Problem, VerifierChoice
from forgeasync.scoring.worker import LOAD_LIMIT_S, WorkerSetup

logger = logging.getLogger(__name__)

STARTUP_LIMIT_S = 120.0
"""Seconds after which a process that is not ready counts as broken."""
MAX_REPLY_BYTES = 1 << 16

_GRACE_S = 5.0
"""Seconds by which the parent's kill follows the process's own limits; it is for processes that hang."""


class VerifierFailure(RuntimeError):
    """The process of verifiers cannot do its work; this is never the fault of an answer."""


class ProblemDiffers(ValueError):
    """A problem is not what its index generates here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerLimits:
    """The resources that one answer may use."""

    time_s: float
    """Wall time for verifying one answer, in seconds."""
    memory_bytes: int
    """Bytes that verifying one answer may allocate."""


class VerifierProcess:
    """Verifies one answer at a time; not thread-safe. The process starts with the first request."""

    def __init__(self, choice: VerifierChoice, limits: AnswerLimits, bubblewrap: Bubblewrap) -> None:
        self._choice = choice
        self._limits = limits
        self._bubblewrap = bubblewrap
        self._process: subprocess.Popen[bytes] | None = None
        self._stop: weakref.finalize | None = None
        self._layers: tuple[Layer, ...] = ()

    @property
    def pid(self) -> int | None:
        """Process id of the running worker; None without one."""
        return None if self._process is None else self._process.pid

    def start(self) -> tuple[Layer, ...]:
        """Start the process if needed; returns what isolates it.

        Raises:
            ValueError: the choice of verifier is impossible, with the config field.
            VerifierFailure: the process does not start.
        """
        if self._process is not None and self._process.poll() is not None:
            logger.warning(
                "a process of verifiers ended with code %d between answers", self._process.returncode
            )
            self.stop()
        if self._process is None:
            scratch = self._spawn()
            setup = WorkerSetup(
                choice=CHOICE_CODEC.dump_python(self._choice, mode="json"),
                answer_limit_s=self._limits.time_s,
                answer_memory_bytes=self._limits.memory_bytes,
                scratch_folder=scratch,
            )
            reply = self._exchange({"setup": dataclasses.asdict(setup)}, limit_s=STARTUP_LIMIT_S)
            if reply is None:
                raise VerifierFailure(
                    "a process of verifiers did not start; see its messages in the scorer's log"
                )
            if "refused" in reply:
                self.stop()
                raise ValueError(reply["refused"])
            self._layers = tuple(Layer(one) for one in reply["ready"])
        return self._layers

    def verify(self, problem: Problem, answer: str) -> dict[str, Any]:
        """Return the verdict on one answer, in a form of ``forgeasync.scoring.worker``'s protocol.

        Raises:
            ProblemDiffers: the problem's index generates another problem here.
            VerifierFailure: the process does not start, or ends over the problem.
        """
        self.start()
        request = {"problem": PROBLEM_CODEC.dump_python(problem, mode="json")}
        loaded = self._exchange(request, limit_s=LOAD_LIMIT_S + _GRACE_S)
        if loaded is None:
            raise VerifierFailure(f"the process of verifiers ended while it loaded {str(problem)[:500]}")
        if "refused" in loaded:
            raise ProblemDiffers(loaded["refused"])
        verdict = self._exchange({"answer": answer}, limit_s=self._limits.time_s + _GRACE_S)
        return {"crash": "the whole process of verifiers"} if verdict is None else verdict

    def stop(self) -> None:
        """End the process; the next request starts another one."""
        if self._stop is not None:
            self._stop()
        self._process = self._stop = None

    def _spawn(self) -> str | None:
        """Returns the folder that imported libraries may write to; None where bubblewrap has one."""
        command = python_command(["-m", "forgeasync.scoring.worker"])
        variables, scratch = environment(), None
        if self._bubblewrap.path is not None:
            command = [*bubblewrap_command(self._bubblewrap.path), *command]
        else:
            # The process removes it once it has imported everything.
            scratch = tempfile.mkdtemp(prefix="forgeasync-verifier-")
            variables = environment(scratch)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=variables,
            cwd="/",
            # A process group of its own, to be killed as one; Ctrl-C does not reach it.
            start_new_session=True,
        )
        # Runs at exit too, and when this object is garbage.
        self._stop = weakref.finalize(self, stop_process, self._process, scratch)
        return scratch

    def _exchange(self, request: dict[str, Any], *, limit_s: float) -> dict[str, Any] | None:
        """Return the reply to a request; None if there is none in time, after killing the process."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        line = b""
        # The kill ends a blocked write as well as a blocked read. A broken pipe is that of a process that
        # died, which is reported as no reply.
        with KILL_WATCH.limit(limit_s, lambda: kill_group(process)), suppress(BrokenPipeError):
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline(MAX_REPLY_BYTES)
        if not line.endswith(b"\n"):
            self.stop()
            return None
        return json.loads(line)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that leads a session, and all that it has started there."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def stop_process(process: subprocess.Popen[bytes], scratch: str | None) -> None:
    """Kill a process, wait for its end, and remove its folder."""
    assert process.stdin is not None and process.stdout is not None
    kill_group(process)
    process.wait()
    with suppress(BrokenPipeError):  # a request that it never read is still buffered
        process.stdin.close()
    process.stdout.close()
    if scratch is not None:
        shutil.rmtree(scratch, ignore_errors=True)
