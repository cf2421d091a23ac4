"""An agent that says what a test has written, and keeps what it was told."""

from collections import Counter
from collections.abc import Sequence

from forgeasync.environments import BrokenToolCall, Message, ToolCall, ToolSpec, Turn, checked_messages
from forgeasync.rollouts import FinishReason, ToolStatus


def said(text: str = "", *calls: ToolCall, broken: Sequence[BrokenToolCall] = ()) -> Turn:
    return Turn(
        text=text,
        num_prompt_tokens=1,
        num_tokens=1,
        finish_reason=FinishReason.STOP,
        tool_calls=calls,
        broken_tool_calls=tuple(broken),
    )


class ScriptedAgent:
    """Takes the given turns, one after the other."""

    def __init__(self, *turns: Turn | str, tool_limit_s: float = 300.0) -> None:
        self._turns = [said(turn) if isinstance(turn, str) else turn for turn in turns]
        self.tool_limit_s = tool_limit_s
        self.tool_calls: Counter[ToolStatus] = Counter()
        self.tool_calls_s: list[float] = []
        self.kept: dict[str, bytes | str] = {}
        self.heard: list[tuple[Message, ...]] = []
        """The messages of every call of ``respond``."""
        self.tools: list[tuple[ToolSpec, ...]] = []
        self.stops: list[tuple[str, ...]] = []

    async def respond(
        self,
        messages: str | Sequence[Message],
        tools: Sequence[ToolSpec] | None = None,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Turn:
        self.heard.append(checked_messages(messages))
        self.tools.append(tuple(tools or ()))
        self.stops.append(tuple(stop))
        return self._turns.pop(0)

    def keep(self, name: str, data: bytes | str) -> None:
        self.kept[name] = data

    def count_tool_call(self, status: ToolStatus, *, took_s: float | None = None) -> None:
        self.tool_calls[status] += 1
        if took_s is not None:
            self.tool_calls_s.append(took_s)
