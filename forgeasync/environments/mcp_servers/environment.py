"""The environment of ``kind: mcp``: tasks that the model solves with the tools of MCP servers."""

import asyncio
import concurrent.futures
from collections.abc import Iterator

from forgeasync.config import McpEnvironment, SandboxSection
from forgeasync.environments.answers import AnswerChecker
from forgeasync.environments.build import SectionEnvironment
from forgeasync.environments.environment import Agent
from forgeasync.environments.mcp_servers.connection import Connection, ServerLost
from forgeasync.environments.mcp_servers.tools import McpTools
from forgeasync.environments.messages import Message
from forgeasync.environments.tools.run_tools import run_tools
from forgeasync.environments.tools.toolbox import Toolbox
from forgeasync.rollouts import Score, Task
from forgeasync.schema import Problem


class McpToolsEnvironment(SectionEnvironment):
    """Every episode has servers, or sessions with them, of its own.

    ``failed_calls`` among the penalties counts calls that gave no result.
    """

    def __init__(self, section: McpEnvironment, sandbox: SandboxSection) -> None:
        self._section = section
        self._checker = AnswerChecker(section.answer)

    @classmethod
    def check(cls, section: McpEnvironment, sandbox: SandboxSection) -> Iterator[Problem]:
        """Start or reach every server once, and list its tools; blocks for as long as that takes."""
        # In a thread of its own, since the caller may be in an event loop.
        with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
            problems = thread.submit(lambda: asyncio.run(_try_all(section))).result()
        for name, problem in problems.items():
            yield Problem(
                field=f"environment.servers.{name}",
                value=section.servers[name].kind,
                remedy=f"cannot be used: {problem}",
            )

    async def rollout(self, task: Task, agent: Agent) -> Score:
        section = self._section
        messages: list[Message] = []
        if section.system_prompt is not None:
            messages.append({"role": "system", "content": section.system_prompt})
        messages.append({"role": "user", "content": task.prompt})
        async with McpTools(section.servers, start_s=section.start_s) as mcp:
            toolbox = Toolbox(mcp.tools, max_characters=section.max_result_characters)
            run = await run_tools(agent, messages, toolbox, max_rounds=section.max_rounds)
        score = self._checker.score(task, run.turn.text)
        return Score(
            score.value,
            score.is_correct,
            has_answer=score.has_answer,
            penalties={"failed_calls": float(run.num_failed_calls)},
        )


async def _try_all(section: McpEnvironment) -> dict[str, str]:
    async def problem_of(name: str) -> str | None:
        connection = Connection(section.servers[name])
        try:
            await connection.open(limit_s=section.start_s)
            return None if connection.tools else "it has no tools"
        except ServerLost as error:
            return str(error)
        finally:
            await connection.close()

    found = await asyncio.gather(*map(problem_of, section.servers))
    return {name: one for name, one in zip(section.servers, found, strict=True) if one is not None}
