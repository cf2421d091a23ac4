"""Faults of runs that never were: planned, injected, and as faults.jsonl tells of them."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chaos_faults import Injected, Kind, Moment, Planned
from chaos_injector import Injector


def planned(role: str, kind: Kind, *, at_step: int = 1, **more: Any) -> Planned:
    known = {"role": role, "kind": kind, "at_step": at_step, "pause_share": 0.0, "which": 0.0}
    return Planned(**(known | more))


def injected(role: str, kind: Kind, time_s: float, moment: Moment = Moment.STEP, **more: Any) -> Injected:
    known = {"number": 0, "role": role, "kind": kind, "time_s": time_s, "moment": moment, "rank": 0, "pid": 7}
    return Injected(**(known | more))


def detected(role: str, time_s: float, number: int = 0) -> dict[str, Any]:
    return {"event": "detected", "role": role, "time_s": time_s, "number": number}


def recovered(role: str, time_s: float, number: int = 0) -> dict[str, Any]:
    return detected(role, time_s, number) | {"event": "recovered"}


class Watched:
    """An injector, and the files of the run that it watches."""

    def __init__(self, out: Path, *faults: Planned, make: Callable[..., Injector] = Injector) -> None:
        self.out = out
        self.run_dir = out / "run"
        self.run_dir.mkdir()
        self.injector = make(out, faults, max_steps=100)
        self._events: list[dict[str, Any]] = []

    def list_processes(self, *roles: tuple[str, int], controller: int | None = None) -> None:
        """The role of each process, whose ranks are counted, and its pid."""
        processes = [
            {"role": role, "rank": [one for one, _ in roles[:index]].count(role), "pid": pid}
            for index, (role, pid) in enumerate(roles)
        ]
        listed = {"controller": controller or os.getpid(), "procs": processes}
        (self.run_dir / "procs.json").write_text(json.dumps(listed))

    def write(self, name: str, *lines: dict[str, Any]) -> None:
        (self.run_dir / name).write_text("".join(json.dumps(line) + "\n" for line in lines))

    def write_steps(self, *steps: int, step_s: float = 1.0) -> None:
        self.write("metrics.jsonl", *({"step": step, "time/step_s": step_s} for step in steps))

    def look(self, *events: dict[str, Any], num_looks: int = 5) -> list[Injected]:
        """What has been injected after some looks, once faults.jsonl has these lines more."""
        self._events += events
        self.write("faults.jsonl", *self._events)
        for _ in range(num_looks):
            self.injector.look()
        return self.injector.injected

    @property
    def num_ended_outages(self) -> int:
        return len(list((self.out / "orders").glob("*.end")))
