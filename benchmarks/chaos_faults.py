"""Kinds of faults, the roles and moments that can have them, and a plan of faults drawn from a seed."""

import random
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """A fault of a process, of a host, of a disk or of the whole run.

    Attributes:
        SIGKILL: The process ends at once, as when the kernel runs out of memory.
        SIGSTOP: The process stays and does not answer.
        SIGSEGV: The process ends as after a fault in native code.
        EXIT: The process calls ``os._exit``, which runs no handlers of Python.
        ABORTED_COLLECTIVE: A collective of a trainer rank raises, as after a lost connection.
        HUNG_COLLECTIVE: A trainer rank never enters a collective.
        DELAYED_MESSAGES: Messages to the process wait for less than its heartbeat. The run must not notice.
        DROPPED_MESSAGES: All further messages to the process are lost.
        FULL_DISK: No process can write to the run's folder (ENOSPC) until a moment after the run has noticed.
        FAILING_DISK: The same as ``FULL_DISK`` with EIO.
        EVERYTHING: All processes die at once, the supervisor too. Then the run resumes.
        SLOW_LINK: A host's link is limited to a few MBit/s for a while. The run must not notice.
        SHORT_PARTITION: A host's link is down for less than every heartbeat. The run must not notice.
        LONG_PARTITION: A host's link is down until the run has noticed, and ``timeouts.host_s`` longer.
        LOST_NODE: All processes of a host die, Slurm's daemon too. It returns after the run has noticed.
        CANCELLED_JOB: The Slurm job is canceled (scancel).
    """

    SIGKILL = "sigkill"
    SIGSTOP = "sigstop"
    SIGSEGV = "sigsegv"
    EXIT = "exit"
    ABORTED_COLLECTIVE = "aborted_collective"
    HUNG_COLLECTIVE = "hung_collective"
    DELAYED_MESSAGES = "delayed_messages"
    DROPPED_MESSAGES = "dropped_messages"
    FULL_DISK = "full_disk"
    FAILING_DISK = "failing_disk"
    EVERYTHING = "everything"
    SLOW_LINK = "slow_link"
    SHORT_PARTITION = "short_partition"
    LONG_PARTITION = "long_partition"
    LOST_NODE = "lost_node"
    CANCELLED_JOB = "cancelled_job"


class Moment(StrEnum):
    """When a fault is injected.

    Attributes:
        STEP: At any time within a step.
        START: During the run's first start, before the first step.
        EVALUATION: During an evaluation of held-out problems.
        PUBLISHING: While the trainer stages a version's weights.
        CHECKPOINT: While a checkpoint is written.
        RESUME: While the run resumes after its controller was killed, which is a fault as well.
        SHUTDOWN: After the last step.
    """

    STEP = "step"
    START = "start"
    EVALUATION = "evaluation"
    PUBLISHING = "publishing"
    CHECKPOINT = "checkpoint"
    RESUME = "resume"
    SHUTDOWN = "shutdown"


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
    HOST: (Kind.SLOW_LINK, Kind.SHORT_PARTITION, Kind.LONG_PARTITION, Kind.LOST_NODE, Kind.CANCELLED_JOB)
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
    """A fault to inject.

    Attributes:
        at_step: Inject it after this step, and once the faults before allow it (``Injector``).
        pause_share: Wait for this share of a step's time, or of the moment's.
        which: Which process of the role, as a share of their number.
    """

    role: str
    kind: Kind
    moment: Moment = Moment.STEP
    at_step: int
    pause_share: float
    which: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected:
    """A fault that was injected.

    Attributes:
        number: Place in the plan. The kill of a controller before ``Moment.RESUME`` has that of its fault.
        time_s: From ``time.time``.
        pid: 0 if the fault is not of a single process.
        words: Details from the process itself.
    """

    number: int
    time_s: float
    role: str
    rank: int
    kind: Kind
    moment: Moment
    pid: int
    words: str = ""


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
        ValueError: a role has none of the kinds at any of the moments.
    """
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
