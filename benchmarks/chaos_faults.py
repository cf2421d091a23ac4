"""Kinds of faults, the roles and moments that can have them, and a plan of faults drawn from a seed."""

import random
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """A fault of a process, of a host, of a disk or of the whole run."""

    SIGKILL = "sigkill"
    """The process ends at once, as when the kernel runs out of memory."""
    SIGSTOP = "sigstop"
    """The process stays and does not answer."""
    SIGSEGV = "sigsegv"
    """The process ends as after a fault in native code."""
    EXIT = "exit"
    """The process calls ``os._exit``, which runs no handlers of Python."""
    ABORTED_COLLECTIVE = "aborted_collective"
    """A collective of a trainer rank raises, as after a lost connection."""
    HUNG_COLLECTIVE = "hung_collective"
    """A trainer rank never enters a collective."""
    DELAYED_MESSAGES = "delayed_messages"
    """Messages to the process wait for less than its heartbeat. The run must not notice."""
    DROPPED_MESSAGES = "dropped_messages"
    """All further messages to the process are lost."""
    FULL_DISK = "full_disk"
    """No process can write into the run's folder (ENOSPC) until a moment after the run noticed."""
    FAILING_DISK = "failing_disk"
    """The same as ``FULL_DISK`` with EIO."""
    EVERYTHING = "everything"
    """All processes die at once, the supervisor too. Then the run starts again with ``--resume latest``."""
    SLOW_LINK = "slow_link"
    """A host's link is limited to a few MBit/s for a while. The run must not notice."""
    SHORT_PARTITION = "short_partition"
    """A host's link is down for less than every heartbeat. The run must not notice."""
    LONG_PARTITION = "long_partition"
    """A host's link is down until the run has noticed, and ``timeouts.host_s`` longer."""
    LOST_NODE = "lost_node"
    """All processes of a host die, Slurm's daemon too. The host returns after the run has noticed."""
    CANCELLED_JOB = "cancelled_job"
    """The Slurm job is canceled (scancel)."""


class Moment(StrEnum):
    """When a fault is injected."""

    STEP = "step"
    """At any time within a step."""
    START = "start"
    """During the run's first start, before the first step."""
    EVALUATION = "evaluation"
    """During an evaluation of held-out problems."""
    PUBLISHING = "publishing"
    """While the trainer stages a version's weights."""
    CHECKPOINT = "checkpoint"
    """While a checkpoint is written."""
    RESUME = "resume"
    """While the run resumes after its controller was killed, which is a fault as well."""
    SHUTDOWN = "shutdown"
    """After the last step."""


SIGNALS = {Kind.SIGKILL: signal.SIGKILL, Kind.SIGSTOP: signal.SIGSTOP, Kind.SIGSEGV: signal.SIGSEGV}

DEADLY = (Kind.SIGKILL, Kind.SIGSEGV, Kind.EXIT)
MESSAGES = (Kind.DELAYED_MESSAGES, Kind.DROPPED_MESSAGES)
COLLECTIVES = (Kind.ABORTED_COLLECTIVE, Kind.HUNG_COLLECTIVE)
DISKS = (Kind.FULL_DISK, Kind.FAILING_DISK)
UNNOTICED = (Kind.DELAYED_MESSAGES, Kind.SLOW_LINK, Kind.SHORT_PARTITION)
"""Kinds that the run must not notice."""

CONTROLLER = "controller"
TEACHER = "teacher"
STORAGE = "storage"
HOST = "host"
SUPERVISED = frozenset({CONTROLLER, "buffer", HOST})
"""Roles whose loss ends the run. Only a supervisor starts it again."""

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
"""Kinds of each role, which is named as in ``procs.json``. The supervisor notices a stopped controller."""

CLUSTER_KINDS: Mapping[str, Sequence[Kind]] = {
    HOST: (
        Kind.SLOW_LINK,
        Kind.SHORT_PARTITION,
        Kind.LONG_PARTITION,
        Kind.LOST_NODE,
        Kind.CANCELLED_JOB,
    ),
}
"""Kinds that ``chaos_cluster.py`` injects."""

MOMENTS: Mapping[Moment, tuple[Kind, ...]] = {
    Moment.STEP: tuple(Kind),
    Moment.START: DEADLY,
    Moment.EVALUATION: (*DEADLY, Kind.SIGSTOP, Kind.EVERYTHING, *MESSAGES, *DISKS),
    Moment.PUBLISHING: (*DEADLY, Kind.SIGSTOP, Kind.EVERYTHING),
    Moment.CHECKPOINT: (*DEADLY, Kind.SIGSTOP, Kind.EVERYTHING, *DISKS),
    Moment.RESUME: (*DEADLY, Kind.EVERYTHING),
    Moment.SHUTDOWN: DEADLY,
}
"""Kinds of each moment. A fault also needs a role that has its kind."""

STEP_SHARE = 0.5
"""Share of faults at ``Moment.STEP``, of those that several moments can have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A fault to inject."""

    role: str
    kind: Kind
    moment: Moment = Moment.STEP
    at_step: int
    """Inject it after this step, and once the faults before allow it (``Injector``)."""
    pause_share: float
    """Wait for this share of a step's time, or of the moment's."""
    which: float
    """Which process of the role, as a share of their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected:
    """A fault that was injected."""

    number: int
    """Place in the plan. The kill of a controller before ``Moment.RESUME`` has the number of its fault."""
    time_s: float
    """From ``time.time``."""
    role: str
    rank: int
    kind: Kind
    moment: Moment
    pid: int
    """0 if the fault is not of a single process."""
    words: str = ""
    """Details from the process itself."""


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
    """Draw one fault for every ``steps_per_fault`` steps. The same arguments give the same faults.

    ``kinds_of`` has the kinds of each role.

    Raises:
        ValueError: a role is unknown, or it has none of the kinds at any of the moments.
    """
    for role in roles:
        if role not in KINDS:
            raise ValueError(f"--role {role}: must be one of {', '.join(KINDS)}")
    is_supervised = bool(SUPERVISED & set(roles))
    draw = random.Random(seed)
    faults = []
    for number in range(num_faults):
        role = draw.choice(list(roles))
        is_possible = {
            Moment.START: number == 0 and is_supervised,
            Moment.RESUME: is_supervised,
            Moment.SHUTDOWN: number == num_faults - 1,
        }
        possible = {
            moment: found
            for moment in moments
            if is_possible.get(moment, True)
            # A host has no moments of its own.
            and (role != HOST or moment is Moment.STEP)
            and (found := [kind for kind in kinds_of[role] if kind in MOMENTS[moment] and kind in kinds])
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
