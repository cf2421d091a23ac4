"""Processes that run a reward: calls with limits, kill and replacement, and a pool shared by threads.

The reward is a user's own or a process reward model; both kinds of processes use the same protocol.
"""

import dataclasses
import json
import os
import queue
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, BinaryIO

from forgeasync.config import ProcessRewardModel, PythonReward, name_of
from forgeasync.environments import Response
from forgeasync.isolation import ContainedProcess, ProcessExited, python_path
from forgeasync.rollouts import Score, Task
from forgeasync.scoring.reward_worker import decode_score

STARTUP_LIMIT_S = 120.0
"""Seconds within which a process must have imported and built its reward."""

GRACE_S = 1.0
"""Seconds that a process has to cancel a coroutine at its limit before the parent kills it."""

MAX_CONCURRENT_CALLS = 64
"""Maximum number of concurrent calls of a coroutine in each process."""

MAX_KILLED = 3
"""Maximum number of attempts of a call whose process is killed over another call."""

ProcessReward = PythonReward | ProcessRewardModel
"""Rewards that have processes of this kind."""


class RewardFailure(RuntimeError):
    """A reward has not returned scores; the message has the reason. It is never the fault of a response."""


class RewardTimeout(RewardFailure):
    """A call took longer than its limit."""


class ProcessKilled(RuntimeError):
    """The process was killed because another of its calls did not end."""


class _Running:
    """One process, its calls in flight, and the thread that distributes its replies."""

    def __init__(self, section: ProcessReward) -> None:
        """Start the process. Raises the same errors as ``RewardProcess.start``."""
        self._process = ContainedProcess(
            [sys.executable, "-m", _module(section)],
            # Unlike a verifier's process it has the environment of the run, because its code is the user's or
            # ours.
            env=os.environ | {"PYTHONPATH": python_path()} | _own_environment(section),
        )
        self.stop = self._process.stop
        self._lock = threading.Lock()
        self._num_calls = 0
        self._pending: dict[int, Future[dict[str, Any]]] = {}
        self._is_killed = False
        self.is_async, self.version = self._build(section)
        # The thread has no reference to this object, so that dropping it ends the process.
        threading.Thread(
            target=_read_replies,
            args=[weakref.ref(self), self._process.replies],
            name="reward replies",
            daemon=True,
        ).start()

    def _build(self, section: ProcessReward) -> tuple[bool, str]:
        limit_s = section.start_limit_s if isinstance(section, ProcessRewardModel) else STARTUP_LIMIT_S
        try:
            reply = self._process.ask({"reward": section.model_dump(mode="json")}, limit_s=limit_s)
        except ProcessExited as gone:
            if gone.is_late:
                raise RewardTimeout(f"was not imported and built within {limit_s:g} s") from None
            raise ValueError(
                f"ended its process (exit status {gone.exit_code}) while it was imported and built"
            ) from None
        if "refused" in reply:
            self.stop()
            raise ValueError(reply["refused"])
        return reply["is_async"], reply["version"]

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._is_killed or self._process.exit_code is not None

    def request(self, request: dict[str, Any]) -> tuple[int, Future[dict[str, Any]]]:
        """Begin a call; return its number and the future of its reply."""
        future: Future[dict[str, Any]] = Future()
        with self._lock:
            number = self._num_calls
            self._num_calls += 1
            if self._is_killed:
                future.set_exception(ProcessKilled())
                return number, future
            self._pending[number] = future
            self._process.send({"call": number, **request})
        return number, future

    def kill(self, number: int) -> bool:
        """Kill the process over a call that does not end; its other calls fail. False if killed before."""
        with self._lock:
            self._pending.pop(number, None)
            was_killed, self._is_killed = self._is_killed, True
        self._process.kill()
        return not was_killed

    def reply(self, reply: dict[str, Any]) -> None:
        """Pass a reply to the waiting caller."""
        with self._lock:
            future = self._pending.pop(reply["call"], None)
        if future is not None:
            future.set_result(reply)

    def end(self) -> None:
        """Fail all pending calls, because no more replies will arrive."""
        status = self._process.wait()
        with self._lock:
            left, self._pending = list(self._pending.values()), {}
            error = RewardFailure(f"ended its process (exit status {status})")
            is_killed, self._is_killed = self._is_killed, True
        for future in left:
            future.set_exception(ProcessKilled() if is_killed else error)


def _module(section: ProcessReward) -> str:
    """Return the module that the process runs."""
    if isinstance(section, ProcessRewardModel):
        return "forgeasync.scoring.process_reward_worker"
    return "forgeasync.scoring.reward_worker"


def _own_environment(section: ProcessReward) -> dict[str, str]:
    """Return environment variables for this process only. Scorers themselves see no GPU."""
    if isinstance(section, ProcessRewardModel) and section.gpu is not None:
        return {"CUDA_VISIBLE_DEVICES": str(section.gpu)}
    return {}


def _read_replies(running_ref: weakref.ref[_Running], replies: BinaryIO) -> None:
    """Read replies until the process ends.

    Keeps no reference in between, so that dropping the object ends the process.
    """
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
    """Runs calls of one reward; thread-safe. The process starts on demand, and again after its end."""

    def __init__(self, section: ProcessReward) -> None:
        self._section = section
        self._running: _Running | None = None
        self._starting = threading.Lock()
        self.num_killed = 0
        """Number of processes that were killed because a call did not end."""

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
        """Digest of everything that affects the reward; "" without a process."""
        return "" if self._running is None else self._running.version

    def start(self) -> bool:
        """Start the process if needed; return whether its calls can run concurrently.

        Raises:
            ValueError: The reward cannot be imported or built; the message has the reason.
            RewardTimeout: The start took longer than ``STARTUP_LIMIT_S``, or a model's ``start_limit_s``.
        """
        return self._started().is_async

    def call(self, task: Task, responses: Sequence[Response]) -> tuple[Score, ...]:
        """Score responses to one task; blocks until the scores are there.

        Raises:
            RewardTimeout: The call exceeded its limit; a process that it blocked was killed.
            RewardFailure: The reward raised, returned something other than scores, or ended its process.
            ProcessKilled: The process was killed over another call.
        """
        try:
            running = self._started()
        except ValueError as error:
            # The reward could be built when the run began.
            raise RewardFailure(f"cannot be built again: {error}") from error
        request = {"task": dataclasses.asdict(task), "responses": list(map(dataclasses.asdict, responses))}
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
        """Stop the process; ``start`` starts another one."""
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


class RewardPool:
    """Runs one reward in ``num_processes`` processes; thread-safe. A call occupies a place in one of them.

    Waiting for a place does not count towards any limit.
    """

    def __init__(self, section: PythonReward, num_processes: int) -> None:
        """Store the settings; ``start`` starts the processes."""
        self._section = section
        self._name = name_of(section)
        self._processes = [RewardProcess(section) for _ in range(num_processes)]
        self._places: queue.Queue[RewardProcess] = queue.Queue()
        """Each process, once for every further call that it can run."""
        self.num_places = 0
        """Maximum number of concurrent calls; 0 before ``start``."""

    @property
    def counts(self) -> Counter[str]:
        """Counts since the pool was created."""
        return Counter({"scoring/num_killed_rewards": sum(one.num_killed for one in self._processes)})

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the running processes."""
        return tuple(process.pid for process in self._processes if process.pid is not None)

    @property
    def version(self) -> str:
        """Digest of the reward's code, as read by the last of the processes; "" before ``start``."""
        return next((one.version for one in reversed(self._processes) if one.version), "")

    def start(self) -> str:
        """Start all processes concurrently; return a description.

        Raises the same errors as ``RewardProcess.start``.
        """
        with ThreadPoolExecutor(len(self._processes)) as threads:
            (is_async, *_) = threads.map(RewardProcess.start, self._processes)
        calls_at_once = MAX_CONCURRENT_CALLS if is_async else 1
        self.num_places = calls_at_once * len(self._processes)
        for process in self._processes * calls_at_once:
            self._places.put(process)
        how = f"up to {MAX_CONCURRENT_CALLS} calls" if is_async else "one call"
        return f"processes for reward {self._name!r}: {len(self._processes)}, {how} at a time each"

    def score(self, task: Task, responses: Sequence[Response], rollouts: str) -> tuple[Score, ...]:
        """Score responses to one task; ``rollouts`` names them in errors ("rollout 3").

        Raises:
            RewardFailure: There are no scores; the message names the reward, the task and the rollouts.
        """
        try:
            for _ in range(MAX_KILLED):
                process = self._places.get()
                try:
                    return process.call(task, responses)
                except ProcessKilled:
                    continue
                finally:
                    self._places.put(process)
            raise RewardFailure(f"had its process killed {MAX_KILLED} times over other calls")
        except RewardFailure as error:
            where = f"reward {self._name!r} ({self._section.factory}) on task {task.task_id}, {rollouts}"
            raise type(error)(f"{where}: {error}") from None

    def close(self) -> None:
        """Stop the processes; a later call starts new ones."""
        for process in self._processes:
            process.stop()
