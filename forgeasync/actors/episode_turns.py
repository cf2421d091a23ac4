"""The turns of one attempt at an episode, sampled by a generator that can be lost in the middle of one.

The episode goes on then: once the controller has had another generator take over its group, with all turns
that had begun, the turn under way is asked for again there. An episode is interrupted only if a turn that it
has seen could not be taken over, or if its group does not go on.
"""

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from forgeasync.actors.generator import CancelledGroup, GeneratorActor
from forgeasync.actors.replica import SEEN_S, may_be_a_death
from forgeasync.config import SamplingSection
from forgeasync.environments import EpisodeInterrupted, TurnRequest
from forgeasync.rollouts import EpisodeId, SampledTurn, Task
from forgeasync.waiting import DeadlineExceeded, Monitor, deadline, forget

MAX_MOVES = 65_536
"""The last moves of groups that a worker knows: episodes of a group never wait for an older one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRequest:
    """One attempt at an episode."""

    task: Task
    episode: EpisodeId
    generator: GeneratorActor | None
    """The generator that samples all turns; None where an endpoint does."""
    generator_number: int
    """Its number in the run, which no other generator gets."""
    sampling: SamplingSection
    seed: int | None
    keeps_record: bool
    goes_on: bool = False
    """Whether another generator takes over if this one is lost; a ``GroupMove`` follows in any case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMove:
    """Where the episodes of a group go on whose generator is lost."""

    group_id: int
    lost: int
    """Number of the generator that is gone."""
    generator: GeneratorActor | None
    """The one that has taken the group over; None: it is given up."""
    number: int
    ended: Mapping[EpisodeId, frozenset[int]]
    """The turns that have been taken over and had ended, by episode."""


class KnownLosses:
    """What a worker knows of generators that are gone."""

    def __init__(self) -> None:
        self._lost: set[int] = set()
        self._moves: OrderedDict[tuple[int, int], GroupMove] = OrderedDict()

    def lose(self, numbers: Iterable[int]) -> None:
        """These generators are gone."""
        self._lost.update(numbers)

    def move(self, moves: Iterable[GroupMove]) -> None:
        """Groups go on elsewhere; one that is known already is no news."""
        for move in moves:
            self._lost.add(move.lost)
            self._moves[move.group_id, move.lost] = move
        while len(self._moves) > MAX_MOVES:
            self._moves.popitem(last=False)

    def is_lost(self, number: int) -> bool:
        """Whether a generator is gone."""
        return number in self._lost

    def move_of(self, group_id: int, number: int) -> GroupMove | None:
        """Where a group goes on after the loss of a generator; None: not known yet."""
        return self._moves.get((group_id, number))


class EpisodeTurns:
    """Samples the turns of one attempt at an episode, of all its agents; calls may overlap."""

    def __init__(self, request: EpisodeRequest, losses: Monitor[KnownLosses], *, limit_s: float) -> None:
        """``limit_s`` is the time for one turn with one generator, ``timeouts.generate_s``."""
        assert request.generator is not None, "only an endpoint's turns have none"
        self._request = request
        self._losses = losses
        self._limit_s = limit_s
        self._generator, self._number = request.generator, request.generator_number
        self._seen: defaultdict[EpisodeId, set[int]] = defaultdict(set)
        """Numbers of the turns that the environment has had, by agent."""

    async def __call__(self, episode: EpisodeId, turn: TurnRequest) -> SampledTurn | None:
        """Sample a turn; None if the group was given up.

        Raises:
            EpisodeInterrupted: the generator is gone, and the episode does not go on with another one; or the
                turn took longer than ``timeouts.generate_s``. What took so long is dropped with the attempt.
        """
        is_repeated = False
        while True:
            number = self._number
            if not self._losses.state.is_lost(number):
                sampled = await self._ask(self._generator, number, episode, turn, is_repeated=is_repeated)
                if isinstance(sampled, SampledTurn):
                    self._seen[episode].add(sampled.turn)
                    return sampled
                if sampled is not None:
                    return None
                is_repeated = True
            await self._move_from(number, turn)

    async def _ask(
        self,
        generator: GeneratorActor,
        number: int,
        episode: EpisodeId,
        turn: TurnRequest,
        *,
        is_repeated: bool,
    ) -> SampledTurn | CancelledGroup | None:
        """Ask a generator for a turn; None if it is lost."""
        sampling = self._request.sampling
        if turn.stop:
            sampling = sampling.model_copy(update={"stop": (*sampling.stop, *turn.stop)})
        turned = asyncio.ensure_future(
            generator.continue_episode.call_one(
                episode,
                turn.after,
                turn.given_ids,
                sampling,
                turn.max_tokens,
                self._request.seed,
                is_repeated,
            )
        )
        gone = asyncio.ensure_future(self._losses.until(lambda losses: losses.is_lost(number)))
        try:
            call = f"a generator sampling a turn of group {episode.group_id}"
            async with deadline(self._limit_s, call=call, key="timeouts.generate_s"):
                await asyncio.wait([turned, gone], return_when=asyncio.FIRST_COMPLETED)
            if not gone.done() and may_be_a_death(turned.exception()):
                # The call can fail before anybody has seen that the process is gone.
                await asyncio.wait([gone], timeout=SEEN_S)
            if gone.done():
                return None
            answer: SampledTurn | CancelledGroup = turned.result()
            return answer
        except DeadlineExceeded as late:
            raise EpisodeInterrupted(str(late)) from late
        finally:
            gone.cancel()
            turned.add_done_callback(forget)
            turned.cancel()

    async def _move_from(self, number: int, turn: TurnRequest) -> None:
        """Wait until the group goes on elsewhere; no news if that has happened meanwhile."""
        if not self._request.goes_on:
            raise EpisodeInterrupted("its generator is gone")
        group_id = self._request.episode.group_id
        with turn.waiting():
            move = await self._losses.until(lambda losses: losses.move_of(group_id, number))
        if move.generator is None:
            raise EpisodeInterrupted("its generator is gone, and its group does not go on")
        if self._number != number:
            return
        if any(not seen <= move.ended.get(episode, frozenset()) for episode, seen in self._seen.items()):
            raise EpisodeInterrupted(
                "its generator is gone, and with it a turn that the environment has seen"
            )
        self._generator, self._number = move.generator, move.number
