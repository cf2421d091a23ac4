"""The process behind ``apps.grpo --supervise``: starts the run, and starts it again whenever it dies.

    python -m forgeasync.controller.supervisor [--resume latest|FOLDER] --config FILE ... [key.path=value ...]

It is small, as it imports neither torch nor vLLM, and does nothing while the run goes on. After a death it
ends what the run has left, writes the death into ``faults.jsonl``, and starts the run with ``--resume
latest``. If no checkpoint was written yet, the run begins anew in the same folder, and the files of the start
before are moved aside. ``runtime/restart_policy.py`` decides when to give up. Ctrl-C and SIGTERM go to the
run, and end both.
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
from forgeasync.runtime import STOP_SIGNALS, End, Ending, Restart, RestartPolicy, is_death, read_stacks
from forgeasync.schema import EXIT_FAILED, EXIT_REFUSED, EXIT_SIGNAL, ConfigError

LINGER_S = 5.0
"""Time for what a run that ended in order has started to end by itself, before it is killed."""

PIPE = "FORGEASYNC_SUPERVISOR_PIPE"
"""Environment variable with the file descriptor that a run writes its signs of life to."""

BEAT_S = 1.0
"""Seconds between two signs of life."""

LOOK_S = 0.5
"""Seconds between two looks at a run, if nothing comes."""

STALL_S = 5.0
"""A look that comes later than this shows that the supervisor stood still, and maybe the run with it."""

_PR_SET_CHILD_SUBREAPER = 36


def become_supervisor(configs: Sequence[str], overrides: Sequence[str], resume: str | None) -> NoReturn:
    """Replace this process, which has imported everything, by a small one that supervises the run."""
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

        With ``--resume latest`` behind it, it goes on from the newest one of ``checkpoints``. ``resume`` is
        what the first start is resumed from. A run that gives no sign of life for ``controller_s`` is killed.
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
        """Faults that were noted before the last start."""
        self._controller_s = controller_s
        self._silence: str | None = None
        """Says that the run was killed because it stood still; None: it was not."""
        self._evidence: str | None = None
        """The stacks of the run that stood still, before it was killed."""

    def run(self) -> int:
        """Supervise until the run is done or cannot go on; returns the exit code."""
        _adopt_orphans()
        for number in STOP_SIGNALS:
            signal.signal(number, self._on_signal)
        try:
            return self._supervise()
        except RunInUse as holder:
            _say(f"gives up: {self._run_dir.path} is the folder of another run at this moment ({holder})")
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
                # An earlier run that was resumed may have had its end too.
                has_ended=_size(self._run_dir.ledger) != ledger_bytes and has_ended(self._run_dir),
                words=self._silence or _words(exit_code, _failure(self._run_dir.run_log, log_bytes)),
            )
            decision = policy.after(ending)
            if exit_code not in (0, EXIT_REFUSED):
                resume = self._clean_up(ending, decision)
            match decision:
                case End():
                    if decision.words is not None:
                        _say(decision.words)
                    return decision.exit_code
                case Restart():
                    if self._received is not None:
                        return EXIT_SIGNAL + self._received
                    _say(f"starting it again{'' if resume is None else f', with --resume {resume}'}")

    def _start_and_wait(self, resume: str | None) -> int:
        """Start the run, and return its exit code; collects orphans of the run that end meanwhile."""
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
            # It came before there was anybody to pass it on to.
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
                    f"has given no sign of life for timeouts.controller_s = {self._controller_s:g} s"
                )
                self._evidence = read_stacks(process.pid)
                _say(f"the run {self._silence}: killing it; {self._evidence}")
                process.kill()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._received is None:
            self._received = signal.Signals(number)
        if self._child is not None:
            # Ctrl-C in a terminal has reached it already, which takes two at once for one.
            with contextlib.suppress(ProcessLookupError):
                # It has ended just now.
                os.kill(self._child, number)

    def _end_descendants(self, *, at_once: bool) -> None:
        """End all processes of the run that are left: they have become this process's children."""
        end_all(_descendants, linger_s=0.0 if at_once else LINGER_S)

    def _clean_up(self, ending: Ending, decision: End | Restart) -> str | None:
        """End what the run has left, note its death, and make its folder ready for the next start.

        Returns what that is to be resumed from; None: it begins anew.

        Raises:
            RunInUse: another run has the folder by now.
            NotEnded: something of the run does not end.
        """
        folder = self._run_dir
        lock = self._lock_folder()
        try:
            words = [] if lock.before is None else end_leftovers(folder, lock.before)
            faults = FaultLog(folder.faults, _say)
            # A run that ends by itself over a role that it has lost has noted whose fault it is. What the
            # starts before have noted says nothing of this one's end.
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
            if isinstance(decision, Restart) and resume is None:
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
                # The kernel has let go of it; the file names this process, which the next start can look for.
                _say(f"{folder.lock} could not be written at the end: {error}")

    def _lock_folder(self) -> RunLock:
        """Lock the run's folder, as soon as its disk lets it be written.

        Raises:
            RunInUse: another run has it.
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
            # It may have died before it moved those aside that are later than the one that it was given.
            return self._resume
        return LATEST if checkpoints else None


class HeartbeatPipe:
    """The signs of life of a run: a pipe with a byte every second.

    A thread of the run writes it, which a busy event loop does not hold up, only what stops the whole
    process, such as SIGSTOP. Before the first byte, while the program is loaded, nothing counts.
    """

    def __init__(self, *, limit_s: float) -> None:
        """``limit_s`` is ``timeouts.controller_s``."""
        self._limit_s = limit_s
        self._reader, self.writer = os.pipe()
        """``writer`` is for the run; close it here once the run has started."""
        self._is_open = True
        self._last_s: float | None = None
        """When the last byte came; None: none has."""
        self._looked_s = time.monotonic()

    def look(self) -> bool:
        """Wait a moment for a byte; returns whether none has come for ``limit_s``.

        If the run ends, the wait is over at once.
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
        """Close the supervisor's end; the run has ended."""
        os.close(self._reader)


def start_beating() -> None:
    """Give this process's supervisor signs of life from now on; does nothing without a supervisor.

    If the supervisor ends, the run goes on.
    """
    if (pipe := os.environ.pop(PIPE, None)) is None:
        return
    descriptor = int(pipe)
    # Processes that this one starts do not inherit it: the supervisor sees this one's end by the pipe's.
    os.set_inheritable(descriptor, False)
    os.set_blocking(descriptor, False)
    # The first at once: what stops this process before the thread runs is to be noticed too.
    _beat(descriptor)
    threading.Thread(target=_keep_beating, args=(descriptor,), name="supervisor-beat", daemon=True).start()


def _keep_beating(descriptor: int) -> None:
    while _beat(descriptor):
        time.sleep(BEAT_S)


def _beat(descriptor: int) -> bool:
    """Give a sign of life; False if the supervisor is gone."""
    try:
        os.write(descriptor, b".")
    except BlockingIOError:
        # The supervisor stands still.
        pass
    except BrokenPipeError:
        return False
    return True


def _adopt_orphans() -> None:
    """Have the kernel make this process the parent of all descendants whose parents are gone."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def _descendants() -> Iterable[psutil.Process]:
    """Return what runs below this process; collects what has ended."""
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        return []
    return psutil.Process().children(recursive=True)


def num_detected(faults: Path) -> int:
    """Return how many faults a faults.jsonl has, which may end in half of a line or not be there."""
    if not faults.exists():
        return 0
    return sum(event["event"] == "detected" for event in read_json_lines(faults))


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _failure(run_log: Path, start: int) -> str | None:
    """Return the line that says why a run failed, after the first ``start`` bytes of its run.log."""
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
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(description="Starts a run again whenever it dies.")
    parser.add_argument("--config", action="append", required=True)
    parser.add_argument("--resume")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_intermixed_args()
    try:
        config = load_config(arguments.config, arguments.overrides)
        overrides = list(arguments.overrides)
        if config.run_dir is None:
            # Every start has to be in the same folder.
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
