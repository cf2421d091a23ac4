"""Runs the episodes of one environment, each on its own thread and with deadlines.

It uses asyncio only; the Monarch actor is a thin wrapper around ``Episodes``. Turns are sampled on the event
loop that calls ``Episodes.run``, while the event loop of the episode's thread waits for them.
"""

import asyncio
import bisect
import dataclasses
import json
import logging
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from forgeasync.config import Ending, EpisodesSection, SamplingSection
from forgeasync.environments.agent import (
    AgentRole,
    EpisodeAgent,
    EpisodeArtifacts,
    Participant,
    SampleTurn,
    TurnLimits,
    TurnRequest,
    artifact_folder_name,
)
from forgeasync.environments.conversation import RecordedBranch, turn_facts
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
from forgeasync.environments.sessions.session import Session
from forgeasync.environments.tools import num_stuck_calls
from forgeasync.observability import describe_error
from forgeasync.processes import kill
from forgeasync.rollouts import (
    AgentOutcome,
    EpisodeId,
    EpisodeOutcome,
    SampledTurn,
    Score,
    Task,
    VersionRange,
)


@dataclass(slots=True)
class EpisodeActivity:
    """Turns and waits of one episode, for its deadlines. Times are in seconds of the clock ``now_s``."""

    now_s: Callable[[], float] = time.perf_counter
    num_sampling: int = 0
    num_begun: int = 0
    last_s: float = 0.0
    """Start of the sampling in progress. Without sampling: start of the episode, or end of a turn or wait."""
    sampling_s: float = 0.0
    num_waiting: int = 0
    """Number of waits in progress, for people or generators; they may overlap."""
    waited_s: float = 0.0
    """Total time of completed waits."""
    waited_before_turns_s: float = 0.0
    """Total time of waits before the first turn. No sampled token ages during them."""
    _waiting_since_s: float = 0.0

    def begin_turn(self, now_s: float) -> None:
        """Record the start of a turn."""
        if not self.num_sampling:
            self.last_s = now_s
        self.num_sampling += 1
        self.num_begun += 1

    def end_turn(self, now_s: float) -> None:
        """Record the end of a turn, with any outcome."""
        self.num_sampling -= 1
        if not self.num_sampling:
            self.sampling_s += now_s - self.last_s
            self.last_s = now_s

    def begin_wait(self, now_s: float) -> None:
        """Stop the deadlines."""
        if not self.num_waiting:
            self._waiting_since_s = now_s
        self.num_waiting += 1

    def end_wait(self, now_s: float) -> None:
        """Resume the deadlines, unless there is another wait."""
        self.num_waiting -= 1
        if self.num_waiting:
            return
        waited_s = now_s - self._waiting_since_s
        self.waited_s += waited_s
        if not self.num_begun:
            self.waited_before_turns_s += waited_s
        if not self.num_sampling:
            self.last_s = now_s

    @contextmanager
    def turn_on(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Context of a turn that an endpoint samples, on any thread; this object is updated on ``loop``."""
        loop.call_soon_threadsafe(self.begin_turn, self.now_s())
        try:
            yield
        finally:
            loop.call_soon_threadsafe(self.end_turn, self.now_s())

    @contextmanager
    def wait_on(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        """Context of a wait for people or generators, on any thread; this object is updated on ``loop``."""
        loop.call_soon_threadsafe(self.begin_wait, self.now_s())
        try:
            yield
        finally:
            loop.call_soon_threadsafe(self.end_wait, self.now_s())


logger = logging.getLogger(__name__)


def ending_of_episode(
    agents: Sequence[Participant],
    roles: Sequence[AgentRole],
    result: object,
    overdue: str | None,
    where: str,
    *,
    has_one_agent: bool,
) -> tuple[Ending, dict[str, Score], str | None]:
    """Return how an episode ended, the scores by agent, and what went wrong.

    ``result`` is what ``rollout`` returned or raised, ``overdue`` is the deadline that has passed, and
    ``where`` is the prefix of the description of a problem.
    """
    if overdue is not None:
        return Ending.TIMEOUT, {}, f"{where}: took longer than {overdue}"
    if isinstance(result, BaseException):
        return _ending_of(result, agents), {}, f"{where}: {type(result).__name__}: {describe_error(result)}"
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


ENDINGS: Mapping[type[Exception], Ending] = {
    ContextFull: Ending.LENGTH,
    TooManyTurns: Ending.MAX_TURNS,
    ParseError: Ending.PARSE_ERROR,
    ToolError: Ending.TOOL_ERROR,
    NoScore: Ending.NO_SCORE,
    EpisodeInterrupted: Ending.INFRASTRUCTURE,
}
"""Ending of an episode whose ``rollout`` raises an exception of this type."""


def _ending_of(error: BaseException, agents: Sequence[Participant]) -> Ending:
    has_turns = any(agent.num_turns for agent in agents)
    for kind, ending in ENDINGS.items():
        if isinstance(error, kind) and (has_turns or kind is not ContextFull):
            return ending
    # An exception of the user's code is logged with its traceback.
    logger.warning("an episode failed", exc_info=error)
    return Ending.ENVIRONMENT_CRASH


MAX_BYTES = 500_000
"""Maximum size of the messages of a record, in bytes of JSON. The rest is cut and counted."""


def episode_record(
    task: Task,
    agents: Sequence[Participant],
    ending: Ending,
    scores: Mapping[str, Score],
    problem: str | None,
    artifacts: EpisodeArtifacts,
) -> dict[str, Any]:
    """Return a record as JSON values: task, ending, files kept, and the score and branches of each agent."""
    records = [(agent.name, scores.get(agent.name), agent.num_turns, agent.branches()) for agent in agents]
    return _record(task, ending, problem, artifacts.paths, records)


def response_record(
    task: Task,
    response: Response,
    score: Score | None,
    problem: str | None,
    *,
    versions: VersionRange | None,
) -> dict[str, Any]:
    """Return the record of a response without an environment, in the form of an episode with one turn."""
    prompt = {"role": "user", "content": task.prompt}
    answer = {"role": ASSISTANT, "content": response.text} | turn_facts(
        versions=versions, num_tokens=response.num_tokens, finish_reason=response.finish_reason
    )
    return _record(task, None, problem, [], [("agent", score, 1, [[prompt, answer]])])


def _record(
    task: Task,
    ending: Ending | None,
    problem: str | None,
    artifacts: Sequence[str],
    agents: Iterable[tuple[str, Score | None, int, list[RecordedBranch]]],
) -> dict[str, Any]:
    """Return a record; ``agents`` has the name, score, number of turns and branches of each."""
    room = _Room(MAX_BYTES)
    records = [
        {
            "name": name,
            "score": None
            if score is None
            else {"value": score.value, "is_correct": score.is_correct, "parts": dict(score.parts)},
            "num_turns": num_turns,
            "branches": [room.kept(branch) for branch in branches],
        }
        for name, score, num_turns, branches in agents
    ]
    return {
        "task_id": task.task_id,
        "ending": None if ending is None else ending.value,
        "problem": problem,
        "artifacts": list(artifacts),
        "agents": records,
        "num_cut_bytes": room.num_cut,
    }


class _Room:
    """Byte budget for the messages of a record."""

    def __init__(self, num_left: int) -> None:
        self._num_left = num_left
        self.num_cut = 0

    def kept(self, branch: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the messages that fit into the budget.

        The first message that is too large keeps the beginning of its texts and loses its tool calls.
        """
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
            # Cut all following messages, so that a conversation has no gaps.
            self._num_left = 0
        return kept

    def _part(self, message: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the part of a message that fits; None if nothing fits."""
        texts = [key for key in ("content", "reasoning_content") if key in message]
        part = {key: value for key, value in message.items() if key != "tool_calls"} | dict.fromkeys(
            texts, ""
        )
        if _num_bytes(part) > self._num_left:
            return None
        for key in texts:
            room = self._num_left - _num_bytes(part)
            # A character takes at least one byte, so no more than this many fit.
            text = message[key][:room]
            num_fitting = bisect.bisect_right(
                range(1, len(text) + 1), room, key=lambda length: _num_bytes(text[:length]) - len('""')
            )
            part[key] = text[:num_fitting]
        return part


def _as_json(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message for rollouts.jsonl. Arguments that JSON cannot hold, such as NaN, become text."""
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
    """Return the number of bytes of a value in rollouts.jsonl."""
    return len(json.dumps(value, allow_nan=False))


CLEAN_UP_S = 5.0
"""Seconds for a cancelled episode to clean up. After that its processes are killed."""

INTERRUPT_S = 1.0
"""Seconds for a thread to end after its processes were killed and it was interrupted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointTurns:
    """Settings of turns that an endpoint samples instead of the run's generators."""

    endpoint: EndpointModel
    sampling: SamplingSection
    limit_s: float
    """Time limit for one turn, in seconds."""


SampleEpisodeTurn = Callable[[EpisodeId, TurnRequest], Awaitable[SampledTurn | None]]
"""Samples a turn of the episode with this id; see ``SampleTurn``."""


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
        open_session: Callable[[EpisodeAgent], Session] | None = None,
        now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Configure the episodes.

        ``renderer`` is None if an endpoint samples all turns. ``name`` is the environment's name in messages.
        With ``has_one_agent``, ``rollout`` gets an ``Agent``, otherwise an ``Agents``. ``limit_s`` is
        ``timeouts.episode_s``. ``open_session`` opens an agent's session when its URL or key is first used.
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
        """Number of processes of ended episodes that were killed."""

    @property
    def num_stuck(self) -> int:
        """Number of threads of ended episodes and timed-out tools that could not be stopped."""
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
        """Run one attempt at an episode to its end.

        If ``keeps_record`` is true, files that the episode keeps are written below ``artifacts_folder``.

        Raises:
            EpisodeCancelled: The group was abandoned during the episode.
            Exception: ``sample`` raised it, even if the environment caught it. ``EpisodeInterrupted`` is not
                raised: it gives the ending ``Ending.INFRASTRUCTURE``.
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
            if isinstance(agent.failure, EpisodeInterrupted):
                # This decides the ending even if the environment caught the exception.
                result, overdue = agent.failure, None
            elif agent.failure is not None:
                raise agent.failure
        ending, scores, problem = ending_of_episode(
            agents, self._roles, result, overdue, where, has_one_agent=self._has_one_agent
        )
        record = episode_record(task, agents, ending, scores, problem, artifacts) if keeps_record else None
        counts = Counter(
            {
                "episode/num_cut_record_bytes": 0 if record is None else record["num_cut_bytes"],
                "episode/num_artifacts": artifacts.num_files,
                "episode/num_refused_artifacts": artifacts.num_refused,
            }
        )
        for agent in agents:
            counts.update(agent.counts)
            counts.update({f"session/{name}": num for name, num in agent.session_counts.items()})
        return EpisodeOutcome(
            ending=ending,
            agents=tuple(
                AgentOutcome(score=scores.get(one.name), num_turns=one.num_turns, versions=one.versions)
                for one in agents
            ),
            episode_s=self._now_s() - start_s - activity.waited_before_turns_s,
            sampling_s=activity.sampling_s,
            problem=problem,
            record=record,
            attempt=episode.attempt,
            episode=episode.index,
            counts=counts,
            tool_calls_s=tuple(call_s for agent in agents for call_s in agent.tool_calls_s),
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
                self._sampler(episode, index, activity, sample),
                self._renderer,
                limits,
                name=role.name,
                artifacts=artifacts,
                open_session=self._open_session,
                waiting=partial(activity.wait_on, asyncio.get_running_loop()),
            )
            for index, role in enumerate(self._roles)
        ]

    def _sampler(
        self, episode: EpisodeId, index: int, activity: EpisodeActivity, sample: SampleEpisodeTurn
    ) -> SampleTurn:
        """Return a function, callable on any loop, that samples one agent's turns on the current loop."""
        loop = asyncio.get_running_loop()
        of_agent = dataclasses.replace(episode, agent=index)

        async def here(request: TurnRequest) -> SampledTurn | None:
            activity.begin_turn(self._now_s())
            try:
                return await sample(of_agent, request)
            finally:
                activity.end_turn(self._now_s())

        async def from_anywhere(request: TurnRequest) -> SampledTurn | None:
            if asyncio.get_running_loop() is loop:
                return await here(request)
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(here(request), loop))

        return from_anywhere

    def _endpoint_agent(
        self, role: AgentRole, activity: EpisodeActivity, turns: EndpointTurns, artifacts: EpisodeArtifacts
    ) -> EndpointAgent:
        """Return an agent whose turns are sampled on the episode's loop and counted on the current loop."""
        loop = asyncio.get_running_loop()
        return EndpointAgent(
            endpoint=turns.endpoint,
            sampling=turns.sampling,
            limit_s=turns.limit_s,
            max_turns=self._section.max_turns,
            tool_s=self._section.tool_s,
            name=role.name,
            artifacts=artifacts,
            taking_turn=partial(activity.turn_on, loop),
            waiting=partial(activity.wait_on, loop),
        )

    async def _rollout(self, task: Task, agent: Agent | Agents, agents: Sequence[Participant]) -> object:
        try:
            # An environment with several agents takes Agents instead of an Agent.
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
        # A turn that failed or was abandoned ends the episode.
        agent: Agent | Agents = (
            agents[0] if self._has_one_agent else Agents({one.name: one for one in agents})
        )
        thread: EpisodeThread[object] = EpisodeThread(
            lambda: self._rollout(task, agent, agents), name=where[:60]
        )
        ended = thread.start()
        overdue = None
        try:
            while not (ended.done() or any(one.failure is not None for one in agents)):
                due_s, overdue_key = self._next_deadline(activity, start_s)
                left_s = due_s - self._now_s()
                if left_s <= 0:
                    overdue = overdue_key
                    break
                # Turns move the next deadline, so check again within a second.
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
        return min(deadlines)

    async def _end(self, thread: EpisodeThread[object], ended: "asyncio.Future[object]") -> None:
        """Cancel a thread's coroutine, kill its processes and interrupt it. If it continues, it is stuck."""
        processes = thread.processes()
        thread.cancel()
        await asyncio.wait([ended], timeout=CLEAN_UP_S)
        self.num_killed_processes += kill([*processes, *thread.processes()])
        if not ended.done():
            thread.interrupt()
            await asyncio.wait([ended], timeout=INTERRUPT_S)
        if not ended.done():
            self._stuck.append(thread)
