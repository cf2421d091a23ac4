"""An episode for people to read: every branch with its messages, and the versions that sampled the turns."""

import bisect
import json
from collections.abc import Mapping, Sequence
from typing import Any

from forgeasync.config import Ending
from forgeasync.environments.artifacts import EpisodeArtifacts
from forgeasync.environments.branches import turn_facts
from forgeasync.environments.messages import ASSISTANT
from forgeasync.environments.participant import Participant
from forgeasync.environments.reward import Response
from forgeasync.rollouts import Score, Task, VersionRange

MAX_BYTES = 500_000
"""Most bytes of the messages of a record, as JSON; what is beyond is cut, and its number is told."""


def episode_record(
    task: Task,
    agents: Sequence[Participant],
    ending: Ending,
    scores: Mapping[str, Score],
    problem: str | None,
    artifacts: EpisodeArtifacts,
) -> dict[str, Any]:
    """Return JSON values: task, ending, files kept, and for every agent its score and its branches."""
    room = _Room(MAX_BYTES)
    record: dict[str, Any] = {
        "task_id": task.task_id,
        "ending": ending.value,
        "problem": problem,
        "artifacts": artifacts.paths,
        "agents": [
            {
                "name": agent.name,
                "score": _score(scores.get(agent.name)),
                "num_turns": agent.num_turns,
                "branches": [room.kept(branch) for branch in agent.branches()],
            }
            for agent in agents
        ],
    }
    return record | {"num_cut_bytes": room.num_cut}


def response_record(
    task: Task,
    response: Response,
    score: Score | None,
    problem: str | None,
    *,
    versions: VersionRange | None,
) -> dict[str, Any]:
    """Return the record of one response to a task's prompt, in the form of an episode's with one turn."""
    room = _Room(MAX_BYTES)
    prompt = {"role": "user", "content": task.prompt}
    answer = {"role": ASSISTANT, "content": response.text} | turn_facts(
        versions=versions, num_tokens=response.num_tokens, finish_reason=response.finish_reason
    )
    branch = room.kept([prompt, answer])
    return {
        "task_id": task.task_id,
        "ending": None,
        "problem": problem,
        "artifacts": [],
        "agents": [
            {
                "name": "agent",
                "score": _score(score),
                "num_turns": 1,
                "branches": [branch],
            }
        ],
        "num_cut_bytes": room.num_cut,
    }


class _Room:
    """How many bytes are left."""

    def __init__(self, num_left: int) -> None:
        self._num_left = num_left
        self.num_cut = 0

    def kept(self, branch: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages for which there is room; the first that is too large has the beginnings of its
        texts and no tool calls."""
        kept = []
        for message in branch:
            whole = _as_json(message)
            num_bytes = _num_bytes(whole)
            if num_bytes <= self._num_left:
                kept.append(whole)
                self._num_left -= num_bytes
                continue
            self.num_cut += num_bytes
            if (part := self._part(whole)) is not None:
                kept.append(part)
                self.num_cut -= _num_bytes(part)
            # Whatever follows is cut: a conversation has no gaps.
            self._num_left = 0
        return kept

    def _part(self, message: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return as much of a message as there is room for; None if there is none at all."""
        texts = [key for key in ("content", "reasoning_content") if key in message]
        part = {key: value for key, value in message.items() if key != "tool_calls"} | dict.fromkeys(
            texts, ""
        )
        if _num_bytes(part) > self._num_left:
            return None
        for key in texts:
            room = self._num_left - _num_bytes(part)
            # A character takes one byte at least, so that only so many can fit.
            text = message[key][:room]
            num_fitting = bisect.bisect_right(
                range(1, len(text) + 1), room, key=lambda length: _num_bytes(text[:length]) - len('""')
            )
            part[key] = text[:num_fitting]
        return part


def _as_json(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as rollouts.jsonl can have it: arguments that JSON has not, such as NaN, as text."""
    try:
        json.dumps(message, allow_nan=False)
    except (TypeError, ValueError):
        calls = [
            {**call, "function": {**call["function"], "arguments": str(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
        return {**message, "tool_calls": calls}
    return dict(message)


def _num_bytes(value: object) -> int:
    """Number of bytes that a value takes in rollouts.jsonl."""
    return len(json.dumps(value, allow_nan=False))


def _score(score: Score | None) -> dict[str, Any] | None:
    if score is None:
        return None
    return {"value": score.value, "is_correct": score.is_correct, "parts": dict(score.parts)}
