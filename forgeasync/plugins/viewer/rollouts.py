"""Rollouts and the values of their tokens, read from the run's files on request.

Only offsets are kept in memory. A text or a value is read from the file when it is requested.
"""

import re
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from forgeasync.plugins.viewer.followed_file import LineUnreadable, read_record
from forgeasync.rollouts import RolloutKey

MAX_ROLLOUTS = 200
"""Maximum number of a group's or a step's rollouts in an answer."""

MAX_TOKENS = 2000
"""Maximum number of tokens in an answer."""

VALUES = ("mismatch", "ratio", "advantage", "entropy", "version", "kept", "logprob", "behavior")
"""Columns of a branch's line with a value for each trained token."""

Answer = dict[str, object]

# A whole line is too long to be parsed, so only its beginning is read.
_ROLLOUT = re.compile(rb'\{"step": (\d{1,17}), "group_id": (\d{1,17}), ')

# Values of a rollout, or of the worst tokens of a step.
_TOKENS = re.compile(
    rb'\{"step": (\d{1,17}), '
    rb'(?:"group_id": (\d{1,17}), "episode": (\d{1,17}), "agent": (\d{1,17}), |"worst": )'
)

_NONE = -1
"""Number in the index for a field that a line does not have."""

_WORST = RolloutKey(group_id=_NONE, episode=_NONE, agent=_NONE)


class NotFound(LookupError):
    """The run does not have the requested item, or there is no such address; the text names it."""


class _LineIndex:
    """The offset of every line of a file, and some numbers of each line; 8 bytes per number."""

    def __init__(self, file: Path, beginning: re.Pattern[bytes], *names: str) -> None:
        """``beginning`` matches a line that belongs in the file; ``names`` are those of its groups."""
        self.num_damaged = 0
        """Number of lines that do not belong in such a file."""
        self._file = file
        self._beginning = beginning
        self._offsets = array("q")
        self._columns = {name: array("q") for name in names}

    def __len__(self) -> int:
        return len(self._offsets)

    def add(self, line: bytes, offset: int) -> None:
        """Add the next line; damaged lines are counted and skipped."""
        found = self._beginning.match(line)
        if found is None or not line.endswith(b"}"):
            self.num_damaged += 1
            return
        self._offsets.append(offset)
        for column, number in zip(self._columns.values(), found.groups(), strict=True):
            column.append(_NONE if number is None else int(number))

    def find(self, **wanted: int) -> list[int]:
        """Return the indices of the lines that have these numbers, in the order of the file."""
        is_it_N = np.ones(len(self), dtype=bool)
        for name, number in wanted.items():
            is_it_N &= np.array(self._columns[name]) == number
        return [int(place) for place in np.flatnonzero(is_it_N)]


class RolloutIndex(_LineIndex):
    """Steps, groups and offsets of all rollouts so far; rollouts are numbered in the order of the file."""

    def __init__(self, file: Path) -> None:
        super().__init__(file, _ROLLOUT, "step", "group")

    def read(self, number: int) -> dict[str, Any]:
        """Read one rollout.

        Raises:
            NotFound: there is no rollout of this number, or the file has changed.
        """
        if not 0 <= number < len(self):
            what = f"0 to {len(self) - 1}" if len(self) else "none yet"
            raise NotFound(f"there is no rollout {number}; those read so far are {what}")
        try:
            record = read_record(self._file, self._offsets[number])
        except LineUnreadable as error:
            raise NotFound(f"rollout {number} is gone: {error}") from None
        place = self._place(number)
        if (record.get("step"), record.get("group_id")) != (place["step"], place["group"]):
            raise NotFound(f"rollout {number} is gone: {self._file.name} has changed")
        return record

    def _place(self, number: int) -> dict[str, int]:
        return {name: column[number] for name, column in self._columns.items()}

    def rows(self, numbers: Sequence[int]) -> Answer:
        """Return the first ``MAX_ROLLOUTS`` of the given rollouts, and the number of all."""
        rollouts = [self._row(number) for number in numbers[:MAX_ROLLOUTS]]
        return {"num_rollouts": len(numbers), "rollouts": rollouts}

    def _row(self, number: int) -> Answer:
        """Return a rollout's entry for a list, or why it cannot be read."""
        where = {"number": number, **self._place(number)}
        try:
            record = self.read(number)
        except NotFound as error:
            return {**where, "problem": str(error)}
        keys = (
            *("episode", "agent", "reward", "is_correct"),
            *("response_tokens", "finish_reason", "version_spans"),
        )
        return {**where, **{key: record.get(key) for key in keys}}

    def whole(self, number: int) -> Answer:
        """Return a whole rollout: its line of the file, and its response in parts.

        Raises:
            NotFound: it cannot be read.
        """
        record = self.read(number)
        return {**record, "number": number, "response_parts": _response_parts(record)}


def _response_parts(record: Mapping[str, Any]) -> list[Answer] | None:
    """Split a response at the ends of its steps, each with its reward; None if it was not scored by steps."""
    response, steps = record.get("response"), record.get("steps")
    if not isinstance(response, str) or not isinstance(steps, list) or not steps:
        return None
    parts: list[Answer] = []
    start = 0
    for step in steps:
        match step:
            case [int(end), (int() | float() | None) as value] if start <= end <= len(response):
                parts.append({"text": response[start:end], "value": value})
                start = end
            case _:
                return None
    if start < len(response):
        parts.append({"text": response[start:], "value": None})
    return parts


class TokenIndex(_LineIndex):
    """Offsets of all lines of tokens.jsonl so far; the newer of two equal lines counts."""

    def __init__(self, file: Path) -> None:
        super().__init__(file, _TOKENS, "step", "group", "episode", "agent")

    def branches(self, step: int, key: RolloutKey) -> list[dict[str, Any]]:
        """Read the values of a rollout of a step, by branch.

        Raises:
            LineUnreadable: there are none, or the file has changed.
        """
        return self._read(step, key, "branches", "this rollout")

    def worst(self, step: int) -> list[dict[str, Any]]:
        """Read the worst tokens of a step.

        Raises:
            LineUnreadable: there are none, or the file has changed.
        """
        return self._read(step, _WORST, "worst", f"step {step}")

    def _read(self, step: int, key: RolloutKey, part: str, what: str) -> list[dict[str, Any]]:
        name = self._file.name
        if not len(self):
            raise LineUnreadable(f"the run has no {name}: logging.rollouts_per_step is 0, or no step ended")
        found = self.find(step=step, group=key.group_id, episode=key.episode, agent=key.agent)
        if not found:
            raise LineUnreadable(f"{name} has no values of {what}")
        record = read_record(self._file, self._offsets[found[-1]])
        if record.get("step") != step:
            raise LineUnreadable(f"{name} has changed: a line is not at its offset")
        values = record.get(part)
        if not isinstance(values, list) or not all(isinstance(one, dict) for one in values):
            raise LineUnreadable(f"a line of {name} is damaged: {part} is not a list of objects")
        return values


def tokens_answer(
    rollouts: RolloutIndex, tokens: TokenIndex, number: int, *, branch: int, skip: int
) -> Answer:
    """Return up to ``MAX_TOKENS`` tokens of a rollout's branch from ``skip`` on, with a value or null for
    each.

    If the values cannot be read, the answer has only a ``problem``.

    Raises:
        NotFound: there is no such rollout.
    """
    record = rollouts.read(number)
    step, key = record["step"], _key_of(record)
    try:
        branches = tokens.branches(step, key)
        if not branch < len(branches):
            raise LineUnreadable(f"branch = {branch}; must be 0 to {len(branches) - 1}")
        page = _page(branches[branch], skip)
        worst = _worst_places(tokens, step, key, branches[branch]["branch"])
    except LineUnreadable as error:
        return {"problem": str(error)}
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        return {"problem": f"the values of this rollout's tokens are damaged ({error!r})"}
    return {
        "problem": None,
        "num_branches": len(branches),
        "branch": branch,
        "page_size": MAX_TOKENS,
        **page,
        "worst": [[place, rank] for place, rank in worst if skip <= place < skip + MAX_TOKENS],
    }


def _key_of(record: Mapping[str, Any]) -> RolloutKey:
    return RolloutKey(group_id=record["group_id"], episode=record["episode"], agent=record["agent"])


def _page(branch: Mapping[str, Any], skip: int) -> Answer:
    num_tokens = branch["num_tokens"]
    end = min(num_tokens, skip + MAX_TOKENS)
    places = [
        (index, position) for index, position in enumerate(branch["positions"]) if skip <= position < end
    ]
    layers = branch["disagreement"]

    def spread(column: Sequence[object]) -> list[object]:
        found: list[object] = [None] * max(0, end - skip)
        for index, position in places:
            found[position - skip] = column[index]
        return found

    numbers: list[object] = [None] * max(0, end - skip)
    if layers is not None:
        for index, position in places:
            numbers[position - skip] = "".join(layer[index] for layer in layers)
    pieces = branch["pieces"]
    return {
        "num_tokens": num_tokens,
        "skip": skip,
        "pieces": None if pieces is None else pieces[skip:end],
        "is_trained": spread([True] * len(branch["positions"])),
        "values": {name: spread(branch[name]) for name in VALUES},
        "num_layers": 0 if layers is None else len(layers),
        "disagreement": numbers,
    }


def _worst_places(tokens: TokenIndex, step: int, key: RolloutKey, branch: int) -> list[tuple[int, int]]:
    """Return the positions of a branch's tokens among the worst of the step, each with its rank from 1."""
    try:
        worst = tokens.worst(step)
    except LineUnreadable:
        # It is the step's last line, and may not be written yet.
        return []
    return [
        (token["position"], rank)
        for rank, token in enumerate(worst, start=1)
        if _key_of(token) == key and token["branch"] == branch
    ]


def worst_answer(rollouts: RolloutIndex, tokens: TokenIndex, step: int) -> Answer:
    """Return the worst tokens of a step, each with the number of its rollout if that was stored.

    Raises:
        NotFound: a rollout of the step cannot be read.
    """
    try:
        worst = tokens.worst(step)
    except LineUnreadable as error:
        return {"problem": str(error), "worst": []}
    numbers: dict[tuple[object, object, object], int] = {}
    for group in {group for one in worst if isinstance(group := one.get("group_id"), int)}:
        for number in rollouts.find(step=step, group=group):
            record = rollouts.read(number)
            numbers[group, record.get("episode"), record.get("agent")] = number
    return {
        "problem": None,
        "worst": [
            {**one, "rollout": numbers.get((one.get("group_id"), one.get("episode"), one.get("agent")))}
            for one in worst
        ],
    }
