"""Rewards for mathematical answers, by math-verify, in a worker process with hard time and memory limits.

math-verify's own limits rest on signal.alarm: they need a main thread and cannot stop one long C call,
such as raising an integer to an integer power. Here a process is killed instead, so this works from any
thread of any process.
"""

import json
import logging
import os
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import forgeasync

logger = logging.getLogger(__name__)

STARTUP_LIMIT_S = 120.0
"""A worker that is not ready by then is taken for broken."""

_ALARM_GRACE_S = 5.0
"""The worker's own alarm comes this much later than the parent's kill: it is for orphans only."""


def _start_process(*, memory_limit_mib: int, time_limit_s: float) -> subprocess.Popen[bytes]:
    package_root = str(Path(forgeasync.__path__[0]).parent)
    search_path = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [
            sys.executable,
            # -P keeps the current folder off sys.path: a math.py there would shadow the stdlib's.
            "-P",
            "-m",
            "forgeasync.scoring.math_worker",
            f"--memory-limit-bytes={memory_limit_mib * 2**20}",
            f"--time-limit-s={time_limit_s + _ALARM_GRACE_S}",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(search_path)},
    )


def _stop_process(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None and process.stdout is not None
    process.kill()
    process.wait()
    with suppress(BrokenPipeError):  # a request that the killed worker never read is still buffered
        process.stdin.close()
    process.stdout.close()


def _exchange(
    process: subprocess.Popen[bytes], request: bytes, *, limit_s: float
) -> tuple[dict[str, Any] | None, bool]:
    """Send ``request`` and wait for a reply; returns (reply or None, whether the limit killed it)."""
    assert process.stdin is not None and process.stdout is not None
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        process.kill()

    # The kill ends a blocked write as well as a blocked read.
    timer = threading.Timer(limit_s, expire)
    timer.daemon = True
    timer.start()
    line = b""
    try:
        process.stdin.write(request)
        process.stdin.flush()
        line = process.stdout.readline()
    except BrokenPipeError:
        line = b""  # the worker died: reported below as no reply
    finally:
        timer.cancel()
        timer.join()
    return (json.loads(line) if line.endswith(b"\n") else None), expired.is_set()


class MathVerifier:
    """Compares answers in one worker process, which is started when first needed and replaced when lost.

    Thread-safe; calls wait for each other, and waiting does not count against ``time_limit_s`` (seconds
    of wall time per call). ``memory_limit_mib`` is what one worker may allocate beyond its own code.
    """

    def __init__(self, *, time_limit_s: float = 3.0, memory_limit_mib: int = 1024) -> None:
        self._time_limit_s = time_limit_s
        self._memory_limit_mib = memory_limit_mib
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._stop: weakref.finalize | None = None
        self._num_timeouts = 0
        self._num_crashes = 0
        self._num_errors = 0

    @property
    def num_timeouts(self) -> int:
        """Calls cut off by the time limit (and so not correct)."""
        return self._num_timeouts

    @property
    def num_crashes(self) -> int:
        """Calls during which the worker died by itself (and so not correct)."""
        return self._num_crashes

    @property
    def num_errors(self) -> int:
        """Calls in which math-verify raised (and so not correct)."""
        return self._num_errors

    @property
    def worker_pid(self) -> int | None:
        """Process id of the current worker; None while there is none."""
        return None if self._process is None else self._process.pid

    def verify(self, response: str, answer: str) -> bool:
        """Whether the final answer of ``response`` equals ``answer``; False when cut off.

        Raises RuntimeError if a worker cannot be started.
        """
        request = json.dumps({"response": response, "answer": answer}).encode() + b"\n"
        with self._lock:
            process = self._ready_process()
            reply, expired = _exchange(process, request, limit_s=self._time_limit_s)
            if reply is None or expired or reply["retire"]:
                self._discard_process()
            if reply is None:
                self._count_lost(expired=expired, exit_code=process.returncode)
                return False
            if "error" in reply:
                self._num_errors += 1
                logger.warning("math-verify failed (%d so far): %s", self._num_errors, reply["error"])
                return False
            return reply["correct"]

    def close(self) -> None:
        """Stop the worker; a later call starts a new one."""
        with self._lock:
            self._discard_process()

    def _ready_process(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            logger.warning("the idle math worker ended with code %d", self._process.returncode)
            self._discard_process()
        if self._process is None:
            self._process = _start_process(
                memory_limit_mib=self._memory_limit_mib, time_limit_s=self._time_limit_s
            )
            # Runs at exit too, and when the verifier is garbage.
            self._stop = weakref.finalize(self, _stop_process, self._process)
            reply, _ = _exchange(self._process, b"", limit_s=STARTUP_LIMIT_S)
            if reply is None:
                exit_code = self._process.poll()
                self._discard_process()
                raise RuntimeError(f"the math worker did not start: exit code {exit_code}, see stderr")
        return self._process

    def _discard_process(self) -> None:
        if self._stop is not None:
            self._stop()
        self._process = None
        self._stop = None

    def _count_lost(self, *, expired: bool, exit_code: int) -> None:
        if expired:
            self._num_timeouts += 1
            logger.warning(
                "a math answer was cut off after %g s (%d so far)", self._time_limit_s, self._num_timeouts
            )
        else:
            self._num_crashes += 1
            logger.warning("the math worker died with code %d (%d so far)", exit_code, self._num_crashes)


DEFAULT_VERIFIER = MathVerifier()
"""The verifier behind ``math_reward``; it holds no process until its first call."""


def math_reward(response: str, answer: str) -> float:
    r"""1.0 if the final answer of ``response`` (its last ``\boxed``, if any) equals ``answer``, else 0.0."""
    return 1.0 if DEFAULT_VERIFIER.verify(response, answer) else 0.0
