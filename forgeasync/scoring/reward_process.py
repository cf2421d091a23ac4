"""One process that runs a reward, as its parent sees it: calls, their limit, replacement.

The reward is a user's own or a process reward model; the processes of both speak alike.
"""

import dataclasses
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, BinaryIO

from forgeasync.config import ProcessRewardModel, PythonReward
from forgeasync.environments import Response
from forgeasync.rollouts import Score, Task
from forgeasync.scoring.reward_worker import decode_score, encode_responses
from forgeasync.scoring.sandbox import python_path
from forgeasync.scoring.verifier_process import kill_group, stop_process

STARTUP_LIMIT_S = 120.0
"""Seconds after which a process that has not imported and built its reward counts as stuck."""

GRACE_S = 1.0
"""Seconds after which the parent kills a process that failed to cancel a coroutine at its limit."""


ProcessReward = PythonReward | ProcessRewardModel
"""The rewards that have processes of this kind."""


class RewardFailure(RuntimeError):
    """A reward has not scored; the message says why. It is never the fault of a response."""


class RewardTimeout(RewardFailure):
    """A call took longer than its limit."""


class ProcessKilled(RuntimeError):
    """The process was killed because another of its calls did not end."""


class _Running:
    """One process, the calls that it works on, and the thread that hands its replies out."""

    def __init__(self, section: ProcessReward) -> None:
        """Raises as ``RewardProcess.start``."""
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", _module(section)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Unlike a verifier's process it has the environment of the run: its code is the user's or ours.
            env=os.environ | {"PYTHONPATH": python_path()} | _own_environment(section),
            # A process group of its own, to be killed as one; Ctrl-C does not reach it.
            start_new_session=True,
        )
        # Runs at exit too, and when this object is garbage.
        self.stop = weakref.finalize(self, stop_process, process, None)
        self._lock = threading.Lock()
        self._num_calls = 0
        self._pending: dict[int, Future[dict[str, Any]]] = {}
        self._is_killed = False
        try:
            self.is_async, self.version = self._build(section)
        except BaseException:
            self.stop()
            raise
        reader = threading.Thread(
            target=_read_replies, args=[weakref.ref(self), process.stdout], name="reward replies", daemon=True
        )
        reader.start()

    def _build(self, section: ProcessReward) -> tuple[bool, str]:
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        is_late = threading.Event()
        limit_s = section.start_limit_s if isinstance(section, ProcessRewardModel) else STARTUP_LIMIT_S

        def give_up() -> None:
            is_late.set()
            kill_group(process)

        timer = threading.Timer(limit_s, give_up)
        timer.daemon = True
        timer.start()
        line = b""
        with suppress(BrokenPipeError):  # it has died: there is no reply
            process.stdin.write(_line({"reward": section.model_dump(mode="json")}))
            process.stdin.flush()
            line = process.stdout.readline()
        timer.cancel()
        if is_late.is_set():
            raise RewardTimeout(f"was not imported and built within {limit_s:g} s")
        if not line.endswith(b"\n"):
            status = process.wait()
            raise ValueError(f"ended its process (exit status {status}) while it was imported and built")
        reply = json.loads(line)
        if "refused" in reply:
            raise ValueError(reply["refused"])
        return reply["is_async"], reply["version"]

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._is_killed or self._process.poll() is not None

    def request(self, request: dict[str, Any]) -> tuple[int, Future[dict[str, Any]]]:
        """Begin a call; returns its number and the future of its reply."""
        future: Future[dict[str, Any]] = Future()
        assert self._process.stdin is not None
        with self._lock:
            number = self._num_calls
            self._num_calls += 1
            if self._is_killed:
                future.set_exception(ProcessKilled())
                return number, future
            self._pending[number] = future
            with suppress(BrokenPipeError):  # the reader finds that it has ended
                self._process.stdin.write(_line({"call": number, **request}))
                self._process.stdin.flush()
        return number, future

    def kill(self, number: int) -> bool:
        """Kill the process over a call that does not end; its other calls fail. False if killed before."""
        with self._lock:
            self._pending.pop(number, None)
            was_killed, self._is_killed = self._is_killed, True
        kill_group(self._process)
        return not was_killed

    def reply(self, reply: dict[str, Any]) -> None:
        """Pass a reply to the caller that waits for it."""
        with self._lock:
            future = self._pending.pop(reply["call"], None)
        if future is not None:
            future.set_result(reply)

    def end(self) -> None:
        """Fail all pending calls: no more replies will come."""
        status = self._process.wait()
        with self._lock:
            left, self._pending = list(self._pending.values()), {}
            error = RewardFailure(f"ended its process (exit status {status})")
            is_killed, self._is_killed = self._is_killed, True
        for future in left:
            future.set_exception(ProcessKilled() if is_killed else error)


def _module(section: ProcessReward) -> str:
    """What the process runs."""
    if isinstance(section, ProcessRewardModel):
        return "forgeasync.scoring.process_reward_worker"
    return "forgeasync.scoring.reward_worker"


def _own_environment(section: ProcessReward) -> dict[str, str]:
    """Variables of the process alone. Scorers themselves see no GPU."""
    if isinstance(section, ProcessRewardModel) and section.gpu is not None:
        return {"CUDA_VISIBLE_DEVICES": str(section.gpu)}
    return {}


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _read_replies(running_ref: weakref.ref[_Running], replies: BinaryIO) -> None:
    """Read until the process ends; holds no reference meanwhile, so that a dropped object ends it."""
    with suppress(ValueError):  # closed by ``stop``
        for line in replies:
            running = running_ref()
            if running is not None:
                running.reply(json.loads(line))
            del running
    running = running_ref()
    if running is not None:
        running.end()


class RewardProcess:
    """Runs calls of one reward; thread-safe. The process starts when needed, and again after its end."""

    def __init__(self, section: ProcessReward) -> None:
        self._section = section
        self._running: _Running | None = None
        self._starting = threading.Lock()
        self.num_killed = 0
        """Processes so far that were killed because a call did not end."""

    @property
    def pid(self) -> int | None:
        """Process id of the running process; None without one."""
        return None if self._running is None else self._running.pid

    @property
    def is_running(self) -> bool:
        """Whether a call needs no new process, as far as is known."""
        return self._running is not None and not self._running.has_ended

    @property
    def version(self) -> str:
        """A digest of what decides the reward; "" without a process."""
        return "" if self._running is None else self._running.version

    def start(self) -> bool:
        """Start the process if needed; returns whether its calls can run concurrently.

        Raises:
            ValueError: the reward cannot be imported or built; says why.
            RewardTimeout: that took longer than ``STARTUP_LIMIT_S``.
        """
        return self._started().is_async

    def call(self, task: Task, responses: Sequence[Response]) -> tuple[Score, ...]:
        """Score responses to one task; blocks until the scores are there.

        Raises:
            RewardTimeout: they were not there in time; a process that this blocked is gone.
            RewardFailure: the reward raised, returned what is no score, or ended its process.
            ProcessKilled: another call has not ended.
        """
        try:
            running = self._started()
        except ValueError as error:
            # The reward could be built when the run began.
            raise RewardFailure(f"cannot be built any more: {error}") from error
        request = {"task": dataclasses.asdict(task), "responses": encode_responses(responses)}
        number, future = running.request(request)
        limit_s = self._section.limit_s
        too_long = f"took longer than {limit_s:g} s (limit_s)"
        try:
            reply = future.result(limit_s + (GRACE_S if running.is_async else 0.0))
        except TimeoutError:
            reply = {"blocked": True}
        if "blocked" in reply:
            self.num_killed += running.kill(number)
            raise RewardTimeout(f"{too_long}; its process was killed")
        if "timeout" in reply:
            raise RewardTimeout(too_long)
        if "error" in reply:
            raise RewardFailure(reply["error"])
        return tuple(decode_score(score) for score in reply["scores"])

    def stop(self) -> None:
        """End the process; ``start`` starts another one."""
        with self._starting:
            if self._running is not None:
                self._running.stop()
                self._running = None

    def _started(self) -> _Running:
        with self._starting:
            if self._running is not None and self._running.has_ended:
                self._running.stop()
                self._running = None
            if self._running is None:
                self._running = _Running(self._section)
            return self._running
