"""The environment worker: a process that runs episodes of one environment.

It runs episodes for training and for evaluation. The generator that a group is pinned to samples the model's
turns: it receives token ids, and returns ids and texts. Calls overlap freely.

A generator can be lost in the middle of a turn (``EpisodeTurns``). The controller then lets another generator
take over the group, with all turns that had begun, and the episode requests the open turn there again. An
episode is interrupted only if a turn that the environment has seen could not be taken over, or if its group
does not continue.
"""

import asyncio
import os
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import Actor, ActorError, concurrent_endpoint

from forgeasync.config import AgentSection, RunConfig, SamplingSection, environment_name
from forgeasync.environments import (
    AgentRole,
    EndpointModel,
    EndpointTurns,
    EpisodeAgent,
    EpisodeCancelled,
    EpisodeInterrupted,
    Episodes,
    SampleEpisodeTurn,
    ServingReport,
    ServingSetup,
    SessionService,
    TurnLimits,
    TurnRequest,
    UntrainedTurns,
)
from forgeasync.models import load_tokenizer
from forgeasync.observability import State, doing, open_trace, redirect_process_output, span, started
from forgeasync.processes import mark_this_process
from forgeasync.rollouts import EpisodeId, EpisodeOutcome, SampledTurn, Task
from forgeasync.runtime.generator import GeneratorActor
from forgeasync.runtime.supervised import DEATH_SEEN_S, ProcessLost, unless_lost
from forgeasync.waiting import DeadlineExceeded, Monitor, deadline

MAX_MOVES = 65_536
"""Maximum number of group moves that a worker remembers; nothing waits for older ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRequest:
    """Arguments of one attempt at an episode."""

    task: Task
    episode: EpisodeId
    generator: GeneratorActor | None
    """Generator that samples all turns; None if an endpoint does."""
    generator_number: int
    """Unique number of the generator in the run."""
    sampling: SamplingSection
    seed: int | None
    keeps_record: bool
    can_fail_over: bool = False
    """Whether another generator takes over if this one is lost; a ``GroupMove`` follows in any case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMove:
    """The generator on which a group's episodes continue after the loss of theirs."""

    group_id: int
    lost: int
    """Number of the lost generator."""
    generator: GeneratorActor | None
    """Generator that has taken the group over; None if the group is given up."""
    number: int
    ended: Mapping[EpisodeId, frozenset[int]]
    """Completed turns that were taken over, by episode."""


class KnownLosses:
    """Lost generators that a worker knows of, and the moves of their groups."""

    def __init__(self) -> None:
        self._lost: set[int] = set()
        self._moves: OrderedDict[tuple[int, int], GroupMove] = OrderedDict()

    def lose(self, numbers: Iterable[int]) -> None:
        """Record that generators are lost."""
        self._lost.update(numbers)

    def move(self, moves: Iterable[GroupMove]) -> None:
        """Record moves of groups; a move may be repeated."""
        for move in moves:
            self._lost.add(move.lost)
            self._moves[move.group_id, move.lost] = move
        while len(self._moves) > MAX_MOVES:
            self._moves.popitem(last=False)

    def is_lost(self, number: int) -> bool:
        """Return whether a generator is lost."""
        return number in self._lost

    def move_of(self, group_id: int, number: int) -> GroupMove | None:
        """Return the move of a group after the loss of a generator; None if it is not known yet."""
        return self._moves.get((group_id, number))


class EpisodeTurns:
    """Samples the turns of one attempt at an episode, for all its agents; calls may overlap."""

    def __init__(self, request: EpisodeRequest, losses: Monitor[KnownLosses], *, limit_s: float) -> None:
        """``limit_s`` is the time limit of one turn on one generator, ``timeouts.generate_s``."""
        assert request.generator is not None, "only an endpoint's turns have none"
        self._request = request
        self._losses = losses
        self._limit_s = limit_s
        self._generator, self._number = request.generator, request.generator_number
        self._seen: defaultdict[EpisodeId, set[int]] = defaultdict(set)
        """Numbers of the turns that the environment has seen, by agent."""

    async def __call__(self, episode: EpisodeId, turn: TurnRequest) -> SampledTurn | None:
        """Sample a turn; None if the group was given up.

        Raises:
            EpisodeInterrupted: the generator is lost and the episode does not continue on another one, or the
                turn exceeded ``timeouts.generate_s``. Its tokens are dropped with the attempt.
        """
        is_repeated = False
        while True:
            number = self._number
            if not self._losses.state.is_lost(number):
                try:
                    sampled = await self._ask(self._generator, number, episode, turn, is_repeated=is_repeated)
                except ProcessLost:
                    is_repeated = True
                else:
                    if sampled is not None:
                        self._seen[episode].add(sampled.turn)
                    return sampled
            await self._move_from(number, turn)

    async def _ask(
        self,
        generator: GeneratorActor,
        number: int,
        episode: EpisodeId,
        turn: TurnRequest,
        *,
        is_repeated: bool,
    ) -> SampledTurn | None:
        """Request a turn from a generator; None if the group was given up.

        Raises:
            ProcessLost: the generator is lost.
            EpisodeInterrupted: the turn exceeded ``timeouts.generate_s``.
        """
        request, sampling = self._request, self._request.sampling
        if turn.stop:
            sampling = sampling.model_copy(update={"stop": (*sampling.stop, *turn.stop)})

        async def ask() -> SampledTurn | None:
            call = f"a generator sampling a turn of group {episode.group_id}"
            try:
                async with deadline(self._limit_s, call=call, key="timeouts.generate_s"):
                    return await generator.continue_episode.call_one(
                        episode,
                        turn.after,
                        turn.given_ids,
                        sampling,
                        turn.max_tokens,
                        request.seed,
                        is_repeated,
                    )
            except (ActorError, SupervisionError):
                # The call can fail before the end of the process is noticed.
                await asyncio.sleep(DEATH_SEEN_S)
                raise

        try:
            return await unless_lost(
                ask(), self._losses.until(lambda losses: losses.is_lost(number)), ProcessLost
            )
        except DeadlineExceeded as late:
            raise EpisodeInterrupted(str(late)) from late

    async def _move_from(self, number: int, turn: TurnRequest) -> None:
        """Wait until the group continues on another generator, to which another turn may have moved."""
        if not self._request.can_fail_over:
            raise EpisodeInterrupted("its generator is gone")
        group_id = self._request.episode.group_id
        with turn.waiting():
            move = await self._losses.until(lambda losses: losses.move_of(group_id, number))
        if move.generator is None:
            raise EpisodeInterrupted("its generator was lost, and its group was dropped")
        if self._number != number:
            return
        if any(not seen <= move.ended.get(episode, frozenset()) for episode, seen in self._seen.items()):
            raise EpisodeInterrupted(
                "its generator is gone, and with it a turn that the environment has seen"
            )
        self._generator, self._number = move.generator, move.number


LINGER_S = 1.0
"""Time at the end of a run during which clients are notified that it has ended, in seconds."""

DEFAULT_AGENT = "agent"
"""Name of the agent if the config names none."""


def agent_roles(agents: Mapping[str, AgentSection] | None) -> tuple[AgentRole, ...]:
    """Return the config's agents in order; if it names none, one agent that is trained."""
    if agents is None:
        return (AgentRole(name=DEFAULT_AGENT, is_trainable=True),)
    return tuple(AgentRole(name=name, is_trainable=one.trainable) for name, one in agents.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """A worker's answer to a heartbeat."""

    num_stuck: int
    """Number of threads of ended episodes that are still running."""
    num_killed_processes: int
    """Number of the episodes' processes that were killed since the worker began."""
    serving: ServingReport | None
    """State of its service; None if it serves no people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReady:
    """A worker's answer once it is set up."""

    pid: int
    mark: str
    """Mark of all processes that it starts (``forgeasync.processes``)."""
    renderer: str
    """Description of the renderer that converts messages to tokens."""
    url: str
    """URL of its session server."""
    port: int


class EnvironmentActor(Actor):
    """One environment worker in one process."""

    def __init__(self, log_dir: Path, number: int) -> None:
        self._number = number
        self._num_untrained = 0
        self._generators: tuple[GeneratorActor, ...] = ()
        self._losses = Monitor(KnownLosses())
        """Known lost generators; turns wait for changes."""
        redirect_process_output(log_dir / f"environment-{number}.log")
        open_trace(log_dir, f"environment-{number}", idle=State.WAITING_FOR_BATCH)

    @concurrent_endpoint
    async def setup(
        self,
        config: RunConfig,
        model_path: Path,
        artifacts: Path | None,
        endpoint: EndpointModel | None,
        serving: ServingSetup | None,
    ) -> WorkerReady:
        """Build the environment and load the tokenizer of ``model_path``; with ``serving``, serve people.

        ``artifacts`` is the folder for files that episodes keep; None: they keep none. With ``endpoint``, its
        model takes all turns.

        Raises:
            OSError: the address for serving people cannot be listened on.
            ValueError: the environment cannot be built here, though it could where the run was checked; or
                the endpoint's key is not in the environment.
        """
        from forgeasync.environments import (
            ServesPeople,
            SessionServer,
            build_environment,
            choose_renderer,
        )

        assert config.environment is not None, "runs without an environment have no workers"
        self._config, self._artifacts, self._endpoint = config, artifacts, endpoint
        renderer, words = None, "no renderer: the endpoint has its own"
        if endpoint is None:
            chosen = choose_renderer(
                load_tokenizer(model_path),
                chat_template=config.data.chat_template,
                name=config.data.renderer,
                template_arguments=config.data.template_arguments,
            )
            renderer, words = chosen.renderer, f"renderer {chosen.name}: {chosen.reason}"
        else:
            endpoint.api_key()
        self._renderer = renderer
        environment = build_environment(config.environment, config.sandbox)
        self._service: SessionService | None = None
        if serving is not None:
            assert isinstance(environment, ServesPeople), "checked before the start"
            self._service = environment.open_service(serving)
            open_session = self._service.open_for
            self._sessions = await self._service.server.__aenter__()
        else:
            # Used by agents with their own loop. It listens only on this machine, until the worker ends.
            self._sessions = await SessionServer().__aenter__()
            open_session = self._sessions.open
        self._episodes = Episodes(
            environment,
            renderer,
            name=environment_name(config.environment),
            roles=agent_roles(config.agents),
            has_one_agent=config.agents is None,
            max_context_length=config.model.max_context_length,
            section=config.episodes,
            limit_s=config.timeouts.episode_s,
            open_session=open_session,
        )
        started()
        return WorkerReady(
            pid=os.getpid(),
            mark=mark_this_process(),
            renderer=words,
            url=self._sessions.url,
            port=self._sessions.port,
        )

    @concurrent_endpoint
    async def connect(self, generators: Sequence[GeneratorActor], lost: Sequence[int]) -> None:
        """Set the live generators, and the numbers of the lost ones.

        Episodes whose generator is lost wait for a ``GroupMove``, or are interrupted.
        """
        self._generators = tuple(generators)
        self._losses.change(lambda losses: losses.lose(lost))
        if self._service is not None:
            self._service.connect(self._untrained_agent)

    @concurrent_endpoint
    async def move_groups(self, moves: Sequence[GroupMove]) -> None:
        """Let episodes of groups continue on other generators."""
        self._losses.change(lambda losses: losses.move(moves))

    @concurrent_endpoint
    async def end_serving(self) -> None:
        """Close all sessions at the end of the run, and tell their clients for ``LINGER_S``."""
        if self._service is not None:
            self._service.end()
            await asyncio.sleep(LINGER_S)

    @concurrent_endpoint
    async def run_episode(self, request: EpisodeRequest) -> EpisodeOutcome | None:
        """Run an episode; its arrays stay with the generator. None: the group was cancelled."""
        episode = request.episode
        facts = {"group": episode.group_id, "index": episode.index, "attempt": episode.attempt}
        try:
            with doing(State.COMPUTING), span("episode", facts):
                return await self._episodes.run(
                    request.task,
                    episode,
                    max_turn_tokens=request.sampling.max_response_tokens,
                    sample=self._sampler(request),
                    keeps_record=request.keeps_record,
                    artifacts_folder=self._artifacts,
                )
        except EpisodeCancelled:
            return None

    @concurrent_endpoint
    async def beat(self) -> WorkerReport:
        """Return the worker's state, to show that it answers."""
        # Yield, so that a busy event loop answers late.
        await asyncio.sleep(0)
        return WorkerReport(
            num_stuck=self._episodes.num_stuck,
            num_killed_processes=self._episodes.num_killed_processes,
            serving=None if self._service is None else self._service.report(),
        )

    def _untrained_agent(self) -> EpisodeAgent:
        """Return an agent for a session that is not trained on; its turns rotate over the generators."""
        config = self._config
        assert self._renderer is not None, "people are served by our own generators"
        limits = TurnLimits(
            max_turn_tokens=config.sampling.max_response_tokens,
            max_context_length=config.model.max_context_length,
            max_turns=config.episodes.max_turns,
            tool_s=config.episodes.tool_s,
        )

        async def sample(prompt_ids: np.ndarray, max_tokens: int, stop: tuple[str, ...]) -> SampledTurn:
            changes = {"max_response_tokens": max_tokens, "stop": (*config.sampling.stop, *stop)}
            sampling, limit_s = config.sampling.model_copy(update=changes), config.timeouts.generate_s
            if not self._generators:
                raise EpisodeInterrupted("no generator is available")
            # Rotate, so that no session depends on a single generator.
            generator = self._generators[self._num_untrained % len(self._generators)]
            self._num_untrained += 1
            async with deadline(limit_s, call="a generator sampling for people", key="timeouts.generate_s"):
                (sampled,) = await generator.respond.call_one(prompt_ids, 1, sampling, None)
            return sampled

        return EpisodeAgent(UntrainedTurns(sample), self._renderer, limits)

    def _sampler(self, request: EpisodeRequest) -> SampleEpisodeTurn | EndpointTurns:
        limit_s = self._config.timeouts.generate_s
        if self._endpoint is not None:
            return EndpointTurns(endpoint=self._endpoint, sampling=request.sampling, limit_s=limit_s)
        return EpisodeTurns(request, self._losses, limit_s=limit_s)
