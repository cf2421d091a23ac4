"""Which faults are injected into which process of a run, and when: drawn from a seed, and written down."""

import json
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil


class Kind(StrEnum):
    """What is done to a process."""

    SIGKILL = "sigkill"
    """It is gone at once, as when the kernel has no memory left."""
    SIGSTOP = "sigstop"
    """It stays, and answers nothing."""
    SIGSEGV = "sigsegv"
    """It ends as by a fault of native code."""


SIGNALS = {Kind.SIGKILL: signal.SIGKILL, Kind.SIGSTOP: signal.SIGSTOP, Kind.SIGSEGV: signal.SIGSEGV}

CONTROLLER = "controller"
SUPERVISED = frozenset({CONTROLLER, "buffer"})
"""Roles whose loss ends the run, so that only a supervisor brings it back."""

KINDS: dict[str, tuple[Kind, ...]] = {
    "scorer": tuple(Kind),
    "environment": tuple(Kind),
    "generator": tuple(Kind),
    "trainer": tuple(Kind),
    "buffer": tuple(Kind),
    CONTROLLER: (Kind.SIGKILL, Kind.SIGSEGV),
}
"""What can be injected, by role as ``procs.json`` names it. A controller that was stopped would be noticed by
nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A fault that is to be injected."""

    role: str
    kind: Kind
    at_step: int
    """It is injected once this step is done and the role has recovered from the fault before."""
    pause_share: float
    """And after this share of the time of a step."""
    which: float
    """Which process of the role, as a share of their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected:
    """A fault that was injected."""

    time_s: float
    """As ``time.time`` says it."""
    role: str
    rank: int
    kind: Kind
    pid: int


def plan(seed: int, num_faults: int, roles: Sequence[str], *, steps_per_fault: int) -> list[Planned]:
    """Draw faults, at most one for every ``steps_per_fault`` steps; the same for the same arguments.

    Raises:
        ValueError: nothing is known of a role.
    """
    for role in roles:
        if role not in KINDS:
            raise ValueError(f"--role {role}: must be one of {', '.join(KINDS)}")
    draw = random.Random(seed)
    faults = []
    for number in range(num_faults):
        role = draw.choice(list(roles))
        faults.append(
            Planned(
                role=role,
                kind=draw.choice(KINDS[role]),
                at_step=1 + number * steps_per_fault + draw.randrange(steps_per_fault),
                pause_share=draw.random(),
                which=draw.random(),
            )
        )
    return faults


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a file that may not be there yet, or end in half of one."""
    if not file.exists():
        return []
    lines = file.read_bytes().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def processes_of(run_dir: Path, role: str) -> list[tuple[int, int]]:
    """Return rank and process id of each process of a role, as the run lists them now."""
    file = run_dir / "procs.json"
    if not file.exists():
        return []
    listed = json.loads(file.read_text(encoding="utf-8"))
    if role == CONTROLLER:
        return [(0, listed["controller"])]
    return sorted((one["rank"], one["pid"]) for one in listed["procs"] if one["role"] == role)


class Injector:
    """Injects planned faults one after the other into a run that goes on; ``look`` is called again and again.

    What it has done goes to a file of its own, the witness, which the run knows nothing of.
    """

    def __init__(self, run_dir: Path, faults: Sequence[Planned], witness: Path) -> None:
        self._run_dir = run_dir
        self._left = list(faults)
        self._witness = witness
        self._due_s: float | None = None
        self.injected: list[Injected] = []

    def look(self) -> None:
        """Inject the next fault, if its time has come."""
        if not self._left:
            return
        fault = self._left[0]
        steps = read_lines(self._run_dir / "metrics.jsonl")
        if not steps or steps[-1]["step"] < fault.at_step or not self._has_recovered(fault.role):
            self._due_s = None
            return
        if self._due_s is None:
            step_s = steps[-1].get("time/step_s", 1.0)
            self._due_s = time.monotonic() + fault.pause_share * step_s
        if time.monotonic() < self._due_s:
            return
        listed = processes_of(self._run_dir, fault.role)
        if not listed:
            return
        rank, pid = listed[int(fault.which * len(listed))]
        # What is listed may have ended by itself: that would be a fault of somebody else's.
        if not psutil.pid_exists(pid):
            return
        # The time before: the run must not seem to have noticed it earlier.
        injected = Injected(time_s=time.time(), role=fault.role, rank=rank, kind=fault.kind, pid=pid)
        try:
            os.kill(pid, SIGNALS[fault.kind])
        except ProcessLookupError:
            return
        self.injected.append(injected)
        with self._witness.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(injected)) + "\n")
        self._left.pop(0)
        self._due_s = None

    def _has_recovered(self, role: str) -> bool:
        events = read_lines(self._run_dir / "faults.jsonl")
        num_recovered = sum(one["event"] == "recovered" and one["role"] == role for one in events)
        return num_recovered >= sum(one.role == role for one in self.injected)
