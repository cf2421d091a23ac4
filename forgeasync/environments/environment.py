"""What you derive from: ``Environment`` and ``Reward``, and the agents, turns and responses that they get."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from forgeasync.environments.messages import BrokenToolCall, Message, ToolCall, ToolSpec
from forgeasync.rollouts import FinishReason, Rollout, Score, StoredRollout, Task, ToolStatus


class ContextFull(RuntimeError):
    """The conversation leaves no room for another turn in ``model.max_context_length``."""


class TooManyTurns(RuntimeError):
    """The model has taken ``episodes.max_turns`` turns."""


class EpisodeOver(RuntimeError):
    """The episode has ended or was given up: no further turn is sampled."""


class ParseError(ValueError):
    """Raise it where an episode cannot go on because nobody can read what the model wrote."""


class ToolError(RuntimeError):
    """Raise it where an episode cannot go on because a tool of the model has failed."""


class EpisodeInterrupted(RuntimeError):
    """Raise it where an episode cannot go on for a reason that neither the model nor the environment has
    caused, such as a server that is gone: it is run again and never scored.
    """


class NoScore(RuntimeError):
    """Raise it where an episode has ended and nobody can say how good it was: it never trains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of the model."""

    text: str
    """What the model says, without reasoning, tool calls and special tokens."""
    num_tokens: int
    """Number of tokens sampled, those of reasoning and tool calls included."""
    finish_reason: FinishReason
    """``stop``: the model ended its turn; ``length``: it was cut at ``sampling.max_response_tokens`` or at
    the end of the context."""
    stop_text: str | None = None
    """The text that ended the turn, from ``stop`` or ``sampling.stop``; ``text`` ends before it. None where
    the model's own end of a turn or a bound did, and where an endpoint of others does not say."""
    reasoning: str | None = None
    """What the model thought before it spoke; None where its format has no reasoning apart."""
    tool_calls: tuple[ToolCall, ...] = ()
    broken_tool_calls: tuple[BrokenToolCall, ...] = ()
    """Attempts at tool calls that cannot be read. They are in no message, so tell the model of them."""
    num_prompt_tokens: int = 0
    """Number of tokens before the turn: the whole conversation so far. 0 in a turn that was not sampled, such
    as that of a scripted agent in a test."""

    @property
    def message(self) -> dict[str, Any]:
        """The turn as a message, to continue the conversation with."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.message_form for call in self.tool_calls]
        return message


class Agent(Protocol):
    """The model that is trained, as an environment sees it.

    An agent that brings its own loop talks to ``base_url`` instead of ``respond``, by Chat Completions,
    Responses or Anthropic's Messages: docs/sessions.md.
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
        """The session's key."""
        ...

    @property
    def tool_limit_s(self) -> float:
        """Time for one call of a tool in seconds: ``episodes.tool_s``."""
        ...

    def count_tool_call(self, status: ToolStatus, *, took_s: float | None = None) -> None:
        """Count a call of a tool in ``episode/num_tool_calls_<status>``; ``run_tools`` does so itself.

        ``took_s`` is how long it took, for ``episode/tool_call_p95_s`` and its kin; None: nothing ran.
        """
        ...

    def waiting_for_person(self) -> AbstractContextManager[None]:
        """While it is entered, the deadlines of set-up, step and episode stand still.

        For environments that wait for people, and bound that time themselves. A judge's deadline goes on.
        """
        ...

    async def respond(
        self,
        messages: str | Sequence[Message],
        tools: Sequence[ToolSpec] | None = None,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
    ) -> Turn:
        """Sample the model's next turn.

        ``messages`` are the whole conversation so far. Where they continue a conversation that this agent has
        answered before, only the new messages become tokens, after those that were sampled. Everything else
        begins a branch of its own: another conversation, the same messages a second time, or a history in
        which earlier messages were changed, removed or inserted. Calls may overlap. A string stands for one
        user message that begins a conversation. ``tools`` are what the model may call.

        ``max_tokens`` bounds the turn further than ``sampling.max_response_tokens`` does; the first of
        the texts in ``stop`` ends it.

        Raises:
            ContextFull: there is no room for another turn.
            TooManyTurns: the model has taken ``episodes.max_turns`` turns.
            ValueError: a message is malformed, or cannot be rendered; names the message.
        """
        ...

    def keep(self, name: str, data: bytes | str) -> Path | None:
        """Keep a file for people who read the episode: a patch, a log, the output of tests.

        It is written to ``artifacts/<group>-<episode>-<attempt>/<name>`` in the run's folder, replacing one
        of the same name, and is named in the episode's record. Files of episodes that are not written to
        rollouts.jsonl are removed when their group has trained or is lost. An episode keeps at most 32 files
        of 8 MiB together; what is beyond is not written, and counted (``episode/num_refused_artifacts``).

        Returns the file, or None if it was not written: it is beyond the bounds, or nobody keeps a record of
        this episode, as in the evaluations of a run.

        Raises:
            ValueError: the name is not of 1 to 100 letters, digits, '_', '-' and '.', or begins with '-' or
                '.'; or the data is neither bytes nor text.
        """
        ...


class Agents:
    """The agents of an environment that has several, by the names that the config gives them.

        agents:
          solver: {}
          judge: {trainable: false}

    With these, ``rollout(task, agents)`` asks ``agents.solver.respond(...)`` and ``agents.judge``.
    """

    def __init__(self, agents: "Sequence[NamedAgent]") -> None:
        self._by_name = {agent.name: agent for agent in agents}

    def __getattr__(self, name: str) -> Agent:
        try:
            return self._by_name[name]
        except KeyError:
            raise AttributeError(
                f"there is no agent {name!r}; agents of the config has {', '.join(self._by_name)}"
            ) from None


class NamedAgent(Agent, Protocol):
    """An agent that knows its name in the config."""

    name: str


class Environment(ABC):
    """Lets the model work on a task and scores the episode. Derive from it and write ``rollout``.

    A complete example with two turns tells a model whose answer is wrong to try again:

        from forgeasync.environments.environment import Agent, Environment
        from forgeasync.rollouts.score import Score

        class TryAgain(Environment):
            def __init__(self, second_chance: float = 0.5) -> None:
                self.second_chance = second_chance

            async def rollout(self, task: Task, agent: Agent) -> Score:
                messages = [{"role": "user", "content": task.prompt}]
                turn = await agent.respond(messages)
                if turn.text.strip() == task.answer:
                    return Score(value=1.0, is_correct=True)
                messages += [turn.message, {"role": "user", "content": "Wrong, try again."}]
                turn = await agent.respond(messages)
                is_correct = turn.text.strip() == task.answer
                return Score(value=self.second_chance * is_correct, is_correct=is_correct)

    Its section in the config follows; ``options`` are the arguments of ``__init__``:

        environment:
          kind: python
          factory: my_package.my_module.TryAgain
          options: {second_chance: 0.25}

    ``rollout`` is called once for every rollout, many times concurrently on one object of each worker: keep
    the state of an episode in local variables. Every episode runs on a thread and an event loop of its own,
    so that a blocking call delays no other one. Whatever belongs to an event loop, such as a client of a
    server, is made within ``rollout``. Never evaluate here what the model wrote; a ``Sandbox`` is for that.

    How an episode ends says what becomes of it (``episodes.endings``). One that raises, for instance, is run
    again; one that does not end in time does not train, and its group trains without it. Raise
    ``ParseError``, ``ToolError``, ``NoScore`` or ``EpisodeInterrupted`` to say what went wrong. A
    ``ContextFull`` or ``TooManyTurns`` that ``rollout`` does not catch ends the episode with score 0.
    """

    serves_people: ClassVar[bool] = False
    """Whether its tasks are people who open sessions: those of ``data.source: {kind: served}``."""

    @abstractmethod
    async def rollout(self, task: Task, agent: Agent) -> Score:
        """Run one episode: have the agent take at least one turn, and return the score of the episode."""

    async def __call__(self, task: Task, agent: Agent) -> Score:
        """Call ``rollout``."""
        return await self.rollout(task, agent)


TurnReward = Callable[[Task, Turn], Score | Awaitable[Score]]
"""Scores the only turn of an episode."""


class SingleTurn(Environment):
    """Prompts the model with the task and scores its answer; samples the same tokens as a run without an
    environment."""

    def __init__(self, reward: TurnReward) -> None:
        self._reward = reward

    async def rollout(self, task: Task, agent: Agent) -> Score:
        score = self._reward(task, await agent.respond(task.prompt))
        return await score if inspect.isawaitable(score) else score


@dataclass(frozen=True, slots=True)
class Response:
    """A response as a reward gets it. Never evaluate the text: a model wrote it."""

    text: str
    num_tokens: int
    finish_reason: FinishReason
    """``LENGTH`` if the response was cut at ``sampling.max_response_tokens``."""


def response_of(rollout: Rollout | StoredRollout) -> Response:
    """Return the part of a rollout that a reward gets."""
    return Response(rollout.text, rollout.num_response_tokens, rollout.finish_reason)


Verdict = float | Score
"""A reward's result for one response. A float is a ``Score`` without parts that is correct from 1.0 on."""


class Reward(ABC):
    """A reward of your own. A function ``(task, response) -> float | Score`` works as well.

    A function, in ``my_rewards.py`` in a folder of PYTHONPATH:

        def brevity(task, response):
            return 1.0 if response.num_tokens < 100 else 0.0

    A class, whose keywords are ``options``, and whose coroutine may wait for a server: up to 64 of its calls
    run concurrently in a process.

        class Judge(Reward):
            def __init__(self, url, best=5.0):
                self.client, self.best = httpx.AsyncClient(base_url=url), best

            async def __call__(self, task, response):
                reply = await self.client.post("/judge", json={
                    "question": task.prompt, "reference": task.record["solution"], "answer": response.text})
                points = reply.json()["points"]
                return Score(points / self.best, points == self.best, parts={"points": points})

    In the YAML, alone or as one of a list with weights:

        data:
          reward:
            - {kind: math}
            - {kind: python, factory: my_rewards.brevity, weight: 0.1}
            - {kind: python, factory: my_rewards.Judge, options: {url: "http://judge:8000"}, limit_s: 50}

    With ``scores: group`` a call gets all responses to a prompt at once and returns as many verdicts:

        def shortest_right(task, responses):
            right = [task.answer in response.text for response in responses]
            least = min((r.num_tokens for r, ok in zip(responses, right) if ok), default=0)
            return [Score(float(r.num_tokens == least), ok) if ok else 0.0 for r, ok in zip(responses, right)]

    A reward runs in its own processes, each of which builds it once; it may use files and the network. If it
    raises, returns no finite number or takes longer than ``limit_s``, it has not scored: its group is tried
    again and then given up, never scored 0. See docs/rewards.md.
    """

    @abstractmethod
    def __call__(
        self, task: Task, response: Response
    ) -> Verdict | Awaitable[Verdict] | Sequence[Verdict] | Awaitable[Sequence[Verdict]]:
        """Score ``response`` to ``task``; with ``scores: group`` it takes a list and returns a list."""
