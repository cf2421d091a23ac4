"""Messages and tools as chat templates and the package ``renderers`` take them."""

import json
from collections.abc import Sequence
from typing import Any

from forgeasync.environments.messages import Message, ToolSpec


def message_forms(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return copies that may be changed, with plain objects as the arguments of tool calls."""
    forms = []
    for message in messages:
        form = dict(message)
        if "tool_calls" in form:
            form["tool_calls"] = [_call_form(call) for call in form["tool_calls"]]
        forms.append(form)
    return forms


def _call_form(call: Any) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {"name": function["name"], "arguments": json.loads(arguments or "{}")}}


def tool_forms(tools: Sequence[ToolSpec]) -> list[dict[str, Any]]:
    """Return the tools as chat endpoints take them, in plain objects."""
    return [json.loads(json.dumps(tool.message_form, ensure_ascii=False)) for tool in tools]
