"""Rollouts and the values of their tokens: where they are in the run's files, and how the page gets them.

Only offsets are kept in memory. A text or a value is read from the file when somebody asks for it.
"""

import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from forgeasync.plugins.viewer.appended_lines import LineGone, Piece, read_record
from forgeasync.rollouts import RolloutKey

MAX_ROLLOUTS = 200
"""Most rollouts of a group or a step that an answer lists."""

MAX_TOKENS = 2000
"""Most tokens of an answer."""

VALUES = ("mismatch", "ratio", "advantage", "entropy", "version", "kept", "logprob", "behavior")
"""Columns of a branch's line with a value for each trained token."""

Answer = dict[str, object]

# How a run begins each line of rollouts.jsonl. Any other line is parsed, which takes thirty times as long.
_ROLLOUT = re.compile(rb'^\{"step": (\d{1,17}), "group_id": (\d{1,17}), .*\}$', re.MULTILINE)

# How a run begins each line of tokens.jsonl: that of a rollout, or the worst tokens of a step.
_TOKENS = re.compile(
    rb'\{"step": (\d{1,17}), '
    rb'(?:"group_id": (\d{1,17}), "episode": (\d{1,17}), "agent": (\d{1,17}), |"worst": )'
)

_WORST = (-1, -1, -1)
"""Stands for the rollout of a line with the worst tokens of a step."""


class RolloutGone(ValueError):
    """A rollout that cannot be read; the text says why."""


class TokensGone(ValueError):
    """Values of tokens that cannot be read; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlace:
    """One rollout, by its number in the order of the file."""

    number: int
    step: int
    group: int


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    """What is read of a rollout whose line begins in another way."""

    step: Annotated[int, msgspec.Meta(ge=0, lt=10**17)]
    group_id: Annotated[int, msgspec.Meta(ge=0, lt=10**17)]


_HEAD_DECODER = msgspec.json.Decoder(_Head)


class RolloutIndex:
    """Steps, groups and offsets of all rollouts so far. Memory: 24 bytes a rollout."""

    def __init__(self, file: Path) -> None:
        self.num_damaged = 0
        """Lines that are no rollout."""
        self._file = file
        self._steps, self._groups, self._offsets = array("q"), array("q"), array("q")

    def __len__(self) -> int:
        return len(self._offsets)

    def add(self, piece: Piece) -> None:
        """Take the next lines. Damaged ones are counted and left out."""
        data = piece.data
        if not data:
            return
        heads = _ROLLOUT.findall(data)
        if len(heads) != data.count(b"\n"):
            self._add_one_by_one(piece)
            return
        for step, group in heads:
            self._steps.append(int(step))
            self._groups.append(int(group))
        ends_N = np.flatnonzero(np.frombuffer(data, dtype=np.uint8) == ord("\n"))
        offsets_N = np.concatenate([[0], ends_N[:-1] + 1]).astype(np.int64) + piece.start
        self._offsets.frombytes(offsets_N.tobytes())

    def _add_one_by_one(self, piece: Piece) -> None:
        offset = piece.start
        for line in piece.lines():
            try:
                head = _HEAD_DECODER.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                self.num_damaged += 1
            else:
                self._steps.append(head.step)
                self._groups.append(head.group_id)
                self._offsets.append(offset)
            offset += len(line) + 1

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

    def read(self, number: int) -> dict[str, Any]:
        """Read one rollout.

        Raises:
            RolloutGone: there is none of this number, or the file has changed.
        """
        if not 0 <= number < len(self):
            what = f"0 to {len(self) - 1}" if len(self) else "none yet"
            raise RolloutGone(f"there is no rollout {number}; those read so far are {what}")
        try:
            record = read_record(self._file, self._offsets[number])
        except LineGone as error:
            raise RolloutGone(f"rollout {number} is gone: {error}") from None
        if (record.get("step"), record.get("group_id")) != (self._steps[number], self._groups[number]):
            raise RolloutGone(f"rollout {number} is gone: {self._file.name} has changed")
        return record

    def row(self, place: RolloutPlace) -> Answer:
        """Return a rollout's line of a list, or why it cannot be read."""
        where = {"number": place.number, "step": place.step, "group": place.group}
        try:
            record = self.read(place.number)
        except RolloutGone as error:
            return {**where, "problem": str(error)}
        keys = (
            *("episode", "agent", "reward", "is_correct"),
            *("response_tokens", "finish_reason", "version_spans"),
        )
        return {**where, **{key: record.get(key) for key in keys}}

    def rows(self, places: Sequence[RolloutPlace]) -> Answer:
        """Return the first ``MAX_ROLLOUTS`` of some rollouts as a list, and how many they are."""
        return {"num_rollouts": len(places), "rollouts": [self.row(one) for one in places[:MAX_ROLLOUTS]]}

    def whole(self, number: int) -> Answer:
        """Return a whole rollout: its line of the file, and its response in parts.

        Raises:
            RolloutGone: it cannot be read.
        """
        record = self.read(number)
        return {**record, "number": number, "response_parts": _response_parts(record)}


def _response_parts(record: Mapping[str, Any]) -> list[Answer] | None:
    """Cut a response where its steps end, each with its reward; None if it was not scored by steps."""
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


class TokenIndex:
    """Offsets of all lines of tokens.jsonl so far, 40 bytes each. The newer of two equal lines counts."""

    def __init__(self, file: Path) -> None:
        self.num_damaged = 0
        """Lines that do not belong into such a file."""
        self._file = file
        self._offsets, self._steps = array("q"), array("q")
        self._groups, self._episodes, self._agents = array("q"), array("q"), array("q")

    def add(self, piece: Piece) -> None:
        """Take the next lines. Damaged ones are counted and left out."""
        offset = piece.start
        for line in piece.lines():
            head = _TOKENS.match(line)
            if head is None or not line.endswith(b"}"):
                self.num_damaged += 1
            else:
                group, episode, agent = _WORST if head[2] is None else map(int, head.groups()[1:])
                self._offsets.append(offset)
                self._steps.append(int(head[1]))
                self._groups.append(group)
                self._episodes.append(episode)
                self._agents.append(agent)
            offset += len(line) + 1

    def branches(self, step: int, key: RolloutKey) -> list[dict[str, Any]]:
        """Read the values of a rollout of a step, by branch.

        Raises:
            TokensGone: there are none, or the file has changed.
        """
        place = (key.group_id, key.episode, key.agent)
        return self._read(step, place, "branches", "this rollout")

    def worst(self, step: int) -> list[dict[str, Any]]:
        """Read the worst tokens of a step.

        Raises:
            TokensGone: there are none, or the file has changed.
        """
        return self._read(step, _WORST, "worst", f"step {step}")

    def _read(self, step: int, place: tuple[int, int, int], part: str, what: str) -> list[dict[str, Any]]:
        name = self._file.name
        if not self._offsets:
            raise TokensGone(
                f"the run has no {name}: an earlier version made it, or logging.rollouts_per_step is 0, "
                "or no step is done"
            )
        columns = (self._steps, self._groups, self._episodes, self._agents)
        is_it_N = np.logical_and.reduce(
            [np.array(column) == value for column, value in zip(columns, (step, *place), strict=True)]
        )
        found = np.flatnonzero(is_it_N)
        if not len(found):
            raise TokensGone(f"{name} has no values of {what}")
        try:
            record = read_record(self._file, self._offsets[int(found[-1])])
        except LineGone as error:
            raise TokensGone(str(error)) from None
        if record.get("step") != step:
            raise TokensGone(f"{name} has changed: a line is no longer at its offset")
        values = record.get(part)
        if not isinstance(values, list) or not all(isinstance(one, dict) for one in values):
            raise TokensGone(f"a line of {name} is damaged: {part} is not a list of objects")
        return values


def tokens_answer(
    rollouts: RolloutIndex, tokens: TokenIndex, number: int, *, branch: int, skip: int
) -> Answer:
    """Return ``MAX_TOKENS`` tokens of a rollout's branch from ``skip`` on, with a value or null for each.

    If the values cannot be read, the answer has only a ``problem``.

    Raises:
        RolloutGone: there is no such rollout.
    """
    record = rollouts.read(number)
    step, key = record["step"], _key_of(record)
    try:
        branches = tokens.branches(step, key)
        if not branch < len(branches):
            raise TokensGone(f"branch = {branch}; must be 0 to {len(branches) - 1}")
        page = _page(branches[branch], skip)
        worst = _worst_places(tokens, step, key, branches[branch]["branch"])
    except TokensGone as error:
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
    # Runs of earlier versions have neither episodes nor agents.
    return RolloutKey(
        group_id=record["group_id"], episode=record.get("episode", 0), agent=record.get("agent", 0)
    )


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
    """Return which tokens of a branch are among the worst of the step, each with its rank from 1."""
    try:
        worst = tokens.worst(step)
    except TokensGone:
        # It is the step's last line, and may not be written yet.
        return []
    return [
        (token["position"], rank)
        for rank, token in enumerate(worst, start=1)
        if _key_of(token) == key and token["branch"] == branch
    ]


def worst_answer(rollouts: RolloutIndex, tokens: TokenIndex, step: int) -> Answer:
    """Return the worst tokens of a step, each with the number of its rollout if that was written.

    Raises:
        RolloutGone: a rollout of the step cannot be read.
    """
    try:
        worst = tokens.worst(step)
    except TokensGone as error:
        return {"problem": str(error), "worst": []}
    wanted = {one.get("group_id") for one in worst}
    numbers: dict[tuple[object, object, object], int] = {
        (place.group, record.get("episode", 0), record.get("agent", 0)): place.number
        for place in rollouts.of_step(step)
        if place.group in wanted
        for record in [rollouts.read(place.number)]
    }
    return {
        "problem": None,
        "worst": [
            {**one, "rollout": numbers.get((one.get("group_id"), one.get("episode"), one.get("agent")))}
            for one in worst
        ],
    }
