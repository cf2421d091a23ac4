"""The environments of ``kind: python_tool`` and ``kind: mcp``: the model solves a task with tools.

The last turn is compared with the task's answer. Code of the model runs in a sandbox only.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from forgeasync.config import AnswerCheck, AnswerMatch, McpEnvironment, PythonTool, SandboxSection
from forgeasync.environments.environment import (
    NUMBER,
    Agent,
    EpisodeInterrupted,
    SectionEnvironment,
    ToolError,
    final_answer,
    run_apart,
)
from forgeasync.environments.messages import Message, ToolSpec
from forgeasync.environments.tools import (
    TEMPLATE_FORM,
    BadArguments,
    CallForm,
    PlainForm,
    Tool,
    Toolbox,
    ToolFailed,
    ToolTimeout,
    run_tools,
)
from forgeasync.isolation import (
    KilledBy,
    PythonResult,
    PythonSession,
    Sandbox,
    SandboxError,
    check_sandbox,
)
from forgeasync.rollouts import NO_ANSWER, Score, Task
from forgeasync.schema import Problem

MAX_READ_CHARACTERS = 100_000
"""Maximum characters at the end of a turn that are searched for an answer."""

MAX_NUMBER_CHARACTERS = 100


def score_answer(section: AnswerCheck, task: Task, text: str) -> Score:
    """Return the score of the model's last turn: 1 for the task's answer, otherwise 0.

    Raises:
        ValueError: Numbers are compared, and the task's answer is not a number.
    """
    reference = task.answer.strip()
    number = None
    if section.match is AnswerMatch.NUMBER:
        number = _number(reference)
        if number is None:
            raise ValueError(
                f"task {task.task_id!r} has the answer {reference[:80]!r}, which is not a number; "
                "environment.answer.match must be 'exact'"
            )
    answer = final_answer(text[-MAX_READ_CHARACTERS:], prefix=section.prefix, part=section.part)
    if answer is None:
        return NO_ANSWER
    is_correct = answer == reference if number is None else _number(answer) == number
    return Score(float(is_correct), is_correct)


def _number(text: str) -> Decimal | None:
    """Return the value of a text that is one number and nothing else."""
    if len(text) > MAX_NUMBER_CHARACTERS or NUMBER.fullmatch(text) is None:
        return None
    # Exact, because different long numbers can be equal as floats.
    return Decimal(text.replace(",", ""))


SPEC = ToolSpec(
    name="python",
    description="Run Python code. Variables last from call to call. The result is what the code prints, and "
    "the value of its last line.",
    parameters={
        "type": "object",
        "properties": {"code": {"type": "string", "description": "The code to run."}},
        "required": ["code"],
        "additionalProperties": False,
    },
)

_SHARE = 0.9
"""Share of a call's time limit after which the interpreter is ended, to leave time to report its output."""


async def _solve(
    section: PythonTool | McpEnvironment,
    task: Task,
    agent: Agent,
    tools: Sequence[Tool],
    form: CallForm = TEMPLATE_FORM,
) -> Score:
    """Let the model work on a task with tools, and score its last turn.

    The penalty ``failed_calls`` is the number of calls that failed.
    """
    messages: list[Message] = []
    if section.system_prompt is not None:
        messages.append({"role": "system", "content": section.system_prompt})
    messages.append({"role": "user", "content": task.prompt})
    toolbox = Toolbox(tools, max_characters=section.max_result_characters)
    run = await run_tools(agent, messages, toolbox, max_rounds=section.max_rounds, form=form)
    score = score_answer(section.answer, task, run.turn.text)
    return dataclasses.replace(score, penalties={"failed_calls": float(run.num_failed_calls)})


class PythonToolEnvironment(SectionEnvironment):
    """Python in a sandbox as the model's tool. Each episode starts its own sandbox before its first turn."""

    def __init__(self, section: PythonTool, sandbox: SandboxSection) -> None:
        self._section = section
        self._sandbox = sandbox
        self._form: CallForm = TEMPLATE_FORM
        if section.plain_calls is not None:
            self._form = PlainForm(section.plain_calls, tool=SPEC.name, argument="code")

    @classmethod
    def check(cls, section: PythonTool, sandbox: SandboxSection) -> Iterator[Problem]:
        """Check that a sandbox can be started."""
        yield from check_sandbox(sandbox)

    async def rollout(self, task: Task, agent: Agent) -> Score:
        async with contextlib.AsyncExitStack() as stack:
            try:
                box = await stack.enter_async_context(Sandbox(self._sandbox))
            except SandboxError as error:
                raise EpisodeInterrupted(f"a sandbox cannot be started: {error}") from error
            interpreter = BoxedPython(box, limit_s=_SHARE * agent.tool_limit_s)
            return await _solve(self._section, task, agent, [interpreter.tool], self._form)


class BoxedPython:
    """A tool that runs Python in a sandbox. A call starts the interpreter if none is running."""

    def __init__(self, box: Sandbox, *, limit_s: float) -> None:
        """``limit_s`` is the time limit for one call, in seconds."""
        self._box = box
        self._limit_s = limit_s
        self._session: PythonSession | None = None
        self._has_tampered = False
        self.tool = Tool(spec=SPEC, run=self._run)

    async def _run(self, arguments: Mapping[str, Any]) -> str:
        code = arguments.get("code")
        if not isinstance(code, str) or arguments.keys() != {"code"}:
            raise BadArguments("it takes one argument, 'code', which is text")
        try:
            if self._session is None:
                self._session = await self._box.python()
            result = await self._session.run(code, timeout_s=self._limit_s)
        except SandboxError as error:
            self._session = None
            if self._has_tampered:
                raise ToolError(f"the model's code has ended its sandbox: {error}") from error
            raise EpisodeInterrupted(f"the sandbox was lost: {error}") from error
        except BaseException:
            # A cancelled run ends its session.
            self._session = None
            raise
        if result.session_ended:
            self._session = None
        self._has_tampered |= result.killed_by is KilledBy.TAMPERING
        text = _text(result)
        if result.timed_out:
            raise ToolTimeout(text)
        if result.traceback or result.session_ended:
            raise ToolFailed(text)
        return text


def _text(result: PythonResult) -> str:
    parts = [result.stdout, result.stderr, result.value or "", result.traceback]
    num_cut = result.num_stdout_bytes_cut + result.num_stderr_bytes_cut + result.num_report_bytes_cut
    if num_cut:
        parts.append(f"[{num_cut} more bytes were cut]")
    if result.session_ended:
        if result.killed_by is not None:
            why = f"was killed ({result.killed_by})"
        else:
            why = f"has ended with exit code {result.exit_code}"
        parts.append(f"The interpreter {why}; its variables are gone.")
    return "\n".join(part.rstrip("\n") for part in parts if part)


class McpToolsEnvironment(SectionEnvironment):
    """MCP servers as the model's tools. Every episode has its own servers, or its own sessions with them."""

    def __init__(self, section: McpEnvironment, sandbox: SandboxSection) -> None:
        self._section = section

    @classmethod
    def check(cls, section: McpEnvironment, sandbox: SandboxSection) -> Iterator[Problem]:
        """Start or contact every server once, and list its tools; blocks."""
        for name, problem in run_apart(lambda: _try_all(section)).items():
            yield Problem(
                field=f"environment.servers.{name}",
                value=section.servers[name].kind,
                remedy=f"cannot be used: {problem}",
            )

    async def rollout(self, task: Task, agent: Agent) -> Score:
        # The package mcp takes a while to load.
        from forgeasync.environments.mcp_servers import McpTools

        section = self._section
        async with McpTools(section.servers, start_s=section.start_s) as mcp:
            return await _solve(section, task, agent, mcp.tools)


async def _try_all(section: McpEnvironment) -> dict[str, str]:
    from forgeasync.environments.mcp_servers import Connection, ServerLost

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
