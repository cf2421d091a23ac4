"""The base classes ``Environment`` and ``Reward``, and the agents, turns and responses that they get.

``build_environment`` builds the environment that a config describes.
"""

import asyncio
import concurrent.futures
import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar, Protocol, Self, TypeVar, cast

from forgeasync.config import (
    AnswerPart,
    Bubblewrap,
    EnvironmentSection,
    InstalledEnvironment,
    McpEnvironment,
    PythonTool,
    RemoteEnvironment,
    SandboxSection,
)
from forgeasync.environments.messages import BrokenToolCall, Message, ToolCall, ToolSpec
from forgeasync.rollouts import (
    FinishReason,
    Rollout,
    SampledTurn,
    Score,
    StoredRollout,
    Task,
    ToolStatus,
)
from forgeasync.schema import Problem, PythonCode, Section, build_code


class ContextFull(RuntimeError):
    """The conversation leaves no room for another turn in ``model.max_context_length``."""


class TooManyTurns(RuntimeError):
    """The model has had ``episodes.max_turns`` turns."""


class EpisodeOver(RuntimeError):
    """The episode has ended or was abandoned, so no further turn is sampled."""


class EpisodeCancelled(Exception):
    """The episode's group was abandoned, because it would have been too old when the episode ended."""


class ParseError(ValueError):
    """Raise it to end an episode because the model's output cannot be parsed."""


class ToolError(RuntimeError):
    """Raise it to end an episode because a tool of the model has failed."""


class EpisodeInterrupted(RuntimeError):
    """Raise it to end an episode for an external reason, such as a lost server.

    The episode is never scored, and is run again by default (``episodes.endings.infrastructure``).
    """


class NoScore(RuntimeError):
    """Raise it to end an episode that cannot be scored. It is never trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of the model."""

    text: str
    """Text of the turn, without reasoning, tool calls and special tokens."""
    num_tokens: int
    """Number of sampled tokens, including those of reasoning and tool calls."""
    finish_reason: FinishReason
    """``stop``: the model ended its turn. ``length``: it was cut at ``sampling.max_response_tokens`` or at
    the end of the context."""
    stop_text: str | None = None
    """Text of ``stop`` or ``sampling.stop`` that ended the turn; ``text`` ends before it. None if something
    else ended the turn, or if an external endpoint does not report it."""
    reasoning: str | None = None
    """Reasoning before the text; None if the model's format does not separate it, or there is none."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Tool calls, in order. Run them with ``run_tools`` or ``Toolbox.call``."""
    broken_tool_calls: tuple[BrokenToolCall, ...] = ()
    """Tool calls that cannot be parsed. ``message`` does not have them, so report them to the model."""
    num_prompt_tokens: int = 0
    """Number of tokens of the conversation before the turn; 0 if a scripted agent made the turn."""

    @classmethod
    def of_sampled(cls, sampled: SampledTurn, text: str, **parts: Any) -> Self:
        """Return a sampled turn with the parts that were parsed from its tokens."""
        return cls(
            text=text,
            num_tokens=sampled.num_tokens,
            finish_reason=sampled.finish_reason,
            stop_text=sampled.stop_text,
            **parts,
        )

    @property
    def message(self) -> dict[str, Any]:
        """The turn as a message, to continue the conversation with."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.message_form for call in self.tool_calls]
        return message


class RespondingAgent(Protocol):
    """The part of ``Agent`` that samples turns."""

    async def respond(
        self,
        messages: str | Sequence[Message],
        tools: Sequence[ToolSpec] | None = None,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Turn:
        """Sample the model's next turn.

        If the messages continue a conversation that this agent has answered, only the new messages are
        tokenized, after the sampled tokens. Any other messages begin a branch: another conversation, the same
        messages again, or a history with changed, removed or inserted messages. Calls may overlap.

            turn = await agent.respond([{"role": "user", "content": "2 + 2 ="}])
            messages = [{"role": "user", "content": "2 + 2 ="}, turn.message]

        Args:
            messages: The whole conversation so far, as for Chat Completions. A string is one user message
                that begins a conversation.
            tools: Tools that the model may call.
            max_tokens: Maximum number of tokens of the turn, in addition to
                ``sampling.max_response_tokens``.
            stop: Texts, each of which ends the turn.

        Raises:
            ContextFull: There is no room for another turn.
            TooManyTurns: The model has had ``episodes.max_turns`` turns.
            ValueError: A message is malformed or cannot be rendered. The error names the message.
        """
        ...


class Agent(RespondingAgent, Protocol):
    """The model that is trained, as an environment uses it.

    An agent program with its own loop sends requests to ``base_url`` instead of calling ``respond``, over
    Chat Completions, Responses or Anthropic's Messages (docs/sessions.md).
    """

    @property
    def base_url(self) -> str:
        """URL of this agent's own session, for clients of OpenAI's APIs."""
        ...

    @property
    def anthropic_base_url(self) -> str:
        """URL of the same session, for clients of Anthropic's API."""
        ...

    @property
    def api_key(self) -> str:
        """API key of the session."""
        ...

    @property
    def tool_limit_s(self) -> float:
        """Time limit for one tool call in seconds (``episodes.tool_s``)."""
        ...

    def count_tool_call(self, status: ToolStatus, *, took_s: float | None = None) -> None:
        """Count a tool call in ``episode/num_tool_calls_<status>``; ``run_tools`` does so itself.

        ``took_s`` is the call's duration in seconds, for metrics such as ``episode/tool_call_p95_s``; None if
        no tool ran.
        """
        ...

    def waiting_for_person(self) -> AbstractContextManager[None]:
        """Return a context that stops all deadlines of the episode while it is entered.

        It is for environments that wait for people, and that limit this time themselves.
        """
        ...

    def keep(self, name: str, data: bytes | str) -> Path | None:
        """Keep a file for people who read the episode: a patch, a log, the output of tests.

        It is written to ``artifacts/<group>-<episode>-<attempt>/<name>`` in the run's folder, and replaces a
        file with the same name. The episode's record lists it. Files of episodes that are not written to
        rollouts.jsonl are removed when their group has trained or is lost. An episode keeps at most 32 files
        and 8 MiB in total; further files are only counted (``episode/num_refused_artifacts``).

        Returns the path of the file. Returns None if it was not written: it exceeds a limit, the disk refused
        it, or the episode has no record, as in the evaluations of a run.

        Raises:
            ValueError: The name does not have 1 to 100 letters, digits, '_', '-' and '.', or begins with '-'
                or '.'; or the data is neither bytes nor text.
        """
        ...


class Agents:
    """The agents of an environment with several agents, as attributes by their names in the config.

        agents:
          solver: {}
          judge: {trainable: false}

    Then ``rollout(task, agents)`` calls ``agents.solver.respond(...)`` and ``agents.judge.respond(...)``.
    """

    def __init__(self, by_name: Mapping[str, Agent]) -> None:
        self._by_name = by_name

    def __getattr__(self, name: str) -> Agent:
        try:
            return self._by_name[name]
        except KeyError:
            raise AttributeError(
                f"there is no agent {name!r}; agents of the config has {', '.join(self._by_name)}"
            ) from None


class Environment(ABC):
    """Base class for your environments. ``rollout`` lets the model work on a task and scores the episode.

    A complete example with two turns, which lets the model correct a wrong answer:

        import forgeasync as fa


        class TryAgain(fa.Environment):
            def __init__(self, second_chance: float = 0.5) -> None:
                self.second_chance = second_chance

            async def rollout(self, task: fa.Task, agent: fa.Agent) -> fa.Score:
                messages = [{"role": "user", "content": task.prompt}]
                turn = await agent.respond(messages)
                if turn.text.strip() == task.answer:
                    return fa.Score(value=1.0, is_correct=True)
                messages += [turn.message, {"role": "user", "content": "Wrong, try again."}]
                turn = await agent.respond(messages)
                is_correct = turn.text.strip() == task.answer
                return fa.Score(value=self.second_chance * is_correct, is_correct=is_correct)

    The section of this environment in the config, where ``options`` are the arguments of ``__init__``:

        environment:
          kind: python
          factory: my_package.my_module.TryAgain
          options: {second_chance: 0.25}

    ``rollout`` is called once for each rollout, concurrently on one object per worker, so keep the state of
    an episode in local variables. Each episode has its own thread and event loop, so a blocking call does not
    delay the others. Create objects that belong to an event loop, such as HTTP clients, within ``rollout``.
    Never execute model output here; use a ``Sandbox``.

    ``episodes.endings`` is the policy for each ending. By default, an episode that raises is run again, and
    one that times out is left out of its group. Raise ``ParseError``, ``ToolError``, ``NoScore`` or
    ``EpisodeInterrupted`` to choose another ending. A ``ContextFull`` or ``TooManyTurns`` that ``rollout``
    does not catch ends the episode with score 0.
    """

    serves_people: ClassVar[bool] = False
    """Whether the tasks are people who open sessions (``data.source: {kind: served}``)."""

    @abstractmethod
    async def rollout(self, task: Task, agent: Agent) -> Score:
        """Run one episode, with at least one turn of the agent.

        Args:
            task: Task of the episode.
            agent: The model. With ``agents`` in the config, an object with an agent for each name.

        Returns:
            Score of the episode, with which all of its sampled tokens train.
        """

    async def __call__(self, task: Task, agent: Agent) -> Score:
        """Call ``rollout``."""
        return await self.rollout(task, agent)


TurnReward = Callable[[Task, Turn], Score | Awaitable[Score]]
"""Scores the only turn of an episode."""


class SingleTurn(Environment):
    """Prompts the model and scores its answer. Samples the same tokens as a run without an environment."""

    def __init__(self, reward: TurnReward) -> None:
        self._reward = reward

    async def rollout(self, task: Task, agent: Agent) -> Score:
        score = self._reward(task, await agent.respond(task.prompt))
        return await score if inspect.isawaitable(score) else score


@dataclass(frozen=True, slots=True)
class Response:
    """A response, as passed to a reward. Never execute the text, which a model wrote."""

    text: str
    """Text of the response, without special tokens."""
    num_tokens: int
    """Number of sampled tokens."""
    finish_reason: FinishReason
    """``LENGTH`` if the response was cut at ``sampling.max_response_tokens``."""


def response_of(rollout: Rollout | StoredRollout) -> Response:
    """Return the part of a rollout that a reward gets."""
    return Response(rollout.text, rollout.num_response_tokens, rollout.finish_reason)


# A sign after a digit, letter or bracket is an operator. Thousands may have commas.
NUMBER = re.compile(r"(?:(?<![\w)])[-+])?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)", re.ASCII)


def final_answer(text: str, *, prefix: str, part: AnswerPart) -> str | None:
    """Return the answer in a response: all text after the last ``prefix``, or the last number in it.

    With the prefix "" it is in the whole response. Numbers lose their commas. None if there is no answer.
    """
    _, found, answer = text.rpartition(prefix) if prefix else ("", "found", text)
    if not found:
        return None
    if part is AnswerPart.LAST_NUMBER:
        numbers = NUMBER.findall(answer)
        return numbers[-1].replace(",", "").removeprefix("+") if numbers else None
    return answer.strip()


Verdict = float | Score
"""A reward's result for one response. A float is a ``Score`` without parts that is correct from 1.0 on."""


class Reward(ABC):
    """Base class for your rewards. A function ``(task, response) -> float | Score`` works as well.

    A function, in ``my_rewards.py`` in a folder of PYTHONPATH:

        import forgeasync as fa


        def brevity(task: fa.Task, response: fa.Response) -> float:
            return 1.0 if response.num_tokens < 100 else 0.0

    A class, which gets ``options`` as keyword arguments. Its ``__call__`` may be a coroutine that waits for a
    server; up to 64 calls run concurrently in a process.

        import forgeasync as fa
        import httpx


        class Judge(fa.Reward):
            def __init__(self, url: str, best: float = 5.0) -> None:
                self.client, self.best = httpx.AsyncClient(base_url=url), best

            async def __call__(self, task: fa.Task, response: fa.Response) -> fa.Score:
                texts = {"question": task.prompt, "reference": task.answer, "answer": response.text}
                points = (await self.client.post("/judge", json=texts)).json()["points"]
                return fa.Score(points / self.best, points == self.best, parts={"points": points})

    In the YAML, alone or as one of a list with weights:

        data:
          reward:
            - {kind: math}
            - {kind: python, factory: my_rewards.brevity, weight: 0.1}
            - {kind: python, factory: my_rewards.Judge, options: {url: "http://judge:8000"}, limit_s: 50}

    With ``scores: group`` a call gets all responses to a prompt at once and returns one verdict for each:

        def shortest_right(task, responses):
            right = [task.answer in response.text for response in responses]
            least = min((r.num_tokens for r, ok in zip(responses, right) if ok), default=0)
            return [fa.Score(float(ok and r.num_tokens == least), ok) for r, ok in zip(responses, right)]

    A reward runs in its own processes, each of which builds it once; it may use files and the network. If it
    raises, returns no finite number or takes longer than ``limit_s``, its group is tried again and then
    dropped, but never scored 0. See docs/rewards.md.
    """

    @abstractmethod
    def __call__(
        self, task: Task, response: Response
    ) -> Verdict | Awaitable[Verdict] | Sequence[Verdict] | Awaitable[Sequence[Verdict]]:
        """Score a response, or with ``scores: group`` a list of responses.

        Args:
            task: Task with its reference answer.
            response: Response of the model, or a list of all responses to the task.

        Returns:
            A finite float or a ``Score``, or a list of them, or an awaitable of these. A float is correct
            from 1.0 on.
        """


# ---- the environment of a config

T = TypeVar("T")

_SANDBOX = Bubblewrap()

PARAMETERS = ("task", "agent")
"""Names of the arguments of a rollout."""

RolloutFunction = Callable[[Task, Agent], Awaitable[Score]]


class _FunctionEnvironment(Environment):
    """An environment that consists of one rollout function."""

    def __init__(self, function: RolloutFunction) -> None:
        self._function = function

    async def rollout(self, task: Task, agent: Agent) -> Score:
        return await self._function(task, agent)


_BUILT_IN: Mapping[type[Section], str] = {
    PythonTool: "forgeasync.environments.tool_environments:PythonToolEnvironment",
    McpEnvironment: "forgeasync.environments.tool_environments:McpToolsEnvironment",
    RemoteEnvironment: "forgeasync.environments.remote:RemoteAgent",
}
"""The ``SectionEnvironment`` of each built-in kind, imported on use."""


class SectionEnvironment(Environment):
    """An environment that is configured by its own section."""

    @abstractmethod
    def __init__(self, section: Any, sandbox: SandboxSection) -> None:
        """``sandbox`` configures the sandbox in which the model's code runs."""

    @classmethod
    @abstractmethod
    def check(cls, section: Any, sandbox: SandboxSection) -> Iterator[Problem]:
        """Yield problems of this machine that would make every episode fail."""


def run_apart(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine to its end on another thread, because the caller may be in an event loop."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(lambda: asyncio.run(work())).result()


def _class_of(section: EnvironmentSection) -> type[SectionEnvironment]:
    found: type[SectionEnvironment] = resolve_name(_BUILT_IN[type(section)])
    return found


def build_environment(section: EnvironmentSection, sandbox: SandboxSection = _SANDBOX) -> Environment:
    """Build the environment of a section; imports and runs the user's code.

    ``sandbox`` configures the sandbox in which the model's code runs.

    Raises:
        ValueError: The environment does not exist, cannot be built, or has a rollout that is not
            asynchronous.
    """
    if isinstance(section, PythonCode):
        return _build_own(section)
    if isinstance(section, InstalledEnvironment):
        return section.build(sandbox)
    return _class_of(section)(section, sandbox)


def _build_own(section: PythonCode) -> Environment:
    try:
        built = build_code(section, PARAMETERS)
    except ValueError:
        raise
    except Exception as error:
        # A user's class can raise anything while it is built.
        raise ValueError(
            f"raised {type(error).__name__}: {error} when it was called with {section.options}"
        ) from error
    if isinstance(built, Environment):
        if not inspect.iscoroutinefunction(built.rollout):
            raise ValueError(
                f"{type(built).__qualname__}.rollout must be asynchronous: async def rollout(...)"
            )
        _check_parameters(built.rollout)
        return built
    if not inspect.iscoroutinefunction(built):
        raise ValueError(
            f"is neither an Environment nor an async function of ({', '.join(PARAMETERS)}); derive from "
            "forgeasync.Environment"
        )
    return _FunctionEnvironment(cast(RolloutFunction, built))


def _check_parameters(rollout: Callable[..., object]) -> None:
    signature = inspect.signature(rollout)
    try:
        signature.bind(*PARAMETERS)
    except TypeError as error:
        raise ValueError(f"its rollout takes {signature}; must take ({', '.join(PARAMETERS)})") from error


def check_environment(
    section: EnvironmentSection, sandbox: SandboxSection = _SANDBOX, *, is_served: bool = False
) -> Iterator[Problem]:
    """Yield problems that would make every episode of this environment fail.

    This builds a user's own environment, starts a sandbox if the environment runs the model's code, and
    starts or contacts every server once. ``is_served`` says whether people bring the tasks.
    """
    if isinstance(section, PythonCode):
        yield from _check_own(section, is_served)
    elif isinstance(section, InstalledEnvironment):
        yield from section.check_here(sandbox)
    else:
        yield from _class_of(section).check(section, sandbox)


def _check_own(section: PythonCode, is_served: bool) -> Iterator[Problem]:
    remedy = None
    try:
        built = _build_own(section)
    except ValueError as error:
        remedy = str(error)
    else:
        if is_served and not built.serves_people:
            remedy = (
                "must be derived from ServedSessions with data.source.kind = 'served', whose tasks are people"
            )
        if built.serves_people and not is_served:
            remedy = "serves people: needs data.source.kind = 'served'"
    if remedy is not None:
        yield Problem(field="environment.factory", value=section.factory, remedy=remedy)
