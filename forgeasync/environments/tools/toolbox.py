"""The tools of one episode: every call that a model makes gets an answer, in time and of bounded length."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forgeasync.environments.environment import EpisodeInterrupted, ToolError
from forgeasync.environments.messages import TOOL, ToolCall, ToolSpec, show
from forgeasync.environments.tools.signature import BadArguments
from forgeasync.environments.tools.tool import Tool, ToolFailed, ToolServerLost, ToolTimeout
from forgeasync.rollouts import ToolStatus

DEFAULT_MAX_CHARACTERS = 20_000

CLEAN_UP_S = 5.0
"""Time for a call that was cut off to clean up, in seconds."""

MAX_NAMED_TOOLS = 50
"""Most tools that a model is told of when it calls one that does not exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What came of one call."""

    call_id: str
    """Id of the call that it answers."""
    name: str
    """Name of the tool, as the model wrote it."""
    status: ToolStatus
    content: str
    """What the model is told."""
    num_cut_characters: int = 0
    """Characters that the tool said beyond what ``content`` holds."""
    took_s: float | None = None
    """Time from the call to its result, in seconds; None where no tool was called."""

    @property
    def message(self) -> dict[str, Any]:
        """The result as a message, to continue the conversation with."""
        return {"role": TOOL, "tool_call_id": self.call_id, "content": self.content}


class Toolbox:
    """The tools of one episode; make it within ``rollout``.

        toolbox = Toolbox([Tool.from_function(add)])
        result = await toolbox.call(turn.tool_calls[0], limit_s=10.0)

    No call raises for what a model wrote or for what a tool does, with two exceptions: a tool that raises
    ``EpisodeInterrupted`` or ``ToolError`` ends the episode.
    """

    def __init__(self, tools: Sequence[Tool], *, max_characters: int = DEFAULT_MAX_CHARACTERS) -> None:
        """``max_characters`` bounds what the model is told of one call.

        Raises:
            ValueError: two tools have the same name, or ``max_characters`` is not positive.
        """
        if max_characters < 1:
            raise ValueError(f"max_characters = {max_characters}; must be at least 1")
        self._tools: dict[str, Tool] = {}
        for tool in tools:
            if tool.spec.name in self._tools:
                raise ValueError(f"two tools are called {tool.spec.name!r}; give each a name of its own")
            self._tools[tool.spec.name] = tool
        self._max_characters = max_characters

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        """The tools as the model is told of them."""
        return tuple(tool.spec for tool in self._tools.values())

    async def call(self, call: ToolCall, *, limit_s: float) -> ToolResult:
        """Run a call; after ``limit_s`` seconds it is cut off, with the processes that it has started."""
        tool = self._tools.get(call.name)
        if tool is None:
            return self._result(call, ToolStatus.UNKNOWN_TOOL, self._unknown(call.name))
        # A task of its own: what a tool does to the current one must not reach the episode.
        running = asyncio.ensure_future(_guarded(tool, call))
        start_s = time.perf_counter()
        try:
            await asyncio.wait([running], timeout=limit_s)
        finally:
            if not running.done():
                running.cancel()
        if not running.done():
            await asyncio.wait([running], timeout=CLEAN_UP_S)
            running.add_done_callback(_forget)
            status, text = ToolStatus.TIMEOUT, f"Error: the call took longer than {limit_s:g} s"
        elif running.cancelled():
            status, text = ToolStatus.FAILED, "Error: the call has cancelled itself"
        else:
            status, text = running.result()
        return self._result(call, status, text, took_s=time.perf_counter() - start_s)

    def _unknown(self, name: str) -> str:
        names = ", ".join(list(self._tools)[:MAX_NAMED_TOOLS]) or "none"
        return f"Error: there is no tool {show(name)}; tools: {names}"

    def _result(
        self, call: ToolCall, status: ToolStatus, text: str, *, took_s: float | None = None
    ) -> ToolResult:
        content, num_cut = _cut(text, self._max_characters)
        if num_cut and status is ToolStatus.OK:
            status = ToolStatus.CUT
        return ToolResult(
            call_id=call.id,
            name=call.name,
            status=status,
            content=content + _told_cut(num_cut),
            num_cut_characters=num_cut,
            took_s=took_s,
        )


async def _guarded(tool: Tool, call: ToolCall) -> tuple[ToolStatus, str]:
    try:
        return ToolStatus.OK, await tool.run(call.arguments)
    except BadArguments as error:
        return ToolStatus.BAD_ARGUMENTS, f"Error: wrong arguments for {tool.spec.name}: {error}"
    except ToolServerLost as error:
        return ToolStatus.SERVER_LOST, f"Error: {error}"
    except ToolTimeout as error:
        return ToolStatus.TIMEOUT, str(error)
    except ToolFailed as error:
        return ToolStatus.FAILED, str(error)
    except (EpisodeInterrupted, ToolError):
        raise
    except (Exception, SystemExit) as error:
        # Whatever a tool raises is for the model to read; without a traceback, which shows our files.
        return ToolStatus.FAILED, f"{type(error).__name__}: {error}"


def _cut(text: str, max_characters: int) -> tuple[str, int]:
    return text[:max_characters], max(len(text) - max_characters, 0)


def _told_cut(num_cut: int) -> str:
    return f"\n[{num_cut} more characters were cut]" if num_cut else ""


def _forget(ended: "asyncio.Future[tuple[ToolStatus, str]]") -> None:
    if not ended.cancelled():
        ended.exception()
