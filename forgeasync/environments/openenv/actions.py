"""How a turn of the model becomes actions of an OpenEnv environment, and an observation a message."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from forgeasync.config import McpActions, StepTool, TextAction
from forgeasync.environments.environment import Turn
from forgeasync.environments.messages import TOOL, ToolCall, ToolSpec, show
from forgeasync.environments.openenv.connection import Connection, ServerLost
from forgeasync.environments.openenv.wire import Observation, WireError, text_of
from forgeasync.environments.sessions.dialect import check_size
from forgeasync.environments.tools.forms import TEMPLATE_FORM
from forgeasync.rollouts import ToolStatus

MAX_TOOLS = 512
"""Most tools of one environment."""

STEP = "step"
_STEP_DESCRIPTION = "Take an action in the environment."


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One thing that the model tries in a turn: an action, or what is wrong with it."""

    call_id: str | None
    """Id of the tool call that it is; None for text and for calls that cannot be read."""
    action: Mapping[str, Any] | None
    status: ToolStatus = ToolStatus.OK
    problem: str = ""
    """What the model is told where there is no action."""

    def answer(self, text: str) -> dict[str, Any]:
        """Return the message that tells the model what came of it."""
        if self.call_id is None:
            return {"role": "user", "content": text}
        return {"role": TOOL, "tool_call_id": self.call_id, "content": text}


class ActionForm(Protocol):
    """How actions are written and observations told."""

    @property
    def tools(self) -> tuple[ToolSpec, ...]:
        """What the model may call."""
        ...

    def attempts(self, turn: Turn) -> list[Attempt]:
        """Return what the model tries in a turn; none where it has stopped acting."""
        ...

    def told(self, observation: Observation) -> tuple[ToolStatus, str]:
        """Return an observation of a step as the model is told it, and what it makes of the call.

        Raises:
            ValueError: it lacks the field that the config names.
        """
        ...


class TextForm:
    """What the model says is the action."""

    tools = ()

    def __init__(self, section: TextAction, observation_field: str | None) -> None:
        self._field = section.field
        self._observation_field = observation_field

    def attempts(self, turn: Turn) -> list[Attempt]:
        return [Attempt(call_id=None, action={self._field: turn.text})]

    def told(self, observation: Observation) -> tuple[ToolStatus, str]:
        return ToolStatus.OK, observation_text(observation, self._observation_field)


class StepForm:
    """The model calls one tool, whose arguments are the action."""

    def __init__(self, schema: Mapping[str, Any], observation_field: str | None) -> None:
        """``schema`` is the server's schema of actions; its field ``metadata`` is not for the model.

        Raises:
            WireError: it is no schema of an object, or too large.
        """
        if schema.get("type") != "object":
            raise WireError(f"the schema of actions is of type {show(schema.get('type'))}; must be object")
        properties = schema.get("properties")
        shown = dict(schema)
        if isinstance(properties, dict):
            shown["properties"] = {name: one for name, one in properties.items() if name != "metadata"}
        description = schema.get("description")
        self.tools = (_tool(STEP, description if isinstance(description, str) else _STEP_DESCRIPTION, shown),)
        self._observation_field = observation_field

    def attempts(self, turn: Turn) -> list[Attempt]:
        return _attempts(turn, {STEP}, lambda call: call.arguments)

    def told(self, observation: Observation) -> tuple[ToolStatus, str]:
        return ToolStatus.OK, observation_text(observation, self._observation_field)


class McpForm:
    """The model calls the environment's MCP tools."""

    def __init__(self, tools: Sequence[object], observation_field: str | None) -> None:
        """``tools`` are those that the environment lists.

        Raises:
            WireError: there are none, or too many, or one is no tool.
        """
        if not 0 < len(tools) <= MAX_TOOLS:
            raise WireError(f"the environment lists {len(tools)} tools; must be 1 to {MAX_TOOLS}")
        self.tools = tuple(_listed_tool(one) for one in tools)
        self._names = {tool.name for tool in self.tools}
        self._observation_field = observation_field

    def attempts(self, turn: Turn) -> list[Attempt]:
        return _attempts(
            turn,
            self._names,
            lambda call: {"type": "call_tool", "tool_name": call.name, "arguments": call.arguments},
        )

    def told(self, observation: Observation) -> tuple[ToolStatus, str]:
        error = observation.fields.get("error")
        if isinstance(error, dict):
            return ToolStatus.FAILED, f"Error: {text_of(error.get('message'))}"
        if self._observation_field is not None:
            return ToolStatus.OK, observation_text(observation, self._observation_field)
        return _tool_result(observation)


async def list_actions(
    section: StepTool | McpActions | TextAction, observation_field: str | None, session: Connection
) -> ActionForm:
    """Return the form that the config asks for, with the tools that the server has.

    Raises:
        ServerLost: what it says of them cannot be used.
        ServerError, BadReward: the server answers so.
    """
    try:
        match section:
            case TextAction():
                return TextForm(section, observation_field)
            case StepTool():
                return StepForm(await session.schema("action"), observation_field)
            case McpActions():
                listed = (await session.step({"type": "list_tools"})).fields.get("tools")
                return McpForm(listed if isinstance(listed, list) else [], observation_field)
    except WireError as error:
        raise ServerLost(f"the actions of the environment cannot be told to the model: {error}") from error


def observation_text(observation: Observation, field: str | None) -> str:
    """Return an observation as text.

    Raises:
        ValueError: it has no such field.
    """
    fields = observation.fields
    if field is None:
        return json_text({name: one for name, one in fields.items() if name != "metadata"})
    if field not in fields:
        raise ValueError(
            f"environment.observation_field = {field!r}, but the observation has "
            f"{', '.join(sorted(fields)) or 'no fields'}"[:500]
        )
    return text_of(fields[field])


def json_text(value: object) -> str:
    """Return a value as JSON; what Python's encoder cannot nest is named instead."""
    try:
        return text_of(value)
    except RecursionError:
        return "[nested too deeply to be shown]"


def _attempts(turn: Turn, known: set[str], action: Callable[[ToolCall], Mapping[str, Any]]) -> list[Attempt]:
    attempts = [
        Attempt(call_id=call.id, action=action(call))
        if call.name in known
        else Attempt(
            call_id=call.id,
            action=None,
            status=ToolStatus.UNKNOWN_TOOL,
            problem=f"Error: there is no tool {show(call.name)}; tools: {', '.join(sorted(known))}",
        )
        for call in turn.tool_calls
    ]
    return attempts + [
        Attempt(
            call_id=None,
            action=None,
            status=ToolStatus.UNREADABLE,
            problem=TEMPLATE_FORM.answer_broken(call)["content"],
        )
        for call in turn.broken_tool_calls
    ]


def _tool(name: object, description: str, parameters: object) -> ToolSpec:
    if not isinstance(name, str) or not name:
        raise WireError(f"tool {show(name)}.name is {show(name)}; must be a string that is not empty")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    where = f"tool {show(name)}.parameters"
    if not isinstance(parameters, dict):
        raise WireError(f"{where} is {show(parameters)}; must be a JSON schema of type object")
    try:
        check_size(parameters)
        json.dumps((name, parameters), ensure_ascii=False).encode()
    except ValueError as error:
        raise WireError(f"{where}: {error}") from error
    return ToolSpec(name=name, description=description, parameters=parameters)


def _listed_tool(one: object) -> ToolSpec:
    if not isinstance(one, dict):
        raise WireError(f"a tool is {show(one)}; must be an object")
    description = one.get("description")
    return _tool(
        one.get("name"), description if isinstance(description, str) else "", one.get("input_schema")
    )


def _tool_result(observation: Observation) -> tuple[ToolStatus, str]:
    """What a tool has returned: the text of an MCP result, or whatever else stands in ``result`` as JSON."""
    result = observation.fields.get("result")
    if not isinstance(result, dict) or not isinstance(result.get("content"), list):
        return ToolStatus.OK, json_text(result)
    status = ToolStatus.FAILED if result.get("is_error") is True else ToolStatus.OK
    parts = [
        text_of(one["text"])
        if isinstance(one, dict) and isinstance(one.get("text"), str)
        else "[no text: cannot be shown]"
        for one in result["content"]
    ]
    return status, "\n".join(parts)
