"""How a model writes calls of tools, and how it reads their results."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

from forgeasync.config import PlainCalls
from forgeasync.environments.environment import Turn
from forgeasync.environments.messages import BrokenToolCall, ToolCall, ToolSpec
from forgeasync.environments.tools.toolbox import ToolResult
from forgeasync.rollouts import FinishReason

MAX_PROBLEM_CHARACTERS = 1000


class CallForm(Protocol):
    """A form of calls."""

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts that end a turn."""
        ...

    def tools(self, specs: Sequence[ToolSpec]) -> tuple[ToolSpec, ...]:
        """Return the tools that the chat template is given."""
        ...

    def read(self, turn: Turn) -> Turn:
        """Return the turn with its calls; never raises for what a model wrote."""
        ...

    def answer(self, result: ToolResult) -> dict[str, Any]:
        """Return the message that tells the model of a result."""
        ...

    def answer_broken(self, call: BrokenToolCall) -> dict[str, Any]:
        """Return the message that tells the model of a call that cannot be read."""
        ...


class TemplateForm:
    """Calls in the form of the model's chat template, which the renderer has read already."""

    stop = ()

    def tools(self, specs: Sequence[ToolSpec]) -> tuple[ToolSpec, ...]:
        return tuple(specs)

    def read(self, turn: Turn) -> Turn:
        return turn

    def answer(self, result: ToolResult) -> dict[str, Any]:
        return result.message

    def answer_broken(self, call: BrokenToolCall) -> dict[str, Any]:
        problem = call.problem[:MAX_PROBLEM_CHARACTERS]
        return {"role": "user", "content": f"Error: a tool call cannot be read: {problem}"}


class PlainForm:
    """Calls of one tool with one text, between two marks in the model's own text."""

    def __init__(self, section: PlainCalls, *, tool: str, argument: str) -> None:
        """``tool`` and ``argument`` are the names of the tool and of its only argument."""
        self._section = section
        self._tool = tool
        self._argument = argument

    @property
    def stop(self) -> tuple[str, ...]:
        return (self._section.call_suffix,)

    def tools(self, specs: Sequence[ToolSpec]) -> tuple[ToolSpec, ...]:
        return ()

    def read(self, turn: Turn) -> Turn:
        """Read the call at the end of the turn; its text ends before ``call_suffix``, which has ended it."""
        _, prefix, code = turn.text.partition(self._section.call_prefix)
        if not prefix:
            return turn
        if turn.finish_reason is FinishReason.LENGTH:
            broken = BrokenToolCall(text=code, problem=f"it was cut off before {self._section.call_suffix!r}")
            return dataclasses.replace(turn, broken_tool_calls=(broken,))
        call = ToolCall(id="call_0", name=self._tool, arguments={self._argument: code})
        return dataclasses.replace(turn, tool_calls=(call,))

    def answer(self, result: ToolResult) -> dict[str, Any]:
        error_text = self._section.error_text
        return self._message(result.content if result.status.is_success or error_text is None else error_text)

    def answer_broken(self, call: BrokenToolCall) -> dict[str, Any]:
        error_text = self._section.error_text
        return self._message(call.problem[:MAX_PROBLEM_CHARACTERS] if error_text is None else error_text)

    def _message(self, text: str) -> dict[str, Any]:
        return {"role": "user", "content": self._section.result(text)}


TEMPLATE_FORM = TemplateForm()
