"""Processor time of some processes of this machine, with all that they have started."""

import contextlib
import os
import time
from collections.abc import Iterable

import psutil

from forgeasync.profile import MOST_CROWDING

MIN_OTHERS_SHARE = 0.05
"""Others that had less of the cores have cost nothing that could be told from noise."""


def crowding_of(more: float, others_share: float) -> float:
    """Return by which share more processor time something took, by the share of its cores that others had, as
    ``Cores`` has it; 0 where that was too little to tell."""
    if others_share < MIN_OTHERS_SHARE:
        return 0.0
    return min(MOST_CROWDING, max(0.0, more) / others_share)


class ProcessGone(RuntimeError):
    """A process whose time is measured has ended, and its seconds with it."""


class ProcessorTime:
    """Seconds that processes have computed since the last look.

    Raises:
        ProcessGone: one of them is not there any more.
    """

    def __init__(self, pids: Iterable[int]) -> None:
        self._pids = tuple(pids)
        self._before_s = self._total_s()

    def passed_s(self) -> float:
        """Return the seconds since the last call, of all cores together."""
        before_s, self._before_s = self._before_s, self._total_s()
        return max(0.0, self._before_s - before_s)

    def _total_s(self) -> float:
        total_s = 0.0
        for pid in self._pids:
            try:
                process = psutil.Process(pid)
                processes = [process, *process.children(recursive=True)]
            except psutil.NoSuchProcess as error:
                raise ProcessGone(f"process {pid} has ended while its processor time was measured") from error
            for one in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    times = one.cpu_times()
                    # Also of what has ended by now: verifiers fork.
                    total_s += times.user + times.system + times.children_user + times.children_system
        return total_s


class OtherLoad:
    """What processes of others take of this machine's cores."""

    def __init__(self) -> None:
        self._own = ProcessorTime([os.getpid()])
        self._start_s, self._busy_s = time.perf_counter(), _busy_s()

    def share(self) -> float:
        """Return their share of all cores since this was made, from 0 to 1."""
        passed_s = time.perf_counter() - self._start_s
        others_s = _busy_s() - self._busy_s - self._own.passed_s()
        return min(1.0, max(0.0, others_s / (passed_s * psutil.cpu_count())))


def _busy_s() -> float:
    times = psutil.cpu_times()
    return sum(times) - times.idle - times.iowait
