"""Injects planned faults into a run in progress, at moments found in the run's files, and records them."""

import contextlib
import json
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
from chaos_faults import (
    COLLECTIVES,
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
from chaos_match import match
from chaos_orders import Order, Orders

DELAY_S = 3.0
"""Seconds for which messages are delayed: less than the limit of any heartbeat."""
HOLD_CALL_S = 0.5
"""Seconds for which a trainer call is held, so that a fault can be injected during the call."""
ORDER_S = 60.0
"""Seconds for a process to carry out an order before the order is given to another process."""
OUTAGE_S = 3.0
"""Seconds for which a disk refuses writes after the run has noticed it."""
MAX_OUTAGE_S = 120.0
REFUSED_WORDS = b"what is refused is kept and tried again"
"""Text that a run prints for an outage that has a line in faults.jsonl; some refusals have none."""
HOST_NAME = re.compile(r"(trainer|generators)_\d+")
MAX_COLLECTIVES = 30
"""Number of upcoming collectives of a rank from which the one to break is drawn."""
START_PAUSE_S = 12.0
"""Maximum delay from the listing of a process to a fault at the moments ``START`` and ``RESUME``."""
NUM_PACE_STEPS = 9
"""Number of steps whose median is the step time."""
PAUSE_S = 1.0
"""Maximum delay within an evaluation or a shutdown."""

PROBED = {
    Moment.PUBLISHING: ("begin_staging", "finish_staging"),
    Moment.CHECKPOINT: ("begin_checkpoint",),
}
"""Calls of the trainer during which a moment takes place."""


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a JSON lines file, which may be absent or end in a torn line."""
    if not file.exists():
        return []
    lines = file.read_bytes().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def _is_refused(lines: Sequence[dict[str, Any]]) -> bool:
    """Return whether a disk outage is open, by the lines of faults.jsonl.

    An outage may refuse several files, each with its own lines. The loss of a controller ends its outages.
    """
    num_refused = 0
    for one in lines:
        if one["role"] == STORAGE:
            num_refused += 1 if one["event"] == "detected" else -1
        elif one["role"] in SUPERVISED and one["event"] == "recovered":
            num_refused = 0
    return num_refused > 0


def processes_of(run_dir: Path, role: str) -> list[tuple[int, int]]:
    """Return rank and process id of each process of a role in the run's current list.

    Hosts are not in that list. They are found as session leaders, by the names that Monarch gives them.
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


class Injector:
    """Injects planned faults one after the other; call ``look`` repeatedly.

    A fault is injected when earlier faults were detected, and its own role and all roles that end the run
    have recovered. Injected faults are recorded in the witness file, which the run does not read.
    """

    def __init__(
        self,
        run_dir: Path,
        faults: Sequence[Planned],
        witness: Path,
        *,
        orders: Orders,
        output: Path | None = None,
        max_steps: int = 0,
        kill_everything: Callable[[], None] = lambda: None,
        fill_disk: Callable[[], Callable[[], None]] | None = None,
    ) -> None:
        """``output`` is the file with the run's output; ``kill_everything`` also restarts the run.

        ``fill_disk`` fills a real disk and returns a function that frees the space. Without it, processes are
        ordered to treat their disk as full.
        """
        self._run_dir = run_dir
        self._left = list(enumerate(faults))
        self._witness = witness
        self._orders = orders
        self._output = output
        self._max_steps = max_steps
        self._kill_everything = kill_everything
        self._fill_disk = fill_disk
        self._current: Iterator[None] | None = None
        self._files: dict[str, tuple[tuple[int, int], list[dict[str, Any]]]] = {}
        self.injected: list[Injected] = []

    def look(self) -> None:
        """Inject faults that are due; do not wait."""
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
        """Wait for the moment and inject the fault; start over if the moment or the process is gone."""
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
                while not processes_of(self._run_dir, fault.role):
                    yield
                yield from self._pause(fault.pause_share * START_PAUSE_S)
            case Moment.SHUTDOWN:
                while self.newest_step() < self._max_steps or not self._is_quiet(fault):
                    yield
                yield from self._pause(fault.pause_share * PAUSE_S)
            case Moment.RESUME:
                yield from self._until_quiet(fault)
                if number not in (one.number for one in self.injected):
                    yield from self._begin_resume(number, fault)
            case Moment.EVALUATION:
                while not (self._is_due(fault) and self._is_evaluating()):
                    yield
                yield from self._pause(fault.pause_share * PAUSE_S)
            case Moment.PUBLISHING | Moment.CHECKPOINT:
                yield from self._until_call(fault)
            case Moment.STEP:
                yield from self._until_quiet(fault)
                yield from self._pause(fault.pause_share * self._step_s())

    def _begin_resume(self, number: int, fault: Planned) -> Iterator[None]:
        """Kill the controller, and wait until the process for the fault has restarted."""
        ((_, before),) = processes_of(self._run_dir, CONTROLLER)
        self._signal(number, CONTROLLER, Kind.SIGKILL, fault.moment, (0, before))
        while True:
            listed = processes_of(self._run_dir, CONTROLLER)
            if listed and listed[0][1] != before and processes_of(self._run_dir, fault.role):
                break
            yield
        yield from self._pause(fault.pause_share * START_PAUSE_S)

    def _until_call(self, fault: Planned) -> Iterator[None]:
        """Wait until the trainer's first rank is in a call of the fault's moment."""
        names = PROBED[fault.moment]
        method = names[int(fault.pause_share * len(names))]
        is_after = fault.which < 0.5
        while True:
            yield from self._until_quiet(fault)
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

    def _until_quiet(self, fault: Planned) -> Iterator[None]:
        while not self._is_due(fault):
            yield

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
        """Return whether the run's log says that an evaluation after a step is in progress.

        Either training waits for the evaluation, and no line follows, or training continues beside it.
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
        """Return the step in the last complete line of metrics.jsonl; -1 if there is none."""
        steps = self._lines("metrics.jsonl")
        return steps[-1]["step"] if steps else -1

    def _step_s(self) -> float:
        """Return the median time of the newest steps, because single steps may have waited for a role."""
        newest = self._lines("metrics.jsonl")[-NUM_PACE_STEPS:]
        return statistics.median(line.get("time/step_s", 1.0) for line in newest)

    def _lines(self, name: str) -> list[dict[str, Any]]:
        """Return the lines of a file; read it again only if it has changed."""
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
        while time.monotonic() < end_s:
            yield

    # ---- faults

    def _strike(self, number: int, fault: Planned) -> Iterator[None]:
        """Inject a fault, unless its process has just ended by itself."""
        if fault.kind is Kind.EVERYTHING:
            if any((self._run_dir / "checkpoints").glob("step-????????")):
                self._note(number, fault.role, fault.kind, fault.moment, time.time(), (0, 0))
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
            self._signal(number, fault.role, fault.kind, fault.moment, process)
            return
        given_s = time.time()
        more: dict[str, object] = {}
        if fault.kind is Kind.DELAYED_MESSAGES:
            more["seconds"] = DELAY_S
        elif fault.kind in COLLECTIVES:
            more["num_before"] = int(fault.pause_share * MAX_COLLECTIVES)
        order = self._orders.give(process[1], fault.kind.value, **more)
        end_s = time.monotonic() + ORDER_S
        while (taken := order.taken()) is None:
            if time.monotonic() > end_s or not psutil.pid_exists(process[1]):
                order.end()
                return
            yield
        words = ", ".join(f"{key}: {value}" for key, value in taken.items() if key != "time_s")
        # A delay is over when it is said.
        begin_s = given_s if fault.kind is Kind.DELAYED_MESSAGES else taken["time_s"]
        self._note(number, fault.role, fault.kind, fault.moment, begin_s, process, words)

    def _signal(self, number: int, role: str, kind: Kind, moment: Moment, process: tuple[int, int]) -> None:
        # The time before: the run must not seem to have noticed it earlier.
        time_s = time.time()
        try:
            os.kill(process[1], SIGNALS[kind])
        except ProcessLookupError:
            return
        self._note(number, role, kind, moment, time_s, process)

    def _break_disk(self, number: int, fault: Planned) -> Iterator[None]:
        """Make the disk refuse writes until the run has noticed it, and ``OUTAGE_S`` longer.

        If an earlier refusal is still open, the run need not report this one.
        """
        is_noticed = _is_refused(self._lines("faults.jsonl"))
        time_s = time.time()
        orders: list[Order] = []
        give_back: Callable[[], None] | None = None
        if fault.kind is Kind.FULL_DISK and self._fill_disk is not None:
            give_back = self._fill_disk()
        else:
            roles = [CONTROLLER, "buffer", "trainer", "generator", HOST]
            pids = {pid for role in roles for _, pid in processes_of(self._run_dir, role)}
            folder = str(self._run_dir.resolve())
            orders = [self._orders.give(pid, fault.kind.value, folder=folder) for pid in sorted(pids)]
        self._note(number, fault.role, fault.kind, fault.moment, time_s, (0, 0))
        end_s = time.monotonic() + MAX_OUTAGE_S
        # faults.jsonl is refused too: what the run says of it is in its output and, afterwards, in the file.
        while not (is_noticed or self._has_noticed_outage(time_s)) and time.monotonic() < end_s:
            yield
        yield from self._pause(OUTAGE_S)
        if give_back is not None:
            give_back()
        for order in orders:
            order.end()

    def _has_noticed_outage(self, since_s: float) -> bool:
        if any(one["role"] == STORAGE and one["time_s"] >= since_s for one in self._lines("faults.jsonl")):
            return True
        said = b"" if self._output is None else self._output.read_bytes()
        return said.count(REFUSED_WORDS) > self._num_outages_said()

    def _num_outages_said(self) -> int:
        """Return the number of disk outages in faults.jsonl."""
        return sum(
            one["event"] == "detected" and one["role"] == STORAGE for one in self._lines("faults.jsonl")
        )

    def _note(
        self,
        number: int,
        role: str,
        kind: Kind,
        moment: Moment,
        time_s: float,
        process: tuple[int, int],
        words: str = "",
    ) -> None:
        rank, pid = process
        one = Injected(
            number=number, time_s=time_s, role=role, rank=rank, kind=kind, moment=moment, pid=pid, words=words
        )
        self.injected.append(one)
        with self._witness.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(one)) + "\n")
