"""The standard loop of an agent with tools."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from forgeasync.environments.environment import Agent, Turn
from forgeasync.environments.messages import Message
from forgeasync.environments.tools.forms import TEMPLATE_FORM, CallForm
from forgeasync.environments.tools.toolbox import Toolbox, ToolResult
from forgeasync.rollouts import ToolStatus

DEFAULT_MAX_ROUNDS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRun:
    """A conversation in which the model has called tools."""

    messages: tuple[Message, ...]
    """All messages, the model's last one included."""
    turn: Turn
    """The model's last turn."""
    results: tuple[ToolResult, ...]
    """Results of all calls, in their order."""
    num_broken_calls: int
    is_finished: bool
    """Whether the last turn calls no tool; False: the model still did in the last turn that it may take."""

    @property
    def num_failed_calls(self) -> int:
        """Calls that gave the model no result, broken ones included."""
        return self.num_broken_calls + sum(not result.status.is_success for result in self.results)


async def run_tools(
    agent: Agent,
    messages: str | Sequence[Message],
    toolbox: Toolbox,
    *,
    max_rounds: int = DEFAULT_MAX_ROUNDS,
    form: CallForm = TEMPLATE_FORM,
) -> ToolRun:
    """Let the model answer, run the tools that it calls, and so on until a turn calls none.

    A complete environment:

        class Calculator(Environment):
            def __init__(self) -> None:
                self.tools = [Tool.from_function(add)]

            async def rollout(self, task: Task, agent: Agent) -> Score:
                run = await run_tools(agent, task.prompt, Toolbox(self.tools))
                is_correct = run.turn.text.strip() == task.answer
                return Score(float(is_correct), is_correct)

    Calls of one turn run concurrently; each has ``episodes.tool_s``, and results stand in the order of the
    calls. Calls that cannot be read are answered too, by a message of the user. After ``max_rounds`` turns
    with calls the model gets one more turn; calls in that one are not run. ``form`` is how the model writes
    calls: by default as its chat template says.

    Raises:
        ContextFull, TooManyTurns, ValueError: as ``Agent.respond``.
        EpisodeInterrupted, ToolError: a tool has raised it.
    """
    given: list[Message] = (
        [{"role": "user", "content": messages}] if isinstance(messages, str) else [*messages]
    )
    results: list[ToolResult] = []
    num_broken = 0
    for number in range(max_rounds + 1):
        said = await agent.respond(given, tools=form.tools(toolbox.specs), stop=form.stop)
        given.append(said.message)
        turn = form.read(said)
        num_unreadable = len(turn.broken_tool_calls)
        num_broken += num_unreadable
        has_calls = bool(turn.tool_calls or turn.broken_tool_calls)
        if not has_calls or number == max_rounds:
            break
        answered = await asyncio.gather(
            *(toolbox.call(call, limit_s=agent.tool_limit_s) for call in turn.tool_calls)
        )
        for result in answered:
            agent.count_tool_call(result.status, took_s=result.took_s)
        for _ in range(num_unreadable):
            agent.count_tool_call(ToolStatus.UNREADABLE)
        results += answered
        given += [form.answer(result) for result in answered]
        given += [form.answer_broken(call) for call in turn.broken_tool_calls]
    return ToolRun(
        messages=tuple(given),
        turn=turn,
        results=tuple(results),
        num_broken_calls=num_broken,
        is_finished=not has_calls,
    )
