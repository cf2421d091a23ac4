"""Which faults are injected into which process of a run, and when: drawn from a seed."""

import random
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What is done to a process, or to all of them."""

    SIGKILL = "sigkill"
    """It is gone at once, as when the kernel has no memory left."""
    SIGSTOP = "sigstop"
    """It stays, and answers nothing."""
    SIGSEGV = "sigsegv"
    """It ends as by a fault of native code."""
    EXIT = "exit"
    """It ends itself by ``os._exit``: no handler of Python runs."""
    ABORTED_COLLECTIVE = "aborted_collective"
    """The next collective of a trainer rank raises there, as when a connection is gone."""
    HUNG_COLLECTIVE = "hung_collective"
    """A trainer rank never comes to its next collective."""
    DELAYED_MESSAGES = "delayed_messages"
    """Messages that arrive at it within some seconds, fewer than its heartbeat, wait until these are over.
    The run has to take no notice."""
    DROPPED_MESSAGES = "dropped_messages"
    """Messages that arrive at it are lost from now on, and never answered."""
    FULL_DISK = "full_disk"
    """No process of the run can write into its folder (ENOSPC) until it was noticed, and a moment longer."""
    FAILING_DISK = "failing_disk"
    """The same with EIO."""
    EVERYTHING = "everything"
    """All processes are killed at once, the supervisor too; then ``--resume latest`` is given by hand."""
    SLOW_LINK = "slow_link"
    """A host's link carries a few MBit/s for a while and drops what waits too long. The run has to take no
    notice."""
    SHORT_PARTITION = "short_partition"
    """A host's link is down for less than every heartbeat. The run has to take no notice."""
    LONG_PARTITION = "long_partition"
    """A host's link is down until the run has noticed, and then for as long again."""
    LOST_NODE = "lost_node"
    """Everything on a host is killed, Slurm's daemon too; the host comes back once that was noticed."""
    CANCELLED_JOB = "cancelled_job"
    """Somebody cancels the job (scancel)."""


class Moment(StrEnum):
    """When a fault is injected."""

    STEP = "step"
    """At any time of a step."""
    START = "start"
    """While the run starts for the first time: its process is there, and no step."""
    EVALUATION = "evaluation"
    """While held-out problems are evaluated."""
    PUBLISHING = "publishing"
    """While the trainer stages a version's weights."""
    CHECKPOINT = "checkpoint"
    """While a checkpoint is written."""
    RESUME = "resume"
    """While a run goes on after its controller was killed, which is a fault of its own."""
    SHUTDOWN = "shutdown"
    """After the last step."""


SIGNALS = {Kind.SIGKILL: signal.SIGKILL, Kind.SIGSTOP: signal.SIGSTOP, Kind.SIGSEGV: signal.SIGSEGV}

DEADLY = (Kind.SIGKILL, Kind.SIGSEGV, Kind.EXIT)
MESSAGES = (Kind.DELAYED_MESSAGES, Kind.DROPPED_MESSAGES)
COLLECTIVES = (Kind.ABORTED_COLLECTIVE, Kind.HUNG_COLLECTIVE)
DISKS = (Kind.FULL_DISK, Kind.FAILING_DISK)
UNNOTICED = (Kind.DELAYED_MESSAGES, Kind.SLOW_LINK, Kind.SHORT_PARTITION)
"""Kinds of which the run has to take no notice."""

CONTROLLER = "controller"
TEACHER = "teacher"
STORAGE = "storage"
HOST = "host"
SUPERVISED = frozenset({CONTROLLER, "buffer", HOST})
"""Roles whose loss ends the run, so that only a supervisor brings it back."""

KINDS: dict[str, tuple[Kind, ...]] = {
    "scorer": (*DEADLY, Kind.SIGSTOP, *MESSAGES),
    "environment": (*DEADLY, Kind.SIGSTOP, *MESSAGES),
    "generator": (*DEADLY, Kind.SIGSTOP, *MESSAGES),
    "trainer": (*DEADLY, Kind.SIGSTOP, *MESSAGES, *COLLECTIVES),
    "buffer": (*DEADLY, Kind.SIGSTOP, *MESSAGES),
    TEACHER: (*DEADLY, Kind.SIGSTOP, *MESSAGES),
    CONTROLLER: (*DEADLY, Kind.SIGSTOP, Kind.EVERYTHING),
    STORAGE: DISKS,
    HOST: (Kind.SIGKILL,),
}
"""What can be injected, by role as ``procs.json`` names it. A controller that is stopped is noticed by its
supervisor."""

CLUSTER_KINDS: Mapping[str, Sequence[Kind]] = {
    HOST: (
        Kind.SLOW_LINK,
        Kind.SHORT_PARTITION,
        Kind.LONG_PARTITION,
        Kind.LOST_NODE,
        Kind.CANCELLED_JOB,
    ),
}
"""What ``chaos_cluster.py`` injects."""

MOMENTS: Mapping[Moment, tuple[Kind, ...]] = {
    Moment.STEP: tuple(Kind),
    Moment.START: DEADLY,
    Moment.EVALUATION: (*DEADLY, Kind.SIGSTOP, Kind.EVERYTHING, *MESSAGES, *DISKS),
    Moment.PUBLISHING: (*DEADLY, Kind.SIGSTOP, Kind.EVERYTHING),
    Moment.CHECKPOINT: (*DEADLY, Kind.SIGSTOP, Kind.EVERYTHING, *DISKS),
    Moment.RESUME: (*DEADLY, Kind.EVERYTHING),
    Moment.SHUTDOWN: DEADLY,
}
"""Which kinds make sense at a moment. Each also needs the role to have them."""

STEP_SHARE = 0.5
"""Of the faults that can be at several moments so many are at any time of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A fault that is to be injected."""

    role: str
    kind: Kind
    moment: Moment = Moment.STEP
    at_step: int
    """It is injected once this step is done and the faults before allow it (``Injector``)."""
    pause_share: float
    """And after this share of the time of a step, or of what the moment is."""
    which: float
    """Which process of the role, as a share of their number."""

    @property
    def is_noticed(self) -> bool:
        """Whether the run has to notice it."""
        return self.kind not in UNNOTICED


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected:
    """A fault that was injected."""

    number: int
    """Place in the plan. Where a controller is killed first so that the run resumes, both have it."""
    time_s: float
    """As ``time.time`` says it."""
    role: str
    rank: int
    kind: Kind
    moment: Moment
    pid: int
    """0: no process alone."""
    words: str = ""
    """What the process itself says of it."""


def moments_of(
    role: str, *, moments: Sequence[Moment], is_first: bool, is_last: bool, is_supervised: bool
) -> list[Moment]:
    """Return the moments at which a fault of a role can be."""
    found = []
    for moment in moments:
        match moment:
            case Moment.START:
                is_possible = is_first and is_supervised and role != STORAGE
            case Moment.RESUME:
                is_possible = is_supervised
            case Moment.SHUTDOWN:
                is_possible = is_last
            case _:
                is_possible = True
        if is_possible and role != HOST and set(MOMENTS[moment]) & set(KINDS[role]):
            found.append(moment)
    if role == HOST and Moment.STEP in moments:
        found.append(Moment.STEP)
    return found


def plan(
    seed: int,
    num_faults: int,
    roles: Sequence[str],
    *,
    steps_per_fault: int,
    moments: Sequence[Moment] = (Moment.STEP,),
    kinds: Sequence[Kind] = tuple(Kind),
    kinds_of: Mapping[str, Sequence[Kind]] = KINDS,
) -> list[Planned]:
    """Draw faults, at most one for every ``steps_per_fault`` steps; the same for the same arguments.

    ``kinds_of`` says what can be injected into a role.

    Raises:
        ValueError: nothing is known of a role, or a role can have none of the kinds at any of the moments.
    """
    for role in roles:
        if role not in KINDS:
            raise ValueError(f"--role {role}: must be one of {', '.join(KINDS)}")
    is_supervised = bool(SUPERVISED & set(roles))
    draw = random.Random(seed)
    faults = []
    for number in range(num_faults):
        role = draw.choice(list(roles))
        possible = {
            moment: found
            for moment in moments_of(
                role,
                moments=moments,
                is_first=number == 0,
                is_last=number == num_faults - 1,
                is_supervised=is_supervised,
            )
            if (found := [kind for kind in kinds_of[role] if kind in MOMENTS[moment] and kind in kinds])
        }
        if not possible:
            raise ValueError(
                f"--role {role}: it has none of the kinds {', '.join(kinds)} at any of the moments of fault "
                f"{number + 1}, {', '.join(moments)}; benchmarks/chaos_faults.py has the tables"
            )
        others = [moment for moment in possible if moment is not Moment.STEP]
        is_step = Moment.STEP in possible and (not others or draw.random() < STEP_SHARE)
        moment = Moment.STEP if is_step else draw.choice(others)
        faults.append(
            Planned(
                role=role,
                kind=draw.choice(possible[moment]),
                moment=moment,
                at_step=1 + number * steps_per_fault + draw.randrange(steps_per_fault),
                pause_share=draw.random(),
                which=draw.random(),
            )
        )
    return faults
