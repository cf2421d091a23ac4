"""Runs episodes of one environment, each on a thread of its own and under deadlines.

Plain asyncio, no Monarch: the environment worker is a thin shell around ``Episodes``. Turns are sampled on
the loop that ``run`` is called on; an episode's own loop waits for them.
"""

import asyncio
import bisect
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forgeasync.config import Ending, EpisodesSection, SamplingSection
from forgeasync.environments.agent import (
    AgentRole,
    EpisodeAgent,
    EpisodeArtifacts,
    OpenSession,
    Participant,
    SampleTurn,
    TurnLimits,
    TurnRequest,
    artifact_folder_name,
    outcome_of,
)
from forgeasync.environments.conversation import turn_facts
from forgeasync.environments.endpoint_agent import EndpointAgent, EndpointModel
from forgeasync.environments.environment import (
    Agent,
    Agents,
    ContextFull,
    Environment,
    EpisodeInterrupted,
    NoScore,
    ParseError,
    Response,
    ToolError,
    TooManyTurns,
)
from forgeasync.environments.episode_thread import EpisodeThread
from forgeasync.environments.messages import ASSISTANT
from forgeasync.environments.rendering import MessageRenderer
from forgeasync.environments.tools import num_stuck_calls
from forgeasync.observability import last_words
from forgeasync.processes import kill
from forgeasync.rollouts import EpisodeId, EpisodeOutcome, SampledTurn, Score, Task, VersionRange


@dataclass(slots=True)
class EpisodeActivity:
    """What an episode is doing, for its deadlines; times are those of ``now_s``."""

    now_s: Callable[[], float] = time.perf_counter
    num_sampling: int = 0
    num_begun: int = 0
    last_s: float = 0.0
    """When the episode began, or the last turn under way or wait for a person ended."""
    sampling_s: float = 0.0
    judging_since_s: dict[int, float] = field(default_factory=dict)
    num_waiting: int = 0
    """Waits for people and for generators that are under way; they may overlap."""
    waited_s: float = 0.0
    """Time for which somebody was waited for, waits that go on left out."""
    waited_before_turns_s: float = 0.0
    """That of waits which ended before the first turn began: nothing has grown old meanwhile."""
    _waiting_since_s: float = 0.0

    def begin(self, now_s: float) -> None:
        if not self.num_sampling:
            self.last_s = now_s
        self.num_sampling += 1
        self.num_begun += 1

    def end(self, now_s: float) -> None:
        self.num_sampling -= 1
        if not self.num_sampling:
            self.sampling_s += now_s - self.last_s
            self.last_s = now_s

    def begin_wait(self, now_s: float) -> None:
        """From now on deadlines stand still."""
        if not self.num_waiting:
            self._waiting_since_s = now_s
        self.num_waiting += 1

    def end_wait(self, now_s: float) -> None:
        """Deadlines go on if nobody else is waited for."""
        self.num_waiting -= 1
        if self.num_waiting:
            return
        waited_s = now_s - self._waiting_since_s
        self.waited_s += waited_s
        if not self.num_begun:
            self.waited_before_turns_s += waited_s
        for turn, since_s in self.judging_since_s.items():
            self.judging_since_s[turn] = since_s + waited_s
        if not self.num_sampling:
            self.last_s = now_s

    def waiting_on(self, loop: asyncio.AbstractEventLoop) -> Callable[[], AbstractContextManager[None]]:
        """Return what an agent of the episode enters, on any thread, while it waits for a person or for a
        generator; this object belongs to ``loop``."""

        @contextmanager
        def waiting() -> Iterator[None]:
            loop.call_soon_threadsafe(self.begin_wait, self.now_s())
            try:
                yield
            finally:
                loop.call_soon_threadsafe(self.end_wait, self.now_s())

        return waiting


logger = logging.getLogger(__name__)


def has_failed(agents: Sequence[Participant]) -> bool:
    """Whether a turn was given up or could not be sampled, which ends the episode whatever it does."""
    return any(agent.is_cancelled or agent.failure is not None for agent in agents)


def judge_ending(
    agents: Sequence[Participant],
    roles: Sequence[AgentRole],
    result: object,
    overdue: str | None,
    where: str,
    *,
    has_one_agent: bool,
) -> tuple[Ending, dict[str, Score], str | None]:
    """Return how an episode ended, the scores by agent, and what went wrong.

    ``result`` is what the environment's method returned or raised, ``overdue`` the deadline that has passed,
    and ``where`` begins what is said of a problem.
    """
    if overdue is not None:
        return Ending.TIMEOUT, {}, f"{where}: took longer than {overdue}"
    if isinstance(result, BaseException):
        return *_ending_of(result, agents), f"{where}: {type(result).__name__}: {last_words(result)}"
    num_turns = sum(agent.num_turns for agent in agents)
    if not num_turns and not any(agent.has_given_url for agent in agents):
        problem = "ended without a turn of the model; must await agent.respond(...) at least once"
        return Ending.ENVIRONMENT_CRASH, {}, f"{where}: {problem}"
    try:
        scores = _scores(result, roles, has_one_agent=has_one_agent)
    except ValueError as error:
        return Ending.ENVIRONMENT_CRASH, {}, f"{where}: {error}"
    if any(agent.has_hit_length for agent in agents):
        return Ending.LENGTH, scores, None
    if any(agent.has_hit_max_turns for agent in agents):
        return Ending.MAX_TURNS, scores, None
    return Ending.COMPLETED, scores, None


def _scores(result: object, roles: Sequence[AgentRole], *, has_one_agent: bool) -> dict[str, Score]:
    names = [role.name for role in roles]
    if isinstance(result, Score):
        return dict.fromkeys(names, result)
    if isinstance(result, Mapping) and not has_one_agent:
        needed = {role.name for role in roles if role.is_trainable}
        scores = dict(result)
        if not needed <= scores.keys() <= set(names):
            raise ValueError(
                f"rollout returned scores of {sorted(map(str, scores))}; must have one for each of "
                f"{sorted(needed)}"
            )
        if all(isinstance(score, Score) for score in scores.values()):
            return scores
    what = "a Score" if has_one_agent else "a Score, or a mapping from agents' names to Scores"
    raise ValueError(f"rollout returned {str(result)[:80]!r}; must return {what}")


def _ending_of(error: BaseException, agents: Sequence[Participant]) -> tuple[Ending, dict[str, Score]]:
    match error:
        case ContextFull() if any(agent.num_turns for agent in agents):
            return Ending.LENGTH, {}
        case TooManyTurns():
            return Ending.MAX_TURNS, {}
        case ParseError():
            return Ending.PARSE_ERROR, {}
        case ToolError():
            return Ending.TOOL_ERROR, {}
        case NoScore():
            return Ending.NO_SCORE, {}
        case EpisodeInterrupted():
            return Ending.INFRASTRUCTURE, {}
        case _:
            # Whatever the user's code raises is for the user to see, with its traceback in the log.
            logger.warning("an episode failed", exc_info=error)
            return Ending.ENVIRONMENT_CRASH, {}


MAX_BYTES = 500_000
"""Most bytes of the messages of a record, as JSON; what is beyond is cut, and its number is told."""


def episode_record(
    task: Task,
    agents: Sequence[Participant],
    ending: Ending,
    scores: Mapping[str, Score],
    problem: str | None,
    artifacts: EpisodeArtifacts,
) -> dict[str, Any]:
    """Return JSON values: task, ending, files kept, and for every agent its score and its branches."""
    room = _Room(MAX_BYTES)
    record: dict[str, Any] = {
        "task_id": task.task_id,
        "ending": ending.value,
        "problem": problem,
        "artifacts": artifacts.paths,
        "agents": [
            {
                "name": agent.name,
                "score": _score(scores.get(agent.name)),
                "num_turns": agent.num_turns,
                "branches": [room.kept(branch) for branch in agent.branches()],
            }
            for agent in agents
        ],
    }
    return record | {"num_cut_bytes": room.num_cut}


def response_record(
    task: Task,
    response: Response,
    score: Score | None,
    problem: str | None,
    *,
    versions: VersionRange | None,
) -> dict[str, Any]:
    """Return the record of one response to a task's prompt, in the form of an episode's with one turn."""
    room = _Room(MAX_BYTES)
    prompt = {"role": "user", "content": task.prompt}
    answer = {"role": ASSISTANT, "content": response.text} | turn_facts(
        versions=versions, num_tokens=response.num_tokens, finish_reason=response.finish_reason
    )
    branch = room.kept([prompt, answer])
    return {
        "task_id": task.task_id,
        "ending": None,
        "problem": problem,
        "artifacts": [],
        "agents": [
            {
                "name": "agent",
                "score": _score(score),
                "num_turns": 1,
                "branches": [branch],
            }
        ],
        "num_cut_bytes": room.num_cut,
    }


class _Room:
    """How many bytes are left."""

    def __init__(self, num_left: int) -> None:
        self._num_left = num_left
        self.num_cut = 0

    def kept(self, branch: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages for which there is room; the first that is too large has the beginnings of its
        texts and no tool calls."""
        kept = []
        for message in branch:
            whole = _as_json(message)
            num_bytes = _num_bytes(whole)
            if num_bytes <= self._num_left:
                kept.append(whole)
                self._num_left -= num_bytes
                continue
            self.num_cut += num_bytes
            if (part := self._part(whole)) is not None:
                kept.append(part)
                self.num_cut -= _num_bytes(part)
            # Whatever follows is cut: a conversation has no gaps.
            self._num_left = 0
        return kept

    def _part(self, message: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return as much of a message as there is room for; None if there is none at all."""
        texts = [key for key in ("content", "reasoning_content") if key in message]
        part = {key: value for key, value in message.items() if key != "tool_calls"} | dict.fromkeys(
            texts, ""
        )
        if _num_bytes(part) > self._num_left:
            return None
        for key in texts:
            room = self._num_left - _num_bytes(part)
            # A character takes one byte at least, so that only so many can fit.
            text = message[key][:room]
            num_fitting = bisect.bisect_right(
                range(1, len(text) + 1), room, key=lambda length: _num_bytes(text[:length]) - len('""')
            )
            part[key] = text[:num_fitting]
        return part


def _as_json(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as rollouts.jsonl can have it: arguments that JSON has not, such as NaN, as text."""
    try:
        json.dumps(message, allow_nan=False)
    except (TypeError, ValueError):
        calls = [
            {**call, "function": {**call["function"], "arguments": str(call["function"]["arguments"])}}
            for call in message["tool_calls"]
        ]
        return {**message, "tool_calls": calls}
    return dict(message)


def _num_bytes(value: object) -> int:
    """Number of bytes that a value takes in rollouts.jsonl."""
    return len(json.dumps(value, allow_nan=False))


def _score(score: Score | None) -> dict[str, Any] | None:
    if score is None:
        return None
    return {"value": score.value, "is_correct": score.is_correct, "parts": dict(score.parts)}


logger = logging.getLogger(__name__)

CLEAN_UP_S = 5.0
"""Time for a cancelled episode to clean up, in seconds; after that its processes are killed."""

INTERRUPT_S = 1.0
"""Time for a thread to end once its processes are killed and it was interrupted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointTurns:
    """Turns that an endpoint samples instead of our generators."""

    endpoint: EndpointModel
    sampling: SamplingSection
    limit_s: float
    """Time for one turn."""


SampleEpisodeTurn = Callable[[EpisodeId, TurnRequest], Awaitable[SampledTurn | None]]
"""``SampleTurn`` with the id of the episode."""


class EpisodeCancelled(Exception):
    """The group was given up during an episode, because it would have been too old at its end."""


class Episodes:
    """Runs the episodes of one environment."""

    def __init__(
        self,
        environment: Environment,
        renderer: MessageRenderer | None,
        *,
        name: str,
        roles: Sequence[AgentRole],
        has_one_agent: bool,
        max_context_length: int,
        section: EpisodesSection,
        limit_s: float,
        open_session: Callable[[EpisodeAgent], OpenSession] | None = None,
        now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``name`` is the environment's name in messages; ``limit_s`` is ``timeouts.episode_s``.
        ``renderer`` is None where an endpoint samples all turns.

        With ``has_one_agent`` a rollout gets the agent itself, otherwise all of them by their names.
        ``open_session`` opens a session for an agent whose environment asks for one.
        ``now_s`` is the clock of all deadlines.
        """
        self._now_s = now_s
        self._open_session = open_session
        self._environment = environment
        self._renderer = renderer
        self._name = name
        self._roles = tuple(roles)
        self._has_one_agent = has_one_agent
        self._max_context_length = max_context_length
        self._section = section
        self._limit_s = limit_s
        self._stuck: list[EpisodeThread[object]] = []
        self.num_killed_processes = 0
        """Processes of episodes that did not end by themselves."""

    @property
    def num_stuck(self) -> int:
        """Threads of episodes that are over and of tools that were cut off, which nothing has ended."""
        self._stuck = [thread for thread in self._stuck if thread.is_alive]
        return len(self._stuck) + num_stuck_calls()

    async def run(
        self,
        task: Task,
        episode: EpisodeId,
        *,
        max_turn_tokens: int,
        sample: "SampleEpisodeTurn | EndpointTurns",
        keeps_record: bool = False,
        artifacts_folder: Path | None = None,
    ) -> EpisodeOutcome:
        """Run one attempt at an episode to its end, whatever that is.

        Files that it keeps are written below ``artifacts_folder`` if its record is kept, too.

        Raises:
            EpisodeCancelled: the group was given up meanwhile.
            Exception: whatever ``sample`` raised, even if the environment continued without the turn; but an
                ``EpisodeInterrupted`` is an ending (``Ending.INFRASTRUCTURE``).
        """
        where = f"environment {self._name}, task {task.task_id}, rollout {episode.index}"
        activity = EpisodeActivity(now_s=self._now_s, last_s=self._now_s())
        artifacts = EpisodeArtifacts(
            folder=artifacts_folder / artifact_folder_name(episode)
            if keeps_record and artifacts_folder is not None
            else None
        )
        agents = self._agents(episode, activity, max_turn_tokens, sample, artifacts)
        start_s = self._now_s()
        result, overdue = await self._finish(task, agents, activity, start_s, where)
        for agent in agents:
            if agent.is_cancelled:
                raise EpisodeCancelled
            if isinstance(agent.failure, EpisodeInterrupted):
                # Whatever the environment has made of it.
                result, overdue = agent.failure, None
            elif agent.failure is not None:
                raise agent.failure
        ending, scores, problem = judge_ending(
            agents, self._roles, result, overdue, where, has_one_agent=self._has_one_agent
        )
        record = episode_record(task, agents, ending, scores, problem, artifacts) if keeps_record else None
        return EpisodeOutcome(
            ending=ending,
            agents=tuple(outcome_of(agent, scores.get(agent.name)) for agent in agents),
            episode_s=self._now_s() - start_s - activity.waited_before_turns_s,
            sampling_s=activity.sampling_s,
            problem=problem,
            record=record,
            num_cut_bytes=0 if record is None else record["num_cut_bytes"],
            attempt=episode.attempt,
            episode=episode.index,
            num_artifacts=artifacts.num_files,
            num_refused_artifacts=artifacts.num_refused,
        )

    def _agents(
        self,
        episode: EpisodeId,
        activity: EpisodeActivity,
        max_turn_tokens: int,
        sample: "SampleEpisodeTurn | EndpointTurns",
        artifacts: EpisodeArtifacts,
    ) -> Sequence[Participant]:
        if isinstance(sample, EndpointTurns):
            return [self._endpoint_agent(role, activity, sample, artifacts) for role in self._roles]
        assert self._renderer is not None, "tokens are rendered"
        limits = TurnLimits(
            max_turn_tokens=max_turn_tokens,
            max_context_length=self._max_context_length,
            max_turns=self._section.max_turns,
            tool_s=self._section.tool_s,
        )
        return [
            EpisodeAgent(
                self._sampler(episode, index, role, activity, sample),
                self._renderer,
                limits,
                name=role.name,
                artifacts=artifacts,
                open_session=self._open_session,
                waiting=activity.waiting_on(asyncio.get_running_loop()),
            )
            for index, role in enumerate(self._roles)
        ]

    def _sampler(
        self,
        episode: EpisodeId,
        index: int,
        role: AgentRole,
        activity: EpisodeActivity,
        sample: SampleEpisodeTurn,
    ) -> SampleTurn:
        """Sample turns of one agent on the loop that the episodes are run on, from whatever loop it asks."""
        loop = asyncio.get_running_loop()
        of_agent = EpisodeId(
            group_id=episode.group_id, index=episode.index, attempt=episode.attempt, agent=index
        )

        async def here(request: TurnRequest) -> SampledTurn | None:
            number = activity.num_begun
            activity.begin(self._now_s())
            if not role.is_trainable:
                activity.judging_since_s[number] = self._now_s()
            try:
                return await sample(of_agent, request)
            finally:
                activity.judging_since_s.pop(number, None)
                activity.end(self._now_s())

        async def from_anywhere(request: TurnRequest) -> SampledTurn | None:
            if asyncio.get_running_loop() is loop:
                return await here(request)
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(here(request), loop))

        return from_anywhere

    def _endpoint_agent(
        self, role: AgentRole, activity: EpisodeActivity, turns: EndpointTurns, artifacts: EpisodeArtifacts
    ) -> EndpointAgent:
        """An agent whose turns an endpoint samples; they run on the episode's loop and count on this one."""
        loop = asyncio.get_running_loop()
        judging: list[int] = []

        def begin() -> None:
            if not role.is_trainable:
                judging.append(activity.num_begun)
                activity.judging_since_s[activity.num_begun] = self._now_s()
            activity.begin(self._now_s())

        def end() -> None:
            if judging:
                activity.judging_since_s.pop(judging.pop(0), None)
            activity.end(self._now_s())

        return EndpointAgent(
            endpoint=turns.endpoint,
            sampling=turns.sampling,
            limit_s=turns.limit_s,
            max_turns=self._section.max_turns,
            tool_s=self._section.tool_s,
            name=role.name,
            artifacts=artifacts,
            on_begin=lambda: loop.call_soon_threadsafe(begin),
            on_end=lambda: loop.call_soon_threadsafe(end),
            waiting=activity.waiting_on(loop),
        )

    async def _rollout(self, task: Task, agent: Agent | Agents, agents: Sequence[Participant]) -> object:
        try:
            # An environment of several agents takes Agents in the place of one.
            return await self._environment.rollout(task, agent)  # type: ignore[arg-type]
        finally:
            for one in agents:
                await one.leave()

    async def _finish(
        self,
        task: Task,
        agents: Sequence[Participant],
        activity: EpisodeActivity,
        start_s: float,
        where: str,
    ) -> tuple[object, str | None]:
        """Run the user's method; return its result or error, and the deadline that has passed, if any."""
        # A turn that failed or was given up ends the episode, whatever the environment does then.
        agent: Agent | Agents = agents[0] if self._has_one_agent else Agents(agents)
        thread: EpisodeThread[object] = EpisodeThread(
            lambda: self._rollout(task, agent, agents), name=where[:60]
        )
        ended = thread.start()
        overdue = None
        try:
            while not ended.done() and overdue is None and not has_failed(agents):
                due_s, overdue_key = self._next_deadline(activity, start_s)
                left_s = due_s - self._now_s()
                if left_s <= 0:
                    overdue = overdue_key
                    break
                # Turns move the next deadline, so look again soon.
                await asyncio.wait([ended], timeout=min(left_s, 1.0))
        finally:
            for one in agents:
                one.close()
            if not ended.done():
                await self._end(thread, ended)
        if not ended.done():
            ended.cancel()
            return None, overdue
        error = ended.exception()
        return (ended.result() if error is None else error), overdue

    def _next_deadline(self, activity: EpisodeActivity, start_s: float) -> tuple[float, str]:
        section = self._section
        begun_s = start_s + activity.waited_s
        deadlines = [(math.inf, "")]
        if not activity.num_waiting:
            deadlines.append((begun_s + self._limit_s, f"timeouts.episode_s = {self._limit_s:g} s"))
            if not activity.num_begun:
                deadlines.append((begun_s + section.setup_s, f"episodes.setup_s = {section.setup_s:g} s"))
            elif not activity.num_sampling:
                deadlines.append(
                    (activity.last_s + section.step_s, f"episodes.step_s = {section.step_s:g} s")
                )
        for since_s in () if activity.num_waiting else activity.judging_since_s.values():
            deadlines.append((since_s + section.judge_s, f"episodes.judge_s = {section.judge_s:g} s"))
        return min(deadlines)

    async def _end(self, thread: EpisodeThread[object], ended: "asyncio.Future[object]") -> None:
        """End a thread by all means there are; one that goes on is counted as stuck."""
        processes = thread.processes()
        thread.cancel()
        await asyncio.wait([ended], timeout=CLEAN_UP_S)
        self.num_killed_processes += kill([*processes, *thread.processes()])
        if not ended.done():
            thread.interrupt()
            await asyncio.wait([ended], timeout=INTERRUPT_S)
        if not ended.done():
            self._stuck.append(thread)
