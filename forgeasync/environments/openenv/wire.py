"""What goes over the websocket to an environment server of OpenEnv 0.10.0 and back, as text and as records.

Messages are JSON objects with ``type`` and ``data``; every request has one answer, in order
(openenv/core/env_server/http_server.py, types.py).

    {"type": "reset", "data": {"seed": 7}}
    {"type": "step", "data": {...the action...}}
    {"type": "close"}

    {"type": "observation", "data": {"observation": {...}, "reward": 0.5, "done": false}}
    {"type": "error", "data": {"message": "...", "code": "..."}}
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

MAX_ERROR_CHARACTERS = 500


class WireError(ValueError):
    """What a server has sent is not what this wire carries."""


class BadReward(ValueError):
    """The server has given a reward that is no finite number."""


class ErrorCode(StrEnum):
    """Codes of a server's errors that are told apart; all others are failures of the environment."""

    VALIDATION_ERROR = "VALIDATION_ERROR"
    """The action is not one of the environment's."""
    CAPACITY_REACHED = "CAPACITY_REACHED"
    """All sessions of the server are in use."""


class ServerError(Exception):
    """The server has answered with an error."""

    def __init__(self, text: str, *, code: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What the environment says after a reset or a step."""

    fields: Mapping[str, Any]
    reward: float | None
    done: bool


def reset_message(arguments: Mapping[str, Any]) -> str:
    """Return the message that begins an episode."""
    return _message("reset", arguments)


def step_message(action: Mapping[str, Any]) -> str:
    """Return the message that takes an action."""
    return _message("step", action)


CLOSE_MESSAGE = json.dumps({"type": "close"})


def _message(kind: str, data: Mapping[str, Any]) -> str:
    # Half surrogate pairs, which a model may write as escapes, stay escapes.
    return json.dumps({"type": kind, "data": data})


def read_answer(text: str) -> Observation:
    """Read the answer to a reset or a step.

    Raises:
        ServerError: it is an error.
        BadReward: its reward is NaN or infinite.
        WireError: it is neither an observation nor an error.
    """
    message = _object(_parse(text), "a message")
    kind, data = message.get("type"), _object(message.get("data"), "the data of a message")
    if kind == "error":
        raise ServerError(_told(data), code=str(data.get("code"))[:MAX_ERROR_CHARACTERS])
    if kind != "observation":
        raise WireError(f"a message is of type {_show(kind)}; must be observation or error")
    done = data.get("done", False)
    if not isinstance(done, bool):
        raise WireError(f"done is {_show(done)}; must be true or false")
    return Observation(
        fields=_object(data.get("observation"), "the observation"),
        reward=_reward(data.get("reward")),
        done=done,
    )


def read_schema(text: str, part: str) -> Mapping[str, Any]:
    """Return the JSON schema of ``part``, such as ``action``, from what ``/schema`` answers.

    Raises:
        WireError: it has none.
    """
    return _object(_object(_parse(text), "the answer of /schema").get(part), f"the schema of {part!r}")


def text_of(value: object) -> str:
    """Return a value of an observation as text: text as it is, but for half surrogate pairs, which no
    tokenizer takes and which become question marks; everything else as JSON."""
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    return json.dumps(value, ensure_ascii=False).encode(errors="replace").decode()


def _parse(text: str) -> object:
    try:
        return json.loads(text)
    except RecursionError:
        raise WireError("a message is nested too deeply") from None
    except ValueError as error:
        raise WireError(f"a message is no JSON: {error}"[:MAX_ERROR_CHARACTERS]) from None


def _object(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise WireError(f"{what} is {_show(value)}; must be an object")
    return value


def _reward(value: object) -> float | None:
    # A boolean is a number here, as it is for OpenEnv.
    if value is None:
        return None
    if not isinstance(value, int | float):
        raise WireError(f"a reward is {_show(value)}; must be a number or null")
    try:
        reward = float(value)
    except OverflowError:
        reward = math.inf
    if not math.isfinite(reward):
        raise BadReward(f"the server's reward is {reward}; must be finite")
    return reward


def _told(data: Mapping[str, Any]) -> str:
    """An error in words; what pydantic says of an action is for the model to read."""
    found = data.get("errors")
    details = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    words = [str(data.get("message"))]
    for one in details[:10]:
        place = one.get("loc")
        where = ".".join(map(str, place)) if isinstance(place, list) else "action"
        words.append(f"{where}: {one.get('msg')}")
    return text_of(" ".join("; ".join(words)[:MAX_ERROR_CHARACTERS].split()))


def _show(value: object) -> str:
    # Not represented whole: it may be large, or nested so deeply that representing it would recurse.
    if isinstance(value, dict | list):
        return f"{type(value).__name__} of {len(value)}"
    return repr(value)[:80]
