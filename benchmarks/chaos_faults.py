"""Defines the kinds and moments of faults, and draws a plan of faults from a seed."""

import random
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """Kind of a fault."""

    SIGKILL = "sigkill"
    """Process killed, as by the kernel's out-of-memory killer."""
    SIGSTOP = "sigstop"
    """Process suspended, so that it answers nothing."""
    SIGSEGV = "sigsegv"
    """Process killed as by an error in native code."""
    EXIT = "exit"
    """Process ends itself with ``os._exit``, without Python's exit handlers."""
    ABORTED_COLLECTIVE = "aborted_collective"
    """Next collective of a trainer rank raises, as after a lost connection."""
    HUNG_COLLECTIVE = "hung_collective"
    """Trainer rank never enters its next collective."""
    DELAYED_MESSAGES = "delayed_messages"
    """Messages to the process are delayed by less than its heartbeat, which the run must not notice."""
    DROPPED_MESSAGES = "dropped_messages"
    """All further messages to the process are lost."""
    FULL_DISK = "full_disk"
    """Writes to the run's folder fail with ENOSPC until the run has noticed it, and ``OUTAGE_S`` longer."""
    FAILING_DISK = "failing_disk"
    """As ``FULL_DISK``, with EIO."""
    EVERYTHING = "everything"
    """All processes and the supervisor are killed at once; then the run starts with ``--resume latest``."""
    SLOW_LINK = "slow_link"
    """A host's link is slow and drops packets for a while, which the run must not notice."""
    SHORT_PARTITION = "short_partition"
    """A host's link is down for less than any heartbeat, which the run must not notice."""
    LONG_PARTITION = "long_partition"
    """A host's link is down until the run has noticed it, and then for the same time again."""
    LOST_NODE = "lost_node"
    """All processes of a host, including Slurm's daemon, are killed; it returns once the run has noticed."""
    CANCELLED_JOB = "cancelled_job"
    """The job is canceled (scancel)."""


class Moment(StrEnum):
    """Moment of a run at which a fault is injected."""

    STEP = "step"
    """At any time of a step."""
    START = "start"
    """During the run's first start, after its process has started and before the first step."""
    EVALUATION = "evaluation"
    """While held-out problems are evaluated."""
    PUBLISHING = "publishing"
    """While the trainer stages a version's weights."""
    CHECKPOINT = "checkpoint"
    """While a checkpoint is written."""
    RESUME = "resume"
    """While a run resumes after its controller was killed, which is a separate fault."""
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
"""Roles whose loss ends the run, so that a supervisor must restart it."""

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
"""Kinds that can be injected, by role in ``procs.json``. The supervisor notices a suspended controller."""

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
"""Kinds that make sense at each moment; the role must support the kind too."""

STEP_SHARE = 0.5
"""Probability of ``Moment.STEP`` for a fault that can occur at several moments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A fault to inject."""

    role: str
    kind: Kind
    moment: Moment = Moment.STEP
    at_step: int
    """Step after which the fault is injected, once earlier faults allow it (``Injector``)."""
    pause_share: float
    """Additional delay, as a share of the time of a step or of the moment."""
    which: float
    """Which process of the role to hit, as a share of the number of processes."""

    @property
    def is_noticed(self) -> bool:
        """Whether the run must notice the fault."""
        return self.kind not in UNNOTICED


@dataclass(frozen=True, slots=True, kw_only=True)
class Injected:
    """A fault that was injected."""

    number: int
    """Index in the plan; the controller kill before a fault of ``RESUME`` has the same number."""
    time_s: float
    """Time of the injection (``time.time``)."""
    role: str
    rank: int
    kind: Kind
    moment: Moment
    pid: int
    """Process id; 0 if the fault does not concern a single process."""
    words: str = ""
    """Description by the process itself."""


def moments_of(
    role: str, *, moments: Sequence[Moment], is_first: bool, is_last: bool, is_supervised: bool
) -> list[Moment]:
    """Return the moments at which a fault of a role can occur."""
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
    """Draw a deterministic plan of at most one fault per ``steps_per_fault`` steps.

    ``kinds_of`` are the kinds that each role supports.

    Raises:
        ValueError: a role is unknown, or supports none of the kinds at any of the moments.
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
