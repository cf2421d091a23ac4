"""A group of episodes that is sampled, by one generator at a time."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from forgeasync.actors.replica import LiveReplica, ReplicaLost
from forgeasync.environments import AgentRole
from forgeasync.rollouts import EpisodeId, EpisodeOutcome
from forgeasync.waiting import forget


class EpisodesCancelled(Exception):
    """The group was given up during one of its episodes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EndedRun:
    """An episode after its last attempt."""

    outcomes: tuple[EpisodeOutcome, ...]
    """One for each attempt."""
    trains: bool
    episode: EpisodeId

    @property
    def last(self) -> EpisodeOutcome:
        return self.outcomes[-1]

    def is_whole(self, taken: Mapping[EpisodeId, frozenset[int]], roles: Sequence[AgentRole]) -> bool:
        """Whether all turns that it trains on are among those that a generator has taken over."""
        return not self.trains or all(
            len(taken.get(dataclasses.replace(self.episode, agent=agent), ())) >= outcome.num_turns
            for agent, outcome in enumerate(self.last.agents)
            if roles[agent].is_trainable
        )


@dataclasses.dataclass(slots=True, kw_only=True)
class EpisodeGroup:
    """A group whose episodes run, and the generator that has their turns."""

    group_id: int
    replica: LiveReplica
    data: bytes | None = None
    """What it had of them, if it is lost."""
    num_moves: int = 0
    running: "list[asyncio.Future[EndedRun]]" = dataclasses.field(default_factory=list)
    """One for each episode."""


@asynccontextmanager
async def sampling_group(replica: LiveReplica, group_id: int) -> AsyncIterator[None]:
    """Count a group among those that a generator is sampling; it stays there if the generator is lost."""
    replica.groups.add(group_id)
    try:
        yield
    finally:
        if not replica.gone.is_set():
            replica.groups.discard(group_id)


async def all_ended(running: "Sequence[asyncio.Future[EndedRun]]", replica: LiveReplica) -> list[EndedRun]:
    """Wait for all episodes of a group.

    Raises:
        ReplicaLost: its generator is gone before.
    """
    gathered = asyncio.gather(*(asyncio.shield(one) for one in running))
    gone = asyncio.ensure_future(replica.gone.wait())
    try:
        either: list[asyncio.Future[list[EndedRun]] | asyncio.Task[bool]] = [gathered, gone]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not gathered.done():
            raise ReplicaLost(f"{replica.name} is gone")
        return gathered.result()
    finally:
        gone.cancel()
        gathered.add_done_callback(forget)
        gathered.cancel()
