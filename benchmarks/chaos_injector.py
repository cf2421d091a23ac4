"""Injects planned faults into a live run: waits for the moment, acts, and writes down what it did."""

import contextlib
import json
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from chaos_faults import (
    CONTROLLER,
    DISKS,
    HOST,
    SIGNALS,
    STORAGE,
    SUPERVISED,
    Injected,
    Kind,
    Moment,
    Planned,
)
from chaos_report import match, read_lines
from common import REPOSITORY

VARIABLE = "FORGEASYNC_CHAOS"
"""Names the folder of orders, see ``chaos_inside/sitecustomize.py``."""
INSIDE = Path(__file__).resolve().parent / "chaos_inside"

DELAY_S = 3.0
"""How long messages wait: less than every heartbeat's limit."""
HOLD_CALL_S = 0.5
"""How long a call of the trainer waits, so that a fault can be injected within it."""
ORDER_S = 60.0
"""How long a process has to carry out an order. Then another process gets it."""
OUTAGE_S = 3.0
"""How long a disk still fails after the run has noticed."""
MAX_OUTAGE_S = 120.0
REFUSED_WORDS = b"the data is kept, and the write repeated"
"""Printed by a run for each outage that has a line in faults.jsonl. Other files may be refused too."""
HOST_NAME = re.compile(r"(trainer|generators)_\d+")
MAX_COLLECTIVES = 30
"""One of this number of a rank's next collectives breaks."""
START_PAUSE_S = 12.0
"""Longest wait from a process's listing to a fault of a start, or of a resumed run."""
NUM_PACE_STEPS = 9
"""Number of steps whose median is the time of a step."""
PAUSE_S = 1.0
"""Longest wait within an evaluation or a shutdown."""

PROBED = {Moment.PUBLISHING: ("begin_staging", "finish_staging"), Moment.CHECKPOINT: ("begin_checkpoint",)}
"""Calls of the trainer during which it is the moment."""


@dataclass(frozen=True, slots=True)
class Order:
    """An order to a process."""

    file: Path

    def taken(self) -> dict[str, Any] | None:
        """Return the process's answer, which has ``time_s`` and details; None before the order is carried
        out."""
        answer = self.file.with_suffix(".taken")
        return json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else None

    def end(self) -> None:
        """End an order that lasts, or cancel one that was not carried out."""
        self.file.with_suffix(".end").touch()


class Orders:
    """Orders to the processes of one run, as files that ``chaos_inside/sitecustomize.py`` reads."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._num_given = 0

    def environment(self) -> dict[str, str]:
        """Return the variables of a run whose processes take orders and can import ``chaos_witness``."""
        path = [str(INSIDE), str(REPOSITORY), str(INSIDE.parent)]
        path += filter(None, [os.environ.get("PYTHONPATH")])
        return {"PYTHONPATH": os.pathsep.join(path), VARIABLE: str(self._folder)}

    def give(self, pid: int, kind: str, **details: object) -> Order:
        """Order a process to break, with the details that the kind needs."""
        self._num_given += 1
        file = self._folder / f"{pid}-{self._num_given}.json"
        partial = file.with_suffix(".given")
        partial.write_text(json.dumps({"kind": kind, **details}), encoding="utf-8")
        partial.rename(file)
        return Order(file)


def _is_refused(lines: Sequence[dict[str, Any]]) -> bool:
    """Whether an outage of a disk lasts, by the lines of faults.jsonl.

    An outage has a pair of lines for each file. The loss of a controller ends its outages.
    """
    num_refused = 0
    for one in lines:
        if one["role"] == STORAGE:
            num_refused += 1 if one["event"] == "detected" else -1
        elif one["role"] in SUPERVISED and one["event"] == "recovered":
            num_refused = 0
    return num_refused > 0


def processes_of(run_dir: Path, role: str) -> list[tuple[int, int]]:
    """Return rank and process id of each process of a role from procs.json.

    It has no hosts: these are processes that begin a session and that Monarch has named.
    """
    file = run_dir / "procs.json"
    if not file.exists():
        return []
    listed = json.loads(file.read_text(encoding="utf-8"))
    if role == CONTROLLER:
        return [(0, listed["controller"])]
    if role == HOST:
        return list(enumerate(sorted(_hosts_of(listed["controller"]))))
    # A teacher's name follows its role.
    return sorted((one["rank"], one["pid"]) for one in listed["procs"] if one["role"].split()[0] == role)


def _hosts_of(controller: int) -> Iterator[int]:
    with contextlib.suppress(psutil.Error):
        for one in psutil.Process(controller).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if HOST_NAME.fullmatch(one.environ().get("HYPERACTOR_PROCESS_NAME", "")):
                    if os.getsid(one.pid) == one.pid:
                        yield one.pid


def until(is_so: Callable[[], object]) -> Iterator[None]:
    """Wait for a condition."""
    while not is_so():
        yield


class Injector:
    """Injects planned faults one after the other. Call ``look`` repeatedly.

    A fault waits until those before were detected, and until its own role and the roles that end a run have
    recovered. The injected faults are written to witness.jsonl, which the run does not know.
    """

    def __init__(
        self,
        out: Path,
        faults: Sequence[Planned],
        *,
        max_steps: int,
        kill_everything: Callable[[], None] = lambda: None,
    ) -> None:
        """``out`` has the folder ``run``, its output, and ``orders``. ``kill_everything`` also resumes the
        run."""
        self._out = out
        self._run_dir = out / "run"
        self._left = list(enumerate(faults))
        self._orders = Orders(out / "orders")
        self._max_steps = max_steps
        self._kill_everything = kill_everything
        self._current: Iterator[None] | None = None
        self._files: dict[str, tuple[tuple[int, int], list[dict[str, Any]]]] = {}
        self.injected: list[Injected] = []
        self.seen_s: dict[int, float] = {}
        """Time (``time.time``) at which each step was first seen."""

    def look(self) -> None:
        """Do what is due now."""
        if (newest := self.newest_step()) >= 0:
            self.seen_s.setdefault(newest, time.time())
        if self._current is None:
            if not self._left:
                return
            self._current = self._carry_out(*self._left[0])
        try:
            next(self._current)
        except StopIteration:
            self._current = None
            self._left.pop(0)

    def _carry_out(self, number: int, fault: Planned) -> Iterator[None]:
        """Wait for the moment and act, again if the moment was over or the process was gone."""
        while True:
            num_before = len(self.injected)
            yield from self._until_moment(number, fault)
            yield from self._strike(number, fault)
            done = self.injected[num_before:]
            if done and done[-1].role == fault.role and done[-1].kind is fault.kind:
                return
            yield

    # ---- moments

    def _until_moment(self, number: int, fault: Planned) -> Iterator[None]:
        match fault.moment:
            case Moment.START:
                yield from until(lambda: processes_of(self._run_dir, fault.role))
                yield from self._pause(fault.pause_share * START_PAUSE_S)
            case Moment.SHUTDOWN:
                yield from until(lambda: self.newest_step() >= self._max_steps and self._is_quiet(fault))
                yield from self._pause(fault.pause_share * PAUSE_S)
            case Moment.RESUME:
                yield from until(lambda: self._is_due(fault))
                if number not in (one.number for one in self.injected):
                    yield from self._begin_resume(number, fault)
            case Moment.EVALUATION:
                yield from until(lambda: self._is_due(fault) and self._is_evaluating())
                yield from self._pause(fault.pause_share * PAUSE_S)
            case Moment.PUBLISHING | Moment.CHECKPOINT:
                yield from self._until_call(fault)
            case Moment.STEP:
                yield from until(lambda: self._is_due(fault))
                yield from self._pause(fault.pause_share * self._step_s())

    def _begin_resume(self, number: int, fault: Planned) -> Iterator[None]:
        """Kill the controller, and wait until the role of the fault has a process again."""
        ((_, before),) = processes_of(self._run_dir, CONTROLLER)
        self._signal(number, replace(fault, role=CONTROLLER, kind=Kind.SIGKILL), (0, before))

        def is_back() -> bool:
            pids = [pid for _, pid in processes_of(self._run_dir, CONTROLLER)]
            return pids not in ([], [before]) and bool(processes_of(self._run_dir, fault.role))

        yield from until(is_back)
        yield from self._pause(fault.pause_share * START_PAUSE_S)

    def _until_call(self, fault: Planned) -> Iterator[None]:
        """Wait until the trainer's first rank is in a call of the moment."""
        names = PROBED[fault.moment]
        method = names[int(fault.pause_share * len(names))]
        is_after = fault.which < 0.5
        while True:
            yield from until(lambda: self._is_due(fault))
            ranks = processes_of(self._run_dir, "trainer")
            if not ranks:
                yield
                continue
            more = {"method": method, "seconds": HOLD_CALL_S, "is_after": is_after}
            order = self._orders.give(ranks[0][1], "hold_call", **more)
            while order.taken() is None:
                # The rank was replaced, or another start has begun.
                if processes_of(self._run_dir, "trainer")[:1] != ranks[:1]:
                    order.end()
                    break
                yield
            else:
                return

    def _is_due(self, fault: Planned) -> bool:
        return self.newest_step() >= fault.at_step and self._is_quiet(fault)

    def _is_quiet(self, fault: Planned) -> bool:
        lines = self._lines("faults.jsonl")
        if fault.kind in DISKS and _is_refused(lines):
            return False
        matches, _ = match(self.injected, lines)
        ending = {fault.role, *SUPERVISED}
        return all(
            one.detected is not None
            and (one.recovered is not None or {one.injected.role, one.detected["role"]}.isdisjoint(ending))
            for one in matches
            if one.is_expected
        )

    def _is_evaluating(self) -> bool:
        """Whether run.log says that an evaluation after a step is in progress.

        Training either waits for it, so that no line follows, or goes on.
        """
        log = self._run_dir / "run.log"
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
        for line in reversed(lines):
            if "evaluating version 0 " in line or "held-out accuracy" in line or "  eval " in line:
                return False
            if "evaluating version" in line or "evaluating with" in line:
                return True
        return False

    def newest_step(self) -> int:
        """Return the step of the last whole line of metrics.jsonl; -1 if there is none."""
        steps = self._lines("metrics.jsonl")
        return steps[-1]["step"] if steps else -1

    def _step_s(self) -> float:
        """Return the median time of the newest steps, since one of them may have waited for a role."""
        newest = self._lines("metrics.jsonl")[-NUM_PACE_STEPS:]
        return statistics.median(line.get("time/step_s", 1.0) for line in newest)

    def _lines(self, name: str) -> list[dict[str, Any]]:
        """Return a file's lines, and read it again if it has changed."""
        file = self._run_dir / name
        if not file.exists():
            return []
        found = file.stat()
        key = (found.st_size, found.st_mtime_ns)
        if name not in self._files or self._files[name][0] != key:
            self._files[name] = (key, read_lines(file))
        return self._files[name][1]

    @staticmethod
    def _pause(seconds: float) -> Iterator[None]:
        end_s = time.monotonic() + seconds
        return until(lambda: time.monotonic() >= end_s)

    # ---- faults

    def _strike(self, number: int, fault: Planned) -> Iterator[None]:
        """Inject a fault, or nothing if its process has just ended."""
        if fault.kind is Kind.EVERYTHING:
            if any((self._run_dir / "checkpoints").glob("step-????????")):
                self._note(number, fault, time.time())
                self._kill_everything()
            return
        if fault.kind in DISKS:
            yield from self._break_disk(number, fault)
            return
        listed = [one for one in processes_of(self._run_dir, fault.role) if psutil.pid_exists(one[1])]
        if not listed:
            return
        process = listed[int(fault.which * len(listed))]
        if fault.kind in SIGNALS:
            self._signal(number, fault, process)
            return
        given_s = time.time()
        num_before = int(fault.pause_share * MAX_COLLECTIVES)
        order = self._orders.give(process[1], fault.kind.value, seconds=DELAY_S, num_before=num_before)
        end_s = time.monotonic() + ORDER_S
        while (taken := order.taken()) is None:
            if time.monotonic() > end_s or not psutil.pid_exists(process[1]):
                order.end()
                return
            yield
        words = ", ".join(f"{key}: {value}" for key, value in taken.items() if key != "time_s")
        # A process answers when the delay is over.
        begin_s = given_s if fault.kind is Kind.DELAYED_MESSAGES else taken["time_s"]
        self._note(number, fault, begin_s, process, words)

    def _signal(self, number: int, fault: Planned, process: tuple[int, int]) -> None:
        # Read the time first, so that the run cannot notice the fault before it.
        time_s = time.time()
        try:
            os.kill(process[1], SIGNALS[fault.kind])
        except ProcessLookupError:
            return
        self._note(number, fault, time_s, process)

    def _break_disk(self, number: int, fault: Planned) -> Iterator[None]:
        """Let the disk fail until a moment after the run has noticed.

        If an earlier outage still lasts, the run need not report this one.
        """
        is_noticed = _is_refused(self._lines("faults.jsonl"))
        time_s = time.time()
        roles = [CONTROLLER, "buffer", "trainer", "generator", HOST]
        pids = {pid for role in roles for _, pid in processes_of(self._run_dir, role)}
        folder = str(self._run_dir.resolve())
        orders = [self._orders.give(pid, fault.kind.value, folder=folder) for pid in sorted(pids)]
        self._note(number, fault, time_s)
        end_s = time.monotonic() + MAX_OUTAGE_S
        while not is_noticed and time.monotonic() < end_s:
            yield
            is_noticed = self._has_noticed(STORAGE, time_s) or self._has_printed_outage()
        yield from self._pause(OUTAGE_S)
        for order in orders:
            order.end()

    def _has_noticed(self, role: str, since_s: float) -> bool:
        lines = self._lines("faults.jsonl")
        return any(one["role"] == role and one["time_s"] >= since_s for one in lines)

    def _has_printed_outage(self) -> bool:
        """Whether the run has printed an outage that it cannot write to faults.jsonl."""
        outages = [one for one in self._lines("faults.jsonl") if one["role"] == STORAGE]
        num_written = sum(one["event"] == "detected" for one in outages)
        return (self._out / "run.out").read_bytes().count(REFUSED_WORDS) > num_written

    def _note(
        self, number: int, fault: Planned, time_s: float, process: tuple[int, int] = (0, 0), words: str = ""
    ) -> None:
        """Write down a fault; ``process`` is its rank and process id."""
        one = Injected(
            number=number,
            time_s=time_s,
            role=fault.role,
            rank=process[0],
            kind=fault.kind,
            moment=fault.moment,
            pid=process[1],
            words=words,
        )
        self.injected.append(one)
        with (self._out / "witness.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(one)) + "\n")
