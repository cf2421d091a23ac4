"""Runs episodes of one environment, each on a thread of its own and under deadlines.

Plain asyncio, no Monarch: the environment worker is a thin shell around this class. Turns are sampled on the
loop that ``run`` is called on; an episode's own loop waits for them.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from forgeasync.config import EpisodesSection, SamplingSection
from forgeasync.environments.agent import EpisodeAgent, OpenSession, SampleTurn, TurnLimits, TurnRequest
from forgeasync.environments.artifacts import EpisodeArtifacts, artifact_folder_name
from forgeasync.environments.endpoint import EndpointModel
from forgeasync.environments.endpoint_agent import EndpointAgent
from forgeasync.environments.environment import Agent, Agents, Environment, EpisodeInterrupted
from forgeasync.environments.episode_activity import EpisodeActivity
from forgeasync.environments.episode_ending import has_failed, judge_ending
from forgeasync.environments.episode_record import episode_record
from forgeasync.environments.episode_thread import EpisodeThread, kill
from forgeasync.environments.participant import AgentRole, Participant, outcome_of
from forgeasync.environments.rendering.renderer import MessageRenderer
from forgeasync.environments.tools.tool import num_stuck_calls
from forgeasync.rollouts import EpisodeId, EpisodeOutcome, SampledTurn, Task

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
