"""Faults of runs that never were: planned, injected, and as faults.jsonl tells of them."""

from typing import Any

from chaos_faults import Injected, Kind, Moment, Planned


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
