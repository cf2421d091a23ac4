"""Where every rollout of a rollouts.jsonl lies, so that any is found without reading the file again."""

import json
import re
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from forgeasync.viewer.appended_lines import MAX_LINE_BYTES

# With what a run begins each line; other lines are parsed, which takes thirty times as long.
_HEAD = re.compile(rb'^\{"step": (\d{1,17}), "group_id": (\d{1,17}), .*\}$', re.MULTILINE)


class RolloutGone(ValueError):
    """A rollout that cannot be read at its place; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlace:
    """One rollout, by its number in the order of the file."""

    number: int
    step: int
    group: int


class RolloutIndex:
    """Steps, groups and places in the file of all rollouts so far. Memory: 24 bytes a rollout."""

    def __init__(self) -> None:
        self.num_damaged = 0
        """Lines that are no rollout."""
        self._steps, self._groups, self._offsets = array("q"), array("q"), array("q")

    def __len__(self) -> int:
        return len(self._offsets)

    def add(self, data: bytes, *, start: int) -> None:
        """Take whole lines that begin at ``start`` in the file."""
        if not data:
            return
        heads = _HEAD.findall(data)
        if len(heads) != data.count(b"\n"):
            self._add_one_by_one(data, start)
            return
        for step, group in heads:
            self._steps.append(int(step))
            self._groups.append(int(group))
        lengths_N = np.flatnonzero(np.frombuffer(data, dtype=np.uint8) == ord("\n"))
        offsets_N = np.concatenate([[0], lengths_N[:-1] + 1]).astype(np.int64) + start
        self._offsets.frombytes(offsets_N.tobytes())

    def _add_one_by_one(self, data: bytes, start: int) -> None:
        for line in data.split(b"\n")[:-1]:
            try:
                head = _DECODER.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                self.num_damaged += 1
            else:
                self._steps.append(head.step)
                self._groups.append(head.group_id)
                self._offsets.append(start)
            start += len(line) + 1

    def of_group(self, group: int) -> list[RolloutPlace]:
        """Return the rollouts of a group in the order of the file."""
        return self._places(np.flatnonzero(np.array(self._groups) == group))

    def of_step(self, step: int) -> list[RolloutPlace]:
        """Return the rollouts of a step in the order of the file."""
        return self._places(np.flatnonzero(np.array(self._steps) == step))

    def _places(self, numbers: np.ndarray) -> list[RolloutPlace]:
        return [
            RolloutPlace(number=number, step=self._steps[number], group=self._groups[number])
            for number in map(int, numbers)
        ]

    def read(self, file: Path, number: int) -> dict[str, Any]:
        """Read one rollout.

        Raises:
            RolloutGone: there is none of this number, or the file is no longer what it was.
        """
        if not 0 <= number < len(self):
            what = f"0 to {len(self) - 1}" if len(self) else "none yet"
            raise RolloutGone(f"there is no rollout {number}; those read so far are {what}")
        try:
            with file.open("rb") as lines:
                lines.seek(self._offsets[number])
                # The writer's own library: halves of characters are in texts too.
                record = json.loads(lines.readline(MAX_LINE_BYTES))
        except OSError as error:
            raise RolloutGone(f"{file.name} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise RolloutGone(f"rollout {number} is no longer where it was ({error})") from None
        if not isinstance(record, dict) or record.get("group_id") != self._groups[number]:
            raise RolloutGone(f"rollout {number} is no longer where it was")
        return record


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of a rollout whose line begins otherwise."""

    step: Annotated[int, msgspec.Meta(ge=0, lt=10**17)]
    group_id: Annotated[int, msgspec.Meta(ge=0, lt=10**17)]


_DECODER = msgspec.json.Decoder(_Head)
