"""Where the values of a rollout's tokens, and the worst tokens of a step, lie in a tokens.jsonl."""

import json
import re
from array import array
from pathlib import Path
from typing import Any

import numpy as np

from forgeasync.rollouts import RolloutKey
from forgeasync.viewer.appended_lines import MAX_LINE_BYTES

_HEAD = re.compile(
    rb'\{"step": (\d{1,17}), '
    rb'(?:"group_id": (\d{1,17}), "episode": (\d{1,17}), "agent": (\d{1,17}), |"worst": )'
)

_WORST = (-1, -1, -1)
"""Stands for the rollout in the place of a line with the worst tokens of a step."""


class TokensGone(ValueError):
    """Values that cannot be read; the text says why."""


class TokenIndex:
    """Places of lines in the file, 40 bytes each. Of lines that come twice the newer one counts."""

    def __init__(self) -> None:
        self.num_damaged = 0
        """Lines that are none of such a file."""
        self._offsets, self._steps = array("q"), array("q")
        self._groups, self._episodes, self._agents = array("q"), array("q"), array("q")

    @property
    def is_empty(self) -> bool:
        """Whether no line was read."""
        return not self._offsets

    def add(self, data: bytes, *, start: int) -> None:
        """Take whole lines that begin at ``start`` in the file."""
        for line in data.split(b"\n")[:-1]:
            head = _HEAD.match(line)
            if head is None or not line.endswith(b"}"):
                self.num_damaged += 1
            else:
                group, episode, agent = _WORST if head[2] is None else map(int, head.groups()[1:])
                self._offsets.append(start)
                self._steps.append(int(head[1]))
                self._groups.append(group)
                self._episodes.append(episode)
                self._agents.append(agent)
            start += len(line) + 1

    def _offset(self, step: int, group: int, episode: int, agent: int) -> int | None:
        is_it_N = (np.array(self._steps) == step) & (np.array(self._groups) == group)
        is_it_N &= (np.array(self._episodes) == episode) & (np.array(self._agents) == agent)
        found = np.flatnonzero(is_it_N)
        return self._offsets[int(found[-1])] if len(found) else None

    def read_rollout(self, file: Path, step: int, key: RolloutKey) -> dict[str, Any]:
        """Read the line of a rollout of a step.

        Raises:
            TokensGone: there is none, or the file is no longer what it was.
        """
        offset = self._offset(step, key.group_id, key.episode, key.agent)
        if offset is None:
            raise TokensGone(self._missing(file, "this rollout"))
        return _read(file, offset, step, "branches")

    def read_worst(self, file: Path, step: int) -> list[dict[str, Any]]:
        """Read the worst tokens of a step.

        Raises:
            TokensGone: there are none, or the file is no longer what it was.
        """
        offset = self._offset(step, *_WORST)
        if offset is None:
            raise TokensGone(self._missing(file, f"step {step}"))
        return list(_read(file, offset, step, "worst")["worst"])

    def _missing(self, file: Path, what: str) -> str:
        if self.is_empty:
            return (
                f"the run has no {file.name}: an earlier version made it, or logging.rollouts_per_step is 0, "
                "or no step is done"
            )
        return f"{file.name} has no values of {what}"


def _read(file: Path, offset: int, step: int, part: str) -> dict[str, Any]:
    try:
        with file.open("rb") as lines:
            lines.seek(offset)
            record = json.loads(lines.readline(MAX_LINE_BYTES))
    except OSError as error:
        raise TokensGone(f"{file.name} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise TokensGone(f"the values of tokens are no longer where they were ({error})") from None
    if not isinstance(record, dict) or record.get("step") != step:
        raise TokensGone("the values of tokens are no longer where they were")
    found = record.get(part)
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise TokensGone(f"a line of {file.name} is damaged: its {part} are no list of objects")
    return record
