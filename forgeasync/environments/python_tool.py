"""The environment of ``kind: python_tool``: tasks that the model may solve by running Python in a sandbox."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from forgeasync.config import PythonTool, SandboxSection
from forgeasync.environments.answers import AnswerChecker
from forgeasync.environments.build import SectionEnvironment
from forgeasync.environments.environment import Agent, EpisodeInterrupted, ToolError
from forgeasync.environments.messages import Message, ToolSpec
from forgeasync.environments.tools.forms import TEMPLATE_FORM, CallForm, PlainForm
from forgeasync.environments.tools.run_tools import run_tools
from forgeasync.environments.tools.signature import BadArguments
from forgeasync.environments.tools.tool import Tool, ToolFailed, ToolTimeout
from forgeasync.environments.tools.toolbox import Toolbox
from forgeasync.isolation import (
    KilledBy,
    PythonResult,
    PythonSession,
    Sandbox,
    SandboxError,
    check_sandbox,
)
from forgeasync.rollouts import Score, Task
from forgeasync.schema import Problem

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
"""Share of a call's time after which the interpreter is ended, so that what it has printed can be told."""


class PythonToolEnvironment(SectionEnvironment):
    """Every episode has a box of its own, which starts before the first turn.

    ``failed_calls`` among the penalties counts calls that gave no result.
    """

    def __init__(self, section: PythonTool, sandbox: SandboxSection) -> None:
        self._section = section
        self._sandbox = sandbox
        self._checker = AnswerChecker(section.answer)
        self._form: CallForm = TEMPLATE_FORM
        if section.plain_calls is not None:
            self._form = PlainForm(section.plain_calls, tool=SPEC.name, argument="code")

    @classmethod
    def check(cls, section: PythonTool, sandbox: SandboxSection) -> Iterator[Problem]:
        """Start a box."""
        yield from check_sandbox(sandbox)

    async def rollout(self, task: Task, agent: Agent) -> Score:
        messages: list[Message] = []
        if self._section.system_prompt is not None:
            messages.append({"role": "system", "content": self._section.system_prompt})
        messages.append({"role": "user", "content": task.prompt})
        async with contextlib.AsyncExitStack() as stack:
            try:
                box = await stack.enter_async_context(Sandbox(self._sandbox))
            except SandboxError as error:
                raise EpisodeInterrupted(f"a sandbox cannot be started: {error}") from error
            interpreter = BoxedPython(box, limit_s=_SHARE * agent.tool_limit_s)
            toolbox = Toolbox([interpreter.tool], max_characters=self._section.max_result_characters)
            run = await run_tools(
                agent, messages, toolbox, max_rounds=self._section.max_rounds, form=self._form
            )
        score = self._checker.score(task, run.turn.text)
        return Score(
            score.value,
            score.is_correct,
            has_answer=score.has_answer,
            penalties={"failed_calls": float(run.num_failed_calls)},
        )


class BoxedPython:
    """A Python interpreter in a box as a tool; it is started when it is first needed, and again when it is
    gone."""

    def __init__(self, box: Sandbox, *, limit_s: float) -> None:
        """``limit_s`` is the time for one call."""
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
            # A run that was cancelled half way has ended its session.
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
