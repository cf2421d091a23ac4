"""Checks a run once a second: updates the console, and reports a run that makes no progress.

If no process has failed and nothing moves, the report says what each loop waits for and what each process
executes. The monitor does not end the run; the deadlines of calls (``timeouts``) do. Its report comes before
them and says where the run hangs.
"""

import asyncio
import time
from collections.abc import Callable, Hashable, Mapping

from forgeasync.config import RunConfig, is_served
from forgeasync.controller.starting import Roles
from forgeasync.observability import StepConsole
from forgeasync.runtime import (
    GroupEpisodes,
    ProcessManager,
    Progress,
    Resumed,
    Stall,
    StallPolicy,
    awaited_calls,
    stacks_of,
)

LOOK_S = 1.0
"""Seconds between two checks."""

STOOD_STILL_S = 5.0
"""Seconds between two checks above which the controller itself was suspended, and the check is skipped."""

SCORE_COUNTS = ("score/num_queued", "score/num_in_flight", "score/num_early", "scoring/num_failed_attempts")
"""Counts of which at least one changes whenever a response is queued for a scorer or scored."""

MAX_PROCS = 32
"""Maximum number of processes whose stacks are reported."""


class StallMonitor:
    """Monitors the progress of one run."""

    def __init__(
        self, config: RunConfig, roles: Roles, version: Callable[[], int], console: StepConsole
    ) -> None:
        """``version`` returns the current policy version."""
        # A run that serves users may wait for their tasks indefinitely.
        self._is_watched = not is_served(config)
        self._roles = roles
        self._version = version
        self._console = console
        self._tell = console.alarm
        self._policy = StallPolicy()

    def metrics(self) -> dict[str, float]:
        """Return counts since the command started, by metric name."""
        return {"stall/num_found": self._policy.num_found}

    async def loop(self, processes: ProcessManager) -> None:
        """Check the run until cancelled."""
        looked_s = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_S)
            now_s = time.monotonic()
            passed_s, looked_s = now_s - looked_s, now_s
            # Between steps nothing else updates the console.
            self._console.now(
                self._roles.faults.metrics() | self._roles.generators.metrics() | self.metrics()
            )
            if not self._is_watched or self._roles.faults.open or passed_s > STOOD_STILL_S:
                self._policy.rest()
                continue
            match self._policy.look(passed_s, self._marks(processes)):
                case Stall() as stall:
                    await self._tell_stall(stall, processes)
                    # Reading stacks takes time, which must not count as a suspended controller.
                    looked_s = time.monotonic()
                case Resumed(quiet_s=quiet_s):
                    self._tell(f"stall: ended after {quiet_s:.0f} s")

    def _marks(self, processes: ProcessManager) -> Mapping[Progress, Hashable]:
        """Return a value for each kind of progress, which changes whenever there is such progress."""
        counts = self._roles.scorer.metrics()
        scores: list[Hashable] = [counts[key] for key in SCORE_COUNTS]
        if isinstance(self._roles.groups, GroupEpisodes):
            scores += self._roles.groups.metrics().values()
        marks: dict[Progress, Hashable] = {Progress.STEP: self._version(), Progress.SCORES: tuple(scores)}
        if processes.generators is not None:
            table = processes.generators.table.state
            marks[Progress.TOKENS] = sum(one.num_generated_tokens for one in processes.generators.stats())
            marks[Progress.WEIGHTS] = (table.newest, *(one.version for one in table.present))
        return marks

    async def _tell_stall(self, stall: Stall, processes: ProcessManager) -> None:
        what = "nothing has moved" if stall.is_whole else "no optimizer step was made"
        ages = ", ".join(f"{kind} {age_s:.0f} s" for kind, age_s in stall.since_s.items())
        self._tell(
            f"stall: {what} for {stall.quiet_s:.0f} s, at most {stall.longest_s:.0f} s before; "
            f"the run keeps waiting. Time since the last {ages}"
        )
        calls = awaited_calls(asyncio.all_tasks() - {asyncio.current_task()})
        self._tell(f"stall: the controller waits in {calls}")
        procs = [*self._roles.trainer.members, *processes.procs]
        stacks = await asyncio.gather(*(stacks_of(one.host, one.pid) for one in procs[:MAX_PROCS]))
        for one, stack in zip(procs, stacks, strict=False):
            self._tell(f"stall: {one.role} {one.rank} (process {one.pid}): {stack}")
        if len(procs) > MAX_PROCS:
            self._tell(f"stall: {len(procs) - MAX_PROCS} further processes are listed in the run folder")
