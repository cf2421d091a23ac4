"""One of Monarch's jobs from submission to end, with what Slurm or ssh says of it where Monarch does not.

Monarch 0.7.0 says of a job that has ended only that it is no longer active, and of an ssh that has failed
nothing: attaching to hosts that are not there waits for ever.
"""

import asyncio
import concurrent.futures
import logging
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

from monarch._src.job.job import LoginJob  # not among the public names of Monarch 0.7.0
from monarch.job import JobState, JobTrait, SlurmJob

from forgeasync.config import RemoteLauncher, SlurmLauncher
from forgeasync.rollouts import is_running
from forgeasync.waiting import DeadlineExceeded, deadline

ASK_S = 30.0
"""Seconds for an answer of Slurm's commands."""

TELL_S = 15.0
"""Seconds between two looks at what a job in the queue waits for."""

SUBMIT_S = 60.0
"""Seconds that the end of a run waits for a submission under way, whose job it has to cancel."""

ENDINGS = {
    "CANCELLED": "was cancelled by someone other than this run (scancel)",
    "TIMEOUT": "has reached its time limit (launcher.time_limit, or the partition's)",
    "PREEMPTED": "was preempted by another job",
    "NODE_FAIL": "has lost a node",
    "OUT_OF_MEMORY": "has used more memory than it asked for (launcher.mem)",
    "FAILED": "has failed",
    "BOOT_FAIL": "has failed: a node did not boot",
    "DEADLINE": "has reached its deadline",
    "COMPLETED": "has ended",
}
"""What Slurm's states of a job that is over mean here (squeue(1), JOB STATE CODES)."""

REQUEUED = "was put back into the queue (scontrol requeue), which ends its hosts"
"""What it means that a job waits again whose hosts had started."""

logger = logging.getLogger(__name__)


class LaunchFailed(RuntimeError):
    """The hosts of a run did not come, or their job has ended."""


class Submission:
    """A job that is started once and ended once."""

    def __init__(self, job: JobTrait, launcher: RemoteLauncher, log_dir: Path) -> None:
        """``log_dir`` has the scheduler's own logs, and what ssh prints."""
        self._job = job
        self._log_dir = log_dir
        self._launcher = launcher
        self._submitted = threading.Event()
        self._slurm_id: str | None = None
        self._is_started = False
        self._has_hosts = False

    async def start(self, tell: Callable[[str], None]) -> JobState:
        """Submit the job and wait for its hosts, for which a scheduler may need hours.

        What Slurm waits for is told in words, whenever that changes.

        Raises:
            LaunchFailed: the job was refused, has not started within ``launcher.start_timeout_s``, or has
                ended.
        """
        state = await self._start(tell)
        self._has_hosts = True
        return state

    async def _start(self, tell: Callable[[str], None]) -> JobState:
        self._is_started = True
        waiting = asyncio.wrap_future(_in_thread(self._run))
        if not isinstance(self._launcher, SlurmLauncher):
            return await waiting
        limit_s = self._launcher.start_timeout_s
        try:
            if limit_s is None:
                return await self._wait(waiting, tell)
            async with deadline(limit_s, call="the queue", key="launcher.start_timeout_s"):
                return await self._wait(waiting, tell)
        except DeadlineExceeded as late:
            raise LaunchFailed(
                f"{self._name} has not started within {limit_s} s (launcher.start_timeout_s): it is "
                f"{await self._state_and_reason()}. It is cancelled now. Allow it more time, or ask for "
                f"less: it wants {_num_nodes(self._launcher)} nodes of partition {self._launcher.partition}"
            ) from late
        except RuntimeError as error:
            await self.require_present()
            # Monarch's own words have sbatch's refusal.
            raise LaunchFailed(str(error)) from error

    async def _wait(self, waiting: asyncio.Future[JobState], tell: Callable[[str], None]) -> JobState:
        told = ""
        while not (await asyncio.wait([waiting], timeout=TELL_S))[0]:
            if (state := await self._state_and_reason()) != told:
                tell(f"{self._name} is {state}")
                told = state
        return await waiting

    def _run(self) -> JobState:
        try:
            self._job.apply()
            if isinstance(self._job, SlurmJob):
                self._slurm_id = self._job._slurm_job_id
        finally:
            self._submitted.set()
        return self._job.state(cached_path=None)

    async def require_present(self) -> None:
        """To be called while hosts start.

        Raises:
            LaunchFailed: the job has ended.
        """
        if (words := await self.why_gone()) is not None:
            raise LaunchFailed(f"{words} before all hosts had started; see {self._log_dir}")

    async def why_gone(self) -> str | None:
        """What ended the job; None: it is there, as far as this machine can tell."""
        if isinstance(self._job, SlurmJob) and self._slurm_id is not None:
            state = (await self._state_and_reason()).split(" ")[0]
            if state == "PENDING" and self._has_hosts:
                return f"{self._name} {REQUEUED}"
            return f"{self._name} {ENDINGS[state]}" if state in ENDINGS else None
        if isinstance(self._job, LoginJob):
            ended = [name for name, one in self._job._host_to_pid.items() if not is_running(one.pid)]
            if ended:
                return f"ssh to {', '.join(ended)} has ended"
        return None

    @property
    def _name(self) -> str:
        return f"Slurm job {self._slurm_id}" if self._slurm_id is not None else "the Slurm job"

    async def _state_and_reason(self) -> str:
        """Return state and reason in Slurm's words, such as "PENDING (Resources)"."""
        if self._slurm_id is None:
            return "not submitted yet"
        format_ = "--format=%T (%r)"
        command = ["squeue", "--noheader", "--states=all", "--jobs", self._slurm_id, format_]
        try:
            asked = await asyncio.to_thread(
                subprocess.run, command, capture_output=True, text=True, check=False, timeout=ASK_S
            )
        except subprocess.TimeoutExpired:
            return f"in a state that squeue has not told within {ASK_S:.0f} s"
        # Slurm forgets a job some minutes after its end (MinJobAge).
        return asked.stdout.strip() or f"unknown to squeue ({' '.join(asked.stderr.split())})"

    async def end(self) -> None:
        """Cancel the job, also one that is just being submitted; a second call does nothing."""
        if self._is_started:
            if not await asyncio.to_thread(self._submitted.wait, SUBMIT_S):
                logger.warning("the job was still being submitted after %.0f s, and may stay", SUBMIT_S)
            await asyncio.to_thread(self._job.kill)


def _num_nodes(launcher: SlurmLauncher) -> int:
    return launcher.hosts.trainer + launcher.hosts.generators


def _in_thread(run: Callable[[], JobState]) -> "concurrent.futures.Future[JobState]":
    """In a thread that need not end: Ctrl-C shall not wait for a scheduler."""
    started: concurrent.futures.Future[JobState] = concurrent.futures.Future()
    # From now on nobody's cancelling reaches it.
    started.set_running_or_notify_cancel()

    def start() -> None:
        try:
            started.set_result(run())
        except BaseException as error:
            started.set_exception(error)

    threading.Thread(target=start, name="job", daemon=True).start()
    return started
