"""Finds out which proc died and why, from Monarch's reports and from the errors of its peers.

The ranks of a trainer that lose one of theirs fail at once, with an error of the collective that they were
in; Monarch reports the death itself some seconds later.
"""

import asyncio
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import ActorError

from forgeasync.launch import Host
from forgeasync.waiting import DeadlineExceeded, deadline

REPORT_S = 15.0
"""Seconds within which Monarch reports a death: it checks every few seconds."""
BETTER_REPORT_S = 5.0
"""Seconds to wait after a report without a signal for one that names the signal."""
END_S = 1.0
"""Seconds for a proc to end that its peers have lost: their error comes within milliseconds of its end."""
LOOK_S = 0.1
WATCH_S = 2.0
"""Seconds between two checks of procs about which no error was reported."""

_ACTOR = re.compile(r"([\w-]+)\{((?:'\w+': \d+/\d+(?:, )?)+)\}")
_PLACE = re.compile(r"(\d+)/(\d+)")
"""An actor's place in one dimension of its mesh: its procs, or its hosts and the procs of each."""
_PROC = re.compile(r"The actor ([\w-]+?)(?:-\d+)?-(\d+)<")
"""A proc: the role, the number of the mesh if that has replaced another one, and the rank."""
_KILLED = re.compile(r"Killed\(sig=(\d+)\)")


class ActorDied(RuntimeError):
    """A proc of the run ended, or one of its actors failed outside of a call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proc:
    """One proc of a role, to be checked when its peers report errors."""

    role: str
    rank: int
    pid: int
    host: Host

    async def has_ended(self) -> bool:
        """Whether its host no longer has it; a host that does not answer is reported elsewhere."""
        call = f"looking for {self.role} rank {self.rank}"
        try:
            async with deadline(END_S, call=call, key="END_S in deaths.py"):
                return not await self.host.is_running(self.pid)
        except (ActorError, SupervisionError, DeadlineExceeded):
            return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """The content of one of Monarch's reports."""

    text: str
    has_signal: bool


def read_report(report: str, log_dir: Path) -> Death:
    """Name rank, role, signal and log file of a death; or return the report as it is."""
    killed = _KILLED.search(report)
    if (actor := _ACTOR.search(report)) is not None:
        # Monarch's own actor that tells trainer ranks of each other.
        role = "trainer" if actor.group(1) == "_SPMDActor" else actor.group(1)
        rank, num = 0, 1
        for place in _PLACE.finditer(actor.group(2)):
            rank, num = rank * int(place.group(2)) + int(place.group(1)), num * int(place.group(2))
        of_how_many = f" of {num}"
    elif (proc := _PROC.match(report)) is not None:
        role, rank, of_how_many = proc.group(1), int(proc.group(2)), ""
    else:
        return Death(text=report, has_signal=False)
    who, log = f"{role} rank {rank}{of_how_many}", log_dir / f"{role}-{rank}.log"
    if killed is None:
        return Death(text=f"{who} is gone ({' '.join(report.split())}); see {log}", has_signal=False)
    number = int(killed.group(1))
    name = signal.Signals(number).name if number in set(signal.Signals) else "unknown"
    hint = "; the kernel does so when memory runs out" if number == signal.SIGKILL else ""
    return Death(text=f"{who} was killed by signal {number} ({name}{hint}); see {log}", has_signal=True)


async def first_ended(procs: Sequence[Proc], *, within_s: float) -> Proc | None:
    """Return a proc that has ended, or ends ``within_s``; None if all continue. Checks at least once."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + within_s
    while True:
        have_ended = await asyncio.gather(*(proc.has_ended() for proc in procs))
        for proc, has_ended in zip(procs, have_ended, strict=True):
            if has_ended:
                return proc
        if loop.time() >= end_s:
            return None
        await asyncio.sleep(LOOK_S)
