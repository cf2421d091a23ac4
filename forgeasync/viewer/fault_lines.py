"""What has failed in a run and what came back, as faults.jsonl says it."""

from dataclasses import dataclass, replace

import msgspec


class _Detected(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="detected"):
    time_s: float
    number: int
    role: str
    who: str
    what: str


class _Recovered(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="recovered"):
    time_s: float
    number: int
    role: str
    who: str
    how: str
    took_s: float


_DECODER: msgspec.json.Decoder[_Detected | _Recovered] = msgspec.json.Decoder(_Detected | _Recovered)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownFault:
    """One failure, and its end if it has one."""

    number: int
    role: str
    who: str
    what: str
    detected_s: float
    """When it was noticed, as ``time.time`` says it."""
    how: str | None = None
    """How it was recovered from; None: it was not."""
    took_s: float | None = None


class FaultLines:
    """All faults so far."""

    def __init__(self) -> None:
        self.num_damaged = 0
        """Lines that are none of this file, or end a fault that none has begun."""
        self._faults: dict[int, ShownFault] = {}

    def add(self, line: bytes) -> None:
        """Take the next line; one that is damaged is counted and left out."""
        try:
            event = _DECODER.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self.num_damaged += 1
            return
        if isinstance(event, _Detected):
            self._faults[event.number] = ShownFault(
                number=event.number,
                role=event.role,
                who=event.who,
                what=event.what,
                detected_s=event.time_s,
            )
        elif event.number in self._faults:
            self._faults[event.number] = replace(
                self._faults[event.number], how=event.how, took_s=event.took_s
            )
        else:
            self.num_damaged += 1

    @property
    def faults(self) -> list[ShownFault]:
        """In the order in which they were noticed."""
        return list(self._faults.values())

    @property
    def num_open(self) -> int:
        """Faults that the run has not recovered from."""
        return sum(one.how is None for one in self._faults.values())
