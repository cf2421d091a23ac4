"""The process of ``apps.grpo --supervise``: starts the run, and restarts it whenever it dies.

    python -m forgeasync.controller.supervisor [--resume latest|FOLDER] --config FILE ... [key.path=value ...]

The process is small, because it imports neither torch nor vLLM, and only waits while the run is alive. When
the run dies, it ends the run's remaining processes, records the death in ``faults.jsonl``, and starts the run
with ``--resume latest``. If there is no checkpoint yet, the run starts from the beginning in the same folder,
and the earlier files are moved aside. ``RestartPolicy``, a pure state machine, decides when to give up.
Ctrl-C and SIGTERM are passed on to the run and end both processes.
"""

import argparse
import contextlib
import ctypes
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import NoReturn

import psutil

from forgeasync.checkpoints import list_checkpoints
from forgeasync.config import load_config
from forgeasync.controller.resume import (
    LATEST,
    begin_anew,
    end_leftovers,
    has_ended,
    newest_step,
    planned_folder,
)
from forgeasync.files import is_refusal, read_json_lines
from forgeasync.observability import RETRY_S, FaultLog, Role, RunDir, RunInUse, RunLock, default_run_dir
from forgeasync.processes import NotEnded, end_all
from forgeasync.runtime import STOP_SIGNALS, read_stacks
from forgeasync.schema import EXIT_FAILED, EXIT_REFUSED, EXIT_SIGNAL, ConfigError

MAX_STARTS_WITHOUT_STEP = 5
"""Maximum number of consecutive starts that make no new step; after that the supervisor gives up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The end of one start of a run."""

    exit_code: int
    """Exit code as in ``subprocess``: negative after a signal."""
    stopped_by: signal.Signals | None
    """Signal that stopped the supervisor; None if there was none."""
    newest_step: int
    """Newest step that the run has recorded, over all starts; 0: none."""
    has_ended: bool
    """Whether the run has made all its steps and exported its model, regardless of what came after."""
    words: str
    """Description of the ending, such as "was killed by SIGKILL"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Decision to end the supervision."""

    exit_code: int
    words: str | None = None
    """Message for the user; None: the run itself has reported its end."""


def is_death(ending: Ending) -> bool:
    """Return whether a run has ended for another reason than completion, refusal or its user."""
    return ending.stopped_by is None and ending.exit_code not in (
        0,
        EXIT_REFUSED,
        *(EXIT_SIGNAL + one for one in STOP_SIGNALS),
        # The signal can arrive before the run handles it.
        *(-one for one in STOP_SIGNALS),
    )


class RestartPolicy:
    """Decides after each start of one run whether to restart it."""

    def __init__(self, newest_step: int) -> None:
        """``newest_step`` is the newest step that was recorded before the first start."""
        self._newest_step = newest_step
        self._num_without_step = 0

    def after(self, ending: Ending) -> End | None:
        """Record the ending of a start; return how the supervision ends, or None to restart the run."""
        if not is_death(ending):
            return End(exit_code=_exit_code(ending))
        if ending.has_ended:
            return End(exit_code=0, words=f"the run {ending.words}, after it had done everything")
        if ending.newest_step > self._newest_step:
            self._newest_step, self._num_without_step = ending.newest_step, 0
        else:
            self._num_without_step += 1
        if self._num_without_step < MAX_STARTS_WITHOUT_STEP:
            return None
        return End(
            exit_code=EXIT_FAILED,
            words=f"failed: {MAX_STARTS_WITHOUT_STEP} starts in a row made no new step (the newest one is "
            f"{self._newest_step}); the last one {ending.words}",
        )


def _exit_code(ending: Ending) -> int:
    if ending.exit_code >= 0:
        return ending.exit_code
    return EXIT_SIGNAL + (-ending.exit_code if ending.stopped_by is None else ending.stopped_by)


LINGER_S = 5.0
"""Seconds that processes of a run that was not killed have to end by themselves before they are killed."""

PIPE = "FORGEASYNC_SUPERVISOR_PIPE"
"""Environment variable with the file descriptor to which a run writes its heartbeats."""

BEAT_S = 1.0
"""Seconds between two heartbeats."""

LOOK_S = 0.5
"""Maximum seconds that one check waits for a heartbeat."""

STALL_S = 5.0
"""Seconds between two checks above which the supervisor itself was suspended, and perhaps the run too."""

_PR_SET_CHILD_SUBREAPER = 36


def become_supervisor(configs: Sequence[str], overrides: Sequence[str], resume: str | None) -> NoReturn:
    """Replace this process by a supervisor, which needs less memory because it imports little."""
    command = [sys.executable, "-m", "forgeasync.controller.supervisor"]
    command += [] if resume is None else ["--resume", resume]
    os.execv(sys.executable, [*command, *_run_arguments(configs, overrides)])


def _run_arguments(configs: Sequence[str], overrides: Sequence[str]) -> list[str]:
    return [*(part for file in configs for part in ("--config", file)), *overrides]


class Supervisor:
    """Supervises one run."""

    def __init__(
        self,
        command: Sequence[str],
        run_dir: RunDir,
        checkpoints: Path,
        *,
        resume: str | None,
        controller_s: float,
    ) -> None:
        """Supervise the run that ``command`` starts.

        Args:
            command: Command line of the run; the supervisor appends ``--resume``.
            run_dir: The run's folder.
            checkpoints: Folder of the run's checkpoints.
            resume: Value of ``--resume`` for the first start, if any.
            controller_s: Seconds without a heartbeat after which the run is killed.
        """
        self._command = list(command)
        self._run_dir = run_dir
        self._checkpoints = checkpoints
        self._resume = resume
        self._checkpoints_before = list_checkpoints(checkpoints)
        self._child: int | None = None
        self._last_child = 0
        self._received: signal.Signals | None = None
        self._num_faults_before = 0
        """Number of faults recorded before the last start."""
        self._controller_s = controller_s
        self._silence: str | None = None
        """Message about the missing heartbeats for which the run was killed, if it was."""
        self._evidence: str | None = None
        """Stacks of that run, read before it was killed."""

    def run(self) -> int:
        """Supervise until the run is done or cannot continue; return the exit code."""
        _adopt_orphans()
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)
        try:
            return self._supervise()
        except RunInUse as holder:
            _say(f"gives up: {self._run_dir.path} is the folder of another run in progress ({holder})")
            return EXIT_REFUSED
        except NotEnded as error:
            _say(f"gives up: {error}")
            return EXIT_FAILED

    def _supervise(self) -> int:
        resume = self._resume
        policy = RestartPolicy(newest_step(self._run_dir.metrics))
        while True:
            log_bytes, ledger_bytes = _size(self._run_dir.run_log), _size(self._run_dir.ledger)
            exit_code = self._start_and_wait(resume)
            self._end_descendants(at_once=exit_code < 0)
            ending = Ending(
                exit_code=exit_code,
                stopped_by=self._received,
                newest_step=newest_step(self._run_dir.metrics),
                # The ledger must have grown: a resumed run's ledger may hold the end of an earlier start.
                has_ended=_size(self._run_dir.ledger) != ledger_bytes and has_ended(self._run_dir),
                words=self._silence or _words(exit_code, _failure(self._run_dir.run_log, log_bytes)),
            )
            end = policy.after(ending)
            if exit_code not in (0, EXIT_REFUSED):
                resume = self._clean_up(ending, is_restarted=end is None)
            if end is not None:
                if end.words is not None:
                    _say(end.words)
                return end.exit_code
            if self._received is not None:
                return EXIT_SIGNAL + self._received
            _say(f"starting it again{'' if resume is None else f', with --resume {resume}'}")

    def _start_and_wait(self, resume: str | None) -> int:
        """Start the run, wait for it, and return its exit code; reap the run's orphans meanwhile."""
        self._num_faults_before = num_detected(self._run_dir.faults)
        pulse = HeartbeatPipe(limit_s=self._controller_s)
        process = subprocess.Popen(
            [*self._command, *([] if resume is None else ["--resume", resume])],
            pass_fds=[pulse.writer],
            env=os.environ | {PIPE: str(pulse.writer)},
        )
        os.close(pulse.writer)
        self._silence = self._evidence = None
        self._child = self._last_child = process.pid
        if self._received is not None:
            # The signal arrived before the run existed, so it is passed on now.
            os.kill(process.pid, self._received)
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == process.pid:
                self._child = None
                process.returncode = os.waitstatus_to_exitcode(status)
                pulse.close()
                return process.returncode
            if pid == 0 and pulse.look() and self._silence is None:
                self._silence = (
                    f"has not sent a heartbeat for timeouts.controller_s = {self._controller_s:g} s"
                )
                self._evidence = read_stacks(process.pid)
                _say(f"the run {self._silence}: killing it; {self._evidence}")
                process.kill()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._received is None:
            self._received = signal.Signals(number)
        if self._child is not None:
            # Ctrl-C in a terminal has reached the run already; it counts two signals in a row as one.
            with contextlib.suppress(ProcessLookupError):
                # Suppressed if the run has just ended.
                os.kill(self._child, number)

    def _end_descendants(self, *, at_once: bool) -> None:
        """End all remaining processes of the run, which have become descendants of this process."""
        end_all(_descendants, linger_s=0.0 if at_once else LINGER_S)

    def _clean_up(self, ending: Ending, *, is_restarted: bool) -> str | None:
        """End the run's remaining processes, record its death, and prepare its folder for the next start.

        Returns the value of ``--resume`` for the next start; None: start from the beginning.

        Raises:
            RunInUse: another run has locked the folder meanwhile.
            NotEnded: a process of the run does not end.
        """
        folder = self._run_dir
        lock = self._lock_folder()
        try:
            words = [] if lock.before is None else end_leftovers(folder, lock.before)
            faults = FaultLog(folder.faults, _say)
            # A run that fails because it lost a role has recorded that fault itself. Faults recorded by
            # earlier starts do not explain this death.
            is_noted = any(
                fault.role is not Role.CONTROLLER and fault.number >= self._num_faults_before
                for fault in faults.open
            )
            if is_death(ending) and not (ending.exit_code == EXIT_FAILED and is_noted):
                who = f"controller (process {self._last_child})"
                fault = faults.detected(Role.CONTROLLER, who, ending.words, evidence=self._evidence)
                if ending.has_ended:
                    faults.recovered(fault, "had done everything before")
            resume = self._next_resume()
            if is_restarted and resume is None:
                words += begin_anew(folder)
            for line in words:
                _say(line)
            return resume
        finally:
            try:
                lock.release()
            except OSError as error:
                if not is_refusal(error):
                    raise
                # The kernel has released the lock. The file still names this process, and the next start can
                # check that it is gone.
                _say(f"{folder.lock} could not be written at the end: {error}")

    def _lock_folder(self) -> RunLock:
        """Lock the run's folder; retry while its disk refuses writes.

        Raises:
            RunInUse: another run has the lock.
        """
        has_waited = False
        while True:
            try:
                self._run_dir.path.mkdir(parents=True, exist_ok=True)
                return RunLock.take(self._run_dir.lock, secrets.token_hex(16))
            except OSError as error:
                if not is_refusal(error) or self._received is not None:
                    raise
                if not has_waited:
                    _say(f"{self._run_dir.lock} cannot be written ({error}): trying again until it can be")
                has_waited = True
                time.sleep(RETRY_S)

    def _next_resume(self) -> str | None:
        checkpoints = list_checkpoints(self._checkpoints)
        if self._resume is not None and checkpoints == self._checkpoints_before:
            # The run may have died before it moved aside the checkpoints after the one that it resumed from.
            return self._resume
        return LATEST if checkpoints else None


class HeartbeatPipe:
    """Heartbeats of a run: a pipe that gets a byte every ``BEAT_S`` seconds.

    A thread of the run writes the bytes, so a busy event loop does not delay them. They stop only if the
    whole process stops, such as after SIGSTOP. The time limit applies after the first byte, once the program
    has loaded.
    """

    def __init__(self, *, limit_s: float) -> None:
        """``limit_s`` is ``timeouts.controller_s``."""
        self._limit_s = limit_s
        self._reader, self.writer = os.pipe()
        """``writer`` is for the run; close it here once the run has started."""
        self._is_open = True
        self._last_s: float | None = None
        """Time of the last byte; None before the first one."""
        self._looked_s = time.monotonic()

    def look(self) -> bool:
        """Wait up to ``LOOK_S`` for a byte; return whether none has arrived for ``limit_s``.

        Returns immediately if the run ends.
        """
        if not self._is_open:
            time.sleep(LOOK_S / 10)
            return False
        ready, _, _ = select.select([self._reader], [], [], LOOK_S)
        now_s = time.monotonic()
        if now_s - self._looked_s > STALL_S and self._last_s is not None:
            self._last_s = now_s
        self._looked_s = now_s
        if ready and os.read(self._reader, 4096):
            self._last_s = now_s
        elif ready:
            self._is_open = False
        return self._last_s is not None and now_s - self._last_s > self._limit_s

    def close(self) -> None:
        """Close the supervisor's end, after the run has ended."""
        os.close(self._reader)


def start_beating() -> None:
    """Start sending heartbeats to this process's supervisor, if it has one.

    If the supervisor ends, the run continues.
    """
    if (pipe := os.environ.pop(PIPE, None)) is None:
        return
    descriptor = int(pipe)
    # Not inherited by child processes: the supervisor detects this process's end by the end of the pipe.
    os.set_inheritable(descriptor, False)
    os.set_blocking(descriptor, False)
    # First heartbeat before the thread starts, so that the time limit applies from here.
    _beat(descriptor)
    threading.Thread(target=_keep_beating, args=(descriptor,), name="supervisor-beat", daemon=True).start()


def _keep_beating(descriptor: int) -> None:
    while _beat(descriptor):
        time.sleep(BEAT_S)


def _beat(descriptor: int) -> bool:
    """Send one heartbeat; return False if the supervisor is gone."""
    try:
        os.write(descriptor, b".")
    except BlockingIOError:
        # The pipe is full because the supervisor is suspended.
        pass
    except BrokenPipeError:
        return False
    return True


def _adopt_orphans() -> None:
    """Make this process the parent of all descendants whose parents have ended (Linux child subreaper)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def _descendants() -> Iterable[psutil.Process]:
    """Reap children that have ended; return the descendants of this process that still run."""
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        return []
    return psutil.Process().children(recursive=True)


def num_detected(faults: Path) -> int:
    """Return the number of faults in a ``faults.jsonl``, which may be absent or end in a torn line."""
    if not faults.exists():
        return 0
    return sum(event["event"] == "detected" for event in read_json_lines(faults))


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _failure(run_log: Path, start: int) -> str | None:
    """Return the last failure message in a ``run.log`` after its first ``start`` bytes, if any."""
    if not run_log.exists():
        return None
    with run_log.open("rb") as file:
        file.seek(start)
        lines = file.read().decode(errors="replace").splitlines()
    found = [line[line.index(" failed: ") + 1 :] for line in lines if " failed: " in line[:30]]
    return found[-1] if found else None


def _words(exit_code: int, failure: str | None) -> str:
    if exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    words = f"has ended with exit code {exit_code}"
    return words if failure is None else f"{words}: {failure}"


def _say(words: str) -> None:
    print(f"supervisor: {words}", file=sys.stderr, flush=True)


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description="Starts a run again whenever it dies.")
    parser.add_argument("--config", action="append", required=True)
    parser.add_argument("--resume")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_intermixed_args()
    try:
        config = load_config(arguments.config, arguments.overrides)
        overrides = list(arguments.overrides)
        if config.run_dir is None:
            # Every start must use the same folder.
            folder = default_run_dir(config.name, datetime.now())
            overrides.append(f"run_dir={json.dumps(str(folder))}")
            config = load_config(arguments.config, overrides)
    except ConfigError as error:
        print(f"refused:\n{error}", file=sys.stderr)
        return EXIT_REFUSED
    assert config.run_dir is not None
    command = [sys.executable, "-m", "apps.grpo", *_run_arguments(arguments.config, overrides)]
    run_dir = RunDir(path=Path(config.run_dir))
    return Supervisor(
        command,
        run_dir,
        planned_folder(config),
        resume=arguments.resume,
        controller_s=config.timeouts.controller_s,
    ).run()


if __name__ == "__main__":
    sys.exit(main())
