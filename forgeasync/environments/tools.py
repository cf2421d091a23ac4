"""Tools of an agent: their schemas, their calls, and the results for the model.

Every call has a result of bounded length within its time limit. ``run_tools`` is the standard loop of an
agent with tools.

A schema comes from a Python function: types from its annotations and descriptions from its docstring. All
types that pydantic can read from JSON are supported: str, int, float, bool, Literal, enums, lists, dicts,
Optional, dataclasses, TypedDict (of ``typing_extensions`` before Python 3.12) and pydantic's models.
"""

import asyncio
import dataclasses
import inspect
import json
import re
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn, NotRequired, Self, cast, get_type_hints

import docstring_parser
import psutil
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaWarningKind
from pydantic_core import ErrorDetails, PydanticSerializationError, to_json, to_jsonable_python
from typing_extensions import TypedDict

from forgeasync.config import PlainCalls
from forgeasync.environments.environment import Agent, EpisodeInterrupted, ToolError, Turn
from forgeasync.environments.episode_thread import EpisodeThread
from forgeasync.environments.messages import TOOL, BrokenToolCall, Message, ToolCall, ToolSpec, show
from forgeasync.processes import kill, started_by
from forgeasync.rollouts import FinishReason, ToolStatus


class ToolFailed(Exception):
    """Raise it in a tool to tell the model that the call has failed, in exactly these words."""


class ToolTimeout(ToolFailed):
    """The tool itself stopped the call after its time limit. The text is for the model."""


class ToolServerLost(ToolFailed):
    """The server of a tool has ended or does not answer. The text is for the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool that the model may call. Make it from a function with annotations and a docstring:

        import forgeasync as fa


        def add(a: int, b: int) -> int:
            '''Add two whole numbers.

            Args:
                a: The first one.
                b: The second one.
            '''
            return a + b


        tool = fa.Tool.from_function(add)

    docs/tools.md has the types that parameters may have.
    """

    spec: ToolSpec
    """Name, description and parameters of the tool, for the model."""
    run: Callable[[Mapping[str, Any]], Awaitable[str]]
    """Calls the tool with the model's unchecked arguments, and returns the result for the model.

    Cancelling it ends everything that the call has started. Exceptions become results for the model:
    BadArguments and ToolFailed with their text, others with their class and text.
    """

    @classmethod
    def from_function(cls, function: Callable[..., object]) -> Self:
        """Return a tool that calls a function or a bound method with annotations and a docstring.

        A function is called on its own thread, so it may block. A coroutine function runs on the episode's
        loop. Returned text is the result; other values are converted to JSON, and None to an empty text. If a
        call times out, the processes that it has started are killed.

        Raises:
            ValueError: A schema cannot describe the function. The error names the function and the parameter.
        """
        signature = Signature(function)
        call = _call_coroutine if inspect.iscoroutinefunction(function) else _call_on_thread

        async def run(arguments: Mapping[str, Any]) -> str:
            given = signature.read(arguments)
            return _text(await call(function, given))

        return cls(spec=signature.spec, run=run)


async def _call_on_thread(function: Callable[..., object], arguments: Mapping[str, Any]) -> object:
    async def work() -> object:
        return function(**arguments)

    thread: EpisodeThread[object] = EpisodeThread(work, name=f"tool {function.__name__}"[:60])
    ended = thread.start()
    try:
        return await asyncio.shield(ended)
    finally:
        if not ended.done():
            # Nothing waits for the result after this.
            ended.add_done_callback(retrieve_exception)
            thread.cancel()
            kill(thread.processes())
            thread.interrupt()
            _abandoned.append(thread)


_abandoned: list[EpisodeThread[object]] = []


def num_stuck_calls() -> int:
    """Return the number of threads of timed-out calls in this process that could not be stopped."""
    _abandoned[:] = [thread for thread in _abandoned if thread.is_alive]
    return len(_abandoned)


class _Calls(threading.local):
    """The running coroutine tools of a thread.

    All their processes have the same parent, so it is unknown which of several concurrent calls started one.
    """

    def __init__(self) -> None:
        self.num_running = 0
        self.doomed: list[psutil.Process] = []


_calls = _Calls()


async def _call_coroutine(function: Callable[..., object], arguments: Mapping[str, Any]) -> object:
    before = {process.pid for process in started_by(threading.get_native_id())}
    _calls.num_running += 1
    try:
        return await cast(Awaitable[object], function(**arguments))
    except asyncio.CancelledError:
        started = started_by(threading.get_native_id())
        _calls.doomed += [process for process in started if process.pid not in before]
        raise
    finally:
        _calls.num_running -= 1
        if not _calls.num_running:
            # The processes may belong to other calls, so they are killed after the last call.
            kill(_calls.doomed)
            _calls.doomed.clear()


def _text(result: object) -> str:
    if result is None:
        return ""
    return result if isinstance(result, str) else to_json(result, fallback=str).decode()


def retrieve_exception(ended: "asyncio.Future[Any]") -> None:
    """Retrieve the exception of a future, so that asyncio does not warn that it was never retrieved."""
    if not ended.cancelled():
        ended.exception()


DEFAULT_MAX_CHARACTERS = 20_000

CLEAN_UP_S = 5.0
"""Seconds for a timed-out call to clean up."""

MAX_NAMED_TOOLS = 50
"""Maximum number of tools that are listed if the model calls one that does not exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """The result of one call."""

    call_id: str
    """Id of the call."""
    name: str
    """Name of the tool, as the model wrote it."""
    status: ToolStatus
    content: str
    """Text for the model."""
    num_cut_characters: int = 0
    """Number of characters that were cut from the result."""
    took_s: float | None = None
    """Time from the call to its result, in seconds; None if no tool was called."""

    @property
    def message(self) -> dict[str, Any]:
        """The result as a message, to continue the conversation with."""
        return {"role": TOOL, "tool_call_id": self.call_id, "content": self.content}


class Toolbox:
    """The tools of one episode. Create it within ``rollout``.

        toolbox = fa.Toolbox([fa.Tool.from_function(add)])
        result = await toolbox.call(turn.tool_calls[0], limit_s=10.0)

    No call raises because of model output or because a tool fails, with two exceptions: a tool that raises
    ``EpisodeInterrupted`` or ``ToolError`` ends the episode.
    """

    def __init__(self, tools: Sequence[Tool], *, max_characters: int = DEFAULT_MAX_CHARACTERS) -> None:
        """``max_characters`` limits the result of one call.

        Raises:
            ValueError: Two tools have the same name, or ``max_characters`` is not positive.
        """
        if max_characters < 1:
            raise ValueError(f"max_characters = {max_characters}; must be at least 1")
        self._tools: dict[str, Tool] = {}
        for tool in tools:
            if tool.spec.name in self._tools:
                raise ValueError(f"two tools are called {tool.spec.name!r}; give each a different name")
            self._tools[tool.spec.name] = tool
        self._max_characters = max_characters

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        """Descriptions of the tools for the model."""
        return tuple(tool.spec for tool in self._tools.values())

    async def call(self, call: ToolCall, *, limit_s: float) -> ToolResult:
        """Run a call, and return its result for the model.

        Args:
            call: A call of the model.
            limit_s: Time limit in seconds. After it the call is cancelled, and the processes that it has
                started are killed.

        Raises:
            EpisodeInterrupted, ToolError: The tool has raised it.
        """
        tool = self._tools.get(call.name)
        if tool is None:
            names = ", ".join(list(self._tools)[:MAX_NAMED_TOOLS]) or "none"
            text = f"Error: there is no tool {show(call.name)}; tools: {names}"
            return self._result(call, ToolStatus.UNKNOWN_TOOL, text)
        # The call has its own task, because a tool may cancel the current task.
        running = asyncio.ensure_future(_guarded(tool, call))
        start_s = time.perf_counter()
        try:
            await asyncio.wait([running], timeout=limit_s)
        finally:
            if not running.done():
                running.cancel()
        if not running.done():
            await asyncio.wait([running], timeout=CLEAN_UP_S)
            running.add_done_callback(retrieve_exception)
            status, text = ToolStatus.TIMEOUT, f"Error: the call took longer than {limit_s:g} s"
        elif running.cancelled():
            status, text = ToolStatus.FAILED, "Error: the call has cancelled itself"
        else:
            status, text = running.result()
        return self._result(call, status, text, took_s=time.perf_counter() - start_s)

    def _result(
        self, call: ToolCall, status: ToolStatus, text: str, *, took_s: float | None = None
    ) -> ToolResult:
        num_cut = max(len(text) - self._max_characters, 0)
        if num_cut:
            text = f"{text[: self._max_characters]}\n[{num_cut} more characters were cut]"
            status = ToolStatus.CUT if status is ToolStatus.OK else status
        return ToolResult(
            call_id=call.id,
            name=call.name,
            status=status,
            content=text,
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
        # The model gets the exception without the traceback, which would show file names.
        return ToolStatus.FAILED, f"{type(error).__name__}: {error}"


MAX_PROBLEM_CHARACTERS = 1000


class CallForm:
    """A format of tool calls. This class is the chat template's format, which the renderer parses."""

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts that end a turn."""
        return ()

    def tools(self, specs: Sequence[ToolSpec]) -> tuple[ToolSpec, ...]:
        """Return the tools to pass to the chat template."""
        return tuple(specs)

    def read(self, turn: Turn) -> Turn:
        """Return the turn with its calls; never raises because of model output."""
        return turn

    def answer(self, result: ToolResult) -> dict[str, Any]:
        """Return the message with a result for the model."""
        return result.message

    def answer_broken(self, call: BrokenToolCall) -> dict[str, Any]:
        """Return the message that tells the model that a call cannot be parsed."""
        problem = call.problem[:MAX_PROBLEM_CHARACTERS]
        return {"role": "user", "content": f"Error: a tool call cannot be read: {problem}"}


class PlainForm(CallForm):
    """Calls of one tool with one text argument, between two marks in the model's text."""

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
        """Return the turn with the call at its end. The turn's text does not include ``call_suffix``."""
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


TEMPLATE_FORM = CallForm()
"""Form of tool calls that the chat template of the model defines."""


DEFAULT_MAX_ROUNDS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRun:
    """A conversation in which the model has called tools."""

    messages: tuple[Message, ...]
    """All messages, including the model's last one."""
    turn: Turn
    """The model's last turn."""
    results: tuple[ToolResult, ...]
    """Results of all calls, in the order of the calls."""
    num_broken_calls: int
    is_finished: bool
    """Whether the last turn calls no tool. False if the model called a tool in its last allowed turn."""

    @property
    def num_failed_calls(self) -> int:
        """Number of calls that failed, including broken ones."""
        return self.num_broken_calls + sum(not result.status.is_success for result in self.results)


async def run_tools(
    agent: Agent,
    messages: str | Sequence[Message],
    toolbox: Toolbox,
    *,
    max_rounds: int = DEFAULT_MAX_ROUNDS,
    form: CallForm = TEMPLATE_FORM,
) -> ToolRun:
    """Sample turns of the model and run the tools that it calls, until a turn calls none.

    A complete environment:

        import forgeasync as fa


        class Calculator(fa.Environment):
            def __init__(self) -> None:
                self.tools = [fa.Tool.from_function(add)]

            async def rollout(self, task: fa.Task, agent: fa.Agent) -> fa.Score:
                run = await fa.run_tools(agent, task.prompt, fa.Toolbox(self.tools))
                is_correct = run.turn.text.strip() == task.answer
                return fa.Score(float(is_correct), is_correct)

    Calls of one turn run concurrently, each for at most ``episodes.tool_s``. Results have the order of the
    calls. Broken calls are answered by a user message.

    Args:
        agent: The model.
        messages: The conversation so far; a string is one user message.
        toolbox: Tools that the model may call.
        max_rounds: Number of turns with calls, after which the model gets one more turn, whose calls are not
            run.
        form: Format of calls, by default that of the chat template.

    Returns:
        The conversation, with the last turn and the results of all calls.

    Raises:
        ContextFull, TooManyTurns, ValueError: See ``Agent.respond``.
        EpisodeInterrupted, ToolError: A tool has raised it.
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


TOOL_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_\-.]{0,63}", re.ASCII)
"""Tool names that chat endpoints and templates accept."""

MAX_NAMED_PROBLEMS = 5
"""Maximum number of wrong arguments in one error message to the model."""


class BadArguments(ValueError):
    """The arguments of a call do not fit the tool. The text is for the model."""


class Signature:
    """Schema and validation of one function's arguments."""

    def __init__(self, function: Callable[..., object]) -> None:
        """Read annotations and docstring.

        Raises:
            ValueError: A schema cannot describe the function. The error names the function and the parameter.
        """
        name, signature = _name_and_signature(function)
        description, lines = read_docstring(inspect.getdoc(function) or "")
        if not description:
            raise ValueError(
                f"tool {name}: has no docstring; its first lines must tell the model what it is for"
            )
        if unknown := lines.keys() - signature.parameters.keys():
            raise ValueError(
                f"tool {name}: its docstring describes {sorted(unknown)}, which are none of its parameters"
            )
        fields: dict[str, Any] = {}
        for parameter, hint in _hints(function, name, signature).items():
            fields[parameter] = _field(name, signature.parameters[parameter], hint, lines.get(parameter))
        self._arguments = _adapter(name, fields)
        schema = self._arguments.json_schema(schema_generator=_Schema)
        schema.pop("title", None)
        self.spec = ToolSpec(
            name=name, description=description, parameters={"properties": {}, "required": []} | schema
        )

    def read(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the validated arguments as Python values, without those that are left to their defaults.

        Types that JSON distinguishes are not converted: the text "1" is not a number.

        Raises:
            BadArguments: An argument is missing, unknown, of another type or out of bounds.
        """
        try:
            text = json.dumps(arguments)
        except (TypeError, ValueError, RecursionError) as error:
            raise BadArguments(f"the arguments are not a JSON object ({type(error).__name__})") from error
        try:
            return self._arguments.validate_json(text, strict=True)
        except ValidationError as error:
            # The input can be long, and the model knows it.
            problems = error.errors(include_url=False, include_input=False)
        message = "; ".join(map(_message_of, problems[:MAX_NAMED_PROBLEMS]))
        more = len(problems) - MAX_NAMED_PROBLEMS
        raise BadArguments(message + (f"; and {more} more problems" if more > 0 else ""))


def read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Split a docstring into its description and the lines on parameters.

    Parameters are in a section ``Args:`` (``name: text``), in a section in NumPy's style, or in fields
    ``:param name: text``. Other sections, and text after the parameters, are left out.
    """
    parsed = docstring_parser.parse(text)
    lines = {one.arg_name: " ".join((one.description or "").split()) for one in parsed.params}
    return (parsed.description or "").strip(), lines


class _Schema(GenerateJsonSchema):
    """JSON schema without titles, which repeat the names of parameters."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def emit_warning(self, kind: JsonSchemaWarningKind, detail: str) -> None:
        raise ValueError(f"{kind}: {detail}")


def _name_and_signature(function: Callable[..., object]) -> tuple[str, inspect.Signature]:
    if not inspect.isroutine(function):
        raise ValueError(f"{show(function)} is not a function; a tool is made of a function or a method")
    name = function.__name__
    if TOOL_NAME.fullmatch(name) is None:
        raise ValueError(f"tool {name!r}: a tool needs a name that the model can write: letters, digits, '_'")
    signature = inspect.signature(function)
    for parameter in signature.parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            _refuse(
                name, parameter.name, f"is {parameter}; must be an argument that can be given by its name"
            )
    return name, signature


def _hints(function: Callable[..., object], name: str, signature: inspect.Signature) -> dict[str, Any]:
    try:
        hints = get_type_hints(function, include_extras=True)
    except Exception as error:
        # Annotations can be any expression.
        raise ValueError(f"tool {name}: its annotations cannot be read: {error}") from error
    for parameter in signature.parameters:
        if parameter not in hints:
            _refuse(name, parameter, "has no type; annotate it, for instance as str")
    return {parameter: hints[parameter] for parameter in signature.parameters}


def _field(name: str, parameter: inspect.Parameter, hint: Any, description: str | None) -> Any:
    try:
        TypeAdapter(hint).json_schema(schema_generator=_Schema)
    except (PydanticUserError, ValueError) as error:
        reason = str(error).split("\n")[0]
        _refuse(name, parameter.name, f"has type {show(hint)}, which JSON cannot carry: {reason}")
    extra: dict[str, Any] = {}
    if parameter.default is not parameter.empty:
        try:
            extra["default"] = to_jsonable_python(parameter.default)
        except PydanticSerializationError as error:
            _refuse(name, parameter.name, f"has a default that JSON cannot carry: {error}")
    described = Field(description=description or None, json_schema_extra=extra or None)
    field = Annotated[hint, described]
    return NotRequired[field] if extra else field


def _adapter(name: str, fields: dict[str, Any]) -> TypeAdapter[dict[str, Any]]:
    make: Any = TypedDict
    arguments = make(name, fields)
    arguments.__pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)
    return TypeAdapter(arguments)


def _refuse(name: str, parameter: str, remedy: str) -> NoReturn:
    raise ValueError(f"tool {name}: its parameter {parameter!r} {remedy}")


def _message_of(problem: ErrorDetails) -> str:
    place = ".".join(map(str, problem["loc"]))
    match problem["type"]:
        case "missing":
            return f"{place!r} is missing"
        case "extra_forbidden" | "unexpected_keyword_argument":
            return f"there is no argument {show(place)}"
        case "json_invalid":
            return "the arguments are not a JSON object"
    return f"{place!r}: {problem['msg']}"
