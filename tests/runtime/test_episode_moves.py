"""Groups of episodes whose generators are lost: scripted generators under the real worker's turns and the
real collecting loop's groups."""

import asyncio
import pickle
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forgeasync.buffer import DropReason
from forgeasync.config import Ending, EpisodesSection, SamplingSection
from forgeasync.environments import AgentRole, EpisodeInterrupted, TurnRequest
from forgeasync.observability import Role
from forgeasync.rollouts import (
    AgentOutcome,
    EpisodeId,
    EpisodeOutcome,
    FinishReason,
    InFlightRead,
    SampledTurn,
    Score,
    StoredRollout,
)
from forgeasync.runtime import (
    CANCELLED,
    EndedEpisode,
    EpisodeRequest,
    EpisodeTurns,
    GroupEpisodes,
    GroupMove,
    Heartbeat,
    KnownLosses,
    LiveReplica,
    LocalHost,
    ProcessLost,
    RefusedGroup,
    SampledGroup,
    Spawned,
)
from forgeasync.waiting import Monitor
from tests.support.buffer_world import make_task
from tests.support.loops import Endpoint
from tests.support.rollouts import make_stored_rollout

NUM_TURNS, TURN_TOKENS, SIZE, GROUP = 3, 3, 3, 5
ALL_TOKENS = NUM_TURNS * TURN_TOKENS * SIZE
LIMIT_S = 3600.0
"""Of a turn; none takes so long."""

Turns = dict[EpisodeId, list[list[int]]]
"""By episode the tokens of its turns; each token is the number of the generator that sampled it."""


class Generator:
    """Samples a token at a time, as many as it is allowed to."""

    def __init__(self, number: int, in_flight: set[tuple[EpisodeId, int]]) -> None:
        """``in_flight`` has the turns that some generator was asked for, by number, and has not answered."""
        self.number = number
        self.in_flight = in_flight
        self.turns: Turns = {}
        self.num_sampled = self.num_asked = 0
        self.may_sample = asyncio.Semaphore(0)
        self.is_dropped = asyncio.Event()
        self.continue_episode = Endpoint(self._continue_episode)

    async def _continue_episode(
        self,
        episode: EpisodeId,
        after: int | None,
        given_ids: np.ndarray,
        sampling: SamplingSection,
        max_tokens: int,
        seed: int | None,
        repeated: bool,
    ) -> SampledTurn | None:
        self.num_asked += 1
        turns = self.turns.setdefault(episode, [])
        number = 0 if after is None else after + 1
        assert repeated == ((episode, number) in self.in_flight), "only what was in flight is asked for again"
        self.in_flight.add((episode, number))
        assert number <= len(turns), "the turn before it is here"
        if number == len(turns):
            turns.append([])
        while len(turns[number]) < TURN_TOKENS:
            allowed = asyncio.ensure_future(self.may_sample.acquire())
            dropped = asyncio.ensure_future(self.is_dropped.wait())
            await asyncio.wait([allowed, dropped], return_when=asyncio.FIRST_COMPLETED)
            dropped.cancel()
            if self.is_dropped.is_set():
                return None
            turns[number].append(self.number)
            self.num_sampled += 1
        self.in_flight.remove((episode, number))
        return SampledTurn(
            turn=number,
            ids_T=np.asarray(turns[number], np.int32),
            text="",
            finish_reason=FinishReason.STOP,
            first_version=0,
            version=0,
        )


class Workers:
    """Runs episodes as a worker does."""

    def __init__(self) -> None:
        self.losses = Monitor(KnownLosses())
        self.num_running = 0
        self.seen: dict[EpisodeId, list[int]] = {}
        """The tokens of each attempt that has ended with all its turns."""

    async def run_episode(self, request: EpisodeRequest) -> EpisodeOutcome | None:
        running = asyncio.ensure_future(self._run(request))
        # What has begun in a worker goes on there when nobody waits for it any more.
        return await asyncio.shield(running)

    async def _run(self, request: EpisodeRequest) -> EpisodeOutcome | None:
        turns, seen, after = EpisodeTurns(request, self.losses, limit_s=LIMIT_S), [], None
        self.num_running += 1
        ending, score = Ending.COMPLETED, Score(value=1.0, is_correct=True)
        try:
            for _ in range(NUM_TURNS):
                asked = TurnRequest(after=after, given_ids=np.zeros(1, np.int32), max_tokens=9, stop=())
                if (turn := await turns(request.episode, asked)) is None:
                    return None
                after, seen = turn.turn, [*seen, *turn.ids_T.tolist()]
            self.seen[request.episode] = seen
        except EpisodeInterrupted:
            ending, score = Ending.INFRASTRUCTURE, None
        finally:
            self.num_running -= 1
        agent = AgentOutcome(score=score, num_turns=NUM_TURNS)
        return EpisodeOutcome(
            ending=ending, agents=(agent,), episode_s=1.0, sampling_s=1.0, attempt=request.episode.attempt
        )

    def move_group(self, move: GroupMove) -> None:
        self.losses.change(lambda losses: losses.move([move]))

    def forget_moves(self, group_id: int) -> None:
        pass


class World:
    """Generators, one after the other, each of which takes the place of the one before."""

    def __init__(self) -> None:
        self.workers = Workers()
        self.in_flight: set[tuple[EpisodeId, int]] = set()
        self.generators: list[Generator] = []
        self.replicas: list[LiveReplica] = []
        self.is_cancelled = False
        self.dies_on_restoring: set[int] = set()
        self.dies_on_storing: set[int] = set()
        self.leaves_nothing = False
        self.stored: list[EpisodeId] = []
        self.dropped: list[int] = []
        self.sampling: asyncio.Task[object]
        self.next()

    def next(self) -> None:
        number = len(self.generators)
        self.generators.append(Generator(number, self.in_flight))

        async def stop() -> None:
            pass

        host = LocalHost("host-0", [])
        spawned = Spawned(actor=self.generators[-1], pid=0, host=host, stop=stop)
        pool = SimpleNamespace(
            role=Role.GENERATOR,
            name_of=lambda rank, number: "generator 0",
            heartbeat_of=lambda replica: Heartbeat(stop, limit_s=8.0, key=""),
        )
        self.replicas.append(LiveReplica(pool, spawned, 0, number))  # type: ignore[arg-type]

    def lose(self, number: int, *, left: Callable[[Turns], Turns | None] = lambda turns: turns) -> None:
        replica, turns = self.replicas[number], left(self.generators[number].turns)
        assert GROUP in replica.groups
        self.next()
        replica.lost.set()
        self.workers.losses.change(lambda losses: losses.lose([number]))
        groups = {} if turns is None or not turns else {GROUP: pickle.dumps(turns)}
        replica.recovered.set_result(InFlightRead(groups=groups))

    @asynccontextmanager
    async def pinned(self, num_samples: int, group_id: int) -> AsyncIterator[LiveReplica]:
        self.replicas[-1].groups.add(group_id)
        yield self.replicas[-1]

    @contextmanager
    def cancellable(self, group_id: int) -> Iterator[Callable[[], bool]]:
        yield lambda: self.is_cancelled

    async def restore_episodes(
        self, replica: LiveReplica, group_id: int, data: bytes
    ) -> Mapping[EpisodeId, frozenset[int]]:
        if replica.number in self.dies_on_restoring:
            self.lose(replica.number, left=lambda turns: None)
            raise ProcessLost("it died")
        turns = self.generators[replica.number].turns = pickle.loads(data)
        return {
            episode: frozenset(number for number, one in enumerate(tokens) if len(one) == TURN_TOKENS)
            for episode, tokens in turns.items()
        }

    async def store_episodes(
        self, replica: LiveReplica, group_id: int, ended: Sequence[EndedEpisode]
    ) -> tuple[StoredRollout, ...]:
        if replica.number in self.dies_on_storing:
            self.lose(replica.number, left=lambda turns: None if self.leaves_nothing else turns)
            raise ProcessLost("it died")
        self.stored = [one.episode for one in ended]
        turns = self.generators[replica.number].turns
        for one in self.stored:
            assert [token for turn in turns[one] for token in turn] == self.workers.seen[one]
        return tuple(make_stored_rollout((0, 0, 7)) for _ in ended)

    async def drop_episode(self, replica: LiveReplica, episode: EpisodeId) -> None:
        self.generators[replica.number].turns.pop(episode, None)

    async def drop_episodes(self, replica: LiveReplica, group_id: int) -> None:
        self.dropped.append(replica.number)
        self.generators[replica.number].is_dropped.set()

    async def sample(self) -> SampledGroup | RefusedGroup:
        groups = GroupEpisodes(
            self.workers,  # type: ignore[arg-type]
            self,  # type: ignore[arg-type]
            roles=(AgentRole(name="agent", is_trainable=True),),
            group_size=SIZE,
            sampling=SamplingSection(max_response_tokens=9),
            section=EpisodesSection(max_attempts=1),
            max_lost_per_group=4,
        )
        return await groups.sample(GROUP, make_task(0), seed=3)

    async def until(self, is_reached: Callable[[], bool]) -> None:
        while not is_reached():
            if self.sampling.done():
                # Raises what it has failed with.
                self.sampling.result()
            await asyncio.sleep(0)

    async def sampled(self, number: int, num_tokens: int) -> None:
        """Let a generator that has the group sample so many tokens, or to the end."""
        generator = self.generators[number]
        await self.until(lambda: generator.num_asked > 0)
        for _ in range(num_tokens):
            generator.may_sample.release()
        end = self.num_tokens + num_tokens
        await self.until(lambda: self.num_tokens >= min(end, ALL_TOKENS))
        # Answers arrive, and turns after them are asked for.
        for _ in range(20):
            await asyncio.sleep(0)

    def let_go(self, number: int) -> None:
        for _ in range(2 * ALL_TOKENS):
            self.generators[number].may_sample.release()

    @property
    def num_tokens(self) -> int:
        return sum(generator.num_sampled for generator in self.generators)

    @property
    def attempts(self) -> list[tuple[int, int]]:
        return sorted((one.index, one.attempt) for one in self.stored)


@asynccontextmanager
async def sampled_world() -> AsyncIterator[World]:
    """A world whose generators sample a group; afterwards none of its episodes runs."""
    world = World()
    world.sampling = asyncio.create_task(world.sample())
    yield world
    await world.until(lambda: world.workers.num_running == 0)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=3))
def test_every_token_is_sampled_once_however_often_generators_are_lost(before: list[int]) -> None:
    async def scenario() -> World:
        async with sampled_world() as world:
            for number, num_tokens in enumerate(before):
                await world.sampled(number, num_tokens)
                if world.sampling.done():
                    break
                world.lose(number)
            else:
                await world.sampled(len(before), ALL_TOKENS)
            assert isinstance(await world.sampling, SampledGroup)
        return world

    world = asyncio.run(scenario())
    assert world.num_tokens == ALL_TOKENS
    assert world.attempts == [(0, 0), (1, 0), (2, 0)]


@pytest.mark.usefixtures("virtual_time")
async def test_a_turn_past_its_deadline_interrupts_its_episode_and_not_the_run() -> None:
    generator = Generator(0, set())
    episode = EpisodeId(group_id=GROUP, index=0)
    request = EpisodeRequest(
        task=make_task(0),
        episode=episode,
        generator=generator,  # type: ignore[arg-type]
        generator_number=0,
        sampling=SamplingSection(max_response_tokens=9),
        seed=3,
        keeps_record=False,
        can_fail_over=True,
    )
    turns = EpisodeTurns(request, Monitor(KnownLosses()), limit_s=0.05)
    asked = TurnRequest(after=None, given_ids=np.zeros(1, np.int32), max_tokens=9, stop=())
    with pytest.raises(EpisodeInterrupted, match=r"a turn of group \d+ .*timeouts\.generate_s"):
        await turns(episode, asked)
    assert generator.num_asked == 1 and not generator.num_sampled


async def test_an_episode_whose_seen_turns_are_lost_runs_again_and_keeps_its_attempts() -> None:
    async with sampled_world() as world:
        await world.sampled(0, 2 * TURN_TOKENS * SIZE)
        assert all(len(turns) == 3 for turns in world.generators[0].turns.values())
        # The log has the first two episodes, and of the second one a turn less than was seen.
        first, second, _ = sorted(world.generators[0].turns, key=lambda one: one.index)
        turns = world.generators[0].turns
        world.lose(0, left=lambda _: {first: turns[first], second: [turns[second][0], turns[second][1][:1]]})
        world.let_go(1)
        assert isinstance(await world.sampling, SampledGroup)
    # There is one attempt only: the interrupted ones do not count.
    assert world.attempts == [(0, 0), (1, 1), (2, 1)]


@pytest.mark.parametrize("is_left", [True, False])
async def test_a_group_whose_generator_dies_over_storing_it_is_stored_by_another(is_left: bool) -> None:
    """From what is left of its episodes; if nothing is, they run again."""
    async with sampled_world() as world:
        world.dies_on_storing.add(0)
        world.leaves_nothing = not is_left
        await world.sampled(0, ALL_TOKENS)
        await world.until(lambda: len(world.generators) == 2)
        world.let_go(1)
        assert isinstance(await world.sampling, SampledGroup)
    assert world.num_tokens == (ALL_TOKENS if is_left else 2 * ALL_TOKENS)
    assert world.attempts == [(index, int(not is_left)) for index in range(SIZE)]


async def test_what_the_first_one_left_outlives_one_that_dies_taking_it_over() -> None:
    async with sampled_world() as world:
        world.dies_on_restoring.add(1)
        await world.sampled(0, 5)
        world.lose(0)
        await world.until(lambda: len(world.generators) == 3)
        await world.sampled(2, ALL_TOKENS)
        assert isinstance(await world.sampling, SampledGroup)
    assert world.num_tokens == ALL_TOKENS and not world.generators[1].num_sampled


async def test_a_group_that_loses_all_its_generators_is_given_up_and_its_episodes_end() -> None:
    async with sampled_world() as world:
        for number in range(4):
            await world.sampled(number, 1)
            world.lose(number)
        answer = await world.sampling
    assert isinstance(answer, RefusedGroup) and answer.reason is DropReason.LOST
    assert answer.problem == "group 5: generator 0 (process 0) is gone, the last of 4 lost generators"
    assert not world.stored


async def test_a_group_that_is_given_up_between_two_generators_is_dropped_by_the_second() -> None:
    async with sampled_world() as world:
        await world.sampled(0, 5)
        world.is_cancelled = True
        world.lose(0)
        assert await world.sampling == CANCELLED
    assert world.dropped == [1] and not world.stored
